"""Lag-KV: keep keys and values that stand out from the chunk before or after (arXiv:2504.04704)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from arborsim.core.events import Boundary, Decode, Event, Pressure, Prune
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Protect
from arborsim.policies.placement import lowest
from arborsim.policies.stream import RecentPolicy, StreamPolicy
from arborsim.signals.scores import Score, sum_in_order
from arborsim.signals.vectors import LagVariance, Vectors


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
