"""EpiKV: keep the tokens at which the residual stream turns (arXiv:2606.26472), and its ablations.

Scores are those of the paper's section 3 and Table 1: hidden states, keys and values, and hidden
states together with attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import hbm_mask
from arborsim.policies.base import CacheView
from arborsim.policies.stream import ChangingPool, MakeCandidates, RecentPolicy, Stream
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.rolling import TURNS, Band, HiddenChangeContrast, HiddenCosine, RollingBands
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


def mean_window() -> int:
    """The setting `window` of policies that rank by a rolling mean."""
    about = "trailing window of the rolling mean; 1 does not smooth"
    return setting(64, about, unit="tokens", low=1, high=65536)


@dataclass(frozen=True)
class RollingPolicy(RecentPolicy):
    """Base of the policies of the EpiKV paper: the prompt and the newest tokens stay.

    The score (`score`) is computed once, when a token is generated, and frozen (section 3.3); the
    newest ``min(recent, budget / 4)`` tokens are protected (appendix D).
    """

    window: int = setting(
        64, "trailing window of the rolling statistic", unit="tokens", low=2, high=65536
    )

    paper = PAPER


@dataclass(frozen=True)
class EpiKV(RollingPolicy):
    """Rank by ``z_A - z_B`` of the hidden-state change at two layers; needs no attention."""

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)

    name = "epikv"
    summary = "keep tokens at which the hidden state turns; no attention needed"
    formula = (
        "s(t) = z_A(t) - z_B(t); z_l = (g_l - mean_w g_l) / (std_w g_l + 1e-6); "
        "g_l(t) = ||h_l(t) - h_l(t-1)||_2 (Eqs. 1-3)"
    )
    deviations = (SCALED, POSITIONS, WINDOW)

    @cached_property
    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window)


@dataclass(frozen=True)
class HSVariance(EpiKV):
    """Rank by the difference of the rolling means of two layers: EpiKV before its correction.

    Both means drift with position, so the score ranks by age as much as by content; the paper
    reports it to show what the z-score of `EpiKV` corrects (section 3.2).
    """

    window: int = mean_window()

    name = "hs-variance"
    summary = "epikv without the z-score: contrast of rolling means"
    formula = "s(t) = mean_w g_A(t) - mean_w g_B(t); g_l(t) = ||h_l(t) - h_l(t-1)||_2 (Eqs. 1-2)"

    @cached_property
    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window, statistic="mean")


@dataclass(frozen=True)
class HSCosine(RollingPolicy):
    """Rank by how far the hidden state turns instead of by how far it moves.

    With `turn` "state" by the angle between successive hidden vectors; with "change" by the angle
    between successive changes: whether the direction of travel is a new one.
    """

    turn: str = setting("state", "what turns: the hidden state, or its change", choices=TURNS)
    layer: float = setting(10 / 32, "whose output turns", unit="share of the depth", low=0, high=1)

    name = "hs-cosine"
    paper = f"{PAPER}, with a cosine in place of its norm"
    summary = "keep tokens at which the hidden vector, or its change, turns"
    formula = (
        "s(t) = z(1 - cos(x(t), x(t-1))), z as in Eq. 3; x(t) = h_l(t), or with turn=change "
        "h_l(t) - h_l(t-1)"
    )
    deviations = (
        "the paper measures the length of the change alone; cosines are arborsim's, as is one "
        "layer in place of the contrast of two",
        "the recorded layer nearest to `layer` is taken: record it with --hidden-layers",
        POSITIONS,
        WINDOW,
    )

    @cached_property
    def score(self) -> Score:
        return HiddenCosine(self.turn, self.layer, self.window)


@dataclass(frozen=True)
class BandAdaptive(RollingPolicy):
    """Rank by z-scores of the mean hidden-state change of two bands of layers."""

    a_first: float = setting(7 / 32, "band A begins", unit="share of the depth", low=0, high=1)
    a_last: float = setting(13 / 32, "band A ends", unit="share of the depth", low=0, high=1)
    b_first: float = setting(18 / 32, "band B begins", unit="share of the depth", low=0, high=1)
    b_last: float = setting(25 / 32, "band B ends", unit="share of the depth", low=0, high=1)
    weight_a: float = setting(1.29, "weight of band A; band B has 1", low=0)

    name = "band-adaptive"
    summary = "epikv on two bands of layers instead of two layers"
    formula = (
        "s(t) = weight_a z(mean of g_l over band A) - z(mean of g_l over band B); z over the "
        "trailing window as in Eq. 3"
    )
    deviations = (
        SCALED,
        "the paper names the bands (7-13 and 18-25 of 32) but prints no formula: layers are "
        "averaged first, then z-scored, and the default of weight_a is not in its text",
        POSITIONS,
        WINDOW,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for band in ("a", "b"):
            first, last = getattr(self, f"{band}_first"), getattr(self, f"{band}_last")
            if first > last:
                raise UsageError(
                    f"{self.name}: {band}_first ({first:g}) lies behind {band}_last ({last:g}); "
                    "give the shallower layer first"
                )

    @cached_property
    def score(self) -> Score:
        bands = (
            Band(self.a_first, self.a_last, self.weight_a),
            Band(self.b_first, self.b_last, -1),
        )
        return RollingBands(Signal.HIDDEN_CHANGE, bands, window=self.window)


@dataclass(frozen=True)
class KVKey(RollingPolicy):
    """Rank by the rolling mean of the key's variance over the head dimension."""

    window: int = mean_window()

    name = "kv-key"
    summary = "keep tokens around keys that vary most over their channels"
    formula = (
        "s(t) = mean_w of mean over layers and heads of var(k_t), the variance over the head "
        "dimension"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "keys after RoPE; the paper found no difference before it (appendix E)",
        POSITIONS,
        WINDOW,
    )
    signal = Signal.KEY_VARIANCE

    @cached_property
    def score(self) -> Score:
        return RollingBands(self.signal, (Band(0.0, 1.0),), "mean", self.window)


