"""Replaying searches on the banks of a trace: every algorithm and width over every problem.

A problem's bank is read once and walked by all searches; each walk is replayed on the simulated
machine under every policy and budget.  Problems can be spread over processes; what comes out is
the same to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from arborsim.bank.arms import Arm
from arborsim.bank.bank import Bank, no_bank, unrewarded_scores
from arborsim.bank.results import SearchResult
from arborsim.bank.simulate import Simulated, simulate
from arborsim.bank.visited import visited
from arborsim.bank.walk import Walk, walk
from arborsim.core.errors import (
    ArborsimError,
    BudgetInfeasible,
    MissingSignal,
    TraceError,
    UsageError,
)
from arborsim.core.observations import Signal
from arborsim.core.workers import in_order
from arborsim.machine.machine import Machine
from arborsim.run.episode import Cell
from arborsim.trace.columns import floats_of
from arborsim.trace.reader import TraceReader


@dataclass(frozen=True)
class SearchUnit:
    """One problem, and what to run on it; can be pickled."""

    trace: Path
    episode: int
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    machine: Machine
    needs: tuple[Signal, ...]
    embeddings: bool
    quality: bool
    dedupe: bool
    skip_infeasible: bool


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
            if uses_embeddings(arm):
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
        inside = advance if self.workers == 1 else None
        run = partial(run_unit, advance=inside)
        for found, infeasible in in_order(run, self._units(reader), self.workers):
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

    def _units(self, reader: TraceReader) -> Iterator[SearchUnit]:
        read = {signal for cell in self.cells for signal in cell.policy.reads()}
        # Full retention keeps all attention: nothing to measure.
        measured = any(cell.policy.name != "full" for cell in self.cells)
        quality = self.quality and measured and reader.has(Signal.ATTENTION)
        needs = read | ({Signal.ATTENTION} if quality else set())
        for episode in self.chosen(reader):
            yield SearchUnit(
                self.trace,
                episode,
                tuple(self.arms),
                tuple(self.cells),
                self.machine,
                tuple(sorted(needs)),
                any(uses_embeddings(arm) for arm in self.arms),
                quality,
                self.dedupe,
                self.skip_infeasible,
            )


def open_bank(path: Path) -> TraceReader:
    """Open a trace that can be searched.

    Raises
    ------
    TraceError
        It does not say which thoughts ended.
    """
    reader = TraceReader(path)
    if "end" not in reader.columns or not reader.info.knows_ends:
        raise TraceError(no_bank(str(path)))
    return reader


def uses_embeddings(arm: Arm) -> bool:
    return bool(getattr(arm.make(), "uses_embeddings", False))


def require_embeddings(reader: TraceReader, arm: Arm) -> None:
    """Raises `MissingSignal` if the trace has no embeddings to cluster by."""
    if "embedding" not in reader.columns:
        raise MissingSignal(
            f"{arm.algorithm} clusters thoughts by embeddings, which {reader.path} does not hold: "
            "record it with --capture signals or --bank, or search with ets-kv"
        )


def read_bank(
    reader: TraceReader, episode: int, needs: Sequence[Signal] = (), embeddings: bool = False
) -> Bank:
    """The bank of one problem."""
    (found,) = reader.episodes(
        needs, text=True, embedding=embeddings, start=episode, stop=episode + 1
    )
    logprob = floats_of(reader.table(episode, ["logprob"])["logprob"])
    return Bank.of(found, unrewarded_scores(found, logprob))


def run_unit(
    unit: SearchUnit, advance: Callable[[str, int], None] | None = None
) -> tuple[list[SearchResult], list[Skipped]]:
    """All searches on one problem, under all policies and budgets; and what was left out."""
    bank = read_bank(TraceReader(unit.trace), unit.episode, unit.needs, unit.embeddings)
    # Nothing that is replayed needs words.
    bare = replace(bank.episode, text=None, answer=None, embedding=None, embedding_rows=None)
    found: list[SearchResult] = []
    skipped: list[Skipped] = []
    for arm in unit.arms:
        done = walk(arm.make(), bank, unit.dedupe)
        episode = visited(done, bare)
        for cell in unit.cells:
            try:
                simulated = simulate(episode, cell, unit.machine, unit.quality)
            except BudgetInfeasible as error:
                if unit.skip_infeasible:
                    skipped.append((cell, arm))
                    continue
                raise ArborsimError(
                    f"{unit.trace}, problem {unit.episode}, {arm.label} at width {arm.width}: "
                    f"{error}; --skip-infeasible leaves it out"
                ) from error
            geometry = unit.machine.geometry or episode.info.geometry
            found.append(_result(unit, arm, cell, done, geometry.kv_bytes_per_token, simulated))
            if advance:
                advance(f"{arm.label} {arm.width}", 1)
    return found, skipped


def _result(
    unit: SearchUnit, arm: Arm, cell: Cell, done: Walk, kv_bytes: int, simulated: Simulated
) -> SearchResult:
    return SearchResult(
        trace=unit.trace.name,
        episode=unit.episode,
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
