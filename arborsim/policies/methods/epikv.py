"""EpiKV: keep the tokens at which the residual stream turns (arXiv:2606.26472)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.rolling import Band, HiddenChangeContrast, RollingBands
from arborsim.signals.scores import Score

PAPER = "EpiKV, arXiv:2606.26472"
SCALED = (
    "layers scale with the model's depth: those of the paper, of 32, are for competition "
    "mathematics on one 8B model; `arborsim calibrate bands` finds others"
)
POSITIONS = (
    "kept tokens keep their true positions (the authors' harness let positions collapse to the "
    "length of the cache)"
)

WINDOW = (
    "the window trails over the generated tokens of the token's own path; the prompt is not in it"
)


@dataclass(frozen=True)
class RollingPolicy(StreamPolicy):
    """What the policies of the EpiKV paper share: the prompt and the newest tokens stay.

    The score (`score`) is computed once, when a token is generated, and frozen (section 3.3); the
    newest ``min(recent, budget / 4)`` tokens are protected (appendix D).
    """

    window: int = setting(
        64, "trailing window of the rolling statistic", unit="tokens", low=2, high=65536
    )
    recent: int = setting(
        128, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HIDDEN_CHANGE})

    def score(self) -> Score:
        """What tokens rank by."""
        raise TypeError(f"{type(self).__name__} does not say what tokens rank by")

    def scores(self) -> dict[str, Score]:
        return {"score": self.score()}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["score"]


@dataclass(frozen=True)
class EpiKV(RollingPolicy):
    """Rank by ``z_A - z_B`` of the hidden-state change at two layers; needs no attention."""

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)

    name: ClassVar[str] = "epikv"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "keep tokens at which the hidden state turns; no attention needed"
    method: ClassVar[Method] = Method(
        "s(t) = z_A(t) - z_B(t); z_l = (g_l - mean_w g_l) / (std_w g_l + 1e-6); "
        "g_l(t) = ||h_l(t) - h_l(t-1)||_2 (Eqs. 1-3)",
        score="hidden-state change, z-scored, contrast of two layers",
        deviations=(SCALED, POSITIONS, WINDOW),
    )

    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window)


@dataclass(frozen=True)
class HSVariance(EpiKV):
    """Rank by the difference of the rolling means of two layers: EpiKV before its correction.

    Both means drift with position, so the score ranks by age as much as by content; the paper
    reports it to show what the z-score of `EpiKV` corrects (section 3.2).
    """

    name: ClassVar[str] = "hs-variance"
    summary: ClassVar[str] = "epikv without the z-score: contrast of rolling means"
    method: ClassVar[Method] = Method(
        "s(t) = mean_w g_A(t) - mean_w g_B(t); g_l(t) = ||h_l(t) - h_l(t-1)||_2 (Eqs. 1-2)",
        score="hidden-state change, rolling mean, contrast of two layers",
        deviations=(SCALED, POSITIONS, WINDOW),
    )

    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window, statistic="mean")


@dataclass(frozen=True)
class BandAdaptive(RollingPolicy):
    """Rank by z-scores of the mean hidden-state change of two bands of layers."""

    a_first: float = setting(7 / 32, "band A begins", unit="share of the depth", low=0, high=1)
    a_last: float = setting(13 / 32, "band A ends", unit="share of the depth", low=0, high=1)
    b_first: float = setting(18 / 32, "band B begins", unit="share of the depth", low=0, high=1)
    b_last: float = setting(25 / 32, "band B ends", unit="share of the depth", low=0, high=1)
    weight_a: float = setting(1.29, "weight of band A; band B has 1", low=0)

    name: ClassVar[str] = "band-adaptive"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "epikv on two bands of layers instead of two layers"
    method: ClassVar[Method] = Method(
        "s(t) = weight_a z(mean of g_l over band A) - z(mean of g_l over band B); z over the "
        "trailing window as in Eq. 3",
        score="hidden-state change, mean over a band, z-scored, contrast of two bands",
        deviations=(
            SCALED,
            "the paper names the bands (7-13 and 18-25 of 32) but prints no formula: layers are "
            "averaged first, then z-scored, and the default of weight_a is not in its text",
            POSITIONS,
            WINDOW,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for band, first, last in (
            ("a", self.a_first, self.a_last),
            ("b", self.b_first, self.b_last),
        ):
            if first > last:
                raise UsageError(
                    f"{self.name}: {band}_first ({first:g}) lies behind {band}_last ({last:g}); "
                    "give the shallower layer first"
                )

    def score(self) -> Score:
        bands = (
            Band(self.a_first, self.a_last, self.weight_a),
            Band(self.b_first, self.b_last, -1),
        )
        return RollingBands(Signal.HIDDEN_CHANGE, bands, window=self.window)
