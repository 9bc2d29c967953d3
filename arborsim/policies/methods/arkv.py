"""ARKV: full precision, FP8 or eviction, by how sensitive a layer is (and its two baselines).

The paper lost its equations on the way to HTML, so this follows its public code
(Large-scale-Sustainable-Computing-LSC/ARKV), sections IV-C to IV-E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Decode, Event
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Allocation, Decision, Protect
from arborsim.policies.placement import Pool, highest, neighbour_mean
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.scores import Score
from arborsim.signals.spread import HeavyHitters, LayerSensitivity

_KERNEL = 5  # neighbouring tokens whose scores are averaged


@dataclass(frozen=True)
class Cut(Pool):
    """A group over budget is cut, but for the window, to `slack` times what it may be (Eq. 10)."""

    window: int = 32
    slack: float = 0.75
    pin_prompt: bool = False

    about = "cut to a share of the budget"

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        """Evict the lowest, and turn to FP8 all but the best of those kept outside the window."""
        candidates = np.flatnonzero(free)
        room = at.view.budget_tokens - self.window
        room -= at.view.prompt_tokens if self.pin_prompt else 0
        keeps = int(self.slack * max(0, room))
        # Several leaves can protect more than the window: then the budget limits what is kept.
        keeps = min(keeps, len(candidates) - over)
        score = neighbour_mean(at.view.scores["score"][group, candidates], _KERNEL)
        kept = candidates[highest(score, keeps)]
        assert isinstance(at.policy, _ARKVBase)
        full = min(keeps, int(at.policy.full_precision(at.view)[group]))
        best = candidates[highest(score, full)]
        self._place(tier, candidates, kept, best)

    @staticmethod
    def _place(
        tier: np.ndarray, candidates: np.ndarray, kept: np.ndarray, best: np.ndarray
    ) -> None:
        were, tier[candidates] = tier[best], Tier.EVICTED
        tier[kept] = Tier.HBM_QUANTISED
        tier[best] = were  # what was rounded once stays rounded


@dataclass(frozen=True)
class PublishedCut(Cut):
    """The cut as the public code has it, which works on slots and leaves them in another order.

    Neighbours are slots that lie side by side.  The prompt is cut to ``C - W``, without slack, and
    what is kept stays in the order of its scores.  A later cut takes `slack` of all there is
    outside the window.  It sorts the slots at full precision, with those of all KV heads of a layer
    as the rows of one table whose columns are ordered by the first head.
    """

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        view = at.view
        ranked = self._ranked(at, group)
        after_prompt = view.num_tokens == view.prompt_tokens
        room = view.budget_tokens - self.window
        keeps = room if after_prompt else int(self.slack * len(ranked))
        kept = ranked[: min(keeps, len(ranked) - over)]
        assert isinstance(at.policy, _ARKVBase)
        best = kept[: int(at.policy.full_precision(view)[group])]
        self._place(tier, ranked, kept, best)
        if not after_prompt:
            first = group - group % max(1, len(view.tier) // max(1, len(view.shape.layers)))
            leads = best if group == first else self._ranked(at, first)[: len(best)]
            places = leads if view.slots is None else view.slots[first, leads]
            best = best[np.argsort(places)]
        at.lead(group, np.concatenate([best, kept[len(best) :]]))

    def _ranked(self, at: Decision, group: int) -> np.ndarray:
        """Ids of the tokens outside the window in the order of their scores, the best first."""
        held = at.movable & hbm_mask(at.view.tier[group])
        past = at.view.by_slot(group, np.flatnonzero(held))
        score = neighbour_mean(at.view.scores["score"][group, past], _KERNEL)
        return np.asarray(past[np.argsort(score, kind="stable")[::-1]])


@dataclass(frozen=True)
class _ARKVBase(StreamPolicy):
    """Base of the three: the score, and the cut when the cache exceeds the budget."""

    window: int = setting(32, "protected newest tokens; queries that rate the prompt", low=2)
    slack: float = setting(0.75, "share of budget - window that a cut keeps", low=0, high=1)
    gamma: float = setting(263.811, "weight of the variance in a token's score", low=0)
    cumulative: bool = setting(False, "rate by all queries since the prompt, not by the newest")
    per: str = setting("head", "what decides on its own", choices=("layer", "head"))
    as_published: bool = setting(False, "decide as the public code does, defects included")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.as_published and self.pin_prompt:
            raise UsageError(
                f"{self.name}: the public code cuts the prompt: as_published needs pin_prompt=false"
            )

    @cached_property
    def score(self) -> Score:
        return HeavyHitters(self.per, self.window, self.gamma, self.cumulative)

    @cached_property
    def allocate(self) -> Allocation:
        kind = PublishedCut if self.as_published else Cut
        return kind(self.adaptation, self.window, self.slack, self.pin_prompt)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=ANY)

    def full_precision(self, view: CacheView) -> np.ndarray:
        """Int64 ``[groups]``: how many of the best that a cut keeps stay at full precision."""
        return np.full(len(view.tier), view.num_tokens)


@dataclass(frozen=True)
class _Quantiser(_ARKVBase):
    """An ARKV policy that keeps some tokens in FP8, and loses them as published."""

    tiers = (Tier.HBM, Tier.HBM_QUANTISED, Tier.EVICTED)

    def full_precision(self, view: CacheView) -> np.ndarray:
        return np.zeros(len(view.tier), dtype=np.int64)

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


@dataclass(frozen=True)
class ARKV(_Quantiser):
    """The more a layer's attention is spread and changes, the more of it keeps full precision."""

    tau1: float = setting(7.7744, "temperature of the entropy", low=1e-3)
    tau2: float = setting(5.4070, "temperature of the variance", low=1e-3)
    tau3: float = setting(5.5277, "temperature of the kurtosis", low=1e-3)

    name = "arkv"

    def scores(self) -> Mapping[str, Score]:
        taus = (self.tau1, self.tau2, self.tau3)
        return {"score": self.score, "sensitivity": LayerSensitivity(self.per, self.window, *taus)}

    def full_precision(self, view: CacheView) -> np.ndarray:
        """``O_l`` of every group (Eq. 8), or all tokens where no layer looked before its window."""
        if self.as_published and view.num_tokens == view.prompt_tokens:
            return np.full(len(view.tier), view.num_tokens)
        room = view.budget_tokens - self.window
        room -= view.prompt_tokens if self.pin_prompt else 0
        sensitivity = view.scores["sensitivity"][:, 0]
        top = sensitivity.max()
        ratio = sensitivity / top if top > 0 else np.ones(len(sensitivity))
        original = np.clip(np.rint(ratio * room), 0, room).astype(np.int64)
        if self.as_published:
            original = np.minimum(original, view.prompt_tokens - self.window) - self.window
        return np.maximum(original, 0)


@dataclass(frozen=True)
class ARKVOrigin(_ARKVBase):
    """The paper's baseline that evicts only."""

    name = "arkv-origin"


@dataclass(frozen=True)
class ARKVQuant(_Quantiser):
    """The paper's baseline that rounds all it keeps outside the window."""

    name = "arkv-quant"
