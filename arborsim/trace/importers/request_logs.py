"""Logs of requests: which of the known formats a file has, and its requests in order of arrival.

A format says where its rows hold an arrival, lengths and ids of prefix blocks (`Columns`).  Files
of others are read by the columns that the user names.  Rows are lines of CSV, objects a line or
objects of a JSON list.  Sources that hold text or many requests in an object are in
`conversations`.
"""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from arborsim.core.errors import UnknownName, UsageError
from arborsim.trace.importers import conversations, fields, sources
from arborsim.trace.importers.request_formats import FORMATS as FORMATS
from arborsim.trace.importers.request_formats import Columns, Format, found_at
from arborsim.trace.importers.requests import Request
from arborsim.trace.importers.searches import Lengths

#: Ticks per second of the units that times may have.
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

Row = Any  # the cells of a line of CSV, or a JSON object


@dataclass(frozen=True)
class Reading:
    """How a log is read, where it does not say so itself."""

    format: str = ""  # one of `FORMATS`; "" to recognise it
    columns: Columns | None = None  # of an unknown format
    unit: str = ""  # of times; "" for the format's, or seconds
    block_tokens: int = 0  # of a prefix block; 0 for the format's
    #: Seconds that a token of an answer is assumed to take where the next request of its session
    #: waits for it
    token_s: float = 0.03
    lengths: Lengths = field(default_factory=lambda: Lengths(tokens_per_character=0.0))


def columns_of(said: str) -> Columns:
    """The columns of a text such as ``arrival=time,prompt=in,output=out``."""
    roles = list(vars(Columns("", "")))
    found: dict[str, str] = {}
    for part in said.split(","):
        role, equals, column = (each.strip() for each in part.partition("="))
        if not equals or role not in roles or not column:
            raise UsageError(f"--field {part:.40}: it is ROLE=COLUMN, of {', '.join(roles)}")
        found[role] = column
    if missing := {"prompt", "output"} - found.keys():
        raise UsageError(f"--field: say which column is {' and '.join(sorted(missing))}, too")
    return Columns(**found)


@dataclass(frozen=True)
class RequestLog(sources.Contents[Request]):
    """The requests of a log in order of arrival, and what is to be said of them."""

    format: str = ""  # "" for columns that were named
    block_tokens: int = 0
    lengths: str = "the source's"
    notes: tuple[str, ...] = ()


def read_requests(
    path: Path, format: str = "", limit: int = 0, reading: Reading | None = None
) -> RequestLog:
    """The requests of a log, in order of arrival.

    Parameters
    ----------
    path : Path
        CSV, JSON lines or JSON, perhaps gzipped.
    format : str
        One of `FORMATS`; by default it is recognised by its columns.
    limit : int
        Items to read, or 0 for all.
    reading : Reading, optional
        Columns of an unknown format, and what the log does not say.

    Raises `UsageError`: the file cannot be read, holds nothing, or is of an unknown format.
    """
    reading = reading or Reading()
    table = _Table.of(path)
    name = format or reading.format
    if name and name not in FORMATS:
        raise UnknownName("format of requests", name, FORMATS)
    if reading.columns:
        made, name = Format(reading.columns, ()), ""
    else:
        name = name or _recognised(table)
        made = FORMATS[name]
    block_tokens = reading.block_tokens or made.block_tokens
    if made.block_column:
        block_tokens = _block_tokens(table, made) or block_tokens
    if made.columns.prefix and reading.columns and not block_tokens:
        raise UsageError(
            "--block-tokens says how many tokens each prefix block has, such as 16 or 512"
        )
    if made.split is not None:
        contents, lengths = conversations.read(
            path, table.items(limit), made.split, reading.lengths, block_tokens or 16
        )
        block_tokens = block_tokens or 16
        lengths = lengths or "the source's"
    else:
        ticks = UNITS[reading.unit or made.unit]
        columns = made.columns
        if "." not in columns.arrival and not {columns.arrival, columns.delay} & {*table.names}:
            columns = replace(columns, arrival="")  # no row says when
        row_of = table.reader(columns, ticks, block_tokens, made.wanted)
        contents, lengths = sources.contents(path, table.items(limit), row_of), "the source's"
    if not any(request.prefix_blocks for request in contents.searches):
        block_tokens = 0
    requests, notes = _in_order(contents.searches, reading.token_s)
    return RequestLog(
        requests, contents.damaged, contents.items, name, block_tokens, lengths, tuple(notes)
    )


def _recognised(table: _Table) -> str:
    """The name of the first format whose columns the first row has."""
    for name, made in FORMATS.items():
        if all(need in table.names for need in made.needs):
            return name
    shown = ", ".join(f"{name:.30}" for name in table.names[:8]) or "none"
    raise UsageError(
        f"{table.path}: no known log of requests (columns {shown}): say which is which with "
        "--field arrival=COL,prompt=COL,output=COL"
    )


