"""VATP: attention weighted by the size of the value it reads (Guo et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import ValueWeightedAttention
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class Vatp(StreamPolicy):
    """Evict the lowest product of attention received and L1 norm of the value.

    The first tokens receive much attention but have small values, so they are protected apart.
    Published per layer and KV head; ``per=shared`` runs on traces without vectors.
    """

    per: str = setting("head", "what keeps tokens of its own", choices=("shared", "layer", "head"))
    recent_share: float = setting(0.5, "share of the budget for the newest", low=0, high=1)
    sinks: int = setting(
        20, "protected first tokens, at most a quarter of the budget", unit="tokens", low=0
    )

    name: ClassVar[str] = "vatp"
    paper: ClassVar[str] = "Guo et al. 2024, arXiv:2406.12335"
    summary: ClassVar[str] = "keep what is attended and has large values"
    method: ClassVar[Method] = Method(
        "s(i) = ||v_i||_1 x sum over queries t of a_t(i)",
        score="cumulative attention x L1 norm of the value",
        deviations=(
            "sinks take at most a quarter of the budget, so that small budgets can be replayed",
            "grouped-query attention: the mean over the query heads that share a KV head (the "
            "paper's formula is for heads with values of their own)",
            "per=layer averages norms over KV heads, per=shared over layers and KV heads",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION, Signal.VALUES})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False

    @property
    def grouping(self) -> str:
        return self.per

    def reads(self) -> frozenset[Signal]:
        return ValueWeightedAttention(self.per).needs

    def scores(self) -> dict[str, Score]:
        return {"weighted": ValueWeightedAttention(self.per)}

    def protection(self, budget_tokens: int) -> Protection:
        recent = max(1, int(self.recent_share * budget_tokens))
        return Protection(sinks=min(self.sinks, budget_tokens // 4), recent=recent)

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["weighted"]
