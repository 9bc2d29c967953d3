"""Recordings that others made: their files, and the trace of the searches in them.

An item of a file becomes a search, or is reported as damaged: what is wrong with its fields is a
`Damage`, to which the loop over the items adds the place.  The trace is written whole or not at
all, and its metadata says what its source did not know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.outputs import whole
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.searches import Advance, Imported
from arborsim.trace.schema import Capture, TraceInfo
from arborsim.trace.writer import WholeTraceWriter

Search = TypeVar("Search", bound=Imported)


@dataclass(frozen=True)
class Contents(Generic[Search]):
    """The searches in a source, and its damaged items."""

    searches: tuple[Search, ...]
    #: Where and why an item is no search: ``"item 3: ..."`` of a JSON list, from 0, or ``"line 4:
    #: ..."``, from 1
    damaged: tuple[str, ...]
    items: int


def read_list(path: Path, search_of: Callable[[Any], Search], limit: int = 0) -> Contents[Search]:
    """The items of a JSON list, or the first `limit` if that is not 0.

    Raises `UsageError` if the file cannot be read or is no JSON list.
    """
    found = _json(path)
    if not isinstance(found, list):
        raise UsageError(f"{path}: expected a JSON list of searches; is it the right file?")
    items = ((f"item {i}", item) for i, item in enumerate(found))
    return _contents(path, items, search_of, limit)


def read_objects(
    path: Path, search_of: Callable[[Any], Search], limit: int = 0
) -> Contents[Search]:
    """As `read_list`, for a file that may also hold one object alone, or an object a line."""
    lines = (line for line in _text(path).split("\n") if line.strip())
    if isinstance(_parsed(next(lines, "")), dict):
        return read_lines(path, lambda line: search_of(_object(line)), limit)
    found = _json(path)
    if isinstance(found, dict):
        return _contents(path, iter([("item 0", found)]), search_of, limit)
    return read_list(path, search_of, limit)


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}{at}: this is not JSON; is it the right file?") from None


def _parsed(line: str) -> Any:
    """The JSON of a line, or None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _object(line: str) -> dict[str, Any]:
    found = _parsed(line)
    if not isinstance(found, dict):
        raise Damage("this is no JSON object")
    return found


def read_lines(
    path: Path, search_of: Callable[[str], Search], limit: int = 0, header: str = ""
) -> Contents[Search]:
    """The lines of a file that are not empty, or the first `limit` if that is not 0.

    Raises `UsageError` if the file cannot be read, or its first line is not `header`, if given.
    """
    lines = _text(path).split("\n")
    first = int(bool(header))
    if header and lines[0].strip().removeprefix("\ufeff") != header:
        raise UsageError(f"{path}, line 1: expected the header {header}; is it the right file?")
    items = ((f"line {i}", line) for i, line in enumerate(lines[first:], first + 1) if line.strip())
    return _contents(path, items, search_of, limit)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start} is not UTF-8; is it the right file?"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def _contents(
    path: Path, items: Iterator[tuple[str, Any]], search_of: Callable[[Any], Search], limit: int
) -> Contents[Search]:
    searches: list[Search] = []
    damaged: list[str] = []
    for place, item in islice(items, limit or None):
        try:
            searches.append(search_of(item))
        except Damage as error:
            damaged.append(f"{place}: {error}")
    count = len(searches) + len(damaged)
    if not count:
        raise UsageError(f"{path}: there is nothing in it")
    return Contents(tuple(searches), tuple(damaged), count)


#: `Description.extra` of a source that does not tell which thoughts ended (`TraceInfo.knows_ends`).
NO_ENDS = {"ends": "unknown"}


@dataclass(frozen=True)
class Description:
    """A format's account of its searches, for the trace's metadata."""

    #: `lengths` says where the numbers of tokens are from
    format: str
    task: str
    search: str
    lengths: str
    parameters: dict[str, Any]  # options of the import
    extra: dict[str, Any]


def refuse_damage(path: Path, contents: Contents[Any]) -> None:
    """Raise a `UsageError` that names the first damaged item, and counts all."""
    if not contents.damaged:
        return
    first, count = contents.damaged[0], len(contents.damaged)
    if not contents.searches:
        raise UsageError(f"{path}, {first}; {_nothing(contents)}")
    also = f" ({count} of {contents.items} are damaged)" if count > 1 else ""
    raise UsageError(
        f"{path}, {first}{also}; repair the file, or leave out what is damaged with "
        "--on-damage skip"
    )


def _nothing(contents: Contents[Any]) -> str:
    """The remedy for a source of which no item could be read."""
    items = "its only item is" if contents.items == 1 else f"all {contents.items} items are"
    return (
        f"{items} unreadable as this format: is it the right file, and the right one of "
        "`arborsim import --help`?"
    )


def trace_info(
    path: Path, about: Description, contents: Contents[Any], geometry: Geometry, command: str = ""
) -> TraceInfo:
    """Metadata: the source by name and digest, what is made up, and what was left out."""
    extra = {
        **about.extra,
        "source": path.name,
        "source_format": about.format,
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source_items": contents.items,
        "lengths": about.lengths,
        "token_ids": "unknown",
        "times": "unknown",
        "left_out": list(contents.damaged),
    }
    return TraceInfo(
        geometry=geometry,
        model=f"not named by the source; charged as {geometry.name}",
        task=about.task,
        search=about.search,
        search_parameters=about.parameters,
        capture=Capture.TREE,
        command=command,
        extra=extra,
    )


def write_trace(
    contents: Contents[Any],
    info: TraceInfo,
    out: Path,
    overwrite: bool = False,
    advance: Advance = lambda what, units: None,
) -> None:
    """Write the searches to `out`, which appears when all of them are written.

    Raises `UsageError` if `out` exists or cannot be written, or if there is no search to write.
    """
    check_out(out, overwrite)
    if not contents.searches:
        raise UsageError(f"nothing to import: {_nothing(contents)}")
    kind = type(contents.searches[0])
    with whole(out) as part, WholeTraceWriter(part, info, kind.packed) as writer:
        kind.write(contents.searches, writer, advance)


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output that exists or has no folder, before anything is read."""
    if out.is_dir():
        raise UsageError(f"{out} is a directory: name a file to write")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another name, or --overwrite")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no directory {out.parent}")
