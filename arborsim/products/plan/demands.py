"""Demands of a workload's searches, under each way to keep the cache.

A policy knows no clock, so a search is replayed once under a policy, budget and recall mode, and
its demand then serves all GPUs, loads and seeds.  Only what DDR transfers find in flight depends on
the machine: policies that use DDR are recorded once per GPU and host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.machine import Machine, unsuited
from arborsim.machine.program import LEG_COLUMNS, LINEAR, PIECE_COLUMNS, Op, SearchDemand
from arborsim.memory.moves import Moves
from arborsim.play.controller import Meter
from arborsim.play.episode import record_demand
from arborsim.play.meters import AttentionKept
from arborsim.play.meters import Quality as Figures
from arborsim.products.plan.results import Quality
from arborsim.products.plan.statistics import Estimate, Solved, solved_share
from arborsim.products.plan.workload import Candidate, MixEntry, Workload
from arborsim.trace.decode import checked_lists
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader, open_trace
from arborsim.trace.schema import Kind
from arborsim.trace.validate import Where

_ALL = Budget("-", share=1.0)


@dataclass(frozen=True)
class RecordedSearch:
    """One search under one candidate: its demand, and what the replay measured."""

    demand: SearchDemand
    quality: Quality


@dataclass(frozen=True)
class MixDemands:
    """Everything that candidates of one policy, budget and recall mode are served from."""

    #: Entry of the mix and episode of each recorded search, sorted.
    origins: tuple[tuple[int, int], ...]
    recorded: tuple[RecordedSearch, ...]  #: in the order of `origins`; shorter if `infeasible`
    infeasible: str = ""  #: why the policy cannot keep some search; "" if it can keep all

    @property
    def demands(self) -> list[SearchDemand]:
        return [each.demand for each in self.recorded]

    @property
    def verdicts(self) -> list[tuple[int, int]]:
        """Entry of the mix and verdict (`Facts.solved`) of each search."""
        pairs = zip(self.origins, self.recorded, strict=True)
        return [(entry, each.demand.info.solved) for (entry, _), each in pairs]

    def numbers(self, draws: np.ndarray) -> np.ndarray:
        """Which of the demands each drawn search (`Workload.draws`) is; int64 ``[n]``."""
        at = {origin: number for number, origin in enumerate(self.origins)}
        return np.array([at[entry, episode] for entry, episode in draws.tolist()], dtype=np.int64)

    def quality(self, weights: np.ndarray) -> Quality:
        """Means over the searches, weighted by how often each is drawn (float64 ``[origins]``)."""

        def mean(name: str) -> Any:
            values = [getattr(each.quality, name) for each in self.recorded]
            found = float(weights @ np.array(values, dtype=np.float64) / weights.sum())
            return None if math.isnan(found) else found  # some search does not know it

        notes = [each.quality.kept_note for each in self.recorded]
        means = {each.name: mean(each.name) for each in fields(Quality) if each.name != "kept_note"}
        return Quality(**means, kept_note=next(filter(None, notes), ""))


def drawn(workload: Workload) -> tuple[tuple[int, int], ...]:
    """Every (entry, episode) that some run serves, once, sorted."""
    draws = np.concatenate([workload.served(s, workload.searches) for s in workload.seeds()])
    return tuple(sorted({(entry, episode) for entry, episode in draws.tolist()}))


class Facts(NamedTuple):
    """Facts of a trace about one search, whatever its policy."""

    entry: int  #: of the mix
    prompt_tokens: int
    solved: int  #: 1 or 0 for a correct or wrong answer, -1 without a verdict


def recorded_facts(workload: Workload, traces: Sequence[Path]) -> list[Facts]:
    """Facts about each drawn search, from the traces of the mix (`Workload.write_traces`)."""
    readers = [open_trace(trace) for trace in traces]
    found = []
    for entry, number in drawn(workload):
        (episode,) = readers[entry].episodes((), start=number, stop=number + 1)
        verdicts = episode.correct[episode.kind == Kind.ANSWER]
        prompt = int((episode.kind == Kind.PREFILL).sum())
        found.append(Facts(entry, prompt, int(verdicts[-1]) if len(verdicts) else -1))
    return found


def solved_by_entry(workload: Workload, verdicts: Iterable[tuple[int, int]]) -> list[Solved]:
    """Right answers by entry of the mix, from entry and verdict (`Facts.solved`) of searches.

    Verdicts on generated searches are drawn with the stated share: that share itself counts.
    """
    right, judged = [0] * len(workload.mix), [0] * len(workload.mix)
    for entry, verdict in verdicts:
        judged[entry] += verdict >= 0
        right[entry] += verdict == 1
    counts = zip(workload.mix, right, judged, strict=True)
    return [
        Solved(n, of) if (share := stated_share(entry)) is None else Solved(stated=share)
        for entry, n, of in counts
    ]


def solved(workload: Workload, verdicts: Iterable[tuple[int, int]]) -> Estimate | None:
    """Share of the mix's searches with a correct answer, from each one's entry and verdict."""
    weights = [entry.weight for entry in workload.mix]
    return solved_share(weights, solved_by_entry(workload, verdicts))


def origin_of(solved: Iterable[Solved]) -> str:
    """``"stated"``, ``"recorded"`` or ``"stated and recorded"``; "" where nothing is known."""
    kinds = {"recorded" if each.stated is None else "stated" for each in solved if each.known}
    return " and ".join(sorted(kinds, reverse=True))


def stated_share(entry: MixEntry) -> float | None:
    """Share of solved searches that was stated for generated ones; None for recorded ones.

    Traces that `arborsim generate` wrote hold what was stated, too.
    """
    if not isinstance(entry.source, Path):
        return entry.source.spec.solved
    info = open_trace(entry.source).info
    share = info.search_parameters.get("solved") if info.extra.get("generated") else None
    return None if share is None else float(share)


_CHUNK = 8  # episodes that a process takes at a time


@dataclass(frozen=True)
class Unit:
    """Episodes of one trace to record under one candidate, in a process of its own."""

    order: int  #: among the candidate's
    candidate: Candidate
    entry: int
    episodes: tuple[int, ...]
    trace: Path
    shared_tokens: int  #: beginning of the prompts that the entry's searches have in common
    machine: Machine


def record_unit(unit: Unit) -> list[RecordedSearch] | str:
    """Record the unit's searches, or say why the policy cannot keep one of them."""
    policy = unit.candidate.policy.policy
    assert unit.machine.geometry is not None
    if why := unsuited(policy, unit.machine.geometry, unit.machine):
        return why
    reader = open_trace(unit.trace)
    figures = Figures.of(reader, output_error=False)
    blocks = {} if unit.shared_tokens else prefix_blocks(reader, unit.episodes)
    reads = tuple(sorted(policy.reads() | figures.reads([policy.grouping])))
    found = []
    for number in unit.episodes:
        (episode,) = reader.episodes(reads, start=number, stop=number + 1)
        try:
            found.append(_record(unit, episode, figures, blocks.get(number, ())))
        except (BudgetInfeasible, UsageError) as error:
            return f"{reader.path.name}, episode {number}: {error}"
    return found


