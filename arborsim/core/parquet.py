"""Parquet files of unknown origin, read within the memory that their size justifies.

A file of some kilobytes can hold gigabytes: runs of one value, pages of zeros, a long text that a
dictionary repeats.  Before anything is decoded, `ParquetTables.read` works out what decoding takes.
Footers may lie about that, so the headers of all pages that Arrow would read are asked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.core.errors import ArborsimError, UsageError

#: Decoded bytes that any file may take at once: 8 million rows of a trace's counters.
ALWAYS_BYTES = 1 << 29
#: Decoded bytes for each byte in the file, beyond that.
MOST_EXPANDED = 100
#: Decoded bytes that are read faster by one thread than by several.
_MOST_ALONE_BYTES = 1 << 16
_MAGIC = b"PAR1"
_HEADER_BYTES, _MOST_HEADER_BYTES = 1 << 10, 1 << 24
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TEXT = "BYTE_ARRAY"
#: Page types and encodings of the format (parquet.thrift).
_DICTIONARY_PAGE = 2
_PLAIN, _DELTA_LENGTH = 0, 6
#: Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET = range(1, 11)
_STRUCT = 12
_WHOLE = (_I16, _I32, _I64)
_NONE = "the file is damaged (what should say where its data are is none)"


#: What Arrow raises for files that are damaged, and for too little memory.
_BELOW = (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError)


class _Suspect(Exception):
    """Reading would take more than the file's size justifies, or pages that are none."""


@dataclass(frozen=True)
class _Column:
    """One of the columns that Parquet stores: a list is stored as its values."""

    name: str  # of the table's column
    physical: str
    width: int  # bytes of a value; of a text, where it begins
    levels: int  # bytes that say to which list and row a value belongs


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row group's part of a column, as the footer has it."""

    name: str  # of the table's column
    values: int
    nulls: int | None  # None if it is not said
    stored_bytes: int
    decompressed_bytes: int
    first_page: int  # where it begins in the file


class _Page(NamedTuple):
    """The header of a page."""

    kind: int
    bytes: int  # decompressed
    values: int
    encoding: int
    stored: int  # bytes in the file, without the header


class ParquetTables:
    """A Parquet file whose tables are read within bounds.

    `shown` is what messages call it, `error` what is raised, and `remedy` what to do about damage.
    """

    def __init__(
        self,
        path: Path,
        shown: str = "",
        error: type[ArborsimError] = UsageError,
        remedy: str = "copy it or make it again",
    ) -> None:
        self.path, self.shown = path, shown or str(path)
        self._error, self._remedy = error, remedy
        try:
            _refuse_pipe(path)
            self.file = pq.ParquetFile(path, page_checksum_verification=True)
            self.schema = self.file.schema_arrow
            self.schema.names  # noqa: B018 - names that are no text fail only when read
            self._columns = [_column(self.file.schema, i) for i in range(len(self.file.schema))]
        except _BELOW as problem:
            raise self._failure("", "the file is", problem, 0) from problem
        self.metadata = self.file.metadata

    @cached_property
    def chunks(self) -> list[list[Chunk]]:
        """The parts of the columns that Parquet stores, by row group.

        pyarrow has them, too, but its accounts of damaged parts end the process.
        """
        try:
            with self.path.open("rb") as file:
                groups = _groups(file)
            if any(len(group) != len(self._columns) for group in groups):
                raise _Suspect("the file is damaged (parts of columns are missing)")
            names = [column.name for column in self._columns]
            return [list(map(_chunk, names, group)) for group in groups]
        except _Suspect as problem:
            raise self._error(f"{self.shown}: {problem}; {self._remedy}") from None
        except OSError as problem:
            raise self._failure("", "the file is", problem, 0) from problem

    def read(
        self, groups: Sequence[int], columns: Sequence[str] | None = None, what: str = ""
    ) -> pa.Table:
        """Row groups, all columns by default. `what` they are begins messages, e.g. ``"row 3: "``.

        Whatever is wrong with them is one line.
        """
        needed = 0
        try:
            with self.path.open("rb") as file:
                needed = self._check(file, groups, columns)
            names = None if columns is None else list(columns)
            threads = needed > _MOST_ALONE_BYTES
            return self.file.read_row_groups(list(groups), names, use_threads=threads)
        except _Suspect as problem:
            raise self._error(f"{self.shown}: {what}{problem}; {self._remedy}") from None
        except _BELOW as problem:
            raise self._failure(what, "its data are", problem, needed) from problem

    def _failure(self, what: str, subject: str, problem: Exception, needed: int) -> ArborsimError:
        if isinstance(problem, MemoryError):  # Arrow's, too
            takes = f"reading it takes up to {needed / 1e9:.3g} GB" if needed else one_line(problem)
            return self._error(
                f"{self.shown}: {what}out of memory: {takes}: run fewer processes, or take a "
                "machine with more memory"
            )
        if isinstance(problem, OSError) and problem.errno:  # of damage Arrow gives no number
            why = os.strerror(problem.errno)
            return self._error(f"{self.shown}: {what}cannot be read ({why})")
        why = one_line(problem)
        return self._error(f"{self.shown}: {what}{subject} damaged ({why}); {self._remedy}")

    def _check(self, file: IO[bytes], groups: Sequence[int], columns: Sequence[str] | None) -> int:
        """Bytes that reading takes at most. Raises `_Suspect` if those are too many."""
        wanted = {each.name for each in self._columns} if columns is None else {*columns}
        chosen = [(i, each) for i, each in enumerate(self._columns) if each.name in wanted]
        needed = stored = 0
        for number in groups:
            rows = self.metadata.row_group(number).num_rows
            for i, column in chosen:
                chunk = self.chunks[number][i]
                stored += chunk.stored_bytes
                allowed = max(ALWAYS_BYTES, MOST_EXPANDED * stored)
                taken, texts = _sizes(column, list(_pages(file, chunk)), rows)
                if texts and needed + taken + texts > allowed:
                    texts = self._texts(number, column)  # the bound is far above what there is
                needed += taken + texts
                if needed > allowed:
                    raise _Suspect(
                        f"{stored} bytes in the file stand for {needed / 1e9:.3g} GB or more "
                        f"(column {column.name}), which no recording does"
                    )
        return needed

    def _texts(self, group: int, column: _Column) -> int:
        """Bytes of a column's texts, counted without making them: Arrow leaves dictionaries be."""
        import pyarrow.compute as pc  # slow to import

        file = pq.ParquetFile(self.path, metadata=self.metadata, read_dictionary=[column.name])
        total = 0
        for chunk in file.read_row_group(group, columns=[column.name])[column.name].chunks:
            if not pa.types.is_dictionary(chunk.type):
                raise _Suspect(f"texts of column {column.name} may be longer than can be told")
            lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
            total += pc.sum(lengths.take(chunk.indices)).as_py() or 0
        return total


