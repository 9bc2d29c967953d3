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
from arborsim.products.declare import declared
from arborsim.products.options import MachineOptions
from arborsim.products.sweep.jobs import PARAMETERS, Job, setting_of

PARTS = CELLS, EARLIER, FAILED = "cells", "earlier", "failed"
#: What a file takes on a disk: 8 to 11 kB, in blocks of 4 KiB.
FILE_BYTES = 3 * 4096
#: What became of a cell: it has figures; it cannot run, by its parameters; something went wrong.
DONE, LEFT_OUT, WENT_WRONG = "done", "left out", "failed"
#: Fields of a `Row` that are parameters, records, or relative to other cells.
_APART = {*PARAMETERS, "left_out", "time", "relative", "oracle_gap", "answers", "fidelity", "equal"}
_APART |= {"stored", "counters", "title"}
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
#: Of a file's metadata: the digest of the file, itself as zeros.  Parquet's footers have no other.
_DIGEST, _BLANK = b"arborsim.digest", b"0" * 64
_MOST_BYTES = 1 << 24  # of a file
_BATCH = 256  # cells whose values are checked at once
_REMEDY = "delete it, and sweep again"


@dataclass(frozen=True, kw_only=True)
class CellRow(Row, MachineOptions):
    """The row of a cell: figures as those of a replay, and the parameters as in the file."""

    address: str
    kind: str
    settings: str
    first: int
    episodes: int
    quality: bool
    more: str
    status: str
    wall_s: float  #: of a live run; 0 of a replay, whose seconds are simulated
    code: str
    inputs: str

    def __post_init__(self) -> None:
        """Accept whatever ran: live runs have no pages."""

    @property
    def total_s(self) -> float:
        return self.wall_s or self.time.total_s

    @property
    def label(self) -> str:
        return f"{super().label} ({self.settings})" if self.settings else super().label

    @property
    def place(self) -> tuple[object, ...]:
        """The parameters that compared cells share: all parameters but policy and budget."""
        shared = (name for name in PARAMETERS if name not in ("policy", "settings", "budget"))
        return *(getattr(self, name) for name in shared), self.origin

    @property
    def origin(self) -> str:
        """Digests of the code and of all inputs but the policy: others do not compare."""
        inputs = [each for each in self.inputs.split() if not each.startswith("policy=")]
        return " ".join([f"code={self.code}", *inputs])


_KINDS = {each.name: str(each.type) for kind in (TimeSplit, CellRow) for each in fields(kind)}
_KINDS |= {each.name: each.kind.__name__ for each in declared(MachineOptions)}
#: Columns with their types: of the parameters, then of figures, of which a score has all or none,
#: then of what tells cells apart that have the same parameters.
HEAD = {name: _KINDS[name] for name in ("address", *PARAMETERS, "status", "left_out")}
_SCORE = {"right": "int", "answered": "int", "infeasible": "int"}
FIGURES = {each.name: _KINDS[each.name] for each in fields(Row) if each.name not in _APART}
FIGURES |= {each.name: _KINDS[each.name] for each in fields(TimeSplit)}
FIGURES |= {"wall_s": "float", "total_s": "float", "tokens_per_s": "float", **_SCORE}
ORIGIN = {"code": "str", "inputs": "str"}
SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in {**HEAD, **FIGURES, **ORIGIN}.items()])


@dataclass(frozen=True)
class Made:
    """A computed cell."""

    content: bytes  #: of its file
    status: str
    reason: str = ""


def made(
    job: Job,
    status: str,
    row: Row | None = None,
    reason: str = "",
    wall_s: float = 0.0,
    metadata: Mapping[str, Any] | None = None,
) -> Made:
    """A cell's file; the same cell gives the same bytes."""
    head = {**job.head, "address": job.address, "status": status, "left_out": reason}
    figures: dict[str, Any] = {}
    if row is not None:
        figures = figures_of(row) | {"wall_s": wall_s, "total_s": wall_s or row.time.total_s}
    origin = {"code": job.code, "inputs": " ".join(f"{k}={v}" for k, v in job.inputs.items())}
    said = json.dumps(strict(metadata or {"kind": "cell"}), sort_keys=True, allow_nan=False)
    # What is not known is null: NaN is a number to most that read the file.
    known = {name: None if value != value else value for name, value in figures.items()}
    table = pa.Table.from_pylist([{**head, **known, **origin}], schema=SCHEMA)
    buffer = io.BytesIO()
    # Dictionaries, statistics and Arrow's schema say nothing about one row, and are most of a file.
    plain = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    with pq.ParquetWriter(buffer, SCHEMA, write_page_checksum=True, **plain) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({KEY: said, _DIGEST: _BLANK})
    return Made(sealed(buffer.getvalue()), status, reason)


def figures_of(row: Row) -> dict[str, Any]:
    """The figures of a row as columns; None for what it does not have."""
    score = row.answers
    counts = (score.right, score.n, score.infeasible) if score else (None, None, None)
    own = {name: getattr(row, name, None) for name in FIGURES}
    return own | vars(row.time) | dict(zip(_SCORE, counts, strict=True))


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
        """Show the cells of these jobs alone under their settings, those that are there.

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
                if wanted.get(file.stem.partition("-")[0], file.stem) != file.stem:
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
        """Files of all cells, or of these wherever they are; not what is being written."""
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


def _records(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The rows of the files, read and checked a few at a time."""
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
    if sealed(data := path.read_bytes()) != data:
        raise UsageError(f"{path}: the file is damaged (its digest is another one); {_REMEDY}")
    file = ParquetTables(path, remedy=_REMEDY)
    rows, groups = file.metadata.num_rows, file.metadata.num_row_groups
    if (rows, groups) != (1, 1):
        raise UsageError(f"{path}: the file is damaged (a cell has one row, not {rows}); {_REMEDY}")
    if not file.schema.equals(SCHEMA):
        raise UsageError(
            f"{path}: no cell of this version of arborsim has these columns: take the arborsim "
            f"that made it, or {_REMEDY}"
        )
    found: dict[str, Any] = file.read([0]).to_pylist()[0]
    if found["address"] != path.stem:
        raise UsageError(f"{path}: the file is damaged: it does not hold the cell of its name")
    return found


def _check(records: list[dict[str, Any]]) -> None:
    frame = pa.Table.from_pylist(records, schema=SCHEMA).drop(["left_out"]).to_pandas()
    columns = {name: kind for name, kind in HEAD.items() if name != "left_out"}
    check_columns(frame, columns | FIGURES, missing=FIGURES.keys())
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
    own |= {name: own[name] or "" for name in ("per", "kept_note", "left_out")}
    own |= {name: own[name] is not False for name in ("bounded", "fits")}
    own["wall_s"] = record["wall_s"] or 0.0
    answers = None
    if record["answered"]:
        counts = *(record[name] for name in _SCORE), None, str(record["address"])
        answers = Answered(*counts, budget=record["budget"], problems=record["trace"])
    time = TimeSplit(**{each.name: known[each.name] for each in fields(TimeSplit)})
    whole: dict[str, Any] = {**own, "time": time, "relative": Relative(), "answers": answers}
    return CellRow(**whole)
