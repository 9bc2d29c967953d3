"""Choosing the lowest: pure functions, and pools that give up one candidate after the other.

Ties break by one rule everywhere: of two tokens with equal scores the older one loses.  Token ids
rise with age, so in an array ordered by id the earlier entry is evicted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


def lowest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` lowest scores, ascending; the earliest first among equals.

    Scores, float64 ``[n]``, are ordered from oldest to newest token; int64 ``[min(count, n)]``.
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
    """Indices of the `count` lowest scores where `mask`, bool ``[n]``, is set; see `lowest`."""
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


def keep_highest(key: np.ndarray, lengths: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Which entries are among the highest of their block, bool ``[tokens]``; the newer of equals.

    `key`, float64 ``[tokens]``, holds block after block, each from its oldest token to its newest;
    `lengths` and `keep`, int64 ``[blocks]``, say how many tokens a block has and how many are
    wanted of it, at most as many.
    """
    width = int(lengths.max())
    inside = np.arange(width) < lengths[:, None]
    table = np.full(inside.shape, -np.inf)
    table[inside] = key
    rank = np.clip(width - keep, 0, width - 1)
    threshold = np.take_along_axis(np.sort(table, axis=1), rank[:, None], axis=1)
    kept = table >= threshold
    crowded = np.flatnonzero(kept.sum(axis=1) > keep)
    if len(crowded):  # equals at the threshold: the newest stay
        higher = table[crowded] > threshold[crowded]
        ties = kept[crowded] & ~higher
        wanted = keep[crowded] - higher.sum(axis=1)
        newer = np.cumsum(ties[:, ::-1], axis=1)[:, ::-1]
        kept[crowded] = higher | (ties & (newer <= wanted[:, None]))
    return np.asarray(kept[inside])


def neighbour_mean(values: np.ndarray, kernel: int) -> np.ndarray:
    """Mean over `kernel` (odd) neighbours along the last axis; those beyond the ends count as 0."""
    reach = kernel // 2
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(reach, reach)])
    total = np.zeros_like(values)
    for shift in range(kernel):  # in a fixed order, so that equal neighbourhoods tie
        total += padded[..., shift : shift + values.shape[-1]]
    total /= kernel
    return total


class Candidates(Protocol):
    """Candidates of a stream for eviction."""

    def admit(self, stop: int) -> None:
        """Positions before `stop` are candidates now."""
        ...

    def pop(self) -> int | None:
        """Position of the candidate to evict, removed; None if there is none."""
        ...


MakeCandidates = Callable[[np.ndarray, np.ndarray, int, int], Candidates]
"""Makes them of `ids`, `alive`, `start` and `stop`, as `HeapPool` takes them."""


class HeapPool:
    """Candidates whose scores never change, or rise, few of them from one iteration to the next.

    A heap holds what each score was when it was last looked at, which is never above what it is
    now; the lowest entry is brought up to date until the lowest is.

    `scores`, float64 ``[tokens]``, is a live array; `ids`, int64 ``[positions]``, has the token at
    each position of the stream, and bool `alive` whether it is there.  Positions from `start` to
    `stop` are candidates at first.
    """

    def __init__(
        self, scores: np.ndarray, ids: np.ndarray, alive: np.ndarray, start: int, stop: int
    ) -> None:
        # Plain lists: reading one element of an array costs more than a heap operation.
        self._scores = scores
        self._ids: list[int] = ids.tolist()
        self._alive: list[bool] = alive.tolist()
        self._stop = max(start, stop)
        at = np.flatnonzero(alive[start : self._stop]) + start
        self._heap = list(zip(scores[ids[at]].tolist(), at.tolist(), strict=True))
        heapq.heapify(self._heap)

    def admit(self, stop: int) -> None:
        while self._stop < stop:
            at = self._stop
            if self._alive[at]:
                heapq.heappush(self._heap, (self._scores.item(self._ids[at]), at))
            self._stop = at + 1

    def pop(self) -> int | None:
        heap = self._heap
        while heap:
            known, at = heap[0]
            score = self._scores.item(self._ids[at])
            if not score > known:
                return heapq.heappop(heap)[1]
            heapq.heapreplace(heap, (score, at))
        return None


class ChangingPool:
    """Candidates whose scores change freely; the parameters are those of `HeapPool`."""

    def __init__(
        self, scores: np.ndarray, ids: np.ndarray, alive: np.ndarray, start: int, stop: int
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
        while self._stop < stop:
            if self._alive[self._stop]:
                self._at[self._count] = self._stop
                self._token[self._count] = self._ids[self._stop]
                self._count += 1
            self._stop += 1

    def pop(self) -> int | None:
        count = self._count
        if not count:
            return None
        lowest = int(self._scores.take(self._token[:count]).argmin())
        position = int(self._at[lowest])
        self._at[lowest : count - 1] = self._at[lowest + 1 : count]
        self._token[lowest : count - 1] = self._token[lowest + 1 : count]
        self._count = count - 1
        return position
