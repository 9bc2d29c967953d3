"""Policies put together from blocks: score x allocate x place x schedule x recover, and protect.

In a file (see `arborsim.policies.composition_file`), or in Python::

    @dataclass(frozen=True)
    class MyPolicy(Composition):
        score: Score = HiddenChangeContrast()
        allocate: Pool | Tree = Tree(use_attention=False)
        place: Ladder = Ladder(ddr=math.inf)

        name: ClassVar[str] = "my-policy"
        summary: ClassVar[str] = "tree-aware, attention-free, nothing destroyed"
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from arborsim.core.events import Event, Prune, Transition
from arborsim.core.observations import Signal
from arborsim.core.settings import check_settings
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, Method, Policy, Protection
from arborsim.policies.composition_allocate import Pool, Situation, Tree
from arborsim.policies.composition_blocks import (
    SCORES,
    EveryStep,
    Fetch,
    Ladder,
    Never,
    Protect,
    Recompute,
    TreeEvents,
)
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score

ROWS = frozenset({Signal.ATTENTION, Signal.LAYER_ATTENTION, Signal.HEAD_ATTENTION})
"""Signals that need attention rows, which fused kernels do not give."""


@dataclass(frozen=True)
class Composition(Policy):
    """A policy made of blocks.

    A decision has three parts: `allocate` says which tokens HBM holds, ranking by `score`;
    `place` says where the others live; `recover` says which of the others may come back.
    `schedule` says when; a cache over budget is always reason enough.

    Attributes
    ----------
    score : Score
        What matters: one of `arborsim.policies.composition_blocks.SCORES`.
    allocate : Pool or Tree
    place : Ladder
    schedule : EveryStep, Interval, TreeEvents or AfterPrefill
    protect : Protect
    recover : Never, Fetch or Recompute
    """

    score: Score = CumulativeAttention()  # noqa: RUF009 - frozen
    allocate: Pool | Tree = Pool()  # noqa: RUF009 - frozen
    place: Ladder = Ladder()  # noqa: RUF009 - frozen
    schedule: EveryStep = EveryStep()  # noqa: RUF009 - frozen
    protect: Protect = Protect()  # noqa: RUF009 - frozen
    recover: Never = Never()  # noqa: RUF009 - frozen

    name: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    deviations: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Describe a subclass by its default blocks."""
        super().__init_subclass__(**kwargs)
        for attribute, value in _described_by(cls).items():
            setattr(cls, attribute, value)

    def __post_init__(self) -> None:
        for field in fields(self):
            block = getattr(self, field.name)
            if is_dataclass(block):
                check_settings(block, f"{self.name}: [{field.name}]")
        for attribute, value in _described_by(self).items():
            object.__setattr__(self, attribute, value)

    def reads(self) -> frozenset[Signal]:
        return self.needs

    def scores(self) -> dict[str, Score]:
        return {"token": self.score, **self.allocate.scores()}

    def protection(self, budget_tokens: int) -> Protection:
        return self.protect.protection(budget_tokens)

    def protected(self, view: CacheView) -> np.ndarray:
        return self.allocate.protected(view, self.protection(view.budget_tokens))

    def next_decision(self, view: CacheView) -> int:
        return self.schedule.next_decision(view)

    def pressure_margin(self, budget_tokens: int) -> int | None:
        return self.schedule.margin

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if not self._due(view, event):
            return None
        protected, reachable = self.protected(view), self._reachable(view, event)
        score = view.scores["token"]
        at = Situation(
            who=self.name,
            view=view,
            event=event,
            score=score[0] if len(score) == 1 else score.mean(axis=0),
            protected=protected,
            reachable=reachable,
            room=self.schedule.room(view, int(np.count_nonzero(protected & reachable))),
            keep_prompt=self.protect.prompt,
            recover=self.recover.fetches,
        )
        tiers = self.place.place(view, self.allocate.holds(at), protected, at.score)
        if np.array_equal(tiers, view.tier[0]):
            return None
        return Plan(tiers[None], recover=self.recovers)

    def _due(self, view: CacheView, event: Event) -> bool:
        fits = view.num_tokens <= view.budget_tokens
        if isinstance(event, Prune) or (self.schedule.wait and fits):
            return False
        if self.bounded and view.in_hbm > view.budget_tokens:
            return True
        comes_back = isinstance(event, Transition) and self.recover.recomputes
        return comes_back or self.schedule.due(view, event)

    def _reachable(self, view: CacheView, event: Event) -> np.ndarray:
        """Bool ``[tokens]``: in HBM, or able to come back now."""
        lowest = Tier.HBM_QUANTISED
        if self.recover.fetches:
            lowest = Tier.DDR_QUANTISED
        if self.recover.recomputes and isinstance(event, Transition):
            lowest = Tier.EVICTED
        return np.asarray(view.tier[0] <= lowest)


def _described_by(item: Any) -> dict[str, Any]:
    """What a policy's blocks mean for its class attributes; `item` is the policy or its class."""
    needs = item.score.needs
    for score in item.allocate.scores().values():
        needs = needs | score.needs
    named = {kind: name for name, kind in SCORES.items()}
    score = named.get(type(item.score), type(item.score).__name__)
    return {
        "needs": frozenset(needs),
        "fused": not needs & ROWS,
        "recovers": item.recover.recomputes,
        "bounded": item.schedule.bounded,
        "method": Method(
            item.formula or f"tokens by {score}",
            score=score,
            allocate=item.allocate.about,
            place=" > ".join(tier.name.lower().replace("_", " ") for tier in item.place.tiers),
            schedule=item.schedule.about,
            recover=item.recover.about,
            granularity="thought block, then token" if isinstance(item.allocate, Tree) else "token",
            tiers=item.place.tiers,
            deviations=item.deviations,
        ),
    }


__all__ = [
    "Composition", "EveryStep", "Fetch", "Ladder", "Never", "Pool", "Protect", "Recompute", "Tree",
    "TreeEvents",
]  # fmt: skip
