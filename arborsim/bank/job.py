"""Replaying searches on the banks of a trace: every algorithm and width over every problem.

A problem's bank is read once and walked by all searches; each walk is replayed on the simulated
machine under every policy and budget.  Problems can be spread over processes; what comes out is
the same to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from arborsim.bank.arms import Arm
from arborsim.bank.bank import open_bank, read_bank
from arborsim.bank.results import SearchResult, Simulated
from arborsim.bank.visited import visited
from arborsim.bank.walk import Walk, walk
from arborsim.core.errors import (
    ArborsimError,
    BudgetInfeasible,
    MissingSignal,
    UsageError,
)
from arborsim.core.events import Decode, Event, Prefill, Prune
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.core.workers import in_order
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.run.controller import Controller
from arborsim.run.episode import Cell, Watch, play_episode
from arborsim.run.meters import UNMEASURED, Quality
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader

#: A budget that was too small for a search.
Skipped = tuple[Cell, Arm]


@dataclass
class SearchJob:
    """What to run, and what came of it.

    Attributes
    ----------
    trace : Path
    arms : sequence of Arm
    cells : sequence of Cell
    machine : Machine
    quality : bool
        Measure the attention kept, where the trace holds attention.
    dedupe : bool
        Thoughts that repeat a complete sibling are dead.
    first, count : int, int or None
        Which problems.
    skip_infeasible : bool
        Leave out what a budget is too small for, instead of raising.
    workers : int
    results : list of SearchResult
        Of the problems that are done.
    infeasible : Counter
        Problems left out, by policy, budget and search.
    problems : int
        How many are done.
    """

    trace: Path
    arms: Sequence[Arm]
    cells: Sequence[Cell]
    machine: Machine
    quality: bool = True
    dedupe: bool = True
    first: int = 0
    count: int | None = None
    skip_infeasible: bool = False
    workers: int = 1
    results: list[SearchResult] = field(default_factory=list, init=False)
    infeasible: Counter[Skipped] = field(default_factory=Counter, init=False)
    problems: int = field(default=0, init=False)

    def open(self) -> TraceReader:
        """Open the trace, and check that it serves everything that was asked for."""
        reader = open_bank(self.trace)
        for arm in self.arms:
            if arm.uses_embeddings:
                require_embeddings(reader, arm)
        for cell in self.cells:
            reader.require(cell.policy.reads(), f"policy {cell.policy.name}")
        if not self.chosen(reader):
            raise UsageError(f"{self.trace}: no episode {self.first}; it has {reader.num_episodes}")
        return reader

    def chosen(self, reader: TraceReader) -> range:
        stop = None if self.count is None else self.first + self.count
        return range(reader.num_episodes)[self.first : stop]

    def work(self, reader: TraceReader) -> int:
        """Searches to replay, for a progress bar."""
        return len(self.chosen(reader)) * len(self.arms) * len(self.cells)

    def run(self, advance: Callable[[str, int], None] | None = None) -> list[SearchResult]:
        """Run everything; `advance(what, searches)` is called as work is done.

        What is done so far is in `results`, whole problems only, whatever ends the run.

        Returns
        -------
        list of SearchResult
            By arm, policy and budget, then by problem.
        """
        reader = self.open()
        # Without its results: they need not travel to other processes.
        run = partial(run_problem, replace(self), advance=advance if self.workers == 1 else None)
        for found, infeasible in in_order(run, self.chosen(reader), self.workers):
            self.results.extend(found)
            self.infeasible.update(infeasible)
            self.problems += 1
            if advance and self.workers > 1:
                advance(f"problem {self.first + self.problems - 1}", self._per_problem)
        return self.ordered()

    def notes(self) -> list[str]:
        """A line per policy and budget: the searches that it was too small for, and how often."""
        return [
            f"left out: {cell.policy.name} at budget {cell.budget.text} is too small for "
            + ", ".join(
                f"{arm.label} {arm.width} ({count} of {self.problems} problems)"
                for arm in self.arms
                if (count := self.infeasible[cell, arm])
            )
            for cell in self.cells
            if any(self.infeasible[cell, arm] for arm in self.arms)
        ]

    def ordered(self) -> list[SearchResult]:
        """What is done, by arm, policy and budget, then by problem."""
        arm = {(a.label, a.width): i for i, a in enumerate(self.arms)}
        cell = {(c.policy.name, c.budget.text): i for i, c in enumerate(self.cells)}
        return sorted(
            self.results,
            key=lambda r: (cell[r.policy, r.budget], arm[r.label, r.width], r.episode),
        )

    @property
    def _per_problem(self) -> int:
        return len(self.arms) * len(self.cells)

    def quality_of(self, reader: TraceReader) -> Quality:
        """Which quality figures are taken: full retention keeps all attention."""
        measured = self.quality and any(cell.policy.name != "full" for cell in self.cells)
        return Quality(attention_kept=measured and reader.has(Signal.ATTENTION))


def require_embeddings(reader: TraceReader, arm: Arm) -> None:
    """Raises `MissingSignal` if the trace has no embeddings to cluster by."""
    if "embedding" not in reader.columns:
        raise MissingSignal(
            f"{arm.algorithm} clusters thoughts by embeddings, which {reader.path} does not hold: "
            "record it with --capture signals or --bank, or search with ets-kv"
        )


def run_problem(
    job: SearchJob, number: int, advance: Callable[[str, int], None] | None = None
) -> tuple[list[SearchResult], list[Skipped]]:
    """All searches on one problem, under all policies and budgets; and what was left out."""
    reader = TraceReader(job.trace)
    quality = job.quality_of(reader)
    needs = quality.reads().union(*(cell.policy.reads() for cell in job.cells))
    embeddings = any(arm.uses_embeddings for arm in job.arms)
    bank = read_bank(reader, number, sorted(needs), embeddings)
    found: list[SearchResult] = []
    skipped: list[Skipped] = []
    for arm in job.arms:
        done = walk(arm.make(), bank, job.dedupe)
        episode = visited(done, bank.bare)
        for cell in job.cells:
            try:
                simulated = simulate(episode, cell, job.machine, quality=quality)
            except BudgetInfeasible as error:
                if job.skip_infeasible:
                    skipped.append((cell, arm))
                    continue
                raise ArborsimError(
                    f"{job.trace}, problem {number}, {arm.label} at width {arm.width}: "
                    f"{error}; --skip-infeasible leaves it out"
                ) from error
            kv_bytes = job.machine.charged(episode.info).kv_bytes_per_token
            found.append(_result(job, number, arm, cell, done, kv_bytes, simulated))
            if advance:
                advance(f"{arm.label} {arm.width}", 1)
    return found, skipped


def _result(
    job: SearchJob,
    number: int,
    arm: Arm,
    cell: Cell,
    done: Walk,
    kv_bytes: int,
    simulated: Simulated,
) -> SearchResult:
    return SearchResult(
        trace=job.trace.name,
        episode=number,
        algorithm=arm.algorithm,
        swept=arm.swept,
        width=arm.width,
        policy=cell.policy.name,
        budget=cell.budget.text,
        correct=done.correct,
        kv_tokens=done.kv_tokens,
        kv_tokens_with_prompt=done.kv_tokens_with_prompt,
        selections=done.selections,
        model_calls=done.model_calls,
        iterations=done.iterations,
        generated_tokens=done.generated_tokens,
        prompt_tokens=done.prompt_tokens,
        given_up=sum(len(step.dropped) for step in done.steps),
        bank_misses=done.bank_misses,
        kv_bytes_per_token=kv_bytes,
        simulated=simulated,
    )


def simulate(
    episode: Episode,
    cell: Cell,
    machine: Machine,
    *,
    quality: Quality = UNMEASURED,
    watch: Watch | None = None,
) -> Simulated:
    """Replay one episode under one policy and budget.

    Parameters
    ----------
    episode : Episode
        With the observations that the policy and `quality` read.
    cell : Cell
        A share of a budget is one of this search's own tokens.
    machine : Machine
    quality : Quality
    watch : callable, optional
        See `arborsim.run.episode.Watch`.

    Raises
    ------
    BudgetInfeasible
    """
    executor = machine.executor(cell.policy, episode.info)
    gauge = _ByteSeconds(executor, machine.charged(episode.info).kv_bytes_per_token)

    def watched(events: Iterable[Event], controller: Controller) -> Iterable[Event]:
        return gauge.watch(watch(events, controller) if watch else events, controller)

    played = play_episode(episode, cell, executor, quality=quality, watch=watched)
    return Simulated(
        played.measured,
        played.budget_tokens,
        played.attention_kept,
        gauge.hbm.total,
        gauge.peak_held_bytes,
        gauge.held.total,
    )


@dataclass
class _Integral:
    """Of bytes over time, by trapezoids."""

    total: float = 0.0
    _time_s: float = 0.0
    _bytes: int = 0

    def to(self, time_s: float, held_bytes: int) -> None:
        self.total += (time_s - self._time_s) * (self._bytes + held_bytes) / 2
        self._time_s, self._bytes = time_s, held_bytes


class _ByteSeconds:
    """Follows the bytes in HBM, and those of what the search has not given up."""

    def __init__(self, executor: SimulatedExecutor, kv_bytes_per_token: float) -> None:
        self._executor = executor
        self._per_token = int(kv_bytes_per_token)
        self._tokens = 0
        self.hbm, self.held = _Integral(), _Integral()
        self.peak_held_bytes = 0

    def watch(self, events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        for event in events:
            yield event
            self._take(event, controller.tree)

    def _take(self, event: Event, tree: ThoughtTree) -> None:
        match event:
            case Prefill(run) | Decode(run):
                self._tokens += run.num_tokens
            case Prune(node):
                self._tokens -= tree.num_node_tokens(node)
        held = self._tokens * self._per_token
        self.peak_held_bytes = max(self.peak_held_bytes, held)
        time_s, executor = self._executor.clock(), self._executor
        self.held.to(time_s, held)
        self.hbm.to(time_s, executor.ledger.hbm_page_bytes + executor.staging_bytes)
