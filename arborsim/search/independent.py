"""N chains of thoughts that share the prompt alone: what the samplers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf


@dataclass
class IndependentSamples:
    """Sample `n` chains to their ends.

    Parameters
    ----------
    n : int
        Chains.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool] = False
    keeps_duplicates: ClassVar[bool] = True
    """Chains are independent: one that repeats another goes on, and votes."""
    n: int = 16

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"{self.name}: n must be 1 or more")

    @property
    def slots(self) -> int:
        return self.n

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        if frontier[0].visits == 0:
            return Expansion({ROOT: min(self.n, width)})
        waiting = [x.node for x in frontier if x.node != ROOT and x.visits == 0 and x.expandable]
        return Expansion(dict.fromkeys(waiting[:width], 1))