def one_line(error: BaseException) -> str:
    """An error of a library below, on one line and without its tail of hints."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def ends_of(path: Path) -> tuple[bool, bool, int]:
    """Whether a file begins, and ends, as Parquet does, and its bytes. May raise `OSError`."""
    _refuse_pipe(path)
    with path.open("rb") as file:
        head = file.read(4)
        size = file.seek(0, 2)
        file.seek(max(size - 4, 0))
        return head == _MAGIC, file.read(4) == _MAGIC and size >= 12, size


def _refuse_pipe(path: Path) -> None:
    """An `OSError` for a pipe: its writer may never come, and Parquet is read from the end."""
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe: write it to a file first", str(path))


def _column(schema: pq.ParquetSchema, i: int) -> _Column:
    found = schema.column(i)
    width = _WIDTHS.get(found.physical_type, 4)
    if found.physical_type == "FIXED_LEN_BYTE_ARRAY":
        width = max(found.length, 1)
    levels = 4 * found.max_repetition_level + (found.max_definition_level > 0)
    return _Column(found.path.split(".")[0], found.physical_type, width, levels)


def _sizes(column: _Column, pages: Sequence[_Page], rows: int) -> tuple[int, int]:
    """Bytes that a column's part takes, and what its texts take at most."""
    dictionary = next((page for page in pages if page.kind == _DICTIONARY_PAGE), None)
    values = texts = 0
    for page in pages:
        if page.kind == _DICTIONARY_PAGE:
            continue
        values += page.values
        if column.physical != _TEXT:
            continue
        if page.encoding in (_PLAIN, _DELTA_LENGTH):
            texts += page.bytes
        else:  # each as long as all that the dictionary, or the page, holds
            longest = page.bytes if dictionary is None else dictionary.bytes
            texts += page.values * longest
    if column.levels < 4:  # no lists: Arrow reads as many as there are rows
        values = min(values, rows)
    entries = 0 if dictionary is None else dictionary.values * max(column.width, 16)
    taken = values * (column.width + column.levels) + entries
    return taken + max((page.bytes for page in pages), default=0), texts


def _groups(file: IO[bytes]) -> list[list[tuple[Any, ...]]]:
    """The columns' parts by row group, as `_chunk` takes them."""
    size = file.seek(-8, 2)
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(size - length, 0))
    data = file.read(length)
    try:
        footer, _ = _struct(data, 0, {4: [{1: [{3: _PART}, _packed]}]})
    except IndexError:
        raise _Suspect("the file is damaged (its footer is cut short)") from None
    return [group.get(1, []) for group in footer.get(4, [])]


def _packed(column: dict[int, Any]) -> tuple[Any, ...]:
    """A column's part without its dicts, each of which takes hundreds of bytes."""
    part = column.get(3, {})
    numbers = (max(part.get(field, 0), 0) for field in (5, 6, 7, 9))
    return (*numbers, part.get(11, 0), part.get(12, {}).get(3))


