"""Self-consistency (Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning").

N independent chains; the answer that most of them give wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.search.base import Leaf
from arborsim.search.independent import IndependentSamples
from arborsim.search.vote import majority


@dataclass
class SelfConsistency(IndependentSamples):
    """N chains, the majority wins."""

    name: ClassVar[str] = "self-consistency"

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return majority(frontier)
