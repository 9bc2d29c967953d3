"""Fields of the JSON that others wrote: read with checks, or refused as `Damage`."""

from __future__ import annotations

import math
from typing import Any

#: Most tokens of one search; more is a damaged length, and would not fit the memory.
MOST_TOKENS = 1 << 24


class Damage(ValueError):
    """A fault in one item of a source."""


def field(item: Any, name: str) -> Any:
    """The field of a JSON object."""
    if not isinstance(item, dict):
        raise Damage(f"expected an object with {name}, found {kind_of(item)}")
    if name not in item:
        raise Damage(f"{name} is missing")
    return item[name]


def whole(value: Any, what: str, low: int = 0, high: int = MOST_TOKENS) -> int:
    """An integer between `low` and `high`, neither a truth value nor a fraction."""
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


def reward(value: Any, what: str, scale: float) -> float:
    """A value of the source as a reward, of which `scale` makes 1."""
    share = finite(value, what, low=0.0) / scale
    if share > 1:
        raise Damage(f"{what} is {shown(value)}, more than {scale:g}")
    return share


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
