"""A policy outside the package that uses a third memory: old tokens go to NVMe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import Event
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, Method, Policy


@dataclass(frozen=True)
class ColdOnNvme(Policy):
    """The newest tokens stay in HBM; over budget, `batch` more than must go to NVMe at once."""

    name: ClassVar[str] = "cold-on-nvme"
    batch: int = setting(16, "Tokens that leave beyond the excess.", low=0)

    @property
    def method(self) -> Method:
        return Method("age", place="NVMe", recover="fetch (stage)")

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return Tier.HBM, Tier.NVME

    def next_decision(self, view: CacheView) -> int:
        return max(0, view.budget_tokens - view.in_hbm) // len(view.leaves) + 1

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        over = view.in_hbm - view.budget_tokens
        if over <= 0:
            return None
        tiers = view.tier.copy()
        tiers[:, np.flatnonzero(hbm_mask(tiers[0]))[: over + self.batch]] = Tier.NVME
        return Plan(tiers)
