"""H2O: heavy hitters by cumulative attention, and a recent window (Zhang et al., NeurIPS 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class H2O(StreamPolicy):
    """Half of the budget for the newest tokens, the rest for the most attended of the others.

    `per="head"` is the published method: every layer and KV head keeps tokens of its own.  The
    default is one ranking for the whole model, attention averaged over layers and heads, as the
    EpiKV and memory-hierarchy papers run it.  As published, prompt tokens are evictable too.
    """

    recent_share: float = setting(0.5, "share of the budget for the newest", low=0, high=1)
    sinks: int = setting(0, "protected tokens at the beginning", unit="tokens", low=0)
    keep_prompt: bool = setting(False, "protect the whole prompt")
    per: str = setting("shared", "what ranks on its own", choices=("shared", "layer", "head"))

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "Zhang et al. 2023, arXiv:2306.14048"
    summary: ClassVar[str] = "keep the most attended tokens and a recent window"
    method: ClassVar[Method] = Method(
        "s(i) = sum over queries t of a_t(i)",
        score="cumulative attention",
        allocate="one pool (per=shared), or the same budget for every layer or KV head",
        deviations=(
            "by default one ranking serves the whole model, so that traces without vectors can be "
            "replayed; per=head is the published form",
            "grouped-query attention: a group's probabilities are averaged over its query heads "
            "(the paper's models have none)",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False
    rising_rank: ClassVar[bool] = True

    @property
    def grouping(self) -> str:
        return self.per

    def reads(self) -> frozenset[Signal]:
        return CumulativeAttention(grouping=self.per).needs

    def scores(self) -> dict[str, Score]:
        return {"attention": CumulativeAttention(up_to_constant=True, grouping=self.per)}

    def protection(self, budget_tokens: int) -> Protection:
        recent = max(1, int(self.recent_share * budget_tokens))
        return Protection(prompt=self.keep_prompt, sinks=self.sinks, recent=recent)

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["attention"]
