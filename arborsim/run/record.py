"""Reduce recorded searches to demands: one replay per episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from arborsim.core.measurements import Measurements
from arborsim.core.tiers import Budget
from arborsim.machine.machine import Machine, num_groups
from arborsim.machine.program import DemandInfo, SearchDemand
from arborsim.policies.base import Policy
from arborsim.run.controller import Meter
from arborsim.run.episode import Cell, play_episode
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind


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
    """The demand of each episode of a trace under one policy and budget.

    Parameters
    ----------
    trace : path
    policy, budget, machine
        What `arborsim.run.replay.Replay` would be given.
    first, count : int, int or None
        Which episodes.
    prefix, prefix_tokens : str, int
        Key and length of what these searches' prompts have in common ("" for nothing).

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


def record_demand(
    episode: Episode,
    policy: Policy,
    budget: Budget,
    machine: Machine,
    prefix: str = "",
    prefix_tokens: int = 0,
    trace: str = "",
    meters: Sequence[Meter] = (),
) -> tuple[SearchDemand, Measurements]:
    """The demand of one episode, and what its replay measured on an idle machine."""
    executor = machine.executor(policy, episode.info, record=True, prefix_tokens=prefix_tokens)
    played = play_episode(episode, Cell(policy, budget), executor, meters=meters)
    geometry, groups = machine.charged(episode.info), num_groups(policy, episode.info)
    verdicts = episode.correct[episode.kind == Kind.ANSWER]
    info = DemandInfo(
        trace, episode.index, policy.name, budget.text, machine.recall, geometry.name,
        geometry.kv_bytes_per_token, groups, policy.fused, prefix, prefix_tokens,
        int(verdicts[-1]) if len(verdicts) else -1,
    )  # fmt: skip
    return executor.demand(info), played.measured
