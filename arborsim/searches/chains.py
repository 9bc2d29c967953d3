"""Chains of thoughts that share the prompt alone: one, as in ordinary decoding, or N samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.settings import setting
from arborsim.searches.base import ROOT, Expansion, Leaves, Search
from arborsim.searches.ranking import Rewarded, answer_setting


@dataclass
class Linear(Search):
    """Continue the newest thought until it is finished."""

    name = "linear"
    synchronous = True
    by_levels = True

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
    synchronous = False
    width_option = "n"
    by_levels = True
    keeps_duplicates = True  # chains are independent
    n: int = setting(16, "chains", low=1)

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

    name = "best-of-n"


@dataclass(kw_only=True)
class SelfConsistency(IndependentSamples):
    """The answer that most chains give wins (Wang et al. 2022, "Self-Consistency Improves Chain of
    Thought Reasoning")."""

    name = "self-consistency"
    answer: str = answer_setting("vote")


@dataclass(kw_only=True)
class WeightedVote(IndependentSamples):
    """The answer whose chains have the highest sum of final scores wins (Beeching et al. 2024,
    "Scaling test-time compute")."""

    name = "weighted-vote"
    answer: str = answer_setting("weighted")
