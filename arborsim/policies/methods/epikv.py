"""EpiKV: keep the tokens at which the residual stream turns (arXiv:2606.26472), and its ablations.

Scores are those of the paper's section 3 and Table 1: hidden states, keys and values, and hidden
states together with attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

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


def mean_window() -> int:
    """The setting `window` of policies that rank by a rolling mean."""
    about = "trailing window of the rolling mean; 1 does not smooth"
    return setting(64, about, unit="tokens", low=1, high=65536)


@dataclass(frozen=True)
class RollingPolicy(RecentPolicy):
    """Base of the policies of the EpiKV paper: the prompt and the newest tokens stay.

    The score (`score`) is computed once, when a token is generated, and frozen (section 3.3).  The
    newest ``min(recent, budget / 4)`` tokens are protected (appendix D).
    """

    window: int = setting(
        64, "trailing window of the rolling statistic", unit="tokens", low=2, high=65536
    )


@dataclass(frozen=True)
class EpiKV(RollingPolicy):
    """Rank by ``z_A - z_B`` of the hidden-state change at two layers, without attention."""

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)

    name = "epikv"

    @cached_property
    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window)


@dataclass(frozen=True)
class HSVariance(EpiKV):
    """Rank by the difference of the rolling means of two layers: EpiKV before its correction.

    Both means drift with position, so the score ranks by age as much as by content.  The paper
    reports it to show what the z-score of `EpiKV` corrects (section 3.2).
    """

    window: int = mean_window()

    name = "hs-variance"

    @cached_property
    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window, statistic="mean")


@dataclass(frozen=True)
class HSCosine(RollingPolicy):
    """Rank by how far the hidden state turns instead of by how far it moves.

    `turn` "state" takes the angle between successive hidden vectors, "change" the angle between
    successive changes, which shows whether the direction of travel is new.
    """

    turn: str = setting("state", "what turns: the hidden state, or its change", choices=TURNS)
    layer: float = setting(10 / 32, "whose output turns", unit="share of the depth", low=0, high=1)

    name = "hs-cosine"

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
    signal = Signal.KEY_VARIANCE

    @cached_property
    def score(self) -> Score:
        return RollingBands(self.signal, (Band(0.0, 1.0),), "mean", self.window)


@dataclass(frozen=True)
class KVValue(KVKey):
    """Rank by the rolling mean of the value's variance over the head dimension."""

    name = "kv-value"
    signal = Signal.VALUE_VARIANCE


@dataclass(frozen=True)
class AttnHS(RollingPolicy):
    """Rank by cumulative attention and by the z-score of the hidden-state change, half and half.

    Both are scaled to [0, 1] over the generated tokens that are held, the newest ones included, or
    over all that are held if the prompt may leave.
    """

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)

    name = "attn-hs"
    score = CumulativeAttention(up_to_constant=True)  # scaling does not notice

    def scores(self) -> Mapping[str, Score]:
        band = Band(self.layer_a, self.layer_a)
        turns: Score = RollingBands(Signal.HIDDEN_CHANGE, (band,), window=self.window)
        return {"score": self.score, "turns": turns if self.pin_prompt else turns.with_prompt()}

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
    """Candidates that rank by the mean of two scores, scaled with the `recent` ones after them.

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
    """Mean of two scores, float64 ``[n]``, each scaled to [0, 1].

    Changes both, equals become 0.
    """
    for values in (one, other) if len(one) else ():
        low, high = values.min(), values.max()
        values -= low
        if high > low:
            values /= high - low
            values *= 0.5
    one += other
    return one
