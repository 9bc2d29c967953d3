"""SnapKV: what the prompt's last queries look at stays, and two that share a budget unevenly.

PyramidKV gives deeper layers less, AdaKV lets the heads of a layer compete."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Prefill
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import AfterPrefill, Allocation, Decision, Protect, pin_prompt_setting
from arborsim.policies.placement import Pool, lowest, lowest_of, neighbour_mean
from arborsim.policies.stream import Composed, StreamPolicy
from arborsim.signals.attention import PromptAttention
from arborsim.signals.scores import GROUPINGS, Score, rounded


@dataclass(frozen=True)
class SnapKV(Composed):
    """After the prefill, keep the last `window` prompt tokens and those they attend to most.

    The budget is what the prompt may keep.  What is generated stays, whatever its length: the
    cache outgrows the budget.  There is one stream only, the prompt, on trees too.
    """

    pin_prompt: bool = pin_prompt_setting(False)
    per: str = setting("head", "what keeps tokens of its own", choices=GROUPINGS)
    window: int = setting(64, "last prompt tokens: they vote, and stay", unit="tokens", low=1)
    kernel: int = setting(5, "width of the pooling; odd", unit="tokens", low=1)

    name = "snapkv"
    schedule = AfterPrefill()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_odd(self.name, self.kernel)
        if self.pin_prompt:
            raise UsageError(f"{self.name}: compresses the prompt alone: pin_prompt must be false")

    @cached_property
    def score(self) -> Score:
        return PromptAttention(self.window, grouping=self.per)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=1.0)

    def rank(self, view: CacheView) -> np.ndarray:
        before = view.num_tokens - self.protection(view.budget_tokens).recent
        rank = np.zeros(view.tier.shape)
        rank[:, :before] = neighbour_mean(view.scores["score"][:, :before], self.kernel)
        return rank


def _check_odd(name: str, kernel: int) -> None:
    if kernel % 2 == 0:
        raise UsageError(f"{name}: kernel must be odd, not {kernel}")


@dataclass(frozen=True)
class Voting(StreamPolicy):
    """SnapKV's votes in a policy that keeps its budget while tokens are generated, too.

    Every generated token's query votes like those of the prompt's window.  Votes for the prompt
    before its window are pooled, as in SnapKV. Other tokens have their own.
    """

    window: int = setting(
        64,
        "newest tokens: they stay; in the prompt they vote.  At most half of the budget stays",
        unit="tokens",
        low=1,
    )
    kernel: int = setting(5, "width of the pooling; odd", unit="tokens", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_odd(self.name, self.kernel)

    @cached_property
    def score(self) -> Score:
        return PromptAttention(self.window, True, "head")

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=0.5)

    def rank(self, view: CacheView) -> np.ndarray:
        rank = view.scores["score"].copy()
        before = max(0, view.prompt_tokens - self.window)
        rank[:, :before] = neighbour_mean(rank[:, :before], self.kernel)
        return rank


@dataclass(frozen=True)
class Pyramid(Pool):
    """The shares of layers fall linearly with their depth and average to the budget.

    Of a budget ``C`` and a window ``W`` (with a prompt that is pinned, and no smaller than the
    number of leaves), the last layer keeps ``W + (C - W) / beta``, the first as much more than
    ``C`` as that is less.  Where the first
    cannot fill its share yet, the others have what it leaves: the pyramid grows steep as the cache
    grows.
    """

    window: int = 64
    beta: int = 20
    pin_prompt: bool = False

    about = "shares that fall with depth"

    def headroom(self, view: CacheView) -> int:
        return view.budget_tokens - view.in_hbm  # a layer may exceed its share where others do not

    def shares(self, view: CacheView) -> np.ndarray:
        budget, layer = view.budget_tokens, view.shape.rows(len(view.tier))
        layers = int(layer[-1]) + 1
        newest = max(min(self.window, budget // 2), len(view.leaves))  # one of each leaf stays
        stays = newest + (view.prompt_tokens if self.pin_prompt else 0)
        base = budget - stays
        most = min(2 * base - base // self.beta, view.fullest - stays)
        if layers == 1 or most <= base:  # all fits
            return super().shares(view)
        # What the first i layers keep together beyond what stays, rounded up: shares add up.
        i = np.arange(layers + 1)
        fall = (2 * most - 2 * base) * i * (i - 1) // (2 * (layers - 1))
        return np.asarray((stays + np.diff(most * i - fall))[layer])


@dataclass(frozen=True)
class PyramidKV(Voting):
    """SnapKV with budgets that fall with depth, while tokens are generated too."""

    beta: int = setting(20, "the last layer keeps 1/beta of the budget beyond the window", low=1)

    name = "pyramidkv"

    @cached_property
    def allocate(self) -> Allocation:
        return Pyramid(self.adaptation, self.window, self.beta, self.pin_prompt)


_FEW = 4


@dataclass(frozen=True)
class HeadsShare(Pool):
    """The lowest of all heads of a layer go, so that heads keep uneven numbers of tokens.

    Every head is safe to keep `alpha` of an even share.  For the prompt that is a mixture of both,
    as published (Algorithm 2), later a floor.
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

        Of equals the oldest goes first, then the one of the first head.  `rank` is float64, `free`
        bool, both ``[heads, tokens]``.  The result is int64 ``[heads]``.
        """
        if over <= _FEW * len(free):  # at every iteration: finding minima beats sorting
            return few_lowest(np.where(free, rank, np.inf), most, over)
        mine = [lowest_of(f, r, int(m)) for f, r, m in zip(free, rank, most, strict=True)]
        head = np.repeat(np.arange(len(mine)), [len(tokens) for tokens in mine])
        token = np.concatenate(mine)
        order = np.lexsort((head, token))
        head, token = head[order], token[order]
        evicted = head[lowest(rank[head, token], over)]
        return np.asarray(np.bincount(evicted, minlength=len(mine)))


def few_lowest(rank: np.ndarray, most: np.ndarray, over: int) -> np.ndarray:
    """`HeadsShare.lowest_by_head`, one token after the other.  Changes `rank`."""
    evicted = np.zeros(len(rank), dtype=np.int64)
    firsts = rank.argmin(axis=1).tolist()
    lowest = [(rank[h, at], at, h) for h, at in enumerate(firsts) if most[h]]
    heapq.heapify(lowest)
    while evicted.sum() < over:
        _, at, head = heapq.heappop(lowest)
        rank[head, at] = np.inf
        evicted[head] += 1
        if evicted[head] < most[head]:
            at = int(rank[head].argmin())
            heapq.heappush(lowest, (rank[head, at], at, head))
    return evicted


def whole(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers of the same sum: the largest fractions are rounded up, the first of equals."""
    numbers = rounded(numbers)
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
