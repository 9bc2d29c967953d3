"""The largest load that meets a target, found by search on one grid of loads for all candidates.

Loads in searches per second lie 2% apart (`STEP`); numbers of clients are whole, and 2% apart where
that is more than one.  Candidates that are compared are therefore tried at the same loads, with the
same arrivals and searches: where one meets the target at all loads at which another does, its
largest load is no smaller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

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
    """The last k at which something holds that holds up to some k and not beyond.

    Goes from `start` in growing steps until it has passed the border, then halves.

    Parameters
    ----------
    meets : callable
        Asked about each k at most once, and only between `low` and `high`.
    low, high : int
        It holds at `low` and does not at `high`; neither is asked about.
    start : int
        Where to begin: the closer to the border, the fewer questions.

    Returns
    -------
    int, int
        Neighbours: it holds at the first (or that is `low`), and not at the second (or that is
        `high`).
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
