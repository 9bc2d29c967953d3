"""Tables of a TOML file, read field by field; what is wrong is named with its table and key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from arborsim.core.errors import ArborsimError, UnknownName, UsageError

MOST_SEED = (1 << 63) - 1
_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(ms|s|min|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@contextmanager
def located(place: str) -> Iterator[None]:
    """Put `place` in front of the message of a user's error, which becomes one line."""
    try:
        yield
    except ArborsimError as error:
        said = " ".join(str(error).split())  # quoted keys can hold line breaks
        raise UsageError(f"{place}: {said}") from None


class Section:
    """A table whose keys are known.

    Parameters
    ----------
    values : object
        As `tomllib` gives it.
    place : str
        Its name in messages, e.g. ``"[arrivals]"``; empty for the file itself.
    known : sequence of str

    Raises
    ------
    UsageError
        It is no table, or has a key that is not known (the nearest known ones are named).

    Notes
    -----
    Every method below raises `UsageError` if the key is missing, of another type or out of range;
    ``key in section`` tells whether it is there.
    """

    def __init__(self, values: object, place: str, known: Sequence[str]) -> None:
        if not isinstance(values, dict):
            raise UsageError(f"{place} must be a table, not {values!r:.40}")
        for key in values:
            if key not in known:
                raise UnknownName(f"key of {place}" if place else "key or table", key, known)
        self._values: dict[str, Any] = values
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def at(self, key: str) -> str:
        """A key with its table, for messages."""
        return f"{self._place} {key}".strip()

    def value(self, key: str) -> Any:
        """Whatever stands there."""
        if key not in self._values:
            raise UsageError(f"{self.at(key)} is missing")
        return self._values[key]

    def text(self, key: str) -> str:
        """A text with something in it."""
        value = self.value(key)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{self.at(key)} must be a text, not {value!r:.40}")
        return value.strip()

    def choice(self, key: str, what: str, known: Sequence[str]) -> str:
        """One of the known words."""
        value = self.text(key)
        if value not in known:
            with located(self.at(key)):
                raise UnknownName(what, value, known)
        return value

    def number(
        self,
        key: str,
        low: float = -math.inf,
        high: float = math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float:
        """A finite number in ``[low, high]`` and strictly between `above` and `below`."""
        value = self.value(key)
        if not _is_number(value):
            raise UsageError(f"{self.at(key)} must be a number, not {value!r:.40}")
        limits = {
            f"at least {low:g}": value >= low,
            f"above {above:g}": value > above,
            f"at most {high:g}": value <= high,
            f"below {below:g}": value < below,
        }
        broken = [limit for limit, holds in limits.items() if not holds]
        if broken:
            raise UsageError(f"{self.at(key)} must be {' and '.join(broken)}, not {value:g}")
        return float(value)

    def whole(self, key: str, low: int, high: int = 10_000_000) -> int:
        """A whole number in ``[low, high]``."""
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{self.at(key)} must be a whole number, not {value!r:.40}")
        if value < low:
            raise UsageError(f"{self.at(key)} must be at least {low}, not {value!r:.40}")
        if value > high:
            raise UsageError(f"{self.at(key)} must be at most {high}, not {value!r:.40}")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise UsageError(f"{self.at(key)} must be true or false, not {value!r:.40}")
        return value

    def items(self, key: str) -> list[Any]:
        """A list that is not empty."""
        value = self.value(key)
        if not isinstance(value, list):
            raise UsageError(f"{self.at(key)} must be a list, not {value!r:.40}")
        if not value:
            raise UsageError(f"{self.at(key)} is empty: name at least one")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts, without repetitions."""
        found = self.items(key)
        if not all(isinstance(each, str) and each.strip() for each in found):
            raise UsageError(f"{self.at(key)} must be a list of texts, not {found!r:.60}")
        if len(set(found)) < len(found):
            again = next(each for each in found if found.count(each) > 1)
            raise UsageError(f"{self.at(key)} names '{again}' twice")
        return found

    def numbers(self, key: str) -> list[float]:
        """A number, or a list of numbers."""
        value = self.value(key)
        found = value if isinstance(value, list) else [value]
        if not found or not all(_is_number(each) for each in found):
            raise UsageError(
                f"{self.at(key)} must be a number or a list of numbers, not {value!r:.40}"
            )
        return [float(each) for each in found]

    def duration_s(self, key: str) -> float:
        """A time above 0 with its unit, in seconds: ``"90 s"``, ``"50 ms"``, ``"2 min"``."""
        value = self.value(key)
        if _is_number(value):
            raise UsageError(
                f'{self.at(key)} = {value:g} has no unit: write "{value:g} s" '
                f"(or {', '.join(unit for unit in _SECONDS if unit != 's')})"
            )
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise UsageError(
                f'{self.at(key)} must be a time with its unit, such as "90 s" or "50 ms", '
                f"not {value!r:.40}"
            )
        seconds = float(match[1]) * _SECONDS[match[2]]
        if not 0 < seconds < math.inf:
            raise UsageError(f"{self.at(key)} must be above 0 and finite, not {value!r:.40}")
        return seconds


def _is_number(value: object) -> bool:
    """Neither a truth value nor nan nor inf, all of which TOML can say."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
