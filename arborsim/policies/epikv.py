"""EpiKV: keep the tokens at which the residual stream turns (arXiv:2606.26472)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.settings import setting
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.observations import Signal
from arborsim.signals.scores import HiddenChangeContrast, Score


@dataclass(frozen=True)
class EpiKV(StreamPolicy):
    """Rank by ``z_A - z_B`` of the hidden-state change at two layers; needs no attention.

    The score is computed once, when a token is generated, and frozen (section 3.3).  The prompt
    and the newest ``min(recent, budget / 4)`` tokens stay (appendix D).
    """

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)
    window: int = setting(64, "trailing window of the z-score", unit="tokens", low=2, high=65536)
    recent: int = setting(
        128, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )

    name: ClassVar[str] = "epikv"
    paper: ClassVar[str] = "EpiKV, arXiv:2606.26472"
    summary: ClassVar[str] = "keep tokens at which the hidden state turns; no attention needed"
    method: ClassVar[Method] = Method(
        "s(t) = z_A(t) - z_B(t); z_l = (g_l - mean_w g_l) / (std_w g_l + 1e-6); "
        "g_l(t) = ||h_l(t) - h_l(t-1)||_2 (Eqs. 1-3)",
        score="hidden-state change, z-scored, contrast of two layers",
        deviations=(
            "layers scale with the model's depth: 10 and 21 of 32 are the paper's, for "
            "competition mathematics on one 8B model; `arborsim calibrate bands` finds others",
            "kept tokens keep their true positions (the authors' harness let positions collapse "
            "to the length of the cache)",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HIDDEN_CHANGE})

    def scores(self) -> dict[str, Score]:
        return {"contrast": HiddenChangeContrast(self.layer_a, self.layer_b, self.window)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["contrast"]
