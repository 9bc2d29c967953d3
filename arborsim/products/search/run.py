"""Replaying searches on the banks of a trace: every algorithm and width over every problem.

A problem's bank is read once and walked by all searches. Each walk is replayed on the simulated
machine under every policy and budget.  Problems can be spread over processes. What comes out is
the same to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from arborsim.core.errors import (
    ArborsimError,
    BudgetInfeasible,
    MissingSignal,
    UnknownName,
    UsageError,
    more_room,
)
from arborsim.core.events import Decode, Event, Prefill, Prune
from arborsim.core.workers import in_order
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.play import served
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell, Watch, play_episode
from arborsim.play.meters import UNMEASURED, Quality
from arborsim.play.results import LeftOut
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, find, parameter_name, parameters
from arborsim.products.replay.words import left_out
from arborsim.products.search.results import OPTION, SearchResult, Simulated, SkippedSearch
from arborsim.searches import search_options
from arborsim.searches.arms import (
    REFERENCE,
    Arm,
    Sweep,
    arms_of,
    chosen_algorithms,
    split_settings,
)
from arborsim.searches.bank import open_bank, read_bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import walk
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader, open_trace
from arborsim.trace.schema import recording_options

_OF_WALK = (
    "correct",
    "kv_tokens",
    "kv_tokens_with_prompt",
    "selections",
    "model_calls",
    "iterations",
    "generated_tokens",
    "prompt_tokens",
    "bank_misses",
)


@dataclass
class SearchJob:
    """The searches to run, and their results."""

    trace: Path
    arms: Sequence[Arm]
    cells: Sequence[Cell]
    machine: Machine
    quality: bool = True  #: measure the attention kept, where the trace holds attention
    dedupe: bool = True  #: thoughts that repeat a complete sibling are dead
    #: Which problems.
    first: int = 0
    count: int | None = None
    strict: bool = False  #: raise where a budget is too small, in place of leaving that out
    workers: int = 1
    #: Of the problems that are done.
    results: list[SearchResult] = field(default_factory=list, init=False)
    #: What a budget was too small for, in the problems that are done.
    skipped: list[SkippedSearch] = field(default_factory=list, init=False)
    problems: int = field(default=0, init=False)  #: how many are done

    def open(self) -> TraceReader:
        """Open the trace, and check that it serves everything that was asked for."""
        reader = open_bank(self.trace)
        for arm in self.arms:
            require_embeddings(reader, arm)
        for cell in self.cells:
            served.require(cell.policy, reader)
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
        """Run everything. `advance(what, searches)` is called as work is done.

        What is done so far is in `results`, whole problems only, whatever ends the run.
        """
        reader = self.open()
        # Without its results: they need not travel to other processes.
        run = partial(run_problem, replace(self), advance=advance if self.workers == 1 else None)
        for found, skipped in in_order(run, self.chosen(reader), self.workers):
            self.results.extend(found)
            self.skipped.extend(skipped)
            self.problems += 1
            if advance and self.workers > 1:
                done = len(self.arms) * len(self.cells)
                advance(f"problem {self.first + self.problems - 1}", done)
        if self.skipped and not self.results:
            first = self.skipped[0]
            raise ArborsimError(
                f"{self.trace}, problem {first.episode}, {first.label} at width {first.width}: "
                f"budget {first.budget} is infeasible for {first.policy}, which {first.left_out}; "
                + more_room([first.left_out])
            )
        return self.ordered()

    def notes(self) -> list[str]:
        """A line per policy and budget: the searches that it was too small for, and how often.

        Those that no problem leaves anything of have a row (`rows_of`), and no line.
        """
        ran = {(r.label, r.width, r.policy, r.budget) for r in self.results}
        keys = ((s.label, s.width, s.policy, s.budget) for s in self.skipped)
        some = Counter(key for key in keys if key in ran)
        return [
            f"left out: {cell.policy.name} at budget {cell.budget.text} is too small for "
            + ", ".join(
                f"{arm.label} {arm.width} ({count} of {self.problems} problems)"
                for arm in self.arms
                if (count := some[arm.label, arm.width, cell.policy.name, cell.budget.text])
            )
            for cell in self.cells
            if any((cell.policy.name, cell.budget.text) == key[2:] for key in some)
        ]

    def ordered(self) -> list[SearchResult]:
        """Finished searches, by arm, policy and budget, then by problem."""
        arm = {(a.label, a.width): i for i, a in enumerate(self.arms)}
        cell = {(c.policy.name, c.budget.text): i for i, c in enumerate(self.cells)}
        return sorted(
            self.results,
            key=lambda r: (cell[r.policy, r.budget], arm[r.label, r.width], r.episode),
        )


def require_embeddings(reader: TraceReader, arm: Arm) -> None:
    """Raises `MissingSignal` if the search clusters by embeddings that the trace does not hold."""
    if arm.uses_embeddings and "embedding" not in reader.columns:
        raise MissingSignal(
            f"{arm.name} clusters thoughts by embeddings, which {reader.path} does not hold: "
            "record it with --capture signals or --bank, or search with ets-kv"
        )


def run_problem(
    job: SearchJob, number: int, advance: Callable[[str, int], None] | None = None
) -> tuple[list[SearchResult], list[SkippedSearch]]:
    """All searches on one problem, under all policies and budgets, and what was left out."""
    reader = open_trace(job.trace)
    lossy = any(cell.policy.name != "full" for cell in job.cells)  # full keeps all attention
    quality = Quality.of(reader, output_error=False) if job.quality and lossy else UNMEASURED
    needs = quality.reads(cell.policy.grouping for cell in job.cells).union(
        *(cell.policy.reads() for cell in job.cells)
    )
    embeddings = any(arm.uses_embeddings for arm in job.arms)
    bank = read_bank(reader, number, sorted(needs), embeddings)
    found: list[SearchResult] = []
    skipped: list[SkippedSearch] = []
    for arm in job.arms:
        done = walk(arm.make(), bank, job.dedupe)
        episode = visited(done, bank.bare)
        for cell in job.cells:
            try:
                simulated = simulate(episode, cell, job.machine, quality=quality)
            except BudgetInfeasible as error:
                if not job.strict:
                    skipped.append(
                        SkippedSearch(
                            job.trace.name,
                            number,
                            arm.name,
                            arm.swept,
                            arm.width,
                            cell.policy.name,
                            cell.budget.text,
                            f"needs {error.needed_tokens} tokens or more: "
                            f"{error.made_of}, not {error.budget_tokens}",
                        )
                    )
                    continue
                raise ArborsimError(
                    f"{job.trace}, problem {number}, {arm.label} at width {arm.width}: "
                    f"{error}; without --strict it is left out"
                ) from error
            found.append(
                SearchResult(
                    job.trace.name,
                    number,
                    arm.name,
                    arm.swept,
                    arm.width,
                    cell.policy.name,
                    cell.budget.text,
                    **{name: getattr(done, name) for name in _OF_WALK},
                    given_up=sum(len(step.dropped) for step in done.steps),
                    kv_bytes_per_token=job.machine.charged(episode.info).kv_bytes_per_token,
                    simulated=simulated,
                    by_levels=arm.kind.by_levels,
                )
            )
            if advance:
                advance(f"{arm.label} {arm.width}", 1)
    return found, skipped


def simulate(
    episode: Episode,
    cell: Cell,
    machine: Machine,
    *,
    quality: Quality = UNMEASURED,
    watch: Watch | None = None,
) -> Simulated:
    """Replay one episode, with what the policy and `quality` read, under one policy and budget.

    A share of a budget is one of this search's own tokens.
    """
    executor = SimulatedExecutor.of(machine, cell.policy, episode.info)
    token_bytes = int(machine.charged(episode.info).kv_bytes_per_token)
    # Seconds, bytes in HBM, and bytes of what the search has not given up, after each event.
    moments = [(0.0, 0, 0)]

    def watched(events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        tokens = 0
        for event in watch(events, controller) if watch else events:
            yield event
            match event:
                case Prefill(run) | Decode(run):
                    tokens += run.num_tokens
                case Prune(node):
                    tokens -= controller.tree.num_node_tokens(node)
            hbm_bytes = executor.ledger.hbm_page_bytes + executor.staging_bytes
            moments.append((executor.clock(), hbm_bytes, tokens * token_bytes))

    played = play_episode(episode, cell, executor, quality=quality, watch=watched)
    seconds, in_hbm, held = np.array(moments).T
    return Simulated(
        played.measured,
        played.budget_tokens,
        played.attention_kept,
        _integral(seconds, in_hbm),
        int(held.max()),
        _integral(seconds, held),
        played.kept_note,
    )


def _integral(seconds: np.ndarray, values: np.ndarray) -> float:
    """By trapezoids, added one by one: the same bits everywhere."""
    areas = np.diff(seconds) * (values[:-1] + values[1:]) / 2
    return float(areas.cumsum()[-1])


def chosen_arms(
    algorithms: Sequence[str], widths: Sequence[int], sweep: str, given: Iterable[str]
) -> tuple[list[Arm], list[str], list[str]]:
    """The searches, the settings that are left for policies, and what is left out and why."""
    chosen = chosen_algorithms(algorithms)
    swept = Sweep.parse(sweep, chosen) if sweep else None
    if swept is not None and swept.option == OPTION and REFERENCE not in chosen:
        chosen = [REFERENCE, *chosen]  # what the values are compared with
    options, rest = split_settings(chosen, given)
    found: list[Arm] = []
    left_out: list[str] = []
    for width, algorithm in product(widths, chosen):
        try:
            found += _arms(algorithm, width, options[algorithm], swept)
        except UsageError as error:
            if "all" not in algorithms:
                raise
            left_out.append(f"left out: {error}")
    return sorted(dict.fromkeys(found), key=lambda arm: arm.width), rest, left_out


def _arms(algorithm: str, width: int, given: dict[str, str], swept: Sweep | None) -> list[Arm]:
    """A search at one width, once for each value of a sweep of one of its options."""
    if swept is None or swept.option not in search_options(algorithm):
        return arms_of(algorithm, [width], given)
    option, found = swept.option, []
    for value in swept.values:
        found += arms_of(algorithm, [width], {**given, option: value}, f"{option}={value}")
    return found


def must_be_known(rest: Iterable[str], algorithms: Sequence[str], policies: Sequence[str]) -> None:
    """Refuse a setting that no chosen search or policy has."""
    known = {name for a in algorithms for name in search_options(a)}
    kinds = [find(policy) for policy in policies]
    own = {name for kind in kinds for name in parameters(kind)}
    for setting in rest:
        key = setting.partition("=")[0]
        head = key.partition(".")[0]
        has = any(parameter_name(kind, key) for kind in kinds)
        if not has and head not in available() and head not in policies:
            raise UnknownName("setting of the chosen searches and policies", key, known | own)


def check_fits(machine: Machine) -> None:
    """Refuse a model whose weights alone exceed the GPU."""
    geometry, profile = machine.geometry, machine.profile
    if geometry is not None and geometry.weight_bytes > profile.usable_hbm_bytes:
        raise UsageError(
            f"--model {geometry.name}: its weights are {geometry.weight_bytes / 1e9:.1f} GB, and "
            f"{profile.name} has {profile.usable_hbm_bytes / 1e9:.1f} GB that can be used: choose "
            "a larger --gpu or a smaller --model"
        )


def served_arms(
    reader: TraceReader, arms: Sequence[Arm], *, optional: bool
) -> tuple[list[Arm], list[str]]:
    """The searches that the bank can serve, and why the others are left out if optional."""
    kept, errors = [], []
    for arm in arms:
        try:
            require_embeddings(reader, arm)
            kept.append(arm)
        except MissingSignal as error:
            errors.append(error)
    if errors and not (optional and kept):
        raise errors[0]
    return kept, [f"left out: {error}" for error in errors]


def served_policies(
    reader: TraceReader, policies: Sequence[Policy], *, optional: bool
) -> tuple[list[Policy], list[str]]:
    """The policies that the bank can serve, and why the others are left out if optional."""
    kept = [each for each in policies if not served.missing(each, reader)]
    unserved = [each for each in policies if served.missing(each, reader)]
    if unserved and not (optional and kept):
        served.require(unserved[0], reader)
    name, info = reader.path.name, reader.info
    return kept, left_out(
        LeftOut(
            name,
            each.name,
            remedy=" ".join(recording_options(served.missing(each, reader), info)),
            unrecorded=info.unrecorded,
        )
        for each in unserved
    )
