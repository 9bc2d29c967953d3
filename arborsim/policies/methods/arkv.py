"""ARKV: full precision, FP8 or eviction, by how sensitive a layer is (and its two baselines)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arborsim.core.events import Decode, Event
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.blocks import highest
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.heads import HeavyHitters, LayerSensitivity
from arborsim.signals.scores import Score

_PAPER = "ARKV (Large-scale-Sustainable-Computing-LSC/ARKV)"
_SCORE = "attention of the last prompt queries, then of the newest query; variance counts"
_SCHEDULE = "when the cache exceeds the budget"
_LOSS = (
    "the code drops an FP8 token before the next query reads it; here a decision follows an "
    "iteration, so that query still does; tokens that a revisited path protects are not lost",
)
_ROUNDING = (
    "the code's third defect, one scale per cache slot for heads that hold different tokens, "
    "changes values and not decisions: it is not reproduced",
    "what was rounded to FP8 stays FP8 when it ranks among the best again (the code stores the "
    "rounded value at full precision)",
)
_POOL = 5  # kernel of the average over neighbouring tokens


def neighbour_mean(scores: np.ndarray) -> np.ndarray:
    """Mean over five neighbours; beyond the ends are zeros, which count (torch's `avg_pool1d`)."""
    padded = np.pad(scores, _POOL // 2)
    total = np.zeros(len(scores))
    for i in range(_POOL):
        total += padded[i : i + len(scores)]
    return np.asarray(total / _POOL)


@dataclass(frozen=True)
class _Tailor(StreamPolicy, ABC):
    """Over budget, cut the tokens outside the window to `slack` times what they may be.

    Subclasses say how many of those kept stay at full precision (`_full_precision`).
    """

    window: int = setting(32, "protected newest tokens; queries that rate the prompt", low=2)
    slack: float = setting(0.75, "share of budget - window that a cut keeps", low=0, high=1)
    gamma: float = setting(263.811, "weight of the variance in a token's score", low=0)
    cumulative: bool = setting(False, "rate by all queries since the prompt, not by the newest")
    per: str = setting("head", "what decides on its own", choices=("layer", "head"))

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False

    @property
    def grouping(self) -> str:
        return self.per

    def scores(self) -> dict[str, Score]:
        return {"heavy": HeavyHitters(self.per, self.window, self.gamma, self.cumulative)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(recent=self.window)

    def _keeps(self, view: CacheView) -> int:
        """Tokens outside the window that a cut leaves."""
        return int(self.slack * (view.budget_tokens - self.window))

    @abstractmethod
    def _full_precision(self, view: CacheView, keeps: int) -> np.ndarray:
        """Int64 ``[groups]``: how many of the `keeps` best stay at full precision."""

    def _evict_lowest(
        self, view: CacheView, tiers: np.ndarray, stream: np.ndarray, over: np.ndarray
    ) -> None:
        """Cut every group that is over budget (Eq. 10)."""
        candidates = stream[~self.protected(view)[stream]]
        full = self._full_precision(view, self._keeps(view))
        for group in np.flatnonzero(over > 0):
            free = candidates[tiers[group, candidates] <= Tier.HBM_QUANTISED]
            if len(free) < over[group]:
                raise self._infeasible(view, len(free), int(over[group]))
            # Several leaves can protect more than the window: then the budget limits what is kept.
            keeps = min(self._keeps(view), len(free) - int(over[group]))
            score = neighbour_mean(view.scores["heavy"][group, free])
            kept = free[highest(score, keeps)]
            best = free[highest(score, min(keeps, int(full[group])))]
            were = tiers[group, best]
            tiers[group, free] = Tier.EVICTED
            tiers[group, kept] = Tier.HBM_QUANTISED
            tiers[group, best] = were  # what was rounded once stays rounded


@dataclass(frozen=True)
class _Quantiser(_Tailor):
    """A tailor that keeps some tokens in FP8, and can lose them as the public code does."""

    as_published: bool = setting(False, "decide as the public code does, defects included")

    def next_decision(self, view: CacheView) -> int:
        if self.as_published and (view.tier == Tier.HBM_QUANTISED).any():
            return 1
        return super().next_decision(view)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if self.as_published and isinstance(event, Decode):
            lost = (view.tier == Tier.HBM_QUANTISED) & ~self.protected(view)
            if lost.any():
                tiers = np.where(lost, np.int8(Tier.EVICTED), view.tier)
                return super().decide(replace(view, tier=tiers), event) or Plan(tiers)
        return super().decide(view, event)

    def _keeps(self, view: CacheView) -> int:
        if self.as_published and only_prompt(view):
            return view.budget_tokens - self.window
        return super()._keeps(view)


def only_prompt(view: CacheView) -> bool:
    """Whether nothing has been generated yet."""
    return view.num_tokens == view.prompt_tokens


@dataclass(frozen=True)
class ARKV(_Quantiser):
    """The more a layer's attention is spread and changes, the more of it keeps full precision."""

    tau1: float = setting(7.7744, "temperature of the entropy", low=1e-3)
    tau2: float = setting(5.4070, "temperature of the variance", low=1e-3)
    tau3: float = setting(5.5277, "temperature of the kurtosis", low=1e-3)

    name: ClassVar[str] = "arkv"
    paper: ClassVar[str] = _PAPER
    summary: ClassVar[str] = "per layer, the best tokens in full precision, the next in FP8"
    method: ClassVar[Method] = Method(
        "OQ_l = Ent^(1/tau1) Var^(1/tau2) Kurt^(1/tau3); O_l = clip(round(OQ_l / max OQ (C - W)), "
        "0, C - W); hh = avgpool5(mean_q A + gamma Var_q A); keep the top slack (C - W) by hh: the "
        "first O_l in full precision, the rest in FP8 (Eqs. 3-10)",
        score=_SCORE,
        allocate="full precision by the sensitivity of the layer",
        place="quantise, then evict",
        schedule=_SCHEDULE,
        tiers=(Tier.HBM, Tier.HBM_QUANTISED, Tier.EVICTED),
        deviations=(
            "by default as the equations say; as_published decides as the public code does: W is "
            "subtracted from O_l twice, O_l is at most the prompt before its window, the prompt is "
            "cut to C - W without slack or FP8, and every FP8 token is lost one step later",
            *_LOSS,
            *_ROUNDING,
        ),
    )

    def scores(self) -> dict[str, Score]:
        taus = (self.tau1, self.tau2, self.tau3)
        return {**super().scores(), "sensitivity": LayerSensitivity(self.per, self.window, *taus)}

    def _full_precision(self, view: CacheView, keeps: int) -> np.ndarray:
        """``O_l`` of every group (Eq. 8); all there is where no layer looked before its window."""
        if self.as_published and only_prompt(view):
            return np.full(len(view.tier), keeps)
        room = view.budget_tokens - self.window
        sensitivity = view.scores["sensitivity"][:, 0]
        top = sensitivity.max()
        ratio = sensitivity / top if top > 0 else np.ones(len(sensitivity))
        original = np.clip(np.rint(ratio * room), 0, room).astype(np.int64)
        if self.as_published:
            original = np.minimum(original, view.prompt_tokens - self.window) - self.window
        return np.maximum(original, 0)


@dataclass(frozen=True)
class ARKVOrigin(_Tailor):
    """The paper's baseline that evicts only."""

    name: ClassVar[str] = "arkv-origin"
    paper: ClassVar[str] = _PAPER
    summary: ClassVar[str] = "ARKV's baseline: the same cuts, all kept tokens in full precision"
    method: ClassVar[Method] = Method(
        "keep the top slack (C - W) by hh = avgpool5(mean_q A + gamma Var_q A)",
        score=_SCORE,
        allocate="the same for every layer",
        schedule=_SCHEDULE,
        deviations=(
            "the prompt is cut with slack too, as the equations say (the public code cuts it to "
            "C - W)",
        ),
    )

    def _full_precision(self, view: CacheView, keeps: int) -> np.ndarray:
        return np.full(len(view.tier), keeps)


@dataclass(frozen=True)
class ARKVQuant(_Quantiser):
    """The paper's baseline that rounds all it keeps outside the window."""

    name: ClassVar[str] = "arkv-quant"
    paper: ClassVar[str] = _PAPER
    summary: ClassVar[str] = "ARKV's baseline: the same cuts, all kept tokens in FP8"
    method: ClassVar[Method] = Method(
        "keep the top slack (C - W) by hh = avgpool5(mean_q A + gamma Var_q A), all in FP8",
        score=_SCORE,
        allocate="the same for every layer",
        place="quantise, then evict",
        schedule=_SCHEDULE,
        tiers=(Tier.HBM, Tier.HBM_QUANTISED, Tier.EVICTED),
        deviations=(
            "as_published cuts the prompt to C - W without slack, and loses every FP8 token one "
            "step later, as the public code does",
            *_LOSS,
            "tokens turn to FP8 when the cache exceeds the budget, not when they leave the window "
            "(section V-G: below the budget nothing differs from the plain model)",
        ),
    )

    def _full_precision(self, view: CacheView, keeps: int) -> np.ndarray:
        return np.zeros(len(view.tier), dtype=np.int64)
