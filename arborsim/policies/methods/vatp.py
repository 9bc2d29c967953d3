"""VATP: attention weighted by the size of the value it reads (Guo et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Protect, ProtectSome
from arborsim.policies.stream import ChangingPool, MakeCandidates, Stream, StreamPolicy
from arborsim.signals.attention import CumulativeAttention, ValueWeightedAttention
from arborsim.signals.scores import GROUPINGS, Score
from arborsim.signals.vectors import ValueSize


@dataclass(frozen=True)
class Vatp(StreamPolicy):
    """Evict the lowest product of attention received and L1 norm of the value.

    The first tokens receive much attention but have small values, so they are protected apart.
    Published per layer and KV head; ``per=shared`` runs on traces without vectors.
    """

    per: str = setting("head", "what keeps tokens of its own", choices=GROUPINGS)
    recent_share: float = setting(0.5, "share of the budget for the newest", low=0, high=1)
    sinks: int = setting(
        20, "protected first tokens, at most a quarter of the budget", unit="tokens", low=0
    )

    name = "vatp"

    @cached_property
    def score(self) -> Score:
        return ValueWeightedAttention(self.per)

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, self.sinks, ANY, self.recent_share, sinks_share=0.25)

    def scores(self) -> Mapping[str, Score]:
        """The factors: their product for every token would be made anew by every iteration."""
        return {"score": CumulativeAttention(grouping=self.per), "size": ValueSize(self.per)}

    def rank(self, view: CacheView) -> np.ndarray:
        return np.asarray(view.scores["score"] * view.scores["size"])

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        return partial(ProductPool, view.scores["score"][0], view.scores["size"][0])


class ProductPool(ChangingPool):
    """Candidates that rank by the product of two scores."""

    def __init__(self, scores: np.ndarray, others: np.ndarray, stream: Stream) -> None:
        super().__init__(scores, stream)
        self._others = others

    def values_of(self, known: np.ndarray) -> np.ndarray:
        return np.asarray(self._scores.take(known) * self._others.take(known))
