"""What the searches of a workload ask for, under each way to keep the cache.

A policy knows no clock, so a search is replayed once under a policy, budget and recall mode, and
its demand then serves all GPUs, loads and seeds.  Only what DDR transfers find in flight depends on
the machine: policies that use DDR are recorded once per GPU and host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arborsim.core.budget import Budget
from arborsim.machine.demand import SearchDemand
from arborsim.machine.profile import HardwareProfile
from arborsim.plan.mix import Draws
from arborsim.plan.results import Quality
from arborsim.plan.workload import Candidate, PolicyChoice, Workload

NO_BUDGET = Budget("-", share=1.0)


@dataclass(frozen=True)
class Variant:
    """A way to keep the cache, and the machine that it is recorded on.

    Attributes
    ----------
    policy : PolicyChoice
    budget : Budget
        `NO_BUDGET` for a policy that ignores budgets.
    recall : str
        How DDR tokens are read.
    profile : HardwareProfile
        Where a policy that uses DDR decides; the demands of others do not depend on it.
    """

    policy: PolicyChoice
    budget: Budget
    recall: str
    profile: HardwareProfile

    @property
    def offloads(self) -> bool:
        """Whether the policy may put tokens into DDR."""
        return any(tier.in_ddr for tier in self.policy.policy.method.tiers)

    @property
    def shown_recall(self) -> str:
        """For tables: "-" where nothing is ever recalled."""
        return self.recall if self.offloads else "-"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Variants of one key have the same demands."""
        where = self.profile.name if self.offloads else ""
        return self.policy.name, self.budget.text, self.shown_recall, where


def variant_of(candidate: Candidate) -> Variant:
    """How the candidate keeps the cache, recorded on its own machine."""
    budget = candidate.budget or NO_BUDGET
    return Variant(candidate.policy, budget, candidate.recall, candidate.hardware.profile)


def variants(workload: Workload) -> list[Variant]:
    """The workload's, in its order; recall modes and GPUs differ only where a policy uses DDR."""
    found: dict[tuple[str, str, str, str], Variant] = {}
    for candidate in workload.candidates():
        made = variant_of(candidate)
        found.setdefault(made.key, made)
    return list(found.values())


@dataclass(frozen=True)
class Recorded:
    """One search under one variant: its demand, and what the replay measured.

    Shares are per token of the search; `attention_kept` is NaN if the trace holds no attention.
    """

    demand: SearchDemand
    attention_kept: float
    peak_kept: float
    evicted: float
    quantised: float
    offloaded: float
    recomputed: float


@dataclass(frozen=True)
class VariantDemands:
    """Everything that a variant's candidates are served from.

    Attributes
    ----------
    variant : Variant
    places : tuple of (int, int)
        Entry of the mix and episode of each recorded search, sorted.
    recorded : tuple of Recorded
        In the order of `places`; shorter if `infeasible`.
    infeasible : str
        Why the variant cannot keep some search; "" if it can keep all.
    """

    variant: Variant
    places: tuple[tuple[int, int], ...]
    recorded: tuple[Recorded, ...]
    infeasible: str = ""

    @property
    def demands(self) -> list[SearchDemand]:
        return [each.demand for each in self.recorded]

    def numbers(self, draws: Draws) -> np.ndarray:
        """Which of the demands each drawn search is; int64 ``[n]``."""
        at = {place: number for number, place in enumerate(self.places)}
        pairs = zip(draws.entry.tolist(), draws.episode.tolist(), strict=True)
        return np.array([at[pair] for pair in pairs], dtype=np.int64)

    def quality(self, weights: np.ndarray) -> Quality:
        """Means over the searches, weighted by how often each is drawn (float64 ``[places]``)."""

        def mean(name: str) -> float:
            values = np.array([getattr(each, name) for each in self.recorded])
            return float(weights @ values / weights.sum())

        kept = mean("attention_kept")
        return Quality(
            None if math.isnan(kept) else kept, mean("peak_kept"), mean("evicted"),
            mean("quantised"), mean("offloaded"), mean("recomputed"),
        )  # fmt: skip


def drawn(workload: Workload) -> tuple[tuple[int, int], ...]:
    """Every (entry, episode) that some run serves, once, sorted."""
    found: set[tuple[int, int]] = set()
    for seed in workload.seeds():
        found.update(workload.draws(seed).distinct())
    return tuple(sorted(found))