def prefix_blocks(reader: TraceReader, episodes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Ids of the blocks that the prompt of each episode is made of; {} if the trace has none."""
    if not reader.info.prefix_block_tokens or "prefix_blocks" not in reader.columns:
        return {}
    found, name = {}, "prefix_blocks"
    for number in episodes:
        column, where = reader.first_row(number, [name])[name], Where(str(reader.path), number)
        found[number] = tuple(checked_lists(column, name, where)[0].tolist())
    return found


def _record(
    unit: Unit, episode: Episode, figures: Figures, blocks: tuple[int, ...]
) -> RecordedSearch:
    policy, shared = unit.candidate.policy.policy, unit.shared_tokens
    block_tokens = episode.info.prefix_block_tokens
    if blocks:  # all of them, and not only those that others have: no engine knows beforehand
        prompt = int((episode.kind == Kind.PREFILL).sum())
        shared = min(len(blocks) * block_tokens, prompt)
    rows = figures.rows(policy.grouping)
    meter = AttentionKept(rows) if rows is not None else None
    unread = _Unread()
    prefix = f"mix {unit.entry}" if shared else ""
    meters, budget = [meter, unread] if meter else [unread], unit.candidate.budget or _ALL
    demand, measured = record_demand(
        episode, policy, budget, unit.machine, prefix, shared, unit.trace.name, meters
    )
    info, short = demand.info, demand.prompt_tokens
    if short < shared:  # only prompts that are as short have all of it in common
        info = replace(info, prefix=f"{prefix}, {short}", prefix_tokens=short)
    if blocks:
        info = replace(info, prefix_blocks=blocks, prefix_block_tokens=block_tokens)
    tokens = measured.prompt_tokens + measured.generated_tokens
    quality = Quality(
        attention_kept=meter.share if meter else None,
        peak_kept=measured.peak_hbm_kv_tokens / tokens,
        evicted=measured.evicted_tokens / tokens,
        quantised=measured.quantised_tokens / tokens,
        offloaded=measured.offloaded_tokens / tokens,
        recomputed=measured.rehydrated_tokens / tokens,
        kept_note=figures.kept_note(policy.grouping),
        unread=float(unread.found),
    )
    return RecordedSearch(replace(demand, info=info), quality)


class _Unread(Meter):
    """Whether a plan left tokens unread that the cache held."""

    found = False

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        if reads is not None:
            self.found |= not reads[tier != Tier.EVICTED].all()


class Recording:
    """The searches to record for a candidate, handed out in units, and joined again.

    There is one trace for each entry of the mix (`Workload.write_traces`).
    """

    def __init__(self, workload: Workload, candidate: Candidate, traces: Sequence[Path]) -> None:
        self._origins = drawn(workload)
        self._left: deque[Unit] = deque()
        self._under_way = 0
        self._found: dict[int, list[RecordedSearch] | str] = {}  # by `Unit.order`
        layout = workload.page_tokens, workload.tree_attention
        machine = Machine(candidate.hardware.profile, workload.geometry, candidate.recall, *layout)
        for entry, kind in enumerate(workload.mix):
            episodes = [episode for other, episode in self._origins if other == entry]
            for first in range(0, len(episodes), _CHUNK):
                part = tuple(episodes[first : first + _CHUNK])
                source = traces[entry], kind.shared_prompt_tokens, machine
                self._left.append(Unit(len(self._left), candidate, entry, part, *source))

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing more to record: nothing is left, or a search is infeasible."""
        return not self._left or any(isinstance(found, str) for found in self._found.values())

    def next_unit(self) -> Unit:
        """Another one to record."""
        self._under_way += 1
        return self._left.popleft()

    def add(self, unit: Unit, result: list[RecordedSearch] | str) -> None:
        self._under_way -= 1
        self._found[unit.order] = result

    @property
    def complete(self) -> bool:
        return not self._under_way and self.exhausted

    def joined(self) -> MixDemands:
        """All of it; the reason is that of the first unit that has one, in their own order."""
        ordered: list[RecordedSearch] = []
        for _, found in sorted(self._found.items()):
            if isinstance(found, str):
                return MixDemands(self._origins, (), found)
            ordered += found
        return MixDemands(self._origins, tuple(ordered))


def record(workload: Workload, candidate: Candidate, traces: Sequence[Path]) -> MixDemands:
    """The demands of a workload's searches under one candidate."""
    recording = Recording(workload, candidate, traces)
    while not recording.exhausted:
        unit = recording.next_unit()
        recording.add(unit, record_unit(unit))
    return recording.joined()


_ITERATIONS = PIECE_COLUMNS.index("iterations")
#: How many numbers of each phase grow with the length of a search.
_SCALED: dict[Op, tuple[int, ...]] = {Op.RECOMPUTE: (1, 2), Op.LEVEL: (1, 2, 3), Op.MOVE: (3,)}
_SCALED |= dict.fromkeys((Op.PREFILL, Op.DECIDE, Op.COPY, Op.HOLD), (1,))
_SCALED |= {Op.STORE: (2,)}


def stretched(demand: SearchDemand, factor: float) -> SearchDemand:
    """The same search with every thought, and the prompt, `factor` times as long.

    Each run of iterations becomes longer and begins with more tokens by the factor; what an
    iteration adds stays.  Branches, prunings and everything moved or dropped keep their place and
    their share of the search, which is what a budget that is a share of the search asks for.  Not
    exact for a policy that keeps a fixed number of tokens, or a model with sliding windows.
    """
    if factor == 1:
        return demand
    pieces, ops, legs = demand.pieces.copy(), demand.ops.copy(), demand.legs.copy()
    decodes = np.flatnonzero(ops[:, 0] == Op.DECODE)
    order = ops[decodes, 1]
    # Rounding the running sums, so that searches of many short runs keep their whole length.
    ends = np.rint(factor * np.cumsum(pieces[order, _ITERATIONS])).astype(np.int64)
    pieces[order, _ITERATIONS] = np.diff(ends, prepend=0)
    for name in ("streamed_bytes", "remote_bytes"):
        _multiply(pieces, [PIECE_COLUMNS.index(name)], factor)
    for name in LINEAR:
        first, growth = (PIECE_COLUMNS.index(each) for each in (name, f"{name}_growth"))
        # What the first iteration adds is in `first` already, and is not multiplied.
        before = np.maximum(pieces[:, first] - pieces[:, growth], 0)
        added = pieces[:, first] - before
        pieces[:, first] = np.rint(factor * before) + added
    for kind, columns in _SCALED.items():
        rows = ops[:, 0] == kind
        ops[rows] = _multiply(ops[rows], columns, factor)
    _multiply(legs, range(LEG_COLUMNS.index("bytes"), len(LEG_COLUMNS)), factor)
    emptied = decodes[pieces[order, _ITERATIONS] == 0]
    prefix = {
        name: round(factor * getattr(demand.info, name))
        for name in ("prefix_tokens", "prefix_block_tokens")
    }
    info = replace(demand.info, **prefix)
    return SearchDemand(info, np.delete(ops, emptied, axis=0), pieces, legs)


def with_longer_answers(found: MixDemands, factor: float) -> MixDemands:
    """The same searches, whose answers are `factor` times as long under the policy.

    What they hold stays as it is: a policy that makes answers longer bounds what is held.
    """
    if factor == 1:
        return found
    longer = [replace(each, demand=_longer(each.demand, factor)) for each in found.recorded]
    return replace(found, recorded=tuple(longer))


def _longer(demand: SearchDemand, factor: float) -> SearchDemand:
    pieces = demand.pieces.copy()
    order = demand.ops[demand.ops[:, 0] == Op.DECODE, 1]
    before = pieces[order, _ITERATIONS]
    ends = np.rint(factor * np.cumsum(before)).astype(np.int64)
    pieces[order, _ITERATIONS] = after = np.maximum(1, np.diff(ends, prepend=0))
    for name in LINEAR:
        growth = PIECE_COLUMNS.index(f"{name}_growth")
        pieces[order, growth] = pieces[order, growth] * before // np.maximum(before, after)
    return replace(demand, pieces=pieces)


def _multiply(table: np.ndarray, columns: Iterable[int], factor: float) -> np.ndarray:
    for column in columns:
        table[:, column] = np.rint(factor * table[:, column])
    return table