def _chunk(name: str, part: tuple[Any, ...]) -> Chunk:
    """Arrow begins with the dictionary where there is one."""
    values, decompressed, stored, first, dictionary, nulls = part
    begin = dictionary if 0 < dictionary < first else first
    return Chunk(name, values, nulls, stored, decompressed, begin)


def _pages(file: IO[bytes], chunk: Chunk) -> Iterator[_Page]:
    """The pages of a column's part that Arrow reads, by their own headers."""
    at, left = chunk.first_page, chunk.values
    end = at + chunk.stored_bytes
    while left > 0 and at < end:
        page, at = _page(file, at)
        at += page.stored
        left -= 0 if page.kind == _DICTIONARY_PAGE else page.values
        yield page


def _page(file: IO[bytes], at: int) -> tuple[_Page, int]:
    """The page at this place of the file, and where its data begin."""
    size = _HEADER_BYTES
    while True:
        data = b""
        try:
            data = os.pread(file.fileno(), size, at)
            found, length = _struct(data, 0, _HEADER)
        except (IndexError, OverflowError):
            if len(data) < size or size >= _MOST_HEADER_BYTES:
                raise _Suspect(f"its data are damaged (no page at byte {at})") from None
            size *= 16
            continue
        found = {**_NO_PAGE, **found}
        own = {**_NO_PAGE, **(found[5] or found[7] or found[8])}
        page = _Page(found[1], found[2], own[1], own[4] if found[8] else own[2], found[3])
        if page.values < 0 or page.bytes < 0 or page.stored < 0:
            raise _Suspect("its data are damaged (a page of negative size)")
        return page, at + length


# --- Thrift's compact protocol, in which Parquet says what there is ---

#: Fields of a footer's ColumnMetaData, and of a PageHeader, that are read; true: a number.
_PART = {5: True, 6: True, 7: True, 9: True, 11: True, 12: {3: True}}
_NO_PAGE: dict[int, Any] = {1: 0, 2: 0, 3: 0, 4: 0, 5: {}, 7: {}, 8: {}}
_HEADER = {1: True, 2: True, 3: True, 5: {1: True, 2: True}, 7: {1: True}, 8: {1: True, 4: True}}


def _struct(
    data: bytes, at: int, wanted: Mapping[int, Any], depth: int = 0
) -> tuple[dict[int, Any], int]:
    """The wanted fields of a struct, and where it ends.  `IndexError` if it does not.

    Fields are numbers (true), structs (a dict), or lists of structs (a list of one, or
    with what is made of each). Those of another type than wanted are skipped.
    """
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:  # a footer has many: what is short is read without a call
        at += 1
        kind = head & 15
        if head > 15:
            field += head >> 4
        else:
            field, at = _number(data, at)
        if kind in _WHOLE:
            byte, start = data[at], at
            while data[at] > 127:
                at += 1
            at += 1
            if field in wanted and wanted[field] is True:
                short = at == start + 1
                found[field] = (byte >> 1) ^ -(byte & 1) if short else _number(data, start)[0]
        elif field not in wanted or wanted[field] is True:
            if kind == _BINARY and data[at] < 128:
                at += 1 + data[at]
            else:
                at = _skip(data, at, kind, depth)
        elif kind == _STRUCT and isinstance(wanted[field], dict):
            found[field], at = _struct(data, at, wanted[field])
        elif kind == _LIST and isinstance(wanted[field], list) and data[at] & 15 == _STRUCT:
            count, at = _length(data, at)
            items = found[field] = []
            fields, *made = wanted[field]
            for _ in range(count):
                item, at = _struct(data, at, fields)
                items.append(made[0](item) if made else item)
        else:
            at = _skip(data, at, kind, depth)
    return found, at + 1


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > 127:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise _Suspect(_NONE)
    return value | byte << shift, at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Entries of a list or set, and where they begin."""
    count = data[at] >> 4
    return _unsigned(data, at + 1) if count == 15 else (count, at + 1)


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Where the value of this type at `at` ends."""
    if kind in _WHOLE:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == _BINARY:
        length, at = _unsigned(data, at)
        return at + length
    if kind in (_TRUE, _FALSE):
        return at
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    if depth > 8:
        raise _Suspect(_NONE)
    if kind == _STRUCT:
        return _struct(data, at, {}, depth + 1)[1]
    if kind in (_LIST, _SET):
        inner = data[at] & 15
        count, at = _length(data, at)
        for _ in range(count):
            if data[at] < 128 and inner in _WHOLE:
                at += 1
            else:
                at = at + 1 if inner in (_TRUE, _FALSE) else _skip(data, at, inner, depth + 1)
        return at
    raise _Suspect(_NONE)  # maps: Parquet has none
