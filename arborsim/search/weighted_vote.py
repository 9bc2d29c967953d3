"""Best of N with a weighted vote (Beeching et al. 2024, "Scaling test-time compute").

N independent chains; the answer whose chains have the highest sum of final scores wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.search.base import Leaf
from arborsim.search.independent import IndependentSamples
from arborsim.search.vote import weighted_majority


@dataclass
class WeightedVote(IndependentSamples):
    """N chains, each votes with its score."""

    name: ClassVar[str] = "weighted-vote"

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return weighted_majority(frontier)
