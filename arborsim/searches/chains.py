"""Chains of thoughts that share the prompt alone: one, as in ordinary decoding, or N samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.searches.base import ROOT, Expansion, Leaves, Search
from arborsim.searches.ranking import Rewarded


@dataclass
class Linear(Search):
    """Continue the newest thought until it is finished."""

    name: ClassVar[str] = "linear"
    synchronous: ClassVar[bool] = True
    by_levels: ClassVar[bool] = True

    @property
    def slots(self) -> int:
        return 1

    def expand(self, frontier: Leaves, width: int) -> Expansion:
        leaf = frontier[-1]
        return Expansion({leaf.node: 1}) if leaf.expandable else Expansion(done=True)

    def answers(self, frontier: Leaves) -> tuple[int, ...]:
        return (frontier[-1].node,)


@dataclass(kw_only=True)
class IndependentSamples(Rewarded):
    """Sample chains to their ends."""

    name: ClassVar[str]
    synchronous: ClassVar[bool] = False
    width_option: ClassVar[str] = "n"
    by_levels: ClassVar[bool] = True
    keeps_duplicates: ClassVar[bool] = True  # chains are independent
    n: int = 16  # chains

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 1:
            raise UsageError(f"{self.name}: n must be 1 or more")

    @property
    def slots(self) -> int:
        return self.n

    def expand(self, frontier: Leaves, width: int) -> Expansion:
        if frontier[0].visits == 0:
            return Expansion({ROOT: min(self.n, width)})
        waiting = [x.node for x in frontier if x.node != ROOT and x.visits == 0 and x.expandable]
        return Expansion(dict.fromkeys(waiting[:width], 1))


@dataclass(kw_only=True)
class BestOfN(IndependentSamples):
    """The finished chain with the best final score wins (Cobbe et al. 2021, "Training Verifiers to
    Solve Math Word Problems")."""

    name: ClassVar[str] = "best-of-n"


@dataclass(kw_only=True)
class SelfConsistency(IndependentSamples):
    """The answer that most chains give wins (Wang et al. 2022, "Self-Consistency Improves Chain of
    Thought Reasoning")."""

    name: ClassVar[str] = "self-consistency"
    answer: str = "vote"


@dataclass(kw_only=True)
class WeightedVote(IndependentSamples):
    """The answer whose chains have the highest sum of final scores wins (Beeching et al. 2024,
    "Scaling test-time compute")."""

    name: ClassVar[str] = "weighted-vote"
    answer: str = "weighted"
