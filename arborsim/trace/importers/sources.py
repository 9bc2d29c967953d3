"""Recordings that others made: their files, and the trace of the searches in them.

An item of a file becomes a search, or is reported as damaged: what is wrong with its fields is a
`Damage`, to which the loop over the items adds the place.  The trace is written whole or not at
all, and its metadata says what its source did not know.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


def read_list(
    path: Path, search_of: Callable[[Any], Search | None], limit: int = 0
) -> Contents[Search]:
    """The items of a JSON list, or the first `limit` if that is not 0.

    Raises `UsageError` if the file cannot be read or is no JSON list.
    """
    found = json_of(path, text_of(path))
    if not isinstance(found, list):
        raise UsageError(f"{path}: expected a JSON list of searches; is it the right file?")
    return contents(path, listed(found, limit), search_of)


def objects_of(path: Path) -> list[tuple[str, Any]]:
    """Items with their places, of a file that holds a list, one object alone, or one a line."""
    text = text_of(path)
    lines = [(f"line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if lines and isinstance(parsed(lines[0][1]), dict):
        return [(place, parsed(line)) for place, line in lines]
    found = json_of(path, text)
    return list(listed(found if isinstance(found, list) else [found]))


def listed(items: Sequence[Any], limit: int = 0) -> Iterator[tuple[str, Any]]:
    """The items of a list with their places."""
    return ((f"item {i}", item) for i, item in enumerate(items[: limit or None]))


def json_of(path: Path, text: str) -> Any:
    """A file's JSON, or a `UsageError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}{at}: this is not JSON; is it the right file?") from None


def parsed(line: str) -> Any:
    """The JSON of a line, or None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def text_of(path: Path) -> str:
    """A file's text, which may be gzipped, or a `UsageError`."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start} is not UTF-8; is it the right file?"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read ({reason})") from error


def contents(
    path: Path, items: Iterable[tuple[str, Any]], found_in: Callable[[Any], Any]
) -> Contents[Any]:
    """The searches in items: of each one, several as a list, or None to pass over it."""
    searches: list[Any] = []
    damaged: list[str] = []
    count = 0
    for place, item in items:
        count += 1
        try:
            found = found_in(item)
        except Damage as error:
            damaged.append(f"{place}: {error}")
            continue
        if isinstance(found, list):
            searches.extend(found)
        elif found is not None:
            searches.append(found)
    if not searches and not damaged:
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
