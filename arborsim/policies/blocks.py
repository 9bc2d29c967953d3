"""Building blocks of policies: small pure functions on NumPy arrays.

Ties break by one rule everywhere: of two tokens with equal scores the older one loses.  Token ids
rise with age, so in an array ordered by id the earlier entry is evicted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np


def lowest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` lowest scores, ascending; the earliest first among equals.

    Parameters
    ----------
    scores : float64 ``[n]``
        Ordered from oldest to newest token.
    count : int

    Returns
    -------
    int64 ``[min(count, n)]``
    """
    if count == 1 and len(scores):
        return np.asarray([int(scores.argmin())])
    return lowest_of_each(scores, [count])[0]


def lowest_of_each(scores: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """`lowest` for several counts at the price of one partition."""
    parted, found = scores, []
    thresholds: dict[int, float] = {}
    # The largest first: what lies below it holds the other thresholds.  A pass for each is faster
    # than one for all, which NumPy does without vector instructions.
    for count in sorted({count for count in counts if 0 < count < len(scores)}, reverse=True):
        parted = np.partition(parted, count - 1)[:count]
        thresholds[count] = parted[-1]
    for count in counts:
        if count <= 0:
            found.append(np.empty(0, dtype=np.int64))
            continue
        if count >= len(scores):
            found.append(np.arange(len(scores)))
            continue
        threshold = thresholds[count]
        chosen = scores < threshold
        ties = np.flatnonzero(scores == threshold)
        chosen[ties[: count - np.count_nonzero(chosen)]] = True
        found.append(np.flatnonzero(chosen))
    return found


def lowest_of(mask: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` lowest scores where `mask` is set, ascending.

    Parameters
    ----------
    mask : bool ``[n]``
    scores : float64 ``[n]``
        Ordered from oldest to newest token.
    count : int

    Returns
    -------
    int64 ``[min(count, set entries)]``
    """
    if count == 1:  # what a policy asks at every iteration: no index array is made
        one = int(np.where(mask, scores, np.inf).argmin())
        if mask[one]:
            return np.asarray([one])
    among = np.flatnonzero(mask)
    return np.asarray(among[lowest(scores[among], count)])


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest scores, ascending; the latest first among equals."""
    keep = np.ones(len(scores), dtype=bool)
    keep[lowest(scores, len(scores) - max(0, count))] = False
    return np.flatnonzero(keep)


class Pool(Protocol):
    """Candidates of a stream for eviction."""

    def admit(self, stop: int) -> None:
        """Positions before `stop` are candidates now."""
        ...

    def pop(self) -> int | None:
        """Position of the candidate to evict, removed; None if there is none."""
        ...


class FrozenPool:
    """Candidates whose scores never change: a heap hands out the lowest, oldest first.

    Parameters
    ----------
    scores : float64 ``[positions]``
        Score of each position of the stream.
    alive : bool ``[positions]``
    start, stop : int
        Positions that are candidates at first; `admit` adds one more at the end.
    """

    def __init__(self, scores: np.ndarray, alive: np.ndarray, start: int, stop: int) -> None:
        # Plain lists: reading one element of an array costs more than a heap operation.
        self._scores: list[float] = scores.tolist()
        self._alive: list[bool] = alive.tolist()
        self._stop = max(start, stop)
        at = np.flatnonzero(alive[start : self._stop]) + start
        self._heap = list(zip(scores[at].tolist(), at.tolist(), strict=True))
        heapq.heapify(self._heap)

    def admit(self, stop: int) -> None:
        """Positions before `stop` are candidates now."""
        while self._stop < stop:
            at = self._stop
            if self._alive[at]:
                heapq.heappush(self._heap, (self._scores[at], at))
            self._stop = at + 1

    def pop(self) -> int | None:
        """Position of the candidate with the lowest score, removed; None if there is none."""
        return heapq.heappop(self._heap)[1] if self._heap else None


class Looked(Protocol):
    """Live scores over tokens, such as an array."""

    def take(self, tokens: np.ndarray, /) -> np.ndarray:
        """The scores that these tokens have now."""
        ...


class ChangingPool:
    """Candidates whose scores change from one iteration to the next.

    The parameters are those of `FrozenPool`, but `scores` is a live array over tokens, read through
    `ids`, the token at each position of the stream.
    """

    def __init__(
        self, scores: Looked, ids: np.ndarray, alive: np.ndarray, start: int, stop: int
    ) -> None:
        self._scores = scores
        self._ids = ids
        self._alive: list[bool] = alive.tolist()
        self._stop = max(start, stop)
        first = np.flatnonzero(alive[start : self._stop]) + start
        # Only candidates are looked at, and they are few: those kept but for the recent ones.
        self._count = len(first)
        self._at = np.empty(len(alive), dtype=np.int64)  # positions of candidates, rising
        self._token = np.empty(len(alive), dtype=np.int64)
        self._at[: self._count] = first
        self._token[: self._count] = ids[first]

    def admit(self, stop: int) -> None:
        """Positions before `stop` are candidates now."""
        while self._stop < stop:
            if self._alive[self._stop]:
                self._at[self._count] = self._stop
                self._token[self._count] = self._ids[self._stop]
                self._count += 1
            self._stop += 1

    def pop(self) -> int | None:
        """Position of the candidate with the lowest score, removed; None if there is none."""
        count = self._count
        if not count:
            return None
        lowest = int(self._scores.take(self._token[:count]).argmin())
        position = int(self._at[lowest])
        self._at[lowest : count - 1] = self._at[lowest + 1 : count]
        self._token[lowest : count - 1] = self._token[lowest + 1 : count]
        self._count = count - 1
        return position


class RisingPool:
    """Candidates whose scores may rise, of which few do from one iteration to the next.

    A heap holds what each score was when it was last looked at, which is never above what it is
    now; the lowest entry is brought up to date until the lowest is.  The parameters are those of
    `ChangingPool`.
    """

    def __init__(
        self, scores: np.ndarray, ids: np.ndarray, alive: np.ndarray, start: int, stop: int
    ) -> None:
        self._scores = scores
        self._ids: list[int] = ids.tolist()
        self._alive: list[bool] = alive.tolist()
        self._stop = max(start, stop)
        at = np.flatnonzero(alive[start : self._stop]) + start
        self._heap = list(zip(scores[ids[at]].tolist(), at.tolist(), strict=True))
        heapq.heapify(self._heap)

    def admit(self, stop: int) -> None:
        """Positions before `stop` are candidates now."""
        while self._stop < stop:
            at = self._stop
            if self._alive[at]:
                heapq.heappush(self._heap, (self._scores.item(self._ids[at]), at))
            self._stop = at + 1

    def pop(self) -> int | None:
        """Position of the candidate with the lowest score, removed; None if there is none."""
        heap = self._heap
        while heap:
            known, at = heap[0]
            score = self._scores.item(self._ids[at])
            if score == known:
                return heapq.heappop(heap)[1]
            heapq.heapreplace(heap, (score, at))
        return None


def least_recently_active(
    last_active: list[int], depth: list[int], candidates: Iterator[int]
) -> list[int]:
    """Nodes in the order in which whole blocks are given up.

    Least recently active first; among equals the deepest, whose loss harms no other block's path;
    then the oldest.
    """
    return sorted(candidates, key=lambda node: (last_active[node], -depth[node], node))