def _block_tokens(table: _Table, made: Format) -> int:
    """Tokens of a block as the first row that names them says; of any other, `_request` tells."""
    for _, row in table.items(0):
        tokens = found_at(row, made.block_column)
        if isinstance(tokens, int) and 0 < tokens <= fields.MOST_TOKENS:
            return tokens
    return 0


@dataclass(frozen=True)
class _Table:
    """A file as rows: its text, and the names of the first row's columns."""

    path: Path
    text: str
    kind: str  # "csv", "lines" or "json"
    names: tuple[str, ...]
    whole: Sequence[Any] = ()  # the objects of a JSON file that is read at once

    @classmethod
    def of(cls, path: Path) -> _Table:
        text = sources.text_of(path).removeprefix("\ufeff")
        first = next((line for line in text.split("\n", 64) if line.strip()), "")
        if not first:
            raise UsageError(f"{path}: there is nothing in it")
        if first.lstrip()[0] not in "[{":
            return cls(path, text, "csv", tuple(cell.strip() for cell in _cells(first)))
        row = sources.parsed(first)
        if isinstance(row, dict):
            return cls(path, text, "lines", tuple(_unwrapped(row)))
        found = sources.json_of(path, text)
        rows = found if isinstance(found, list) else [found]
        names = tuple(rows[0]) if rows and isinstance(rows[0], dict) else ()
        return cls(path, text, "json", names, rows)

    def items(self, limit: int) -> Iterator[tuple[str, Row]]:
        """Rows with their places: of CSV their cells, of JSON what `fields` takes."""
        return islice(self._items(), limit or None)

    def _items(self) -> Iterator[tuple[str, Row]]:
        if self.kind == "csv":
            lines = csv.reader(self.text.splitlines()[1:], delimiter=_delimiter(self.text))
            try:
                for cells in lines:
                    if len(cells) == len(self.names):
                        yield (
                            f"line {lines.line_num + 1}",
                            dict(zip(self.names, cells, strict=True)),
                        )
                    elif cells:
                        wrong = f"it has {len(cells)} cells instead of {len(self.names)}"
                        yield f"line {lines.line_num + 1}", fields.Damage(wrong)
            except csv.Error as error:
                yield f"line {lines.line_num + 1}", fields.Damage(f"this is not CSV ({error})")
        elif self.kind == "lines":
            decode = msgspec.json.Decoder().decode
            for number, line in enumerate(self.text.split("\n"), 1):
                if line.strip():
                    try:
                        yield f"line {number}", _unwrapped(decode(line))
                    except (msgspec.DecodeError, RecursionError):  # NaN, and what is no JSON
                        yield f"line {number}", _unwrapped(sources.parsed(line))
        else:
            yield from ((f"item {i}", row) for i, row in enumerate(self.whole))

    def reader(
        self, columns: Columns, ticks: float, block_tokens: int, wanted: Callable[[Any], bool]
    ) -> Callable[[Row], Request | None]:
        """The function that makes a request of a row, or a `Damage`."""
        named = {role: path for role, path in vars(columns).items() if path}
        shown = {role: path.split("|")[0] for role, path in named.items()}
        if self.kind == "csv":
            for role in ("prompt", "output"):
                if named[role] not in self.names:
                    raise UsageError(
                        f"{self.path}, line 1: no column {named[role]}; is it the right file?"
                    )
        getters = {role: _getter(path) for role, path in named.items()}
        tops = {part.split(".")[0] for path in named.values() for part in path.split("|")}
        own = tops - {columns.session, columns.delay}
        others = {*self.names} - own if self.kind == "csv" else None

        def request_of(row: Any) -> Request | None:
            if isinstance(row, fields.Damage):
                raise row
            if row is None:
                raise fields.Damage("this is not JSON")
            if not isinstance(row, dict):
                found = fields.kind_of(row)
                raise fields.Damage(f"expected an object with {shown['prompt']}, found {found}")
            if not wanted(row):
                return None
            other = {key: row[key] for key in row if key not in own} if others != set() else None
            values = {role: get(row) for role, get in getters.items()}
            return _request(values, shown, ticks, block_tokens, other)

        return request_of


def _unwrapped(row: Any) -> Any:
    """A record of older Dynamo stands in ``event``, next to when it was written."""
    if isinstance(row, dict) and isinstance(row.get("event"), dict):
        return row["event"]
    return row


def _delimiter(text: str) -> str:
    header = text.split("\n", 1)[0]
    return max(",;\t", key=header.count)


def _cells(line: str) -> list[str]:
    return next(csv.reader([line.strip()], delimiter=_delimiter(line)), [])


def _getter(paths: str) -> Callable[[dict[str, Any]], Any]:
    if not re.search(r"[.|]", paths):
        return lambda row: row.get(paths)
    choices = paths.split("|")
    return lambda row: next((v for p in choices if (v := found_at(row, p)) is not None), None)


