"""Attention and hidden state together: the hybrids of EpiKV (arXiv:2606.26472, Table 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.methods.epikv import PAPER, POSITIONS, SCALED, WINDOW, RollingPolicy
from arborsim.policies.segments import SegmentPolicy
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.rolling import Band, HiddenChangeContrast, RollingBands, Sum
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class AttnHS(RollingPolicy):
    """Rank by cumulative attention plus the z-score of the hidden-state change at layer A."""

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)

    name: ClassVar[str] = "attn-hs"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "most attended tokens, or where the hidden state turns"
    method: ClassVar[Method] = Method(
        "s(i) = sum over queries t of a_t(i) + z_A(i) (Table 1; z as in Eq. 3)",
        score="cumulative attention plus hidden-state change, z-scored",
        deviations=(
            "attention is averaged over layers and heads; the terms are added unscaled, as the "
            "table prints them, although it calls the method a product",
            "appendix D does not say what the hybrids protect: the prompt and the newest tokens, "
            "as the other policies on hidden states",
            SCALED,
            POSITIONS,
            WINDOW,
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION, Signal.HIDDEN_CHANGE})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False
    rising_rank: ClassVar[bool] = True

    def score(self) -> Score:
        turns = RollingBands(
            Signal.HIDDEN_CHANGE, (Band(self.layer_a, self.layer_a),), window=self.window
        )
        return Sum(turns, CumulativeAttention(up_to_constant=True))


@dataclass(frozen=True)
class SegmentHS(SegmentPolicy):
    """ThinKV's segments and budgets per segment; inside a segment, tokens rank by EpiKV's score."""

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)
    window: int = setting(
        64, "trailing window of the rolling statistic", unit="tokens", low=2, high=65536
    )

    name: ClassVar[str] = "segment-hs"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "thinkv's segments, tokens inside ranked by the hidden state"
    method: ClassVar[Method] = Method(
        "segments by the entropy of the newest query's attention, as `thinkv`; inside, "
        "s(t) = z_A(t) - z_B(t) (Table 1; Eqs. 2-3)",
        score="hidden-state change, z-scored, contrast of two layers",
        allocate="a fixed number per segment by its class, oldest segment first",
        granularity="segment of 128 tokens",
        deviations=(
            "the paper does not say which hidden-state score ranks inside: EpiKV's",
            "the prompt, for which that score is not defined, is protected (section 3.3), unlike "
            "by `thinkv`",
            "segments and entropies as in `thinkv`, with its deviations",
            SCALED,
            POSITIONS,
            WINDOW,
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION, Signal.HIDDEN_CHANGE})

    def scores(self) -> dict[str, Score]:
        contrast = HiddenChangeContrast(self.layer_a, self.layer_b, self.window)
        return {**super().scores(), "contrast": contrast}

    def protection(self, budget_tokens: int) -> Protection:
        return replace(super().protection(budget_tokens), prompt=True)

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["contrast"]
