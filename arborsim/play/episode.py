"""Playing one recorded search under one policy and budget: what every run is made of.

`play_episode` is the one way to do so: replays, searches on banks and validation call it, each with
the executor and the meters that it needs.  `record_demand` keeps what the search asked of the
machine, for plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arborsim.core.events import Event
from arborsim.core.measurements import Measurements
from arborsim.core.observations import Signal
from arborsim.core.tiers import Budget
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.play.controller import Controller, Executor, Meter
from arborsim.play.meters import UNMEASURED, AttentionKept, OutputError, Quality
from arborsim.play.results import ANY
from arborsim.policies.base import Policy
from arborsim.trace.episode import Episode, play
from arborsim.trace.schema import Kind

if TYPE_CHECKING:
    from arborsim.machine.program import SearchDemand

#: Passes the events of a search on, and looks at its controller before and after each of them.
Watch = Callable[[Iterable[Event], Controller], Iterable[Event]]


@dataclass(frozen=True)
class Cell:
    """One policy under one budget."""

    policy: Policy
    budget: Budget


def cells_of(policies: Sequence[Policy], budgets: Sequence[Budget]) -> list[Cell]:
    """Every policy under every budget, after those that know no budget, once each."""
    free = [Cell(p, Budget(ANY, share=1.0)) for p in policies if not p.uses_budget]
    return free + [Cell(p, budget) for budget in budgets for p in policies if p.uses_budget]


@dataclass(frozen=True)
class Played:
    """One search, played to its end under one cell."""

    controller: Controller  # with the tree, the executor and the budget in tokens
    measured: Measurements
    #: NaN if they were not asked for, or nothing was generated, or why stands in `kept_note`
    attention_kept: float
    output_error: float
    kept_note: str = ""  #: why attention kept is not known: see `Quality.kept_note`

    @property
    def budget_tokens(self) -> int:
        return self.controller.budget_tokens


def play_episode(
    episode: Episode,
    cell: Cell,
    executor: Executor,
    *,
    quality: Quality = UNMEASURED,
    meters: Iterable[Meter] = (),
    watch: Watch | None = None,
) -> Played:
    """Play one search under one policy and budget, on a new executor, to its end.

    `episode` holds the observations that the policy and `quality` read.  A budget's share is one of
    this search's own tokens, prompt included.  Raises `BudgetInfeasible` if the budget cannot hold
    this search.
    """
    rows = quality.rows(cell.policy.grouping)
    kept = AttentionKept(rows) if rows is not None else None
    error = OutputError(cell.policy.formats) if quality.output_error else None
    budget_tokens = cell.budget.in_tokens(episode.num_tokens)
    geometry = episode.info.geometry
    controller = Controller(
        cell.policy,
        executor,
        budget_tokens=budget_tokens,
        layers=geometry.layers,
        vocabulary=geometry.vocab,
        shape=episode.info.cache_shape,
        meters=[meter for meter in (kept, error, *meters) if meter is not None],
    )
    events: Iterable[Event] = play(with_offline_optimum(cell.policy, episode, budget_tokens))
    controller.run(watch(events, controller) if watch else events)
    executor.finish()  # a recording that was cut off has no answer, whose event does it
    return Played(
        controller,
        executor.measurements(),
        kept.share if kept else math.nan,
        error.error if error else math.nan,
        quality.kept_note(cell.policy.grouping),
    )


def with_offline_optimum(policy: Policy, episode: Episode, budget_tokens: int) -> Episode:
    """The episode with what `policy` may know of its future under this budget, if anything."""
    if Signal.EVICTION_TIME not in policy.reads():
        return episode
    from arborsim.signals.offline import with_eviction_times

    protected = policy.protection(budget_tokens)
    prompt_tokens = int(np.count_nonzero(episode.kind == Kind.PREFILL))
    return with_eviction_times(
        episode, budget_tokens, protected.head(prompt_tokens), protected.recent, policy.grouping
    )


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
    executor = SimulatedExecutor.of(
        machine, policy, episode.info, record=True, prefix_tokens=prefix_tokens
    )
    played = play_episode(episode, Cell(policy, budget), executor, meters=meters)
    verdicts = episode.correct[episode.kind == Kind.ANSWER]
    demand = executor.demand(
        trace=trace,
        episode=episode.index,
        budget=budget.text,
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        solved=int(verdicts[-1]) if len(verdicts) else -1,
    )
    return demand, played.measured
