"""AdaKV: the heads of a layer share its budget by what their tokens score (Feng et al. 2024)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.events import Prefill
from arborsim.core.settings import setting
from arborsim.policies.blocks import Allocation, Decision
from arborsim.policies.methods.snapkv import Voting
from arborsim.policies.placement import Pool, lowest, lowest_of

_DECIMALS = 9
_FEW = 4


@dataclass(frozen=True)
class HeadsShare(Pool):
    """The lowest of all heads of a layer go, so that heads keep uneven numbers of tokens.

    Every head is safe to keep `alpha` of an even share: of the prompt as published, as a mixture of
    both (Algorithm 2); later as a floor.
    """

    alpha: float = 0.2

    about = "one pool for all heads of a layer, with a floor for each"
    budget_scope = "layer"

    def evictions(self, at: Decision, first: int, free: np.ndarray, over: int) -> np.ndarray:
        heads, count = len(free), np.count_nonzero(free, axis=1)
        rank = at.rank[first : first + heads]
        even = (int(count.sum()) - over) / heads
        if isinstance(at.event, Prefill):
            kept = count - self.lowest_by_head(rank, free, np.full(heads, over), over)
            return np.asarray(count - whole((1 - self.alpha) * kept + self.alpha * even))
        headroom = np.maximum(count - int(self.alpha * even), 0)
        return self.lowest_by_head(rank, free, np.minimum(headroom, over), over)

    @staticmethod
    def lowest_by_head(
        rank: np.ndarray, free: np.ndarray, most: np.ndarray, over: int
    ) -> np.ndarray:
        """How many of the `over` lowest tokens each head has, where it can give up `most`.

        Of equals the oldest goes first, then the one of the first head.  `rank` is float64,
        `free` bool, both ``[heads, tokens]``; int64 ``[heads]``.
        """
        if over <= _FEW * len(free):  # at every iteration: finding minima beats sorting
            return few_lowest(np.where(free, rank, np.inf), most, over)
        mine = [lowest_of(f, r, int(m)) for f, r, m in zip(free, rank, most, strict=True)]
        head = np.repeat(np.arange(len(mine)), [len(tokens) for tokens in mine])
        token = np.concatenate(mine)
        order = np.lexsort((head, token))
        head, token = head[order], token[order]
        gone = head[lowest(rank[head, token], over)]
        return np.asarray(np.bincount(gone, minlength=len(mine)))


def few_lowest(rank: np.ndarray, most: np.ndarray, over: int) -> np.ndarray:
    """`HeadsShare.lowest_by_head`, one token after the other; `rank` is changed."""
    gone = np.zeros(len(rank), dtype=np.int64)
    firsts = rank.argmin(axis=1).tolist()
    lowest = [(rank[h, at], at, h) for h, at in enumerate(firsts) if most[h]]
    heapq.heapify(lowest)
    while gone.sum() < over:
        _, at, head = heapq.heappop(lowest)
        rank[head, at] = np.inf
        gone[head] += 1
        if gone[head] < most[head]:
            at = int(rank[head].argmin())
            heapq.heappush(lowest, (rank[head, at], at, head))
    return gone


def whole(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers of the same sum: the largest fractions are rounded up, the first of equals."""
    numbers = np.round(numbers, _DECIMALS)
    down = np.floor(numbers)
    up = round(float(numbers.sum() - down.sum()))
    down[np.argsort(down - numbers, kind="stable")[:up]] += 1
    return np.asarray(down, dtype=np.int64)


@dataclass(frozen=True)
class AdaKV(Voting):
    """SnapKV whose heads share the budget of their layer, while tokens are generated too."""

    alpha: float = setting(0.2, "share of an even budget that every head keeps", low=0, high=1)

    name = "adakv"

    @cached_property
    def allocate(self) -> Allocation:
        return HeadsShare(self.adaptation, self.alpha)
