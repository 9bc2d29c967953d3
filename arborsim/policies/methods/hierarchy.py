"""The semantics-aware memory hierarchy: HBM, DDR, compressed DDR, evicted (Algorithm 1).

With it the ablations of its Table 12, which are the hierarchy with other scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Boundary, Decode, Event, Pressure, Prune
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, EveryStep, Interval, Protect, pin_prompt_setting
from arborsim.policies.placement import lowest_of_each, off_path_blocks
from arborsim.policies.stream import Composed
from arborsim.signals.attention import CumulativeAttention, ValueWeightedAttention
from arborsim.signals.scores import Score
from arborsim.signals.vectors import KeyDirections

_HBM, _EVICTED = np.int8(Tier.HBM), np.int8(Tier.EVICTED)


@dataclass(frozen=True)
class Hierarchy(Composed):
    """Every `interval` iterations destroy the lowest few, keep the top in HBM, the rest in DDR.

    Candidates are the reasoning tokens but for the first `sinks` and the newest `recent`.  The
    lowest `evict_ratio` of them are destroyed.  Of the others the share `hbm_ratio` with the
    highest cumulative attention stays in HBM and the rest moves to DDR, where it still takes part
    in attention.  A budget below that caps the HBM share further and leaves room for the tokens
    that arrive before the next decision.  On a tree, blocks off the active paths move to DDR first.
    """

    hbm_ratio: float = setting(
        0.5, "beta: share of the surviving candidates that stays in HBM", low=0, high=1
    )
    evict_ratio: float = setting(
        0.03, "r: share of the candidates destroyed at each decision", low=0, high=1
    )
    evict: str = setting(
        "of-candidates",
        "what r is a share of: the current candidates (as the pseudocode accumulates), or all "
        "candidates there ever were; the paper's tables do not tell which was run",
        choices=("of-candidates", "of-total"),
    )
    quantised_ratio: float = setting(
        0.0, "lowest share of the DDR tokens kept as 8 bit (tier T2)", low=0, high=1
    )
    interval: int = setting(64, "between decisions", unit="iterations", low=1)
    pin_prompt: bool = pin_prompt_setting(True)
    sinks: int = setting(
        4, "protected first tokens: after the prompt if that is pinned", unit="tokens", low=0
    )
    recent: int = setting(128, "protected newest tokens", unit="tokens", low=1)

    name = "hierarchy"
    tiers = (Tier.HBM, Tier.DDR, Tier.DDR_QUANTISED, Tier.EVICTED)
    score: ClassVar[Score] = CumulativeAttention(up_to_constant=True)

    @cached_property
    def schedule(self) -> EveryStep:
        return Interval(self.interval, wait=False)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, self.recent, recent_share=ANY)

    def ddr_tokens(self, prompt_tokens: int, new_tokens: int, budget_tokens: int) -> int:
        over = max(0, prompt_tokens + new_tokens - budget_tokens)  # DDR has no size here
        candidates = new_tokens + (0 if self.pin_prompt else prompt_tokens)
        return max(over, math.ceil((1 - self.hbm_ratio) * candidates))

    def importance(self, view: CacheView, candidates: np.ndarray) -> np.ndarray:
        """How much each candidate matters, float64 ``[n]``: the lowest goes first.

        Candidates, int64 ``[n]``, are readable tokens of the active paths that are not protected.
        """
        return np.asarray(view.scores["score"][0].take(candidates))

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if isinstance(event, Boundary | Prune | Pressure):
            return None
        scheduled = view.iterations % self.interval == 0 and isinstance(event, Decode)
        if not scheduled and view.in_hbm <= view.budget_tokens:
            return None
        # Everything is by position on the path; a path that is the whole tree needs no gathers.
        whole = len(view.path) == view.num_tokens
        path = slice(None) if whole else view.path
        readable = view.tier[0, path] != Tier.EVICTED
        pinned = readable & self.protected(view)[path]
        at = np.flatnonzero(readable & ~pinned)
        importance = self.importance(view, at if whole else view.path[at])
        doomed = 0
        if scheduled and self.evict == "of-candidates":
            doomed = int(self.evict_ratio * len(at))
        elif scheduled:
            evicted = int(np.count_nonzero(~readable))
            doomed = max(0, int(self.evict_ratio * (len(at) + evicted)) - evicted)
        tiers = view.tier.copy()
        in_hbm = self._make_room(view, tiers, len(at) - doomed, int(np.count_nonzero(pinned)))
        cold = len(at) - doomed - in_hbm
        # Down the rungs: each holds the lowest of the ranking that no lower rung claims.  What a
        # search comes back to may lie in DDR: its protected part returns to HBM.
        here = np.where(readable, _HBM, _EVICTED)
        small = int(self.quantised_ratio * cold)
        down = lowest_of_each(importance, [doomed + cold, doomed + small if small else 0, doomed])
        for tier, lost in zip((Tier.DDR, Tier.DDR_QUANTISED, Tier.EVICTED), down, strict=True):
            here[at.take(lost)] = tier
        tiers[:, path] = here
        return Plan(tiers)

    def _make_room(self, view: CacheView, tiers: np.ndarray, candidates: int, pinned: int) -> int:
        """How many candidates may stay in HBM, after moving off-path blocks to DDR if need be."""
        headroom = view.budget_tokens - pinned
        if headroom < 0:
            raise BudgetInfeasible(
                self.name, pinned, view.budget_tokens, f"protected {pinned} on the active path(s)"
            )
        # Room for what arrives before the next decision, but no more than half of what there is:
        # a budget too small for all of it only makes decisions more frequent.
        room = headroom - min(self.interval * len(view.leaves), headroom // 2)
        wanted = int(self.hbm_ratio * candidates)
        off_path = off_path_blocks(view)
        elsewhere = sum(len(block) for block in off_path)
        for block in off_path:
            if elsewhere + wanted <= room:
                break
            tiers[:, block] = Tier.DDR
            elsewhere -= len(block)
        return min(wanted, room - elsewhere)


@dataclass(frozen=True)
class Redundancy(Hierarchy):
    """The hierarchy that ranks by attention minus the similarity of a key to its neighbours."""

    weight: float = setting(1.0, "weight of the redundancy", low=0)
    reach: int = setting(8, "neighbours compared on either side", unit="tokens", low=1)
    sketched: bool = setting(
        True, "take cosines of the keys' sketch of 16 numbers; false: of the keys, if recorded"
    )

    name = "redundancy"
    score: ClassVar[Score] = CumulativeAttention()

    def scores(self) -> Mapping[str, Score]:
        return {"score": self.score, "direction": KeyDirections("shared", False, self.sketched)}

    def importance(self, view: CacheView, candidates: np.ndarray) -> np.ndarray:
        attention = view.scores["score"][0, candidates]
        largest = attention.max(initial=0.0)
        similar = similarity(view.scores["direction"][0], candidates, self.reach)
        return np.asarray(attention / (largest or 1.0) - self.weight * similar)


@dataclass(frozen=True)
class AttnValRedundancy(Redundancy):
    """The hierarchy that ranks by attention times value norm, minus redundancy."""

    name = "attn-val-redundancy"
    score = ValueWeightedAttention()


# Columns that are compared together: few enough for the CPU cache.
_COLUMNS = 8192


def neighbour_cosine(direction: np.ndarray, reach: int) -> np.ndarray:
    """Mean product of each column with up to `reach` columns on either side.  Float64 ``[n]``.

    Columns of `direction`, float64 ``[size, n]``, have length 1.  One without neighbours gets 0.
    """
    number = direction.shape[1]
    reach = min(reach, number - 1)
    total = np.zeros(number)
    for lag in range(1, reach + 1):
        cosine = products_in_order(direction[:, lag:], direction[:, :-lag])
        total[lag:] += cosine
        total[:-lag] += cosine
    place = np.arange(number)
    count = np.minimum(place, reach) + np.minimum(place[::-1], reach)
    return np.asarray(total / np.maximum(count, 1))


def products_in_order(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Scalar product of each column of `left` with that of `right`, float64 ``[n]``.

    Added from the first row to the last, so that equal columns have equal products wherever they
    stand.
    """
    total = left[0] * right[0]
    product = np.empty_like(total)
    for a, b in zip(left[1:], right[1:], strict=True):
        np.multiply(a, b, out=product)
        total += product
    return np.asarray(total)


def similarity(direction: np.ndarray, candidates: np.ndarray, reach: int) -> np.ndarray:
    """`neighbour_cosine` among some tokens, as many at a time as the CPU cache holds.

    `direction` is float64 ``[tokens, size]``, `candidates` and the result are ``[n]``.
    """
    number, width = len(candidates), max(_COLUMNS, reach)
    similar = np.empty(number)
    for first in range(0, number, width):
        last, low = min(first + width, number), max(0, first - reach)
        near = candidates[low : last + reach]
        columns = np.ascontiguousarray(direction.take(near, axis=0).T)
        similar[first:last] = neighbour_cosine(columns, reach)[first - low : last - low]
    return similar
