"""Statistics of results and calibrations, all of them deterministic.

SciPy is imported where it is needed, for it is slow to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import le

import numpy as np

RESAMPLES = 1000  #: of a bootstrap over traces
LEVEL = 0.95  #: of every interval of a bootstrap
SIGNIFICANT = 0.05  #: differences with a smaller p are called differences


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Exact confidence interval of a proportion (Clopper and Pearson, 1934)."""
    tail = (1 - level) / 2
    low = 1 - _proportion(trials - successes, trials, tail) if successes else 0.0
    high = _proportion(successes, trials, tail) if successes < trials else 1.0
    return low, high


@cache
def _proportion(successes: int, trials: int, tail: float) -> float:
    """Under which as few of the trials succeed, or fewer, with the probability `tail`.

    By bisection.  `scipy.special` knows it, but takes longer to import than a small replay.
    """
    k = np.arange(successes + 1)
    log_ways = np.cumsum(np.log(np.append(1.0, (trials - k[:-1]) / (k[:-1] + 1))))
    low, high, p = 0.0, 1.0, 0.5
    for _ in range(60):
        within = np.exp(log_ways + k * math.log(p) + (trials - k) * math.log1p(-p)).sum()
        low, high = (p, high) if within > tail else (low, p)
        p = (low + high) / 2
    return p


def nonnegative_least_squares(
    rows: np.ndarray, target: np.ndarray, least: np.ndarray | float = 0.0
) -> np.ndarray:
    """The ``x >= least`` that brings ``rows @ x`` closest to `target` ``[n]``.

    `rows` is ``[n, unknowns]``, its columns of similar size.  Lawson and Hanson, Solving Least
    Squares Problems (1974), chapter 23. Here because machines with a GPU need not have SciPy.
    """
    target = target - rows @ np.broadcast_to(least, rows.shape[1])
    x = np.zeros(rows.shape[1])
    free, refused = (np.zeros(len(x), dtype=bool) for _ in range(2))
    slack = 1e-13 * float(np.abs(rows).sum(axis=0).max() * max(1.0, np.abs(target).max()))
    for _ in range(30 * len(x)):  # it ends sooner, unless rounding leads it round in circles
        slope = np.where(free | refused, -np.inf, rows.T @ (target - rows @ x))
        best = int(slope.argmax())
        if not slope[best] > slack:
            break
        free[best] = True
        z = _unbounded(rows, target, free)
        if z[best] <= 0:  # its slope was one of rounding
            free[best], refused[best] = False, True
            continue
        refused[:] = False
        while (low := free & (z <= 0)).any():
            x += (x[low] / (x[low] - z[low])).min() * (z - x)
            free &= x > 1e-15 * x.max()
            x[~free] = 0.0
            z = _unbounded(rows, target, free)
        x = z
    return np.asarray(x + least)


def _unbounded(rows: np.ndarray, target: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Least squares over the unknowns that are `free`. The others are 0."""
    x = np.zeros(len(free))
    x[free] = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
    return x


def fisher_p(good: int, other: int, n: int) -> float:
    """Two-sided p of Fisher's exact test for `good` against `other` successes, of `n` each."""
    if good == other:
        return 1.0
    # As both have n, tables are as likely as their mirror images, and rarer towards both ends.
    # (`scipy.stats` has this, too, but is slow to import.)
    both, least = good + other, min(good, other)
    tail = ratio = 1.0  # in units of how likely the table is that was seen
    for k in range(least, max(0, both - n), -1):
        ratio *= k * (n - both + k) / ((n - k + 1) * (both - k + 1))
        tail += ratio
    seen = math.comb(n, good) * math.comb(n, other) / math.comb(2 * n, both)
    return min(1.0, 2 * tail * seen)


def least_visible(correct: int, n: int) -> int | None:
    """The best of the lower counts that `n` problems tell from `correct`. None if there is none."""
    lower = (k for k in range(correct - 1, -1, -1) if fisher_p(k, correct, n) < SIGNIFICANT)
    return next(lower, None)


def efficient(points: Sequence[Sequence[float]]) -> list[int]:
    """Numbers of the points that no other one matches everywhere and beats somewhere.

    All measures are the better the smaller.  They are in the order of the first measure. Of points
    that are equal in all of them, the first one stands for the others.
    """
    found: list[int] = []
    for number in sorted(range(len(points)), key=lambda n: (*points[n], n)):
        mine = points[number]
        if not any(all(map(le, points[other], mine)) for other in found):
            found.append(number)
    return found


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation of two arrays ``[n]``, average ranks for ties. NaN if either is constant."""
    from scipy.stats import rankdata

    if len(x) < 2:
        return float("nan")
    a, b = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    norm = float(np.sqrt(a.dot(a) * b.dot(b)))
    return float(a.dot(b)) / norm if norm else float("nan")


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray | float],
    traces: int,
    seed: int,
    resamples: int = RESAMPLES,
) -> np.ndarray:
    """Percentile interval of a statistic under resampling of traces: both ends, ``[2, ...]``.

    Tokens of one trace depend on each other, so the unit is the trace.  `statistic` gets the
    numbers of the resampled traces, int64 ``[traces]``, and may return an array, and NaN where a
    resample says nothing.
    """
    rng = np.random.default_rng(seed)
    drawn = [statistic(rng.integers(0, traces, traces)) for _ in range(resamples)]
    tail = (1 - LEVEL) / 2
    return np.asarray(np.nanquantile(np.asarray(drawn, dtype=np.float64), [tail, 1 - tail], axis=0))


def fit_logistic(x: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Coefficients ``[k]`` of ``P(y) = sigmoid(theta . x)``, without an intercept.

    `x` is float64 ``[n, k]``, `y` bool ``[n]``.  The penalty ``ridge / 2 * sum(theta'^2)`` is on
    the coefficients of features that are divided by their root mean square, so that it does not
    depend on their units. Above 0 the solution is finite and unique.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    size = np.sqrt((x**2).mean(axis=0))
    size[size == 0] = 1.0
    scaled = x / size
    sign = np.where(y, 1.0, -1.0)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        margin = sign * (scaled @ theta)
        slope = -(sign * expit(-margin)) @ scaled + ridge * theta
        return float(np.logaddexp(0, -margin).sum() + ridge / 2 * theta.dot(theta)), slope

    found = minimize(loss, np.zeros(x.shape[1]), jac=True, method="BFGS", options={"gtol": 1e-8})
    return np.asarray(found.x / size)


def auc(score: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive scores above a negative (ties count half). NaN without both."""
    from scipy.stats import rankdata

    good = int(positive.sum())
    bad = len(positive) - good
    if not good or not bad:
        return float("nan")
    ranks = float(rankdata(score)[positive].sum())
    return (ranks - good * (good + 1) / 2) / (good * bad)


def leave_one_out_scores(
    x: np.ndarray, y: np.ndarray, trace: np.ndarray, ridge: float
) -> np.ndarray:
    """`fit_logistic`'s score ``theta . x`` of each row, fitted without the row's own trace."""
    scores = np.zeros(len(y))
    for left_out in np.unique(trace):
        rest = trace != left_out
        scores[~rest] = x[~rest] @ fit_logistic(x[rest], y[rest], ridge)
    return scores


def rows_of(trace: np.ndarray, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row numbers of the chosen traces, as often as chosen. `trace` is that of each row, from 0."""
    members = [np.flatnonzero(trace == number) for number in range(int(trace.max(initial=-1)) + 1)]
    return np.concatenate([members[number] for number in chosen])


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
