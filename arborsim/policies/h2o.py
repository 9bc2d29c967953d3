"""H2O: heavy hitters by cumulative attention, and a recent window (Zhang et al., NeurIPS 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.observations import Signal
from arborsim.signals.scores import CumulativeAttention, Score


@dataclass(frozen=True)
class H2O(StreamPolicy):
    """Half of the budget for the newest tokens, the rest for the most attended of the others.

    One ranking for the whole model: attention is averaged over layers and heads, as the EpiKV and
    memory-hierarchy papers run it.  As published, prompt tokens are evictable too.

    Parameters
    ----------
    recent_share : float
        Share of the budget reserved for the newest tokens.
    sinks : int
        Protected tokens at the beginning.
    keep_prompt : bool
        Protect the whole prompt.
    """

    recent_share: float = 0.5
    sinks: int = 0
    keep_prompt: bool = False

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "Zhang et al. 2023, arXiv:2306.14048"
    summary: ClassVar[str] = "keep the most attended tokens and a recent window"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "recent_share": (0, 1),
        "sinks": (0, math.inf),
    }

    def scores(self) -> dict[str, Score]:
        return {"attention": CumulativeAttention()}

    def protection(self, budget_tokens: int) -> Protection:
        recent = max(1, int(self.recent_share * budget_tokens))
        return Protection(prompt=self.keep_prompt, sinks=self.sinks, recent=recent)

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["attention"]
