"""Right answers of live searches: their share, its interval, and if a difference is visible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from arborsim.core.statistics import SIGNIFICANT, clopper_pearson, fisher_p

MASKED = ", masked"  #: ends the source of runs in which tokens were masked, not removed


@dataclass(frozen=True)
class Score:
    """Right answers over the problems of one run."""

    right: int
    n: int  #: searches that the budget could hold, and that were judged
    infeasible: int  #: searches that it could not
    #: Right under full retention on the same n problems; None where that was not run on all
    full_right: int | None
    source: str  #: the run: two scores are compared only within one

    @property
    def masked(self) -> bool:
        """Whether tokens were masked in place of removed."""
        return self.source.endswith(MASKED)

    @property
    def accuracy(self) -> float:
        return self.right / self.n if self.n else math.nan

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's, 95%, of the accuracy."""
        return clopper_pearson(self.right, self.n) if self.n else (math.nan, math.nan)

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]

    @property
    def difference(self) -> float:
        """Accuracy less that of full retention on the same problems. NaN if unknown."""
        if self.full_right is None or not self.n:
            return math.nan
        return (self.right - self.full_right) / self.n

    @cached_property
    def p(self) -> float:
        """Two-sided p of Fisher's exact test of `difference`. NaN if that is unknown."""
        if self.full_right is None or not self.n:
            return math.nan
        return fisher_p(self.right, self.full_right, self.n)

    @property
    def loses(self) -> bool:
        """Whether fewer are right than under full retention, visibly."""
        return self.difference < 0 and self.p < SIGNIFICANT

    def alike(self, other: Score) -> bool:
        """Whether both were counted in one run, over the same problems.

        Where a budget could not hold some, those that are left are other problems.
        """
        return (
            self.source == other.source
            and self.n == other.n
            and not self.infeasible
            and not other.infeasible
        )

    def beats(self, other: Score) -> bool:
        """Whether more are right than under `other`, visibly. False unless they are `alike`."""
        more = self.alike(other) and self.right > other.right
        return more and fisher_p(self.right, other.right, self.n) < SIGNIFICANT
