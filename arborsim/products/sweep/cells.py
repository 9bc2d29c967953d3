"""The cells of a sweep on the disk: a folder of small Parquet files, each named by its address.

::

    DIR/cells/ab/ab12...-34cd....parquet    a cell's row: its setting, and what made it
    DIR/earlier/                            the same of other inputs or code: a sweep put them aside
    DIR/failed/                             the same of cells that failed: the next run tries again

All files have the columns of `SCHEMA`.  ``cells`` holds a setting once, of the inputs that were
swept last, so whatever reads it sees no mixture.  A file appears whole or not at all, and depends
on nothing but the cell: not on the moment, the machine, or the number of processes.  Live runs
measure seconds, and are the exception.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.core.documents import strict
from arborsim.core.errors import UsageError
from arborsim.core.measurements import TimeSplit
from arborsim.core.outputs import Busy, Lock, write_bytes
from arborsim.core.parquet import ParquetTables
from arborsim.core.records import located
from arborsim.core.tables import KEY, check_columns, check_parquet
from arborsim.play.results import Answered, Relative, Row
from arborsim.products.sweep.jobs import Job, setting_of

PARTS = CELLS, EARLIER, FAILED = "cells", "earlier", "failed"
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
    "stored",
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
#: Of a file's metadata: the digest of the file, itself as zeros.  Parquet's footers have no other.
_DIGEST, _BLANK = b"arborsim.digest", b"0" * 64
_MOST_BYTES = 1 << 24  # of a file
_BATCH = 256  # cells whose values are checked at once
_SCORE = ("right", "answered", "infeasible")  # all or none
_REMEDY = "delete it, and sweep again"
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
            self.episodes, self.quality, self.more, self.origin,
        )  # fmt: skip

    @property
    def origin(self) -> str:
        """Digests of the code and of all inputs but the policy: others do not compare."""
        inputs = [each for each in (self.inputs or "").split() if not each.startswith("policy=")]
        return " ".join([f"code={self.code or ''}", *inputs])


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
    # What is not known is null: NaN is a number to most that read the file.
    known = {name: None if value != value else value for name, value in figures.items()}
    table = pa.Table.from_pylist([{**head, **known, **origin}], schema=SCHEMA)
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
        writer.add_key_value_metadata({KEY: said, _DIGEST: _BLANK})
    return Made(sealed(buffer.getvalue()), status, reason)


def died(job: Job) -> Made:
    """The record of a cell whose process ended, wherever that was."""
    return made(job, WENT_WRONG, reason="its process died, perhaps for lack of memory")


def sealed(content: bytes) -> bytes:
    """A file with its digest in its metadata."""
    at = content.rfind(_DIGEST) + len(_DIGEST) + 2  # the value's type and length are between
    end = at + len(_BLANK)
    found = hashlib.sha256(content[:at] + _BLANK + content[end:]).hexdigest()
    return content[:at] + found.encode() + content[end:]


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
        return any(self.file(job.address, part).exists() for part in (CELLS, EARLIER))

    def arrange(self, jobs: Iterable[Job]) -> None:
        """Of the settings of these jobs, show their cells alone, those that are there.

        Cells of other inputs or code are put aside before any is computed, so that a folder never
        shows both, and come back when they are swept again.  A cell changes its place by one
        renaming: killed at any moment, the next sweep goes on.

        Raises
        ------
        UsageError
            The folder cannot be written.
        """
        wanted = {job.setting: job.address for job in jobs}
        for part in (CELLS, FAILED):
            for file in (self.path / part).glob("??/*.parquet"):
                if wanted.get(_setting(file), file.stem) != file.stem:
                    self._put_aside(file, part)
        for address in wanted.values():
            self._move(self.file(address, EARLIER), CELLS)

    def _put_aside(self, file: Path, part: str) -> None:
        """A cell that another takes the place of; a failure is no use to keep."""
        if part == CELLS:
            self._move(file, EARLIER)
        else:
            with contextlib.suppress(OSError):
                file.unlink()

    def _move(self, file: Path, part: str) -> None:
        if file.exists():
            target = self._made(file.stem, part)
            try:
                with contextlib.suppress(FileNotFoundError):  # another sweep was faster
                    file.replace(target)
            except OSError as error:
                raise UsageError(f"cannot move {file}: {error.strerror}") from None

    def lock(self, job: Job) -> Lock:
        """Keeps other sweeps from a cell while it is computed, and clears what a killed one left.

        Cells of the same setting share it: one takes the other's place.

        Raises
        ------
        Busy
            Another sweep computes it.
        UsageError
            The folder cannot be written.
        """
        lock = Lock(self._made(job.address).with_name(job.setting))
        for part in (CELLS, FAILED):
            for stump in self.file(job.address, part).parent.glob(f".{job.address}.*.part"):
                stump.unlink(missing_ok=True)
        return lock

    def clear(self) -> None:
        """Remove the names of locks that killed sweeps left."""
        for name in self.path.glob(f"{CELLS}/??/.*.lock"):
            with contextlib.suppress(Busy):
                Lock(name.with_name(name.name[1 : -len(".lock")])).release()

    def write(self, job: Job, found: Made) -> None:
        """Put a cell's file in its place; what is there stays if that fails."""
        for part in (CELLS, FAILED):
            for other in self.file(job.address, part).parent.glob(f"{job.setting}-*.parquet"):
                if other.stem != job.address:  # of a sweep of other inputs at the same time
                    self._put_aside(other, part)
        if found.status == WENT_WRONG:
            write_bytes(self._made(job.address, FAILED), found.content)
            return
        write_bytes(self._made(job.address), found.content)
        self.file(job.address, FAILED).unlink(missing_ok=True)

    def files(self, names: Collection[str] | None = None) -> list[Path]:
        """Of all cells, or of these wherever they are; not what is being written."""
        if names is not None:
            whole = [[self.file(name, part) for part in PARTS] for name in dict.fromkeys(names)]
            return [path for each in whole for path in list(filter(Path.exists, each))[:1]]
        found = {part: sorted((self.path / part).glob("??/*.parquet")) for part in (CELLS, FAILED)}
        done = {path.name for path in found[CELLS]}
        return [*found[CELLS], *(path for path in found[FAILED] if path.name not in done)]

    def rows(self, names: Collection[str] | None = None) -> tuple[list[CellRow], int]:
        """Cells, and the number of those that were put aside.

        `names` are those to take; None for all.

        Raises
        ------
        UsageError
            There are none, or a file is damaged, or two are of one setting.
        """
        files = self.files(names)
        if not files:
            raise UsageError(f"{self.path}: no cells are here; arborsim sweep --out writes them")
        found: dict[str, dict[str, Any]] = {}
        for record in _records(files):
            other = found.setdefault(setting_of(record), record)
            if other is not record:
                raise UsageError(
                    f"{self.path}: cells {other['address']} and {record['address']} have the same "
                    "parameters, but other inputs or versions: sweep again what shall count, or "
                    "move the other away"
                )
        aside = sum(1 for _ in (self.path / EARLIER).glob("??/*.parquet"))
        return [_row(record) for record in found.values()], aside


