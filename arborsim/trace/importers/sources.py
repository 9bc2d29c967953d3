"""Read a source item by item, each turned into a search or reported as damaged.

What is wrong with the fields of an item is a `Damage`; the loop over the items adds the place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arborsim.core.errors import UsageError

#: Most tokens of one search; more is a damaged length, and would not fit the memory.
MOST_TOKENS = 1 << 24


class Damage(ValueError):
    """What is wrong with one item of a source."""


def field(item: Any, name: str) -> Any:
    """The field of a JSON object."""
    if not isinstance(item, dict):
        raise Damage(f"expected an object with {name}, found {kind_of(item)}")
    if name not in item:
        raise Damage(f"{name} is missing")
    return item[name]


def whole(value: Any, what: str, low: int = 0, high: int = MOST_TOKENS) -> int:
    """An integer between `low` and `high`; neither a truth value nor a fraction."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Damage(f"{what} is {shown(value)} instead of a whole number")
    if not low <= value <= high:
        raise Damage(f"{what} is {shown(value)}, not between {low} and {high}")
    return value


def finite(value: Any, what: str, low: float = -math.inf) -> float:
    """A finite number of at least `low`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Damage(f"{what} is {shown(value)} instead of a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low:
        raise Damage(f"{what} is {shown(value)}")
    return number


def text(value: Any, what: str) -> str:
    """A string that can be stored (JSON can name half of a surrogate pair)."""
    if not isinstance(value, str):
        raise Damage(f"{what} is {shown(value)} instead of text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Damage(f"{what} is text with half a surrogate pair") from None
    return value


def array(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Damage(f"{what} is {shown(value)} instead of a list")
    return value


def shown(value: Any) -> str:
    """A value for a message: short, and never thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "a huge number"
    return f"{value!r:.40}"


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), "a number or truth value")


class Importable(Protocol):
    """One search of a source."""

    @property
    def num_tokens(self) -> int: ...

    def columns(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Damaged:
    """An item that is no search."""

    place: str  # ``"item 3"`` (of a JSON list, from 0) or ``"line 4"`` (from 1)
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
    path: Path, search_of: Callable[[str], Importable], limit: int = 0, header: str = ""
) -> Contents:
    """The lines of a file, empty ones left out; only the first `limit`, if that is not 0.

    The first line must be `header`, if there is one.

    Raises
    ------
    UsageError
        The file cannot be read, or has another header.
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
