"""The largest load of a candidate that meets the target: found run by run, then confirmed.

Loads in searches per second lie 2% apart (`STEP`); numbers of clients are whole, and 2% apart where
that is more than one.  Candidates that are compared are therefore tried at the same loads, with the
same arrivals and searches: where one meets the target at all loads at which another does, its
largest load is no smaller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from arborsim.plan.arrivals import ClientLoop
from arborsim.plan.results import MET, MISSED, CandidateResult, LoadPoint, machines_for
from arborsim.plan.runs import MOST_AT_ONCE, Bench, Run, summed_up
from arborsim.plan.statistics import Estimate, rate_interval

STEP = 1.02
_WIDEST = 32  # steps of the grid


class RateGrid:
    """Loads ``1.02 ** k`` for every whole k."""

    def load(self, k: int) -> float:
        return float(STEP**k)

    def below(self, load: float) -> int:
        """The largest k whose load is not above `load`, which is above 0."""
        k = math.floor(math.log(load) / math.log(STEP))
        while self.load(k + 1) <= load:
            k += 1
        while self.load(k) > load:
            k -= 1
        return k


class ClientGrid:
    """Whole numbers from 1 on, 2% apart where that is more than one; k counts from 0."""

    def __init__(self, most: int = 1_000_000) -> None:
        self._loads = [1]
        while self._loads[-1] < most:
            self._loads.append(max(self._loads[-1] + 1, math.floor(self._loads[-1] * STEP)))

    def load(self, k: int) -> float:
        return float(self._loads[k])

    def below(self, load: float) -> int:
        """The largest k whose load is not above `load`; -1 below 1."""
        return bisect_right(self._loads, load) - 1


Grid = RateGrid | ClientGrid


def largest(meets: Callable[[int], bool], low: int, high: int, start: int) -> tuple[int, int]:
    """The last k at which something holds that holds up to some k and not beyond; and the next.

    Goes from `start` in growing steps until it has passed the border, then halves: the closer the
    start to the border, the fewer questions.  `meets` is asked about each k at most once, and only
    between `low`, at which it holds, and `high`, at which it does not.
    """
    width, k, rose = 1, min(max(start, low + 1), high - 1), None
    while high - low > 1:
        if meets(k):
            low, rises = k, True
        else:
            high, rises = k, False
        if rose is not None and rises != rose:
            break
        rose = rises
        k = k + width if rises else k - width
        k = min(max(k, low + 1), high - 1)
        width = min(2 * width, _WIDEST)
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return low, high


_IDLE = 0.01  # a load at which so much of the time is busy counts as none
_FIRST_GUESS = 0.8  # of what the machine finishes at most
_SCOUT = 0.25  # of a run, to find out where to begin
_SCOUTED = 400  # searches that a run has before its beginning tells anything


class LargestLoad:
    """The search for the largest load, run by run, and the figures at it.

    `result` has `alone`; what is found is added to it.  `solved` is the share of searches with a
    correct answer, if solved ones have a cost.
    """

    def __init__(self, bench: Bench, result: CandidateResult, solved: Estimate | None) -> None:
        self._bench, self._workload = bench, bench.workload
        self._result = result
        self._solved = solved
        self._closed = isinstance(bench.workload.arrivals, ClientLoop)
        self._grid: Grid = ClientGrid() if self._closed else RateGrid()
        self._last: dict[int, tuple[int, Run]] = {}  # seed -> k, its last run that met the target

    def found(self) -> CandidateResult:
        """The result with its largest load and the figures there, or why there is none."""
        borders: list[int] = []
        beyond, limits = [], []
        for seed in self._workload.seeds():
            low, high, why = self._range(seed)
            guess = borders[-1] if borders else self._guess(seed, low, high)
            border, over = largest(partial(self._meets, seed), low, high, guess)
            if border == low:
                return self._never()
            borders.append(border)
            beyond.append(over)
            limits.append(why if over == high else "target")
        k, runs = self._confirmed(min(borders))
        if not runs:
            return self._never()
        loads = [self._grid.load(each) for each in borders]
        point = self._point(self._grid.load(k), runs)
        return replace(
            self._result,
            status=MET,
            largest=self._grid.load(k),
            largest_by_seed=tuple(loads),
            spread=rate_interval(loads),
            refuted=self._grid.load(min(beyond)),
            limited_by=limits[int(np.argmin(borders))],
            at_largest=point,
            at_stated=self._at_stated(point),
        )

    def _at_stated(self, at_largest: LoadPoint) -> LoadPoint | None:
        """One machine of as many as the stated load needs, with its part of it."""
        stated = self._workload.arrivals.stated
        if stated is None:
            return None
        load = stated / machines_for(stated, at_largest.load)
        if self._closed:
            load = float(max(1, round(load)))
        if load == at_largest.load:
            return at_largest
        return self._point(load, [self._bench.run(load, seed) for seed in self._workload.seeds()])

    def _range(self, seed: int) -> tuple[int, int, str]:
        """A k that meets the target, one that does not, and why that one does not."""
        if self._closed:
            most = self._workload.searches * MOST_AT_ONCE
            return -1, self._grid.below(most) + 1, "run length"
        rate, full = self._bench.keeps_up_with(seed)
        alone = self._result.alone
        assert alone is not None
        low = self._grid.below(_IDLE / alone.seconds)
        why = "throughput" if full and self._bench.knows_rate(seed) else "run length"
        return low, max(low + 1, self._grid.below(rate) + 1), why

    def _guess(self, seed: int, low: int, high: int) -> int:
        """Where to begin: where the beginning of the run seems to have its border."""
        if self._closed:
            first = (low + high) // 2
        else:
            first = self._grid.below(_FIRST_GUESS * self._grid.load(high))
        if self._workload.searches < _SCOUTED:
            return first

        def meets(k: int) -> bool:
            return self._bench.scout(self._grid.load(k), seed, _SCOUT)

        return largest(meets, low, high, first)[0]

    def _meets(self, seed: int, k: int) -> bool:
        run = self._bench.attempt(self._grid.load(k), seed)
        if run is not None:
            # Later ones are closer to the border: only there is a run looked at again.
            self._last[seed] = (k, run)
        return run is not None

    def _confirmed(self, k: int) -> tuple[int, list[Run]]:
        """All runs at the largest load that meets the target in every one of them, from k down."""
        for lower in range(k, k - 20, -1):
            if self._closed and lower < 0:
                break
            runs = [
                self._last[seed][1]
                if seed in self._last and self._last[seed][0] == lower
                else self._bench.run(self._grid.load(lower), seed)
                for seed in self._workload.seeds()
            ]
            if all(run.meets for run in runs):
                return lower, runs
        return k, []

    def _point(self, load: float, runs: list[Run]) -> LoadPoint:
        return summed_up(self._bench, load, runs, self._solved, None if self._closed else load)

    def _never(self) -> CandidateResult:
        reason = "searches meet the target alone, but not together with others"
        return replace(self._result, status=MISSED, reason=reason)
