"""Lag-KV: keep keys and values that stand out from the previous chunk (arXiv:2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.scores import LagVariance, Score


@dataclass(frozen=True)
class LagKV(StreamPolicy):
    """Rank by the spread of the lag-normalised key and value, as the EpiKV paper streams it.

    The original normalises by the *next* chunk at prefill; decoding knows only the previous one
    (EpiKV, section 3.3).
    """

    recent: int = setting(
        128, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )

    name: ClassVar[str] = "lag-kv"
    paper: ClassVar[str] = "Liang et al. 2025, arXiv:2504.04704; streamed by arXiv:2606.26472"
    summary: ClassVar[str] = "keep keys and values that differ from the previous chunk"
    method: ClassVar[Method] = Method(
        "s(t) = mean over layers and heads of std(k~_t) + std(v~_t); x~ = (x - min) / (max - min) "
        "per channel of the previous chunk of 128",
        score="lag-normalised spread of key and value",
        deviations=(
            "the first chunk uses the raw spread",
            "the spread is the standard deviation over channels, as Lag-KV defines it; the EpiKV "
            "paper prints no formula",
            "scores are compared across the whole stream, without Lag-KV's softmax inside a chunk",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LAG_KEY, Signal.LAG_VALUE})

    def scores(self) -> dict[str, Score]:
        return {"lag": LagVariance()}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["lag"]
