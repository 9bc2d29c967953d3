"""Read a trace one episode at a time, and only the columns that are asked for.

A trace is a Parquet file, which may be packed (`arborsim.trace.packed`) or written again by another
tool (`arborsim.trace.rewritten`), or the directory of an unfinished recording with one small
Parquet file per whole episode.  Whatever is wrong becomes one line that says what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from arborsim.core.errors import MissingSignal, TraceError, UsageError
from arborsim.core.observations import Signal
from arborsim.core.parquet import Chunk, ParquetTables, ends_of, one_line
from arborsim.trace.columns import numbers_of
from arborsim.trace.decode import decode_episode
from arborsim.trace.episode import Episode
from arborsim.trace.packed import NEEDED, EpisodeIndex, expand
from arborsim.trace.rewritten import as_recorded, says_the_same, with_metadata
from arborsim.trace.schema import (
    EVICTED_BY,
    LATER,
    METADATA_KEY,
    PACKED_VERSION,
    RUN,
    VERSION_KEY,
    TraceInfo,
    arrow_schema,
    columns_for,
    recording_options,
    signal_columns,
)
from arborsim.trace.validate import Where

_MAKE_ONE = "make a trace with 'arborsim record', or use one of those in traces/"
_TOGETHER_BYTES = 1 << 18  # of episodes that are read together, in the file
_PARTS_SUFFIX = ".parts"
_PART = re.compile(r"episode-(\d{6,})\.parquet")

#: What messages call signals whose names say little.
_IN_WORDS = {Signal.HIDDEN: "hidden vectors", Signal.ROPE: "RoPE frequencies"}


class TraceReader:
    """A trace file, or the ``.parts`` directory of an interrupted recording.

    `info` is its metadata, `columns` are the names of its columns, `num_episodes` counts its
    episodes, and `file_bytes` is its size on disk.  Whatever is wrong with it is a `TraceError`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        in_parts = self.path.is_dir()
        if not in_parts:
            _must_exist(self.path)
        files = part_files(self.path) if in_parts else [self.path]
        first = _open(files[0], self.path)
        self.info, packed = _info_of(with_metadata(first.schema, self.path), self.path)
        self.columns = tuple(first.schema.names)
        #: Columns whose type another tool changed, and the recorder's
        self._types = _check_columns(first.schema, self.info, packed, self.path)
        self._open_file: tuple[Path, ParquetTables] = (files[0], first)
        # Each row group: its file, and its number there.  It is an episode unless they are packed.
        groups = 1 if in_parts else first.metadata.num_row_groups
        self._groups = [(file, group) for file in files for group in range(groups)]
        if not self._groups or first.metadata.num_rows == 0:
            raise TraceError(f"{self.path}: the trace holds no episodes; record it again")
        if packed and in_parts:
            raise TraceError(f"{files[0]}: a part holds one episode, not packed; record it again")
        self._held: dict[Signal, bool] = {}
        regrouped = not packed and not in_parts and self._regrouped(first)
        self._runs = packed
        #: Where episodes lie, unless each is a row group
        self._packed = self._episode_index(first) if packed or regrouped else None
        #: The last row group of a packed trace that was read, with these columns.
        self._group: tuple[range, tuple[str, ...] | None, pa.Table] | None = None
        self.num_episodes = len(self._groups if self._packed is None else self._packed.group)
        self.file_bytes = sum(os.path.getsize(file) for file in files)

    def _episode_index(self, file: ParquetTables) -> EpisodeIndex:
        groups = range(file.metadata.num_row_groups)
        names = ["episode", RUN.name] if self._runs else ["episode"]
        table = as_recorded(file.read(groups, names), self._types)
        rows = np.array([file.metadata.row_group(group).num_rows for group in groups])
        return EpisodeIndex.of(table, rows, str(self.path))

    def _regrouped(self, file: ParquetTables) -> bool:
        """Whether another tool chose the row groups: the first or last is not one episode."""
        last = file.metadata.num_row_groups - 1
        try:
            for group in {0, last}:
                held = numbers_of(file.read([group], ["episode"])["episode"])
                if ((held >= 0) & (held != group)).any():  # null is damage
                    return True
        except TraceError:  # damage is for those who read the episode
            return False
        return False

    def num_rows(self, episode: int) -> int:
        """Rows of one episode, without reading it."""
        if self._packed is not None:
            return int(self._packed.rows[episode])
        file, group = self._groups[episode]
        return int(self._file(file).metadata.row_group(group).num_rows)

    def has(self, signal: Signal) -> bool:
        """Whether any episode holds this observation."""
        if signal is Signal.ROPE:
            return self.info.rope is not None
        if signal not in self._held:
            columns = signal_columns(signal, self.info)
            self._held[signal] = (
                self._has_values(columns[0]) if columns else any(map(self.has, EVICTED_BY))
            )
        return self._held[signal]

    def _has_values(self, column: str) -> bool:
        return column in self.columns and any(
            chunk.name == column and chunk.nulls != chunk.values for chunk in self.chunks()
        )

    def chunks(self) -> Iterator[Chunk]:
        """Parquet's account of each part of a column, of all episodes."""
        for file, group in self._groups:
            yield from self._file(file).chunks[group]

    def require(self, needs: Iterable[Signal], who: str) -> None:
        """Raise `MissingSignal` unless the trace holds what `who`, e.g. ``"policy h2o"``, reads.

        The message names the signals and the recording option that would supply them.
        """
        missing = [signal for signal in sorted(needs) if not self.has(signal)]
        if missing:
            options = " ".join(recording_options(missing, self.info))
            remedy = f"record it with {options}"
            if self.info.unrecorded:
                remedy = f"{self.info.unrecorded}; take a trace recorded with {options}"
            names = " and ".join(_IN_WORDS.get(signal, signal) for signal in missing)
            raise MissingSignal(f"{who} reads {names}, which {self.path} does not hold: {remedy}")

    def episodes(
        self,
        needs: Iterable[Signal] = (),
        text: bool = False,
        embedding: bool = False,
        start: int = 0,
        stop: int | None = None,
        who: str = "this run",
    ) -> Iterator[Episode]:
        """Yield episodes ``start`` to ``stop``, each validated.  Memory holds one at a time.

        Parameters
        ----------
        needs : iterable of Signal
            The observations to decode.  The others are never read from disk.
        text, embedding : bool
            Also decode the text of blocks and answers (those of thoughts too), and the embeddings
            at boundaries.
        who : str
            What needs the observations, for messages.

        Raises
        ------
        MissingSignal
            `needs` names what the trace does not hold, or there are no embeddings.
        TraceError
            The episode is damaged.
        """
        wanted = frozenset(needs)
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"episodes {start} to {stop} make no range")
        self.require(wanted, who)
        if embedding and "embedding" not in self.columns:
            raise MissingSignal(
                f"{who} reads embeddings, which {self.path} does not hold: record it with "
                "--capture signals, or as a bank with --bank"
            )
        names = [n for n in columns_for(wanted, self.info, text, embedding) if n in self.columns]
        last = self.num_episodes if stop is None else min(stop, self.num_episodes)
        for index, table in enumerate(self._tables(start, last, names), start):
            yield decode_episode(table, self.info, str(self.path), index, wanted, text, embedding)

    def _tables(self, start: int, stop: int, names: list[str]) -> Iterator[pa.Table]:
        """Episodes one after the other, of which small ones are read together: that is faster."""
        index = start
        while index < stop:
            end = index + 1
            if self._packed is None and (count := self._small(index, stop, names)) > 1:
                file = self._open_file[1]
                try:
                    table = file.read(range(index, index + count), names).combine_chunks()
                    table = as_recorded(table, self._types) if self._types else table
                except TraceError:  # one by one: those before the damage can be had
                    count = 1
                else:
                    end, first = index + count, 0
                    for group in range(index, end):
                        rows = file.metadata.row_group(group).num_rows
                        yield table.slice(first, rows)
                        first += rows
            if end == index + 1:
                yield self.table(index, names)
            index = end

    def _small(self, start: int, stop: int, names: list[str]) -> int:
        """How many episodes from `start` on are read together: they are short, and in one file."""
        path, wanted, left = self._groups[start][0], set(names), _TOGETHER_BYTES
        chunks = self._file(path).chunks
        for index in range(start, stop):
            file, group = self._groups[index]
            if file != path:
                return index - start
            left -= sum(each.stored_bytes for each in chunks[group] if each.name in wanted)
            if left < 0:
                return index - start
        return stop - start

    def table(self, index: int, names: list[str] | None = None) -> pa.Table:
        """One episode, a row per event, not validated, with all columns by default."""
        if self._packed is None:
            return self._read(index, index, names)
        if not self._runs:
            return self._packed_rows(index, names)
        read = names if names is None else list(dict.fromkeys([*names, *NEEDED]))
        table = expand(self._packed_rows(index, read), Where(str(self.path), index))
        return table if names is None else table.select(names)

    def first_row(self, index: int, names: list[str]) -> pa.Table:
        """The first row of one episode, where what belongs to a request stands, not validated."""
        stored = (
            self._read(index, index, names)
            if self._packed is None
            else (self._packed_rows(index, names))
        )
        return stored.slice(0, 1)

    def _packed_rows(self, index: int, names: list[str] | None) -> pa.Table:
        """The rows of one episode as they are stored."""
        assert self._packed is not None
        groups = range(int(self._packed.group[index]), int(self._packed.last[index]) + 1)
        key = None if names is None else tuple(names)
        if self._group is None or self._group[:2] != (groups, key):
            table = self._read(groups.start, index, names, len(groups))
            self._group = (groups, key, table.combine_chunks())
        first, stored = int(self._packed.first[index]), int(self._packed.stored[index])
        return self._group[2].slice(first, stored)

    def _read(self, number: int, episode: int, names: list[str] | None, count: int = 1) -> pa.Table:
        """A row group, or some after another, read for one episode."""
        path, group = self._groups[number]
        found = self._file(path).read(range(group, group + count), names, f"episode {episode}: ")
        return as_recorded(found, self._types) if self._types else found

    def _file(self, path: Path) -> ParquetTables:
        if self._open_file[0] != path:
            file = _open(path, self.path)
            if not file.schema.equals(self._open_file[1].schema):
                raise TraceError(
                    f"{path}: its columns differ from those of the other episodes; record it again"
                )
            if file.metadata.num_row_groups != 1:
                raise TraceError(f"{path}: a part holds one episode; record it again")
            self._open_file = (path, file)
        return self._open_file[1]


