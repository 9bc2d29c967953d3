"""Keep everything: the baseline that every figure is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arborsim.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Full retention: nothing is evicted, offloaded or quantised, whatever the budget."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "-"
    summary: ClassVar[str] = "keep every token in HBM"
    bounded: ClassVar[bool] = False
