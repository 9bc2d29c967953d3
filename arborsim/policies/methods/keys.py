"""Policies that read keys and values alone: their norm, direction, or spread after Lag-KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from arborsim.core.events import Boundary, Decode, Event, Pressure, Prune, TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Protect, ProtectSome, pin_prompt_setting
from arborsim.policies.placement import lowest
from arborsim.policies.stream import (
    ChangingPool,
    MakeCandidates,
    RecentPolicy,
    Stream,
    StreamPolicy,
)
from arborsim.signals.scores import GROUPINGS, Score, sum_in_order
from arborsim.signals.vectors import KeyDirections, KeyLength, LagVariance, Vectors


@dataclass(frozen=True)
class KeyPolicy(RecentPolicy):
    """Base of both policies: groups by choice, and the newest tokens stay."""

    pin_prompt: bool = pin_prompt_setting(False)
    per: str = setting(
        "head",
        "ranking: one for the whole model, one per captured layer, or one per captured layer and "
        "KV head (as published); only the shared one runs on traces without vectors",
        choices=GROUPINGS,
    )

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, recent=self.recent)


@dataclass(frozen=True)
class KeyNorm(KeyPolicy):
    """Keep the tokens whose keys are shortest: they are the ones that get attention."""

    name = "key-norm"

    @cached_property
    def score(self) -> Score:
        return KeyLength(self.per)

    def rank(self, view: CacheView) -> np.ndarray:
        return -view.scores["score"]


@dataclass(frozen=True)
class KeyDiff(KeyPolicy):
    """Keep the keys that point least in the mean direction of all keys in the cache.

    The mean changes with every token that comes or goes, so ranks are computed at each decision
    over what the cache holds then.
    """

    name = "keydiff"

    @cached_property
    def score(self) -> Score:
        return KeyDirections(self.per)

    def rank(self, view: CacheView) -> np.ndarray:
        """Minus the product with the sum of all directions: the order of minus the cosine."""
        # Directions are whole numbers, so these products are exact however they are summed.
        rank = np.zeros(view.tier.shape)
        there = view.in_stream(hbm_mask(view.tier), self.adaptation)
        for group, directions in enumerate(view.scores["score"]):
            if 2 * np.count_nonzero(there[group]) > view.num_tokens:  # cheaper than to gather them
                total = there[group].astype(np.float64) @ directions
                rank[group] = -(directions @ total)
                continue
            held = np.flatnonzero(there[group])
            keys = directions[held]
            rank[group, held] = -(keys @ keys.sum(axis=0))
        return rank

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        recent = self.protection(view.budget_tokens).recent
        return partial(LikenessPool, view.scores["score"][0], recent)


class LikenessPool(ChangingPool):
    """Candidates of one group, of which the one most like the sum of all held directions goes.

    The sum is carried along: directions, float64 ``[tokens, size]``, are whole numbers, so that
    nothing is lost by it.  The `recent` positions behind `stop` are held, too, but no candidates.
    """

    def __init__(self, directions: np.ndarray, recent: int, stream: Stream) -> None:
        directions, alive = directions[stream.ids], stream.alive
        super().__init__(directions, stream._replace(ids=directions))
        self._recent = recent
        self._arrived = stream.stop + recent
        self._total = directions[: self._arrived][alive[: self._arrived]].sum(axis=0)
        self._likeness = np.empty(len(alive))

    def admit(self, stop: int) -> None:
        while self._arrived < stop + self._recent:
            self._total += self._scores[self._arrived]
            self._arrived += 1
        super().admit(stop)

    def _pop_lowest(self) -> int:
        count = self._count
        likeness = np.dot(self._known[:count], self._total, out=self._likeness[:count])
        place = int(likeness.argmax())
        alike = likeness == likeness[place]
        if np.count_nonzero(alike) > 1:  # of equals the oldest
            places = np.flatnonzero(alike)
            place = int(places[self._at[places].argmin()])
        position, last = int(self._at[place]), count - 1
        # In no order: the last candidate takes the place of the one evicted.
        self._at[place], self._known[place] = self._at[last], self._known[last]
        self._count = last
        self._total -= self._scores[position]
        return position


@dataclass(frozen=True)
class LagKV(RecentPolicy):
    """Rank by the spread of the lag-normalised key and value, as the EpiKV paper streams it.

    The original normalises by the *next* chunk at prefill.  Decoding knows only the previous one
    (EpiKV, section 3.3).
    """

    name = "lag-kv"
    score = LagVariance()


@dataclass(frozen=True)
class LagKVOfficial(StreamPolicy):
    """Cut the stream into partitions, and keep the best of each when the next one is complete.

    After `sinks` tokens, every `lag` tokens are a partition.  It is compressed once, to the share
    `ratio`, as soon as the partition after it is complete: keys and values are normalised per
    channel by that one's minimum and maximum.  The cache holds about `ratio` of all tokens, not a
    number given in advance.
    """

    sinks: int = setting(16, "tokens at the beginning that stay", unit="tokens", low=0)
    lag: int = setting(1024, "length of a partition", unit="tokens", low=1)
    ratio: float = setting(0.5, "share of a partition that stays", low=0, high=1)

    name = "lag-kv-official"
    bounded = False
    uses_budget = False
    score = Vectors(Signal.KEYS)

    def scores(self) -> Mapping[str, Score]:
        return {"keys": self.score, "values": Vectors(Signal.VALUES)}

    @cached_property
    def protect(self) -> Protect:
        # Alone on its path, a partition is touched only once another `lag` tokens have followed.
        return Protect(self.pin_prompt, self.sinks, self.lag, recent_share=ANY)

    def next_decision(self, view: CacheView) -> int:
        arriving = len(view.leaves) if self.adaptation == "flat" else 1
        lengths = [len(stream) for stream in self._streams(view, view.leaves)]
        missing = min(self.sinks + (self._complete(n) + 1) * self.lag - n for n in lengths)
        return -(-missing // arriving)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if isinstance(event, Boundary | Prune | Pressure):
            return None
        if isinstance(event, Decode):  # a leaf that rests makes decisions come too early
            run = event.run
            arrived = run.num_tokens if self.adaptation == "flat" else run.steps
            lengths = [len(stream) for stream in self._streams(view, run.leaves)]
            if all(self._complete(n) == self._complete(n - arrived) for n in lengths):
                return None
        tiers = view.tier.copy()
        free = ~self.protected(view)
        for stream in self._streams(view, view.leaves):
            last = self.sinks + self._complete(len(stream)) * self.lag
            for part, following in pairwise(stream[self.sinks : last].reshape(-1, self.lag)):
                self._compress(view, tiers, part, following, free)
        return Plan(tiers)

    def _streams(self, view: CacheView, leaves: tuple[int, ...]) -> list[np.ndarray]:
        """Token ids of each stream that `leaves` lengthen, oldest first."""
        if self.adaptation == "flat":
            return [np.arange(view.num_tokens)]
        return [view.tree.path(leaf) for leaf in leaves]

    def _complete(self, length: int) -> int:
        """Complete partitions of a stream of this length."""
        return max(0, length - self.sinks) // self.lag

    def _compress(
        self,
        view: CacheView,
        tiers: np.ndarray,
        part: np.ndarray,
        following: np.ndarray,
        free: np.ndarray,
    ) -> None:
        """Evict in `tiers`, in each group, what of `part` exceeds its share and is `free` to go."""
        keep = int(self.ratio * self.lag)
        for group, tier in enumerate(tiers):
            held = part[hbm_mask(tier[part])]
            excess = len(held) - keep
            if excess <= 0:
                continue
            reference = following[hbm_mask(tier[following])]
            score = np.zeros(len(held))
            for vectors in (view.scores["keys"][group], view.scores["values"][group]):
                score += lag_score(vectors[held], vectors[reference])
            may_go = free[held]
            tier[held[may_go][lowest(score[may_go], excess)]] = Tier.EVICTED


def lag_score(vectors: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Softmax over tokens of the spread of their vectors, normalised by the next partition's range.

    Vectors are ``[tokens, head_dim]``.  The result, float64 ``[tokens]``, sums to 1.  Without any
    token in the partition that follows (`reference`), nothing is normalised.  The standard
    deviation is the unbiased one, over channels.
    """
    wide = vectors.T.astype(np.float64, order="C")  # [head_dim, tokens]: tokens side by side
    if len(reference):
        around = reference.astype(np.float64)
        low = around.min(axis=0)
        span = around.max(axis=0) - low
        wide -= low[:, None]
        wide /= np.where(span > 0, span, 1.0)[:, None]
    size = len(wide)
    wide -= sum_in_order(wide, axis=0) / size
    wide *= wide
    std = np.sqrt(sum_in_order(wide, axis=0) / max(1, size - 1))
    weight = np.exp(std - std.max())
    return np.asarray(weight / sum_in_order(weight))
