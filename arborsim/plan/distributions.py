"""Distributions of whole numbers: tokens of a prompt or thought, levels and branches of a tree.

In text (`--thought-tokens`, or a key of a workload file)::

    256                                     always that many
    uniform:low=64,high=512                 every whole number between them, both included
    lognormal:median=200,sigma=0.6          sigma is that of the logarithm; most=4096 caps it
    file:lengths.txt                        drawn from the numbers in a file, one a line
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import check_ranges, convert, located, read_text
from arborsim.trace.importers.sources import MOST_TOKENS


class Counts(Protocol):
    """A distribution of whole numbers."""

    @property
    def text(self) -> str:
        """As it is written in a workload file."""

    @property
    def range(self) -> tuple[int, int]:
        """Least and largest number that can be drawn."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` independent numbers, int64 ``[count]``."""


@dataclass(frozen=True)
class Fixed:
    """Always the same number."""

    value: int

    @property
    def text(self) -> str:
        return str(self.value)

    @property
    def range(self) -> tuple[int, int]:
        return self.value, self.value

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.value, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every whole number from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UsageError(f"low={self.low} is above high={self.high}")

    @property
    def text(self) -> str:
        return f"uniform:low={self.low},high={self.high}"

    @property
    def range(self) -> tuple[int, int]:
        return self.low, self.high

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    """``median * exp(sigma * z)`` with z standard normal, rounded, and held to ``1 .. most``."""

    median: Annotated[float, Meta(ge=1, le=MOST_TOKENS)]
    sigma: Annotated[float, Meta(ge=0, le=10)]
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        check_ranges(self, "lognormal")
        if not self.median <= self.most:
            raise UsageError(f"most={self.most} is below median={self.median:g}")

    @property
    def text(self) -> str:
        cap = "" if self.most == MOST_TOKENS else f",most={self.most}"
        return f"lognormal:median={self.median:g},sigma={self.sigma:g}{cap}"

    @property
    def range(self) -> tuple[int, int]:
        return 1, self.most

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.rint(np.clip(drawn, 1, self.most)).astype(np.int64)


@dataclass(frozen=True)
class Empirical:
    """Drawn, with replacement, from `values`; `origin` names where they are from."""

    values: tuple[int, ...]
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("there is no number to draw from")

    @property
    def text(self) -> str:
        return f"file:{self.origin}" if self.origin else f"one of {len(self.values)} numbers"

    @property
    def range(self) -> tuple[int, int]:
        return min(self.values), max(self.values)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.asarray(self.values, dtype=np.int64)[rng.integers(0, len(self.values), count)]


_FORMS: dict[str, type[Uniform | LogNormal]] = {"uniform": Uniform, "lognormal": LogNormal}


def parse_counts(given: object, what: str, base: Path = Path()) -> Counts:
    """A distribution from a number, a list of numbers or a text.

    Parameters
    ----------
    what : str
        For messages.
    base : Path
        Folder that ``file:`` starts from.

    Raises
    ------
    UsageError
        It is no distribution.
    """
    with located(what):
        return _counts(given, base)


def check_range(found: Counts, what: str, low: int, high: int) -> None:
    """Refuse a distribution that can give numbers outside of ``low .. high``."""
    least, largest = found.range
    if least < low or largest > high:
        drawn = f"{least}" if least == largest else f"{least} to {largest}"
        cap = ": set most" if isinstance(found, LogNormal) and least >= low else ""
        raise UsageError(f"{what} must be in [{low}, {high}], not {drawn}{cap}")


def _counts(given: object, base: Path) -> Counts:
    if isinstance(given, list):
        return Empirical(convert(tuple[int, ...], given, "its numbers:"))
    if not isinstance(given, str):
        return Fixed(convert(int, given, "it"))
    form, colon, rest = given.strip().partition(":")
    if form == "file" and colon:
        return _from_file(base / rest.strip())
    if colon:
        if form not in _FORMS:
            raise UnknownName("distribution", form, [*_FORMS, "file"])
        return convert(_FORMS[form], _parameters(form, rest), form)
    try:
        return Fixed(int(form))
    except ValueError:
        raise UsageError(
            f"'{given:.40}' is no distribution: give a whole number, uniform:low=64,high=512, "
            "lognormal:median=200,sigma=0.6 or file:NAME"
        ) from None


def _parameters(form: str, text: str) -> dict[str, object]:
    """``"median=200,sigma=0.6"`` as a table."""
    values: dict[str, object] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UsageError(f"'{part:.40}' in {form}: expected name=value")
        if key in values:
            raise UsageError(f"{form} has {key} twice")
        values[key] = _number(value)
    return values


def _number(text: str) -> int | float | str:
    """The number that a text is; the text itself if it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _from_file(path: Path) -> Empirical:
    values = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            values.append(convert(int, _number(text), f"{path}, line {number},"))
    if not values:
        raise UsageError(f"{path} holds no number")
    return Empirical(tuple(values), path.name)
