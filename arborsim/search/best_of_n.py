"""Best of N (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems").

N independent chains; the finished one with the best final score is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.search.base import Leaf, best_answer
from arborsim.search.independent import IndependentSamples


@dataclass
class BestOfN(IndependentSamples):
    """N chains, the best one wins."""

    name: ClassVar[str] = "best-of-n"

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return best_answer(frontier)