def _listed(cell: str) -> list[Any]:
    """Ids in a cell: a JSON list, or texts between separators."""
    found = sources.parsed(cell)
    if isinstance(found, list):
        return found
    return [part for part in re.split(r"[\s|;,]+", cell) if part]


def _request(
    found: Mapping[str, Any],
    shown: Mapping[str, str],
    ticks: float,
    block_tokens: int,
    other: dict[str, Any] | None,
) -> Request:
    """A request of what its row says, by role; `shown` are the names for messages."""
    prompt = _count(found.get("prompt"), shown["prompt"], 1)
    answer = _count(found.get("output"), shown["output"], 0)
    arrival, delay = found.get("arrival"), found.get("delay")
    arrival_s, after = math.nan, None
    if arrival is not None and arrival != "":
        arrival_s = _moment(arrival, shown["arrival"], ticks)
    elif delay is not None and delay != "":
        after = found.get("session"), _moment(delay, shown["delay"], ticks)
    elif "arrival" in found:
        raise fields.Damage(f"{shown['arrival']} is missing")
    blocks = found.get("prefix") or ()
    if blocks:
        blocks = _listed(blocks) if isinstance(blocks, str) else blocks
        blocks = _identifiers(fields.array(blocks, shown["prefix"]), shown["prefix"])
        complete, every = prompt // block_tokens, math.ceil(prompt / block_tokens)
        if len(blocks) not in (complete, every):  # the last, partial one may be left out
            raise fields.Damage(
                f"{shown['prefix']} names {len(blocks)} blocks, but a prompt of {prompt} tokens "
                f"has {every} of {block_tokens} (--block-tokens)"
            )
    return Request(arrival_s, prompt, answer, blocks, other or None, after)


def _count(value: Any, what: str, low: int) -> int:
    """A number of tokens, which tables may write with a point and no fraction."""
    if value is None:
        raise fields.Damage(f"{what} is missing")
    if isinstance(value, str) and len(value) < 15 and value.isascii():
        digits, _, fraction = value.strip().partition(".")
        value = int(digits) if digits.isdigit() and not fraction.strip("0") else value
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return fields.whole(value, what, low)


def _moment(value: Any, what: str, ticks: float) -> float:
    """Seconds, of a number of ticks or a date."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                raise fields.Damage(
                    f"{what} is {fields.shown(value)} instead of a date and time, or a number"
                ) from None
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return fields.finite(value, what, low=0.0) / ticks


def _identifiers(values: list[Any], what: str) -> Sequence[Any]:
    """Ids of blocks: whole numbers of any size, or texts."""
    kinds = {*map(type, values)}
    if kinds <= {int}:
        try:
            return array("q", values)
        except OverflowError:
            return values
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise fields.Damage(f"an id in {what} is {fields.shown(value)}")
    return values


def _in_order(requests: Sequence[Request], token_s: float) -> tuple[tuple[Request, ...], list[str]]:
    """Requests by arrival, with ids of 64 bits, and notes on both."""
    notes = []
    if any(request.after for request in requests):
        count = sum(request.after is not None for request in requests)
        requests = _follow(requests, token_s)
        notes.append(
            f"{count:,} of {len(requests):,} requests follow an answer of their session: they "
            f"arrive as if it took {1000 * token_s:g} ms a token (--token-s)"
        )
    unknown = sum(math.isnan(request.arrival_s) for request in requests)
    if unknown:
        notes.append(f"{unknown:,} of {len(requests):,} requests have no arrival")
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    if not unknown and any(a is not b for a, b in zip(ordered, requests, strict=True)):
        notes.append("the log is not in order of arrival: its requests were sorted")
    if unknown:  # no order among what has none
        ordered = list(requests)
    empty = sum(not request.answer_tokens for request in requests)
    if empty:
        notes.append(f"{empty:,} of {len(requests):,} requests have no answer: prompts only")
    if not all(isinstance(request.prefix_blocks, array | tuple) for request in requests):
        ordered = _numbered(ordered)
    return tuple(ordered), notes


def _follow(requests: Sequence[Request], token_s: float) -> list[Request]:
    """Requests with the moments at which those come that wait for an answer."""
    ends: dict[str, float] = {}  # of the last answer of each session
    found = []
    for request in requests:
        session = json.dumps((request.other or {}).get("session_id"), sort_keys=True)
        if request.after:
            session = json.dumps(request.after[0], sort_keys=True)
            begun = ends.get(session, 0.0)  # the first of its session: as the log begins
            request = replace(request, arrival_s=begun + request.after[1])
        ends[session] = request.arrival_s + token_s * request.answer_tokens
        found.append(request)
    return found


def _numbered(requests: Sequence[Request]) -> list[Request]:
    """Requests whose ids, of whatever type, are numbered as they first come."""
    number: dict[Any, int] = {}
    return [
        replace(
            request,
            prefix_blocks=array(
                "q", [number.setdefault(i, len(number)) for i in request.prefix_blocks]
            ),
        )
        for request in requests
    ]
