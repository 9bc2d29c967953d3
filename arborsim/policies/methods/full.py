"""Keep everything: the baseline that every figure is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.tiers import Tier
from arborsim.policies.base import Method, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Full retention: nothing is evicted, offloaded or quantised, whatever the budget."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keep every token in HBM"
    method: ClassVar[Method] = Method("-", place="-", schedule="never", tiers=(Tier.HBM,))
    bounded: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False
