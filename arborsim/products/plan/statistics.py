"""Estimates from simulated searches, each with the interval that belongs to it.

Searches of one run share a queue, so they depend on each other, and an interval over the searches
of one run is too narrow near saturation.  What separates candidates is judged by the spread over
seeds (`mean_interval`), where each run is one observation.  Runs of one seed serve the same
searches to every candidate, so two candidates are compared by the mean of their differences, seed
by seed (``mean_interval(np.subtract(a, b))``), which is narrower than both intervals suggest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arborsim.core.statistics import clopper_pearson

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval."""

    #: An end that the data cannot give is infinite; without data the value is NaN.
    value: float
    low: float
    high: float
    n: int  #: observations; 0 for a number that was stated, whose ends are the number itself

    @classmethod
    def stated(cls, value: float) -> Estimate:
        """A number that the user gave, exactly."""
        return cls(value, value, value, 0)

    @classmethod
    def share(cls, right: int, n: int, level: float = LEVEL) -> Estimate:
        """A counted share, with Clopper and Pearson's interval."""
        return cls(right / n, *clopper_pearson(right, n, level), n)

    def times(self, factor: float) -> Estimate:
        """The same estimate of a number that is `factor` times as large."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high, self.n)

    @property
    def is_stated(self) -> bool:
        """Whether nothing of it was observed."""
        return self.n == 0 and self.low == self.value == self.high


def percentile(values: Sequence[float] | np.ndarray, rank: float, level: float = LEVEL) -> Estimate:
    """A percentile, with the interval between two order statistics.

    The number of independent observations below the true q-quantile is binomial, which gives an
    interval without any assumption about the distribution (Conover, 1999, section 3.2): the tails
    beyond each end have at most ``(1 - level) / 2``.  High percentiles of few values have no upper
    end: the 99th needs 368 values at a level of 0.95.  `rank` lies in (0, 100).
    """
    from scipy.stats import binom  # slow to import

    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n, q = len(ordered), rank / 100
    if n == 0:
        return Estimate(math.nan, -math.inf, math.inf, 0)
    tail = (1 - level) / 2
    counts = np.arange(n + 1)
    # The l-th smallest lies above the quantile if fewer than l values lie below it.
    below = np.flatnonzero(binom.cdf(counts - 1, n, q) <= tail)
    above = np.flatnonzero(binom.sf(counts - 1, n, q) <= tail)
    low = ordered[below[-1] - 1] if below[-1] > 0 else -math.inf
    high = ordered[above[0] - 1] if len(above) else math.inf
    return Estimate(float(np.quantile(ordered, q)), float(low), float(high), n)


def mean_interval(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean over independent runs, with Student's t interval: the spread over seeds.

    A single run says nothing about the spread.
    """
    runs = np.asarray(values, dtype=np.float64)
    n = len(runs)
    mean = float(runs.mean()) if n else math.nan
    if n < 2:
        return Estimate(mean, -math.inf, math.inf, n)
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, (1 + LEVEL) / 2) * runs.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def rate_interval(values: Sequence[float] | np.ndarray) -> Estimate:
    """`mean_interval` of what is never negative: the lower end, where there is one, is cut at 0.

    Few runs that differ have a wide interval, and a machine does not serve less than nothing.
    """
    found = mean_interval(values)
    return replace(found, low=max(0.0, found.low)) if found.n > 1 else found


@dataclass(frozen=True)
class Solved:
    """How many searches of one kind have a correct answer, as far as that is known."""

    right: int = 0  #: of the distinct recorded searches that were judged
    judged: int = 0
    stated: float | None = None  #: the share that was stated, in place of counts

    @property
    def known(self) -> bool:
        return self.stated is not None or self.judged > 0

    def estimate(self, level: float = LEVEL) -> Estimate:
        """The stated share, or the recorded one with Clopper and Pearson's interval."""
        if self.stated is not None:
            return Estimate.stated(self.stated)
        return Estimate.share(self.right, self.judged, level)


def relative_error(sizes: np.ndarray, seen: int) -> float:
    """Standard error of a rate that `seen` searches tell, relative to the rate.

    Sizes with a coefficient of variation c give ``c / sqrt(seen)``.  c counts as 1 at least, as if
    searches ended at random: the pace of a machine that is never idle depends on which are in it.
    `sizes` are those of the searches that the seen ones are drawn from.
    """
    if not seen:
        return math.inf
    scatter = float(sizes.std() / sizes.mean()) if sizes.any() else 0.0
    return max(1.0, scatter) / math.sqrt(seen)


def cost_per_search(price_per_hour: float, searches_per_s: float) -> float:
    """A search's part of the price of all GPUs that serve it; infinite where none is served."""
    return price_per_hour / 3600 / searches_per_s if searches_per_s else math.inf


def solved_share(weights: Sequence[float], kinds: Sequence[Solved]) -> Estimate | None:
    """Share of the mix's searches whose answer is correct; None if it is unknown of some kind.

    Stated shares count exactly.  A recorded search that is drawn many times is one observation of
    how often the model is right, so what counts is how many *distinct* searches of each kind were
    judged.  The interval is Clopper and Pearson's for one recorded kind.  For k of them it is the
    weighted sums of their ends at the level ``1 - (1 - LEVEL) / k``, which hold jointly at least as
    often as `LEVEL` (Bonferroni).
    """
    recorded = sum(each.stated is None for each in kinds)
    if not all(each.known for each in kinds):
        return None
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    level = 1 - (1 - LEVEL) / recorded if recorded else LEVEL
    found = [each.estimate(level) for each in kinds]
    value, low, high = (
        float(shares @ np.array([getattr(each, end) for each in found], dtype=np.float64))
        for end in ("value", "low", "high")
    )
    return Estimate(value, low, high, sum(each.n for each in found))


def cost_per_solved(cost: float, share: Estimate) -> Estimate:
    """The cost of a solved search, at `cost` per search: unsolved ones are paid for as well.

    The interval of the share of solved searches becomes that of the cost.
    """

    shares = (share.value, share.high, share.low)
    value, low, high = (cost / solved if solved > 0 else math.inf for solved in shares)
    return Estimate(value, low, high, share.n)