@dataclass(frozen=True)
class KVValue(KVKey):
    """Rank by the rolling mean of the value's variance over the head dimension."""

    name = "kv-value"
    summary = "keep tokens around values that vary most over their channels"
    formula = (
        "s(t) = mean_w of mean over layers and heads of var(v_t), the variance over the head "
        "dimension"
    )
    deviations = (POSITIONS, WINDOW)
    signal = Signal.VALUE_VARIANCE


@dataclass(frozen=True)
class AttnHS(RollingPolicy):
    """Rank by cumulative attention and by the z-score of the hidden-state change, half and half.

    Both are brought to [0, 1] over the generated tokens that are held, the newest ones included;
    over all that are held if the prompt may leave.
    """

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)

    name = "attn-hs"
    official = (
        "stevenkolawole/epiphany-kv-cache@d424208: literally, AttentionHSProductEviction on the "
        "rows and z-scores of 22 live searches (chains of 12 lines, budgets of 91 and 110 tokens "
        "of about 160): 1,504 of 1,504 decisions are the same"
    )
    summary = "most attended tokens, or where the hidden state turns"
    formula = (
        "s(i) = 0.5 unit(sum over queries t of a_t(i)) + 0.5 unit(z_A(i)); unit(x) = (x - min x) / "
        "(max x - min x) over the generated tokens held (Table 1; z as in Eq. 3)"
    )
    words = {
        "score": "cumulative attention and hidden-state change, z-scored, each scaled to [0, 1]"
    }
    deviations = (
        "the paper prints no more than 'cumul. attn + z_10', and calls the method a product; that "
        "both parts are scaled to [0, 1] and weigh the same is from the authors' code",
        "attention is averaged over layers and heads, and counts the prompt's queries",
        "appendix D does not say what the hybrids protect: the prompt and the newest tokens, "
        "as the other policies on hidden states",
        SCALED,
        POSITIONS,
        WINDOW,
    )
    score = CumulativeAttention(up_to_constant=True)  # scaling does not notice

    def scores(self) -> Mapping[str, Score]:
        band = Band(self.layer_a, self.layer_a)
        turns: Score = RollingBands(Signal.HIDDEN_CHANGE, (band,), window=self.window)
        return {
            "score": self.score,
            "turns": turns if self.pin_prompt else turns.with_prompt(),
        }

    def rank(self, view: CacheView) -> np.ndarray:
        compete = hbm_mask(view.tier[0])
        compete[: view.prompt_tokens if self.pin_prompt else 0] = False
        rank = np.zeros(view.tier.shape)
        at = np.flatnonzero(view.in_stream(compete, self.adaptation))
        received, turns = (view.scores[name][0].take(at) for name in ("score", "turns"))
        rank[0, at] = half_and_half(received, turns)
        return rank

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        recent = self.protection(view.budget_tokens).recent
        return partial(HybridPool, view.scores["score"][0], view.scores["turns"][0], recent)


class HybridPool(ChangingPool):
    """Candidates that rank by two scores, half and half; scaled with the `recent` ones after them.

    What is held before position `start` has no part in it.
    """

    def __init__(self, scores: np.ndarray, others: np.ndarray, recent: int, stream: Stream) -> None:
        super().__init__(scores, stream)
        self._others, self._recent = others, recent
        self._start, self._old = stream.start, stream.stop

    def admit(self, stop: int) -> None:
        self._old = stop
        super().admit(stop)

    def values_of(self, known: np.ndarray) -> np.ndarray:
        newest = slice(max(self._start, self._old), self._old + self._recent)
        both = np.concatenate([known, self._of[newest][self._alive[newest]]])
        return half_and_half(self._scores.take(both), self._others.take(both))[: len(known)]


def half_and_half(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Mean of two scores, float64 ``[n]``, each scaled to [0, 1]; changes both, equals become 0."""
    for values in (one, other) if len(one) else ():
        low, high = values.min(), values.max()
        values -= low
        if high > low:
            values /= high - low
            values *= 0.5
    one += other
    return one
