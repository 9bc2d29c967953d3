"""Open Parquet files that nobody vouches for: every fault becomes one line."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.core.errors import TraceError
from arborsim.trace.parts import has_parts, part_files, parts_directory

_MAGIC = b"PAR1"


def must_exist(path: Path) -> None:
    """Raise a `TraceError` that says what is there instead, if anything."""
    if path.exists():
        return
    parts = parts_directory(path)
    if parts.is_dir():
        if not has_parts(parts):
            raise TraceError(
                f"{path}: the recording was interrupted before its first whole episode; "
                "resume it, or record it again"
            )
        whole = len(part_files(parts))
        raise TraceError(
            f"{path}: the recording was interrupted after {whole} whole episodes: "
            f"read {parts}, or resume the recording"
        )
    raise TraceError(f"{path}: no such file; {make_one()}")


def make_one() -> str:
    """Where to get a trace from."""
    return "make a trace with 'arborsim record', or use one of those in traces/"


def open_parquet_file(path: Path, shown: Path) -> pq.ParquetFile:
    """Open a Parquet file; whatever is wrong with it becomes a one-line `TraceError`."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(size - 4, 0))
            tail = file.read(4)
    except OSError as error:
        raise TraceError(f"{shown}: cannot be read ({error.strerror})") from error
    if head != _MAGIC:
        raise TraceError(f"{shown}: this is not a Parquet file, and so no trace; {make_one()}")
    if tail != _MAGIC or size < 12:
        raise TraceError(
            f"{shown}: the file is truncated: it ends after {size} bytes without a footer; "
            "copy it again, or record it again"
        )
    try:
        opened = pq.ParquetFile(path, page_checksum_verification=True)
        opened.schema_arrow.names  # noqa: B018 - names that are no text fail only when read
        return opened
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{shown}: the file is damaged ({one_line(error)}); copy it again, or record it again"
        ) from error


def one_line(error: BaseException) -> str:
    """An error of a library below, on one line and without its tail of hints."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
