"""Chains of thoughts that share the prompt alone: one, as ordinary decoding has it, or N samples.

- `Linear`: one chain, never branching.
- `BestOfN`: the finished chain with the best final score (Cobbe et al. 2021, "Training Verifiers
  to Solve Math Word Problems").
- `SelfConsistency`: the answer that most chains give (Wang et al. 2022, "Self-Consistency Improves
  Chain of Thought Reasoning").
- `WeightedVote`: the answer whose chains have the highest sum of final scores (Beeching et al.
  2024, "Scaling test-time compute").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_answer, majority, weighted_majority


@dataclass
class Linear:
    """Continue the newest thought until it is finished."""

    name: ClassVar[str] = "linear"
    synchronous: ClassVar[bool] = True

    @property
    def slots(self) -> int:
        return 1

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        leaf = frontier[-1]
        return Expansion({leaf.node: 1}) if leaf.expandable else Expansion(done=True)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return (frontier[-1].node,)


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


@dataclass
class BestOfN(IndependentSamples):
    """N chains, the best one wins."""

    name: ClassVar[str] = "best-of-n"

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return best_answer(frontier)


@dataclass
class SelfConsistency(IndependentSamples):
    """N chains, the majority wins."""

    name: ClassVar[str] = "self-consistency"

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return majority(frontier)


@dataclass
class WeightedVote(IndependentSamples):
    """N chains, each votes with its score."""

    name: ClassVar[str] = "weighted-vote"

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return weighted_majority(frontier)
