"""Distributions of whole numbers: tokens of a prompt or thought, levels and branches of a tree.

In text (`--thought-tokens`, or a key of a workload file)::

    256                                     always that many
    uniform:low=64,high=512                 every whole number between them, both included
    lognormal:median=200,sigma=0.6          sigma is that of the logarithm; most=4096 caps it
    file:lengths.txt                        drawn from the numbers in a file, one a line
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from arborsim.core.errors import UnknownName, UsageError
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

    median: float
    sigma: float
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.median <= MOST_TOKENS:
            raise UsageError(f"median={self.median:g} must be in [1, {MOST_TOKENS}]")
        if not 0 <= self.sigma <= 10:
            raise UsageError(f"sigma={self.sigma:g} must be in [0, 10]")
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


#: By name in text: the parameters, and whether they are whole numbers.
_FORMS: dict[str, dict[str, bool]] = {
    "uniform": {"low": True, "high": True},
    "lognormal": {"median": False, "sigma": False, "most": True},
}


def parse_counts(given: object, what: str, base: Path = Path()) -> Counts:
    """A distribution from a number, a list of numbers or a text.

    Parameters
    ----------
    given : int, list of int or str
    what : str
        For messages.
    base : Path
        Folder that ``file:`` starts from.

    Raises
    ------
    UsageError
        It is no distribution.
    """
    try:
        return _counts(given, base)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None


def check_range(found: Counts, what: str, low: int, high: int) -> None:
    """Refuse a distribution that can give numbers outside of ``low .. high``.

    Raises
    ------
    UsageError
    """
    least, largest = found.range
    if least < low or largest > high:
        drawn = f"{least}" if least == largest else f"{least} to {largest}"
        cap = ": set most" if isinstance(found, LogNormal) and least >= low else ""
        raise UsageError(f"{what} must be in [{low}, {high}], not {drawn}{cap}")


def _counts(given: object, base: Path) -> Counts:
    if isinstance(given, list):
        return Empirical(tuple(_whole(value, "each number") for value in given))
    if not isinstance(given, str):
        return Fixed(_whole(given, "it"))
    form, colon, rest = given.strip().partition(":")
    if not colon:
        try:
            return Fixed(int(form))
        except ValueError:
            pass
        return _unreadable(given)
    if form == "file":
        return _from_file(rest, base)
    if form not in _FORMS:
        raise UnknownName("distribution", form, [*_FORMS, "file"])
    values = _parameters(form, rest)
    if form == "uniform":
        return Uniform(int(values["low"]), int(values["high"]))
    return LogNormal(values["median"], values["sigma"], int(values.get("most", MOST_TOKENS)))


def _unreadable(given: str) -> Counts:
    raise UsageError(
        f"'{given:.40}' is no distribution: give a whole number, uniform:low=64,high=512, "
        "lognormal:median=200,sigma=0.6 or file:NAME"
    )


def _parameters(form: str, text: str) -> Mapping[str, float]:
    """``"median=200,sigma=0.6"`` as numbers; all but `most` must be there."""
    known, values = _FORMS[form], dict[str, float]()
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UsageError(f"'{part:.40}' in {form}: expected name=value")
        if key not in known:
            raise UnknownName(f"parameter of {form}", key, known)
        if key in values:
            raise UsageError(f"{form} has {key} twice")
        try:
            values[key] = int(value) if known[key] else float(value)
        except ValueError:
            kind = "whole number" if known[key] else "number"
            raise UsageError(f"{key}={value:.20} of {form} is no {kind}") from None
        if not math.isfinite(values[key]):
            raise UsageError(f"{key}={value:.20} of {form} is no finite number")
    lacking = [key for key in known if key not in values and key != "most"]
    if lacking:
        raise UsageError(f"{form} lacks {' and '.join(lacking)}")
    return values


def _from_file(name: str, base: Path) -> Empirical:
    path = base / name.strip()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {path}: it is not UTF-8 text") from None
    values = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            values.append(int(text))
        except ValueError:
            raise UsageError(f"{path}, line {number}: '{text:.40}' is no whole number") from None
    if not values:
        raise UsageError(f"{path} holds no number")
    return Empirical(tuple(values), path.name)


def _whole(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{what} must be a whole number, not {value!r:.40}")
    return value