def _setting(file: Path) -> str:
    """The setting of a file's cell; "" if that cannot be told."""
    setting, known, _ = file.stem.partition("-")
    if known:
        return setting
    with contextlib.suppress(UsageError):  # of an earlier version of arborsim, or damaged
        return setting_of(_record(file))
    return ""


def _records(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """What stands in the files, a few at a time; columns that other versions lack are None."""
    for first in range(0, len(files), _BATCH):
        some = files[first : first + _BATCH]
        records = [_record(path) for path in some]
        try:
            _check(records)
        except UsageError:
            for path, record in zip(some, records, strict=True):
                with located(str(path)):
                    _check([record])
            raise
        yield from records


def _record(path: Path) -> dict[str, Any]:
    """The one row of a file, which is what was written under its name."""
    check_parquet(path)
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{path}: this is no cell: those are smaller; {_REMEDY}")
    # Cells of earlier versions of arborsim have no digest, nor a dash in their names.
    if "-" in path.stem and sealed(data := path.read_bytes()) != data:
        raise UsageError(f"{path}: the file is damaged (its digest is another one); {_REMEDY}")
    file = ParquetTables(path, remedy=_REMEDY)
    rows, groups = file.metadata.num_rows, file.metadata.num_row_groups
    if (rows, groups) != (1, 1):
        raise UsageError(f"{path}: the file is damaged (a cell has one row, not {rows}); {_REMEDY}")
    others = () if file.schema.equals(SCHEMA) else file.schema  # what is usual is quick
    for field in others:
        if field.name not in SCHEMA.names or field.type != SCHEMA.field(field.name).type:
            raise UsageError(
                f"{path}: no cell of this version of arborsim has a column {field.name!r:.40} of "
                f"type {field.type}: take the arborsim that made it, or {_REMEDY}"
            )
    if lacking := _ALWAYS.difference(file.schema.names):
        raise UsageError(f"{path}: the file is damaged (no {min(lacking)}); {_REMEDY}")
    found: dict[str, Any] = file.read([0]).to_pylist()[0]
    if found["address"] != path.stem:
        raise UsageError(f"{path}: the file is damaged: it does not hold the cell of its name")
    return dict.fromkeys(SCHEMA.names) | found


def _check(records: list[dict[str, Any]]) -> None:
    frame = pa.Table.from_pylist(records, schema=SCHEMA).drop(["left_out"]).to_pandas()
    check_columns(frame, columns := {**HEAD, **FIGURES}, missing=columns.keys() - _ALWAYS)
    for right, answered, infeasible in (map(each.get, _SCORE) for each in records):
        known = {each is not None for each in (right, answered, infeasible)}
        if len(known) > 1 or (right or 0) > (answered or 0):
            raise UsageError(
                f"right {right} of answered {answered}, infeasible {infeasible} is no count of "
                f"answers: the file is damaged; {_REMEDY}"
            )


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
