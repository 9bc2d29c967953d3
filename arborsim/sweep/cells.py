"""The cells of a sweep on the disk: a folder of small Parquet files, each named by its address.

``DIR/cells/ab/ab12....parquet`` holds a cell's row; ``DIR/failed`` has the same of cells that
failed, which the next run tries again.  All files have the columns of `SCHEMA`.  A file appears
whole or not at all, and depends on nothing but the cell: not on the moment, the machine, or the
number of processes.  Live runs measure seconds, and are the exception.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from arborsim.core.documents import strict
from arborsim.core.errors import UsageError
from arborsim.core.measurements import TimeSplit
from arborsim.core.outputs import Busy, Lock, write_bytes
from arborsim.core.records import located
from arborsim.core.tables import KEY, check_columns, check_parquet
from arborsim.run.results import Answered, Relative, Row
from arborsim.sweep.jobs import Job

CELLS, FAILED = "cells", "failed"
#: What a file takes on a disk: 8 to 11 kB, in blocks of 4 KiB.
FILE_BYTES = 3 * 4096
#: What became of a cell: it has figures; it cannot run, by its parameters; something went wrong.
DONE, LEFT_OUT, WENT_WRONG = "done", "left out", "failed"
#: Columns of the parameters, before the figures.
HEAD: dict[str, str] = {
    "address": "str", "kind": "str", "trace": "str", "policy": "str", "settings": "str",
    "budget": "str", "gpu": "str", "host": "str", "engine": "str", "model": "str",
    "kv_dtype": "str", "weights": "str", "recall": "str", "page_size": "int",
    "tree_attention": "bool", "first": "int", "episodes": "int", "quality": "bool", "more": "str",
    "status": "str", "left_out": "str",
}  # fmt: skip
#: Of a `Row` what is a parameter, a record, or relative to other cells.
_APART = (
    "trace", "policy", "budget", "left_out", "time", "relative", "oracle_gap", "answers", "equal",
)  # fmt: skip
FIGURES: dict[str, str] = {
    **{each.name: str(each.type) for each in fields(Row) if each.name not in _APART},
    **{each.name: str(each.type) for each in fields(TimeSplit)},
    "wall_s": "float", "total_s": "float", "tokens_per_s": "float",
    "right": "int", "answered": "int", "infeasible": "int",
}  # fmt: skip
#: Columns that every cell of every version has a value in.
_ALWAYS = {"address", "kind", "trace", "policy", "settings", "budget", "status"}
#: What tells cells apart that have the same parameters.
ORIGIN = {"code": "str", "inputs": "str"}
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_FORMAT = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in {**HEAD, **FIGURES, **ORIGIN}.items()])


@dataclass(frozen=True, kw_only=True)
class CellRow(Row):
    """The row of a cell: figures as those of a replay, and the parameters as in the file."""

    address: str
    kind: str
    settings: str
    gpu: str
    host: str
    engine: str
    model: str
    kv_dtype: str
    weights: str
    recall: str
    page_size: int
    tree_attention: bool
    first: int
    episodes: int
    quality: bool
    more: str
    status: str
    wall_s: float  #: of a live run; 0 of a replay, whose seconds are simulated
    code: str
    inputs: str

    @property
    def total_s(self) -> float:
        return self.wall_s or self.time.total_s

    @property
    def label(self) -> str:
        return f"{super().label} ({self.settings})" if self.settings else super().label

    @property
    def place(self) -> tuple[object, ...]:
        """What cells share that are compared: all parameters but policy and budget."""
        return (
            self.kind, self.trace, self.gpu, self.host, self.engine, self.model, self.kv_dtype,
            self.weights, self.recall, self.page_size, self.tree_attention, self.first,
            self.episodes, self.quality, self.more,
        )  # fmt: skip


@dataclass(frozen=True)
class Made:
    """What came of a cell."""

    content: bytes  #: of its file
    status: str
    reason: str = ""


def made(
    job: Job, status: str, row: Row | None = None, reason: str = "", wall_s: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
) -> Made:  # fmt: skip
    """A cell's file; the same cell gives the same bytes."""
    head = {**job.head, "address": job.address, "status": status, "left_out": reason}
    figures: dict[str, Any] = {}
    if row is not None:
        score = row.answers
        figures = {
            **{name: getattr(row, name) for name in FIGURES if hasattr(row, name)},
            **vars(row.time), "wall_s": wall_s, "total_s": wall_s or row.time.total_s,
            "tokens_per_s": row.tokens_per_s,
            "right": score.right if score else None, "answered": score.n if score else None,
            "infeasible": score.infeasible if score else None,
        }  # fmt: skip
    origin = {"code": job.code, "inputs": " ".join(f"{k}={v}" for k, v in job.inputs.items())}
    said = json.dumps(strict(metadata or {"kind": "cell"}), sort_keys=True, allow_nan=False)
    table = pa.Table.from_pylist([{**head, **figures, **origin}], schema=SCHEMA)
    buffer = io.BytesIO()
    # Dictionaries, statistics and Arrow's schema say nothing about one row, and are most of a file.
    with pq.ParquetWriter(
        buffer,
        SCHEMA,
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({KEY: said})
    return Made(buffer.getvalue(), status, reason)


class Folder:
    """The cells in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, address: str, part: str = CELLS) -> Path:
        return self.path / part / address[:2] / f"{address}.parquet"

    def _made(self, address: str, part: str = CELLS) -> Path:
        """The file, whose folder is made."""
        file = self.file(address, part)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {file.parent}: {error.strerror}") from None
        return file

    def __contains__(self, job: Job) -> bool:
        return self.file(job.address).exists()

    def lock(self, job: Job) -> Lock:
        """Keeps other sweeps from a cell while it is computed, and clears what a killed one left.

        Raises
        ------
        Busy
            Another sweep computes it.
        UsageError
            The folder cannot be written.
        """
        file = self._made(job.address)
        lock = Lock(file)
        for part in (CELLS, FAILED):
            for stump in self.file(job.address, part).parent.glob(f".{job.address}.*.part"):
                stump.unlink(missing_ok=True)
        return lock

    def clear(self) -> None:
        """Remove the names of locks that killed sweeps left on cells that are done."""
        for name in self.path.glob(f"{CELLS}/??/.*.lock"):
            file = name.with_name(name.name[1 : -len(".lock")])
            if file.exists():
                with contextlib.suppress(Busy):
                    Lock(file).release()

    def write(self, job: Job, found: Made) -> None:
        """Put a cell's file in its place; what is there stays if that fails."""
        if found.status == WENT_WRONG:
            write_bytes(self._made(job.address, FAILED), found.content)
            return
        write_bytes(self._made(job.address), found.content)
        self.file(job.address, FAILED).unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Of all cells, those that failed last; not what is being written."""
        found = {part: sorted((self.path / part).glob("??/*.parquet")) for part in (CELLS, FAILED)}
        done = {path.name for path in found[CELLS]}
        rest = [path for path in found[FAILED] if path.name not in done]
        return [*found[CELLS], *rest]

    def rows(self, names: Container[str] | None = None) -> tuple[list[CellRow], int]:
        """Cells, and the number of those left out because later ones take their place.

        `names` are those to take; None for all.

        Of cells with the same parameters, but of other contents or another version of arborsim,
        the one that was written last counts.

        Raises
        ------
        UsageError
            There are none, or a file is damaged.
        """
        files = [path for path in self.files() if names is None or path.stem in names]
        if not files:
            raise UsageError(f"{self.path}: no cells are here; arborsim sweep --out writes them")
        rows = list(map(_row, _records(files)))
        times = {path.stem: path.stat().st_mtime_ns for path in files}
        latest: dict[tuple[object, ...], CellRow] = {}
        for row in sorted(rows, key=lambda row: (times[row.address], row.address)):
            latest[*row.place, row.policy, row.settings, row.budget] = row
        counts = {row.address for row in latest.values()}
        return [row for row in rows if row.address in counts], len(rows) - len(counts)


def _records(files: list[Path]) -> Iterator[dict[str, Any]]:
    """What stands in the files; columns that other versions lack are None."""
    try:
        yield from _checked(files)
    except (pa.ArrowException, OSError, UnicodeDecodeError, UsageError) as error:
        for path in files:
            check_parquet(path)
            with (
                located(str(path)),
                contextlib.suppress(pa.ArrowException, OSError, UnicodeDecodeError),
            ):
                _checked([path])
        said = " ".join(str(error).split())[:160]
        raise UsageError(f"{files[0].parents[2]}: a cell is damaged ({said})") from None


def _checked(files: list[Path]) -> list[dict[str, Any]]:
    names = [str(path) for path in files]
    found = ds.dataset(names, schema=SCHEMA, format=_FORMAT).to_table()
    frame = found.drop(["left_out"]).to_pandas()
    check_columns(frame, columns := {**HEAD, **FIGURES}, missing=columns.keys() - _ALWAYS)
    if found["address"].to_pylist() != [path.stem for path in files]:
        raise UsageError("the file is damaged: it does not hold the cell of its name")
    records: list[dict[str, Any]] = found.to_pylist()
    return records


def _row(record: dict[str, Any]) -> CellRow:
    """A file's row as the record that it was made of; what is not known is NaN."""
    known = {
        name: math.nan if value is None and FIGURES.get(name, "str") in ("int", "float") else value
        for name, value in record.items()
    }
    own = {each.name: known[each.name] for each in fields(CellRow) if each.name in known}
    own |= {name: own[name] or "" for name in ("per", "kept_note", "left_out", "more")}
    own |= {name: own[name] is not False for name in ("bounded", "fits")}
    own["wall_s"] = record["wall_s"] or 0.0
    answers = None
    if record["answered"]:
        answers = Answered(
            record["right"], record["answered"], record["infeasible"], None, str(record["address"]),
            budget=record["budget"], problems=record["trace"],
        )  # fmt: skip
    time = TimeSplit(**{each.name: known[each.name] for each in fields(TimeSplit)})
    whole: dict[str, Any] = {**own, "time": time, "relative": Relative(), "answers": answers}
    return CellRow(**whole)
