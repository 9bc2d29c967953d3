"""Demands of recorded searches, episode by episode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from arborsim.core.tiers import Budget
from arborsim.machine.machine import Machine
from arborsim.machine.program import SearchDemand
from arborsim.play.episode import record_demand
from arborsim.policies.base import Policy
from arborsim.trace.reader import TraceReader


def record_demands(
    trace: Path,
    policy: Policy,
    budget: Budget,
    machine: Machine,
    *,
    first: int = 0,
    count: int | None = None,
    prefix: str = "",
    prefix_tokens: int = 0,
) -> Iterator[SearchDemand]:
    """The demand of each of `count` episodes of a trace, from `first` on.

    `prefix` and `prefix_tokens` are key and length of what these searches' prompts have in common
    ("" for nothing).

    Raises
    ------
    UsageError
        Recall modes or compaction that a demand cannot describe.
    BudgetInfeasible
    """
    reader = TraceReader(Path(trace))
    reader.require(policy.reads(), f"policy {policy.name}")
    stop = None if count is None else first + count
    shared = prefix_tokens if prefix else 0
    for episode in reader.episodes(tuple(sorted(policy.reads())), start=first, stop=stop):
        yield record_demand(episode, policy, budget, machine, prefix, shared, reader.path.name)[0]
