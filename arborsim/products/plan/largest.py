"""The largest load that meets the target: looked for run by run, then confirmed in all of them.

Loads in searches per second lie 2% apart (`Workload.resolution`); numbers of clients are whole, and
2% apart where that is more than one.  Candidates that are compared are therefore tried at the same
loads, with the same arrivals and searches: where one meets the target at all loads at which another
does, its largest load is no smaller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import NormalDist

import numpy as np

from arborsim.products.generate.arrivals import ClientLoop
from arborsim.products.plan.costs import machines_for
from arborsim.products.plan.results import (
    MET,
    MISSED,
    RUN_LENGTH,
    TOO_FEW,
    CandidateResult,
    LoadPoint,
)
from arborsim.products.plan.runs import MOST_AT_ONCE, Bench, Run, few_distinct, summed_up
from arborsim.products.plan.statistics import Estimate, rate_interval

_WIDEST = 32  # steps of the grid
_MOST_CLIENTS = 1_000_000
_RATES = (6e-18, 1.6e17)  # searches per second: what any machine serves lies well between


@cache
def rates(resolution: float) -> tuple[float, ...]:
    """Searches per second, 1 among them, that lie a share of `resolution` apart."""
    step = 1 + resolution
    least, most = (int(math.log(each) / math.log(step)) for each in _RATES)
    return tuple(step**k for k in range(least, most))


@cache
def clients(resolution: float) -> tuple[float, ...]:
    """Whole numbers from 1 on, a share of `resolution` apart where that is more than one."""
    found = [1.0]
    while found[-1] < _MOST_CLIENTS:
        found.append(max(found[-1] + 1, float(math.floor(found[-1] * (1 + resolution)))))
    return tuple(found)


def below(loads: Sequence[float], load: float) -> int:
    """Which of `rates` or `clients` is the largest that is not above `load`; -1 for none."""
    return bisect_right(loads, load) - 1


def largest(meets: Callable[[int], bool], low: int, high: int, start: int) -> tuple[int, int]:
    """The last k at which something holds that holds up to some k and not beyond; and the next.

    Goes from `start` in growing steps until it has passed the border, then halves: the closer the
    start to the border, the fewer questions.  `meets` is asked about each k at most once, and only
    between `low`, at which it holds, and `high`, at which it does not.
    """
    width, k, rose, turned = 1, start, None, False
    while high - low > 1:
        k = (low + high) // 2 if turned else min(max(k, low + 1), high - 1)
        rises = meets(k)
        low, high = (k, high) if rises else (low, k)
        turned = turned or rose not in (None, rises)
        rose = rises
        k += width if rises else -width
        width = min(2 * width, _WIDEST)
    return low, high


_IDLE = 0.01  # a load that keeps a machine busy for this share of the time counts as none
_FIRST_GUESS = 0.8  # of what the machine finishes at most
_SCOUT = 0.25  # of a run, to find out where to begin
_SCOUTED = 400  # searches that a run has before its beginning tells anything


class LargestLoad:
    """The search for the largest load, run by run, and the figures at it.

    `result` has `alone`; what is found is added to it.  `solved` is the share of searches with a
    correct answer, if solved ones have a cost.
    """

    def __init__(
        self, bench: Bench, result: CandidateResult, solved: Estimate | None, lengthened: bool
    ) -> None:
        self._bench, self._workload = bench, bench.workload
        self._result, self._solved = result, solved
        self._lengthened = lengthened  # shorter runs saw no limit: it is sought from the top down
        self._closed = isinstance(bench.workload.arrivals, ClientLoop)
        grid = clients if self._closed else rates
        self._loads = grid(bench.workload.resolution)
        self._last: dict[int, tuple[int, Run]] = {}  # seed -> k, its last run that met the target

    def found(self, last: bool) -> CandidateResult:
        """The result with its largest load and the figures there, or why there is none.

        Unless it is the `last` try, a result whose runs saw no limit has no figures.
        """
        borders: list[int] = []
        beyond, limits = [], []
        for seed in self._workload.seeds():
            low, high, why = self._range(seed)
            guess = borders[-1] if borders else self._guess(seed, low, high)
            border, over = largest(partial(self._meets, seed), low, high, guess)
            if border == low:
                return self._never(seed)
            borders.append(border)
            beyond.append(over)
            limits.append(why if over == high else "target")
        k, runs = self._confirmed(min(borders))
        if missed := [run.seed for run in runs if not run.meets]:
            return self._never(missed[0])
        limited_by = limits[int(np.argmin(borders))]
        if limited_by == RUN_LENGTH and not last:
            return replace(self._result, limited_by=limited_by)
        loads = [self._loads[each] for each in borders]
        point = self._point(self._loads[k], runs)
        short = self._too_few(self._loads[k])
        return replace(
            self._result,
            status=TOO_FEW if short else MET,
            reason=short,
            largest=self._loads[k],
            largest_by_seed=tuple(loads),
            spread=rate_interval(loads),
            searches=self._workload.searches,
            refuted=self._loads[min(beyond)],
            limited_by=limited_by,
            at_largest=point,
            at_stated=self._at_stated(point),
        )

    def _too_few(self, largest: float) -> str:
        """Why the stated number of machines cannot carry the stated load; "" if it can."""
        stated, replicas = self._workload.arrivals.stated, self._workload.replicas
        if (
            stated is None
            or replicas is None
            or (needed := machines_for(stated, largest)) <= replicas
        ):
            return ""
        return (
            f"{replicas} replica{'s' * (replicas > 1)} carry up to {replicas * largest:.3g} of "
            f"{stated:.3g} {self._workload.arrivals.unit}: --dp {needed} would"
        )

    def _at_stated(self, at_largest: LoadPoint) -> LoadPoint | None:
        """One machine of as many as the stated load needs, with its part of it."""
        stated = self._workload.arrivals.stated
        if stated is None:
            return None
        load = stated / (self._workload.replicas or machines_for(stated, at_largest.load))
        if self._closed:
            load = float(max(1, round(load)))
        if load == at_largest.load:
            return at_largest
        if load > at_largest.load:  # too few replicas
            return None
        return self._point(load, [self._bench.run(load, seed) for seed in self._workload.seeds()])

    def _range(self, seed: int) -> tuple[int, int, str]:
        """A k that meets the target, one that does not, and why that one does not."""
        if self._closed:
            most = self._workload.searches * MOST_AT_ONCE
            return -1, below(self._loads, most) + 1, RUN_LENGTH
        rate, full = self._bench.keeps_up_with(seed)
        alone = self._result.alone
        assert alone is not None
        low = below(self._loads, _IDLE / alone.seconds)
        why = "throughput" if full and self._bench.knows_rate(seed) else RUN_LENGTH
        return low, max(low + 1, below(self._loads, rate) + 1), why

    def _guess(self, seed: int, low: int, high: int) -> int:
        """Where to begin: where the beginning of the run seems to have its border."""
        first = (low + high) // 2
        if self._lengthened:
            return high - 1
        if not self._closed:
            first = below(self._loads, self._expected(self._loads[high]))
        if self._workload.searches < _SCOUTED:
            return first

        def meets(k: int) -> bool:
            return self._bench.scout(self._loads[k], seed, _SCOUT)

        return largest(meets, low, high, first)[0]

    def _expected(self, full_per_s: float) -> float:
        """About the rate that meets the target, of a machine that finishes `full_per_s` at most.

        A search takes longer with every other one that is in the machine: alone what it takes alone
        (`result.alone`), and with as many as a run can hold what Little's law says.  So the target
        tells how many others it allows.  Where the rate is m per search's stay, an arriving search
        meets Poisson(m) others, of which the target's percentile counts.
        """
        alone, target = self._result.alone, self._workload.target
        assert alone is not None
        taken = [(getattr(alone.at_percentiles, x.kind), x.seconds) for x in target.limits]
        slower = min((limit / s for s, limit in taken if s > 0), default=math.inf)
        most = max(2, int(self._workload.searches * MOST_AT_ONCE))
        each = (most / full_per_s / alone.seconds - 1) / (most - 1)  # slower by, per other search
        ceiling = _FIRST_GUESS * full_per_s
        if each <= 0 or slower <= 1:
            return ceiling
        z = NormalDist().inv_cdf(target.strictest / 100)
        others = (slower - 1) / each
        met = ((math.sqrt(z * z + 4 * others) - z) / 2) ** 2
        return min(ceiling, met / (alone.seconds * (1 + met * each)))

    def _meets(self, seed: int, k: int) -> bool:
        run = self._bench.attempt(self._loads[k], seed)
        if run is not None:
            # Later ones are closer to the border: only there is a run looked at again.
            self._last[seed] = (k, run)
        return run is not None

    def _confirmed(self, k: int) -> tuple[int, list[Run]]:
        """All runs at the largest load that meets the target in every one of them, from k down.

        Or, if there is none within 20 steps, the last that were tried.
        """
        for lower in range(k, max(k - 20, -1), -1):
            runs = [
                self._last[seed][1]
                if seed in self._last and self._last[seed][0] == lower
                else self._bench.run(self._loads[lower], seed)
                for seed in self._workload.seeds()
            ]
            if all(run.meets for run in runs):
                break
        return lower, runs

    def _point(self, load: float, runs: list[Run]) -> LoadPoint:
        return summed_up(self._bench, load, runs, self._solved)

    def _never(self, seed: int) -> CandidateResult:
        reason = (
            f"searches meet the target alone, but those of seed {seed} not together with others"
            f"{few_distinct(self._workload, self._bench.drawn)}"
        )
        return replace(self._result, status=MISSED, reason=reason)