def open_trace(path: Path | str) -> TraceReader:
    """The reader of a trace, which a process opens once for as long as the file stays the same.

    Opening parses what the file says of all its episodes: where work is done episode by episode,
    that would take time quadratic in their number.
    """
    try:
        state = os.stat(path)
    except OSError:
        return TraceReader(path)  # says what is there instead
    return _opened(Path(path), (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=16)
def _opened(path: Path, state: tuple[int, ...]) -> TraceReader:
    return TraceReader(path)


def _open(path: Path, shown: Path) -> ParquetTables:
    """Open a Parquet file, with a one-line `TraceError` for whatever is wrong with it."""
    try:
        begins, ends, size = ends_of(path)
    except OSError as error:
        raise TraceError(f"{shown}: cannot be read ({error.strerror})") from error
    if not begins:
        raise TraceError(f"{shown}: this is not a Parquet file, and so no trace; {_MAKE_ONE}")
    if not ends:
        raise TraceError(
            f"{shown}: the file is truncated: it ends after {size} bytes without a footer; "
            "copy it again, or record it again"
        )
    remedy = "copy the file again, or record it again"
    return ParquetTables(path, str(shown), TraceError, remedy)


def _must_exist(path: Path) -> None:
    """Raise a `TraceError` that says what is there instead, if anything."""
    if path.exists():
        return
    parts = parts_directory(path)
    if not parts.is_dir():
        raise TraceError(f"{path}: no such file; {_MAKE_ONE}")
    if not any(is_part(entry) for entry in parts.iterdir()):
        raise TraceError(
            f"{path}: the recording was interrupted before its first whole episode; "
            "resume it, or record it again"
        )
    raise TraceError(
        f"{path}: the recording was interrupted after {len(part_files(parts))} whole episodes: "
        f"read {parts}, or resume the recording"
    )


def parts_directory(path: Path) -> Path:
    """Where the episodes of a running or interrupted recording of `path` lie."""
    return path.with_name(path.name + _PARTS_SUFFIX)


def is_part(file: Path) -> bool:
    return _PART.fullmatch(file.name) is not None


def part_files(directory: Path) -> list[Path]:
    """The episodes in a parts directory, in order, or a `TraceError` if any or all are missing."""
    found = {
        int(match[1]): entry
        for entry in directory.iterdir()
        if (match := _PART.fullmatch(entry.name))
    }
    if not found:
        raise TraceError(
            f"{directory}: this directory holds no recorded episodes; give a trace file, or the "
            f"{_PARTS_SUFFIX} directory of an interrupted recording"
        )
    for number in range(len(found)):
        if number not in found:
            raise TraceError(
                f"{directory}: episode {number} is missing, although later ones are there; "
                "record it again"
            )
    return [found[number] for number in range(len(found))]


def _info_of(schema: pa.Schema, path: Path) -> tuple[TraceInfo, bool]:
    """The trace's metadata, and by the format version whether it is packed."""
    stored = schema.metadata or {}
    if METADATA_KEY not in stored or VERSION_KEY not in stored:
        if b"arborsim" in stored:
            raise TraceError(
                f"{path}: results, not a trace: arborsim plot draws them, arborsim compare and "
                "load_results read them"
            )
        raise TraceError(
            f"{path}: a Parquet file, but no trace: it has no arborsim metadata, nor is there a "
            f"{path.stem}.json with it; {_MAKE_ONE}"
        )
    version = stored[VERSION_KEY].decode("ascii", "replace")
    if version not in map(str, range(1, PACKED_VERSION + 1)):
        raise TraceError(
            f"{path}: trace format {version[:20]!r}, but this arborsim reads versions up to "
            f"{PACKED_VERSION}; upgrade arborsim, or record it again"
        )
    try:
        info = TraceInfo.from_json(stored[METADATA_KEY].decode())
    except TraceError as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{path}: the trace's metadata cannot be read ({one_line(error)}); record it again"
        ) from error
    return info, int(version) == PACKED_VERSION


