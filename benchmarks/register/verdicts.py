"""Verdicts on claims: worked out of numbers, intervals, directions and grounds, never written down.

A claim states what it needs to be tested; a row states the ground that our numbers come from, what
in our settings is not the authors', and for each judged number the bounds inside which the claim
holds.  `judge` makes the verdict of that.  A person may only lower it, with a reason (`Lowered`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from arborsim.core.errors import UsageError
from arborsim.core.records import Text

#: A number closer than this share to the paper's reproduces it, whatever its interval.
NEAR = 0.05

#: What can test a claim: its definitions and shapes alone, any search tree, any attention model, a
#: model of natural language, the paper's class of models and tasks, or seconds and bytes of a GPU.
Need = Literal["definition", "search", "model", "language", "large-model", "machine"]
#: Where our numbers come from.
Ground = Literal[
    "arithmetic", "drawn-trees", "recorded-trees", "toy-model", "real-model", "priced",
    "measured-gpu", "authors-rule",
]  # fmt: skip

#: On which grounds a claim can be reproduced or contradicted.  On any other its direction can be
#: seen ("in form") or not, and nothing more follows.
FAIR: dict[str, frozenset[str]] = {
    "definition": frozenset(
        {"arithmetic", "drawn-trees", "recorded-trees", "toy-model", "real-model", "priced",
         "measured-gpu", "authors-rule"}
    ),
    "search": frozenset({"drawn-trees", "recorded-trees", "toy-model", "real-model"}),
    "model": frozenset({"toy-model", "real-model"}),
    "language": frozenset({"real-model"}),
    "large-model": frozenset(),
    "machine": frozenset({"arithmetic", "priced", "measured-gpu"}),
}  # fmt: skip


class Verdict(StrEnum):
    """The outcome of a claim, from agreement to what cannot be said here."""

    REPRODUCED = "reproduced"
    IN_FORM = "in-form"
    UNDECIDED = "undecided"
    CONTRADICTED = "contradicted"
    NOT_TESTABLE = "not-testable"

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_WORDS = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.IN_FORM: "in form",
    Verdict.UNDECIDED: "undecided",
    Verdict.CONTRADICTED: "contradicted",
    Verdict.NOT_TESTABLE: "not testable here",
}
_MEANINGS = {
    Verdict.REPRODUCED: (
        "on ground that can test the claim, our interval lies where the claim holds, and contains "
        "the paper's number or is within 5% of it, if the claim has one"
    ),
    Verdict.IN_FORM: (
        "our interval lies where the claim holds, at another magnitude or on ground that cannot "
        "reproduce it, such as a small model for a claim about large ones"
    ),
    Verdict.UNDECIDED: "our interval contains both the claim and its opposite",
    Verdict.CONTRADICTED: (
        "our interval excludes the claim, on ground that can test it and with the authors' settings"
    ),
    Verdict.NOT_TESTABLE: (
        "nothing was measured, or what was measured disagrees on ground or with settings that "
        "cannot contradict the claim; the row says which"
    ),
}
_KINDEST = (Verdict.REPRODUCED, Verdict.IN_FORM, Verdict.UNDECIDED, Verdict.NOT_TESTABLE,
            Verdict.CONTRADICTED)  # fmt: skip
#: What a verdict may be lowered to: less agreement, or less disagreement, never across.
_BELOW = {
    Verdict.REPRODUCED: (Verdict.IN_FORM, Verdict.UNDECIDED, Verdict.NOT_TESTABLE),
    Verdict.IN_FORM: (Verdict.UNDECIDED, Verdict.NOT_TESTABLE),
    Verdict.UNDECIDED: (Verdict.NOT_TESTABLE,),
    Verdict.CONTRADICTED: (Verdict.UNDECIDED, Verdict.NOT_TESTABLE),
    Verdict.NOT_TESTABLE: (),
}


@dataclass(frozen=True)
class Lowered:
    """A verdict below the one that follows from the numbers."""

    to: Verdict
    because: Text


@dataclass(frozen=True)
class Judged:
    """A number that a verdict rests on, with the bounds inside which the claim holds.

    `low` and `high` are the ends of its interval, the number itself where it has none.  `value` is
    the paper's least and largest number, NaN where it is not meant as a number like this one.
    """

    ours: float
    low: float
    high: float
    above: float | None
    below: float | None
    value: tuple[float, float] = (math.nan, math.nan)

    @property
    def holds(self) -> bool:
        """Whether the claim holds in all of the interval."""
        least, most = self._bounds
        return least <= self.low and self.high <= most

    @property
    def fails(self) -> bool:
        """Whether the claim fails in all of the interval."""
        least, most = self._bounds
        return self.high < least or self.low > most

    @property
    def agrees(self) -> bool:
        """Whether the paper's number, if there is one, is in the interval or near."""
        low, high = self.value
        if math.isnan(low):
            return True
        near = low - NEAR * abs(low) <= self.ours <= high + NEAR * abs(high)
        return near or (self.low <= high and self.high >= low)

    @property
    def _bounds(self) -> tuple[float, float]:
        return (
            -math.inf if self.above is None else self.above,
            math.inf if self.below is None else self.below,
        )


def judge(numbers: Iterable[Judged], need: Need, ground: Ground, differs: str) -> Verdict:
    """The verdict of one reading of a claim.  `differs` says what is not as the authors run it."""
    numbers = list(numbers)
    if not numbers:
        return Verdict.NOT_TESTABLE
    fair = ground in FAIR[need]
    if any(each.fails for each in numbers):
        return Verdict.CONTRADICTED if fair and not differs else Verdict.NOT_TESTABLE
    if not all(each.holds for each in numbers):
        return Verdict.UNDECIDED
    if fair and all(each.agrees for each in numbers):
        return Verdict.REPRODUCED
    return Verdict.IN_FORM


def kindest(readings: Iterable[Verdict]) -> Verdict:
    """The verdict of a claim with several readings: contradicted only if all of them are."""
    return min(readings, key=_KINDEST.index)


def lower(verdict: Verdict, lowered: Lowered | None) -> Verdict:
    """The verdict that is shown.

    Raises `UsageError` if a person raises a verdict, or turns agreement into disagreement.
    """
    if lowered is None:
        return verdict
    if lowered.to not in _BELOW[verdict]:
        allowed = ", ".join(_BELOW[verdict]) or "none"
        raise UsageError(
            f"lowered to {lowered.to}, but the numbers say {verdict}, which can be lowered to: "
            f"{allowed}"
        )
    return lowered.to
