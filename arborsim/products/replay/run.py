"""Replaying recorded searches: every policy and budget over every episode of every trace.

An episode is read once and played to one controller and one simulated executor per policy and
budget (`arborsim.play.episode`), so memory does not grow with the number of episodes.  Episodes
can be spread over processes. What comes out is the same to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from arborsim.core.errors import ArborsimError, BudgetInfeasible, UsageError
from arborsim.core.observations import Signal
from arborsim.core.tiers import Budget
from arborsim.core.workers import in_order
from arborsim.machine.executor import SimulatedExecutor, not_recordable
from arborsim.machine.machine import Machine, unsuited
from arborsim.machine.numbers import assumed_numbers
from arborsim.machine.program import SearchDemand
from arborsim.machine.serving import FullGpu, full_gpu
from arborsim.play import served
from arborsim.play.cautions import acts, assumed_policy_time, does_not_fit
from arborsim.play.episode import Cell, cells_of, play_episode
from arborsim.play.meters import UNMEASURED, Quality
from arborsim.play.pictures import TokenMap, TokenMapper, TreeFilm, TreePicture
from arborsim.play.results import (
    ORACLES,
    EpisodeResult,
    EqualBudget,
    LeftOut,
    NothingRan,
    ReplayResult,
    at_budget,
)
from arborsim.policies.base import Policy
from arborsim.policies.registry import values_of
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader, open_trace
from arborsim.trace.schema import Geometry, recording_options

_BELOW = ("core", "trace", "signals", "memory", "policies", "searches", "machine", "play")
#: The sources that a replay's figures depend on.
SOURCES = tuple(
    f"arborsim/{each}" for each in (*_BELOW, "products/replay/run.py", "products/replay/equal.py")
)
#: Searches of each trace that a GPU is filled with, at most.
FILLED = 8
#: An episode of a trace, and what to replay it under.
Unit = tuple[Path, int, list[Cell]]


@dataclass(frozen=True)
class Fixed:
    """Budgets found for each policy, and what goes into the result (`replay.equal`)."""

    cells: dict[str, list[Cell]]  # by the name of the trace
    equal: tuple[EqualBudget, ...]
    left_out: tuple[LeftOut, ...]
    note: str


@dataclass
class Replay:
    """The traces, policies and machine of a replay."""

    traces: Sequence[Path]
    policies: Sequence[Policy]
    budgets: Sequence[Budget]
    machine: Machine
    #: Measure the attention kept where the trace holds attention (reads its largest column), and
    #: the output error where it holds vectors
    quality: bool = True
    #: Which episodes of each trace; None for all that follow
    first: int = 0
    count: int | None = None
    step: int = 1  # 2 for every second one
    pictures: bool = False  # take pictures of each trace's first episode, for the report
    #: Names of the policies that the user asked for; None for all.  What cannot run, because a
    #: trace lacks what it reads or a budget is too small, is left out with its reason in the
    #: result, but some of these must run.
    asked: frozenset[str] | None = None
    strict: bool = False  # each of these must run, everywhere
    fixed: Fixed | None = None  # what to play in place of every policy under every budget
    workers: int = 1  # processes that share the episodes
    fills: bool = False  # also fill a GPU with the first searches of each trace
    settings: dict[str, str] = field(default_factory=dict)  # shown in the report's appendix

    def open(self) -> list[TraceReader]:
        """Open every trace and check that it serves what must run, before any work is done."""
        readers = [open_trace(path) for path in self.traces]
        for reader in readers:
            if not self.chosen(reader):
                raise UsageError(
                    f"{reader.path}: no episode {self.first}; it holds {reader.num_episodes}"
                )
        asked = [
            (policy, reader)
            for reader in readers
            for policy in self.policies
            if self.asks_for(policy)
        ]
        if self.strict or not any(self._serves(*each) for each in asked):
            for policy, reader in asked:
                served.require(policy, reader)
                if why := self._unsuited(policy, reader):
                    raise UsageError(why)
        return readers

    def asks_for(self, policy: Policy) -> bool:
        """Whether the user asked for a policy, which is then no mere reference."""
        return self.asked is None or policy.name in self.asked

    def chosen(self, reader: TraceReader) -> range:
        """Episodes of a trace that are replayed."""
        stop = None if self.count is None else self.first + self.count
        return range(reader.num_episodes)[self.first : stop : self.step]

    def name_of(self, reader: TraceReader) -> str:
        """The trace's name in results: its file name, if no other one is called that."""
        same = [path for path in self.traces if path.name == reader.path.name]
        return reader.path.name if len(same) == 1 else str(reader.path)

    def cells(self, reader: TraceReader) -> list[Cell]:
        """Budgets x the policies that a trace serves. Those that ignore budgets are played once."""
        if self.fixed is not None:
            return self.fixed.cells[self.name_of(reader)]
        return cells_of([p for p in self.policies if self._serves(p, reader)], self.budgets)

    def _serves(self, policy: Policy, reader: TraceReader) -> bool:
        return not served.missing(policy, reader) and not self._unsuited(policy, reader)

    def _unsuited(self, policy: Policy, reader: TraceReader) -> str:
        geometry = self.machine.geometry or reader.info.geometry
        return unsuited(policy, geometry, self.machine)

    def _left_out(self, reader: TraceReader) -> Iterator[LeftOut]:
        """A note for every policy that the trace cannot serve, then for those unsuited here."""
        name = self.name_of(reader)
        able = []
        for policy in self.policies:
            if missing := served.missing(policy, reader):
                yield _lacking(policy, missing, reader, name)
            else:
                able.append(policy)
        for policy in able:
            if why := self._unsuited(policy, reader):
                yield LeftOut(name, policy.label, detail=why, reason=why, unsuited=True)

    def _cautions(
        self, results: Sequence[EpisodeResult], readers: Sequence[TraceReader]
    ) -> Iterator[str]:
        """Cautions about the figures."""
        if self.fixed is not None:
            yield self.fixed.note
        yield from assumed_policy_time(
            (r.policy for r in results if acts(r.measured) and r.policy not in ORACLES),
            self.machine.profile,
        )
        yield from _unknown_attention(results, readers)
        in_ddr = any(result.measured.peak_ddr_bytes for result in results)
        if self.machine.recall == "ondemand" and in_ddr:
            yield (
                "recall ondemand reads only some pages of what is in DDR: attention kept and "
                "output error count all of it as read."
            )
        if not any(reader.info.attention == "sparse" for reader in readers):
            return
        for policy in self.policies:
            if any(score.blurred for score in policy.scores().values()):
                yield (
                    f"{policy.name}: where attention was recorded sparsely, all tokens but the "
                    "strongest of a row share one value, which is often its median; nearly every "
                    "token then counts as used."
                )

    def work(self, readers: Iterable[TraceReader]) -> int:
        """Rows to replay, for a progress bar."""
        return sum(
            len(self.cells(reader)) * sum(map(reader.num_rows, self.chosen(reader)))
            for reader in readers
        )

    def run(self, advance: Callable[[str, int], None] | None = None) -> ReplayResult:
        """Replay everything. `advance(what, rows)` is called as work is done."""
        readers = self.open()
        left_out = [lack for reader in readers for lack in self._left_out(reader)]
        left_out += self.fixed.left_out if self.fixed else ()
        infeasible: dict[tuple[str, str, str], LeftOut] = {}
        outcomes: list[Outcome] = []
        needed = {
            _key(self.name_of(reader), cell)
            for reader in readers
            for cell in self.cells(reader)
            if self.asks_for(cell.policy)
        }
        units = self._units(readers, infeasible)
        play = partial(play_unit, self, advance=advance if self.workers == 1 else None)
        for found in in_order(play, units, self.workers):
            for outcome in found:
                if outcome.infeasible:
                    self._note(outcome, infeasible)
                    if needed and needed <= infeasible.keys():
                        first = next(each for key, each in infeasible.items() if key in needed)
                        raise NothingRan(first.detail, first.reason)
                outcomes.append(outcome)
                if advance and self.workers > 1:
                    advance(outcome.trace, outcome.rows)
        kept = [o for o in outcomes if _key(o.trace, o.cell) not in infeasible]
        demands: dict[tuple[str, str, str], list[SearchDemand]] = {}
        for o in kept:
            if o.demand is not None:
                demands.setdefault(_key(o.trace, o.cell), []).append(o.demand)
        full = {}
        geometries = {self.name_of(r): self.machine.charged(r.info) for r in readers}
        fillings = [Filling(key, tuple(own), geometries[key[0]]) for key, own in demands.items()]
        for key, found_full in in_order(partial(_fill, self), fillings, self.workers):
            if found_full is not None:
                full[key] = found_full
            if advance:
                advance("filling the GPU", 0)
        results = tuple(o.result for o in kept if o.result)
        profile = self.machine.profile
        ran = ((r.trace, at_budget(r.policy, r.budget), r.measured) for r in results)
        return ReplayResult(
            results,
            tuple(o.picture for o in kept if o.picture),
            self.settings,
            assumed_numbers(profile),
            (*left_out, *infeasible.values()),
            tuple(o.token_map for o in kept if o.token_map),
            tuple(dict.fromkeys(self._cautions(results, readers))),
            tuple(does_not_fit(ran, profile.name)),
            {self.name_of(reader): reader.info.recording for reader in readers},
            {policy.label: values_of(policy) for policy in self.policies},
            equal=self.fixed.equal if self.fixed else (),
            full=full,
            asked=tuple(p.label for p in self.policies if self.asks_for(p)),
        )

    def _units(
        self, readers: Iterable[TraceReader], infeasible: dict[tuple[str, str, str], LeftOut]
    ) -> Iterator[Unit]:
        """One per episode. Cells that turned out to be infeasible meanwhile are not in it."""
        for reader in readers:
            name, cells = self.name_of(reader), self.cells(reader)
            for episode in self.chosen(reader):
                yield reader.path, episode, [c for c in cells if _key(name, c) not in infeasible]

    def _note(self, outcome: Outcome, infeasible: dict[tuple[str, str, str], LeftOut]) -> None:
        """Leave a cell out, or raise if it must run."""
        assert outcome.infeasible is not None
        cell, needed = outcome.cell, outcome.infeasible.needed_tokens
        # It is known for this point of the search and for this budget: later tokens, and floors
        # that are a share of the budget, can need more.
        least = ""
        if needed <= outcome.tokens:
            share = math.ceil(100 * needed / outcome.tokens) / 100
            least = f"{needed}" if cell.budget.share is None else f"{share:g}"
        remedy = (
            f"it needs at least --budget {least}, and can need more as the search or the budget "
            "grows"
            if least
            else "no budget below full retention does"
        )
        pinned = any(
            name.endswith("pin_prompt") and on for name, on in values_of(cell.policy).items()
        )
        if pinned:
            remedy += f"; --set {cell.policy.name}.pin_prompt=false lets the prompt compete"
        located = f"{outcome.trace}, episode {outcome.episode}: {outcome.infeasible}; {remedy}"
        if self.strict and self.asks_for(cell.policy):
            raise ArborsimError(f"{located}; without --strict it is left out")
        too_small = outcome.infeasible
        enough = f"needs {least} or more" if least else "no budget is enough"
        infeasible.setdefault(
            _key(outcome.trace, cell),
            LeftOut(
                outcome.trace,
                cell.policy.label,
                cell.budget.text,
                least=least,
                detail=located,
                instead="pin_prompt=false" if pinned else "",
                reason=f"{enough}: {too_small.made_of} = {too_small.needed_tokens} tokens, not "
                f"{too_small.budget_tokens}",
            ),
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one cell: a result (with pictures if asked for), or an infeasible budget."""

    trace: str
    episode: int
    #: Of the episode
    rows: int
    tokens: int
    cell: Cell
    result: EpisodeResult | None = None
    picture: TreePicture | None = None
    token_map: TokenMap | None = None
    infeasible: BudgetInfeasible | None = None
    demand: SearchDemand | None = None  # of the first searches, to fill a GPU with


def play_unit(
    replay: Replay, unit: Unit, advance: Callable[[str, int], None] | None = None
) -> list[Outcome]:
    """Play an episode under each of its cells, in their order.

    `advance` is called with what was done and its number of rows, after each cell.
    """
    path, number, cells = unit
    reader = open_trace(path)
    name = replay.name_of(reader)
    quality = Quality.of(reader) if replay.quality else UNMEASURED
    needs = quality.reads(cell.policy.grouping for cell in cells).union(
        *(cell.policy.reads() for cell in cells)
    )
    (episode,) = reader.episodes(tuple(sorted(needs)), start=number, stop=number + 1)
    chosen = replay.chosen(reader)
    pictures = replay.pictures and number == chosen.start
    fills = replay.fills and number in chosen[:FILLED]
    outcomes = []
    for cell in cells:
        nothing = Outcome(name, number, episode.num_rows, episode.num_tokens, cell)
        try:
            outcomes.append(_play(nothing, episode, replay.machine, quality, pictures, fills))
        except BudgetInfeasible as error:
            outcomes.append(replace(nothing, infeasible=error))
        if advance:
            advance(f"{name} {cell.policy.label}", episode.num_rows)
    return outcomes


def _play(
    outcome: Outcome,
    episode: Episode,
    machine: Machine,
    quality: Quality,
    pictures: bool,
    fills: bool,
) -> Outcome:
    """Fill in the outcome of its cell."""
    cell = outcome.cell
    fills = fills and not not_recordable(machine.charged(episode.info), machine.recall)
    executor = SimulatedExecutor.of(machine, cell.policy, episode.info, record=fills)
    film = TreeFilm.of(episode) if pictures else None
    mapper = TokenMapper.of(episode) if pictures else None
    played = play_episode(
        episode,
        cell,
        executor,
        quality=quality,
        meters=[mapper] if mapper else (),
        watch=film.watch if film else None,
    )
    result = EpisodeResult(
        outcome.trace,
        episode.index,
        cell.policy.label,
        cell.budget.text,
        played.budget_tokens,
        played.measured,
        played.attention_kept,
        machine.charged(episode.info).kv_bytes_per_token,
        played.output_error,
        cell.policy.bounded,
        executor.terms(),
        cell.policy.grouping,
        played.kept_note,
    ).simulated()
    if fills:
        outcome = replace(outcome, demand=executor.demand(trace=outcome.trace))
    if film is None or mapper is None:
        return replace(outcome, result=result)
    where = (cell.policy.label, cell.budget.text, outcome.trace, episode.index)
    cells = mapper.finish(executor.tier)
    return replace(
        outcome,
        result=result,
        picture=TreePicture(*where, *film.finish(played.controller.tree)),
        token_map=TokenMap(*where, mapper.first_tokens, mapper.iterations, cells),
    )


@dataclass(frozen=True)
class Filling:
    """The searches that fill a GPU."""

    cell: tuple[str, str, str]
    demands: tuple[SearchDemand, ...]
    geometry: Geometry


def _fill(replay: Replay, what: Filling) -> tuple[tuple[str, str, str], FullGpu | None]:
    return what.cell, full_gpu(what.demands, replay.machine.profile, what.geometry)


def _key(trace: str, cell: Cell) -> tuple[str, str, str]:
    return trace, cell.policy.label, cell.budget.text


def _lacking(policy: Policy, missing: Sequence[Signal], reader: TraceReader, trace: str) -> LeftOut:
    """A note on a policy that reads what the trace has not."""
    options = " ".join(recording_options(missing, reader.info))
    unrecorded, instead = reader.info.unrecorded, served.instead(policy, reader)
    detail = f"reads {' and '.join(missing)}: {served.remedy(missing, reader)}"
    if instead:
        detail += f", or --set {instead}: {served.MEANING}"
    return LeftOut(
        trace,
        policy.label,
        remedy=options,
        detail=detail,
        instead=instead,
        reason=detail,
        unrecorded=unrecorded,
    )


def _unknown_attention(
    results: Iterable[EpisodeResult], readers: Iterable[TraceReader]
) -> Iterator[str]:
    """A line on policies whose attention kept the traces do not tell, and what would supply it."""
    policies: dict[str, dict[str, None]] = {}  # note -> policies
    for result in results:
        if result.kept_note:
            policies.setdefault(result.kept_note, {})[result.policy] = None
    for note, named in policies.items():
        remedies = dict.fromkeys(
            served.remedy([Signal.HEAD_ATTENTION], reader)
            for reader in readers
            if not reader.has(Signal.HEAD_ATTENTION)
        )
        yield f"Attention kept of {', '.join(named)} is {note}: {'; '.join(remedies)}."