def _check_columns(
    schema: pa.Schema, info: TraceInfo, packed: bool, file: Path
) -> dict[str, pa.DataType]:
    """The columns to cast, and to what.

    Raises `TraceError` unless all columns of this capture level are there, of types that do.
    """
    expected = arrow_schema(info, packed)
    types = {}
    missing = [name for name in expected.names if name not in {*schema.names, *LATER}]
    if missing:
        raise TraceError(
            f"{file}: column {', '.join(missing)} is missing, which a trace with capture level "
            f"'{info.capture}' has; record it again"
        )
    for field in expected:
        if field.name in LATER and field.name not in schema.names:
            continue
        if len(schema.get_all_field_indices(field.name)) != 1:
            raise TraceError(f"{file}: column {field.name} is there twice; record it again")
        found = schema.field(field.name).type
        if _same_type(field.type, found):
            continue
        types[field.name] = field.type
        if not says_the_same(field.type, found):
            raise TraceError(
                f"{file}: column {field.name} has type {found} instead of {field.type}; "
                "write it with TraceWriter"
            )
    return types


def _same_type(expected: pa.DataType, found: pa.DataType) -> bool:
    if pa.types.is_dictionary(expected):
        # The width of the indices is the reader's choice, and plain strings say the same.
        found = found.value_type if pa.types.is_dictionary(found) else found
        expected = expected.value_type
    if pa.types.is_list(expected) and pa.types.is_list(found):
        return _same_type(expected.value_type, found.value_type)  # the item's name is free
    return bool(expected.equals(found))
