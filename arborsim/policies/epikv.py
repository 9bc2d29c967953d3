"""EpiKV: keep the tokens at which the residual stream turns (arXiv:2606.26472)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.observations import Signal
from arborsim.signals.scores import HiddenChangeContrast, Score


@dataclass(frozen=True)
class EpiKV(StreamPolicy):
    """Rank by ``z_A - z_B`` of the hidden-state change at two layers; needs no attention.

    The score is computed once, when a token is generated, and frozen (section 3.3).  The prompt
    and the newest ``min(recent, budget / 4)`` tokens stay (appendix D).

    Parameters
    ----------
    layer_a, layer_b : float
        The two layers as shares of the depth; 10 and 21 of 32 are the paper's, for competition
        mathematics on one 8B model.  They move with task and model.
    window : int
        Tokens in the trailing window of the z-score.
    recent : int
        Protected newest tokens.
    """

    layer_a: float = 10 / 32
    layer_b: float = 21 / 32
    window: int = 64
    recent: int = 128

    name: ClassVar[str] = "epikv"
    paper: ClassVar[str] = "EpiKV, arXiv:2606.26472"
    summary: ClassVar[str] = "keep tokens at which the hidden state turns; no attention needed"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HIDDEN_CHANGE})
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "layer_a": (0, 1),
        "layer_b": (0, 1),
        "window": (2, 65536),
        "recent": (1, math.inf),
    }

    def scores(self) -> dict[str, Score]:
        return {"contrast": HiddenChangeContrast(self.layer_a, self.layer_b, self.window)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["contrast"]
