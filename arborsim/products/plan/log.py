"""Logs of requests that a plan is asked about: imported on the fly."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.products.traces.requests import import_requests


def imported(log: Path, model: str) -> Path:
    """The trace of a log of requests of a known format, which goes when this process ends.

    Raises `UsageError` if the log cannot be read.
    """
    try:
        read = log.stat()
    except OSError as error:
        raise UsageError(f"{log}: cannot be read ({error.strerror})") from None
    return _imported(log, model, read.st_mtime_ns, read.st_size)


@cache
def _imported(log: Path, model: str, changed_ns: int, size: int) -> Path:
    """`imported`, once for a file as it is."""
    folder = Path(tempfile.mkdtemp(prefix="arborsim-log-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = folder / f"{log.stem}.parquet"
    import_requests(log, out, model=model)
    return out
