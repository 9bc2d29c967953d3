"""Read a source item by item, each turned into a search or reported as damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arborsim.core.errors import UsageError
from arborsim.trace.importers.damage import Damage
from arborsim.trace.importers.requests import AZURE_COLUMNS


class Importable(Protocol):
    """One search of a source."""

    @property
    def num_tokens(self) -> int: ...

    def columns(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Damaged:
    """An item that is no search.

    Attributes
    ----------
    place : str
        ``"item 3"`` (of a JSON list, from 0) or ``"line 4"`` (from 1).
    what : str
    """

    place: str
    what: str


@dataclass(frozen=True)
class Contents:
    """What a source holds: its searches in order, and what is damaged."""

    searches: tuple[Importable, ...]
    damaged: tuple[Damaged, ...]
    items: int


def read_list(path: Path, search_of: Callable[[Any], Importable], limit: int = 0) -> Contents:
    """The items of a JSON list; only the first `limit`, if that is not 0.

    Raises
    ------
    UsageError
        The file cannot be read or is no JSON list.
    """
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}{at}: this is not JSON; is it the right file?") from None
    if not isinstance(found, list):
        raise UsageError(f"{path}: expected a JSON list of searches; is it the right file?")
    items = ((f"item {i}", item) for i, item in enumerate(found))
    return _contents(path, items, search_of, limit)


def read_lines(
    path: Path, search_of: Callable[[str], Importable], limit: int = 0, header: bool = False
) -> Contents:
    """The lines of a file, empty ones left out; only the first `limit`, if that is not 0.

    Parameters
    ----------
    header : bool
        The first line must name the columns of Azure's CSV.

    Raises
    ------
    UsageError
        The file cannot be read, or has another header.
    """
    lines = _text(path).split("\n")
    first = 0
    if header:
        first = 1
        if lines[0].strip().removeprefix("\ufeff") != ",".join(AZURE_COLUMNS):
            raise UsageError(
                f"{path}, line 1: expected the header {','.join(AZURE_COLUMNS)}; "
                "is it the right file?"
            )
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
    path: Path,
    items: Iterator[tuple[str, Any]],
    search_of: Callable[[Any], Importable],
    limit: int,
) -> Contents:
    searches: list[Importable] = []
    damaged: list[Damaged] = []
    count = 0
    for place, item in items:
        if limit and count == limit:
            break
        count += 1
        try:
            searches.append(search_of(item))
        except Damage as error:
            damaged.append(Damaged(place, str(error)))
    if not count:
        raise UsageError(f"{path}: there is nothing in it")
    return Contents(tuple(searches), tuple(damaged), count)
