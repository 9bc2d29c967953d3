"""Replaying recorded searches: every policy and budget over every episode of every trace.

An episode is read once and played to one controller and one simulated executor per policy and
budget, so memory does not grow with the number of episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arborsim.budget import Budget
from arborsim.controller import Controller, Executor, Meter
from arborsim.errors import ArborsimError, BudgetInfeasible, UsageError
from arborsim.events import Answer, Boundary, Transition
from arborsim.memory.tiers import NUM_TIERS
from arborsim.meters import AttentionKept
from arborsim.policies.base import Policy
from arborsim.report.results import EpisodeResult, Frame, NodeRecord, ReplayResult, TreePicture
from arborsim.signals.observations import Signal
from arborsim.trace.play import play
from arborsim.trace.reader import TraceReader

if TYPE_CHECKING:
    from arborsim.hardware.profile import HardwareProfile
    from arborsim.trace.episode import Episode
    from arborsim.trace.schema import Geometry, TraceInfo

MAX_FRAMES = 40


@dataclass(frozen=True)
class Machine:
    """What the searches are replayed on.

    Attributes
    ----------
    profile : HardwareProfile
    geometry : Geometry or None
        Model whose bytes and seconds are charged; None for the recorded model's own.
    recall : {"stage", "stream", "near"}
        How tokens in DDR take part in attention.
    page_tokens : int
        KV slots per page.
    tree_attention : bool
        Whether shared ancestors are read once per batch, or once per branch.
    event_by_event : bool
        Simulate every decode iteration as an event of its own (slower, the same to rounding).
    """

    profile: HardwareProfile
    geometry: Geometry | None = None
    recall: str = "stage"
    page_tokens: int = 1
    tree_attention: bool = True
    event_by_event: bool = False

    def executor(self, policy: Policy, recorded: TraceInfo) -> Executor:
        """A simulated machine for one search of a trace under `policy`."""
        from arborsim.simulator.executor import SimulatedExecutor

        return SimulatedExecutor(
            self.geometry or recorded.geometry,
            self.profile,
            groups=num_groups(policy, recorded),
            page_tokens=self.page_tokens,
            recall=self.recall,
            fused=policy.fused,
            tree_attention=self.tree_attention,
            event_by_event=self.event_by_event,
        )


def num_groups(policy: Policy, recorded: TraceInfo) -> int:
    """Cache groups that the plans of `policy` tell apart on a trace: see `Policy.grouping`."""
    layers = len(recorded.qkv_layers)
    return {"shared": 1, "layer": layers, "head": layers * recorded.geometry.kv_heads}[
        policy.grouping
    ]


@dataclass(frozen=True)
class Cell:
    """One policy under one budget."""

    policy: Policy
    budget: Budget


@dataclass
class Replay:
    """What to replay, and how.

    Attributes
    ----------
    traces : sequence of path
    policies, budgets : sequences
    machine : Machine
    quality : bool
        Measure the attention kept where the trace holds attention (reads its largest column).
    first, count : int, int or None
        Which episodes of each trace.
    pictures : bool
        Take pictures of the tree of each trace's first episode, for the report.
    skip_infeasible : bool
        Leave out a policy and budget that cannot serve an episode of a trace, and say so in the
        settings, instead of raising.
    settings : dict
        Shown in the report's appendix.
    """

    traces: Sequence[Path]
    policies: Sequence[Policy]
    budgets: Sequence[Budget]
    machine: Machine
    quality: bool = True
    first: int = 0
    count: int | None = None
    pictures: bool = False
    skip_infeasible: bool = False
    settings: dict[str, str] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """Policies x budgets; a policy that ignores budgets is replayed once."""
        return [
            Cell(policy, budget if policy.uses_budget else Budget("1.0", share=1.0))
            for policy in self.policies
            for budget in (self.budgets if policy.uses_budget else self.budgets[:1])
        ]

    def open(self) -> list[TraceReader]:
        """Open every trace and check that it serves every policy, before any work is done."""
        readers = [TraceReader(path) for path in self.traces]
        for reader in readers:
            if not self.chosen(reader):
                raise UsageError(
                    f"{reader.path}: no episode {self.first}; it holds {reader.num_episodes}"
                )
            for policy in self.policies:
                reader.require(policy.reads(), f"policy {policy.name}")
        return readers

    def chosen(self, reader: TraceReader) -> range:
        """Episodes of a trace that are replayed."""
        stop = None if self.count is None else self.first + self.count
        return range(reader.num_episodes)[self.first : stop]

    def work(self, readers: Iterable[TraceReader]) -> int:
        """Rows to replay, for a progress bar."""
        rows = sum(
            int(reader.metadata(i).num_rows) for reader in readers for i in self.chosen(reader)
        )
        return rows * len(self.cells())

    def run(self, advance: Callable[[str, int], None] | None = None) -> ReplayResult:
        """Replay everything; `advance(what, rows)` is called as work is done."""
        results: list[EpisodeResult] = []
        pictures: list[TreePicture] = []
        settings = dict(self.settings)
        for reader in self.open():
            name = reader.path.name
            needs: set[Signal] = set().union(*(policy.reads() for policy in self.policies))
            if self.quality and reader.has(Signal.ATTENTION):
                needs.add(Signal.ATTENTION)
            chosen, cells = self.chosen(reader), self.cells()
            for episode in reader.episodes(sorted(needs), start=chosen.start, stop=chosen.stop):
                first = episode.index == chosen.start
                for cell in list(cells):
                    try:
                        result, picture = self._one(name, episode, cell, self.pictures and first)
                    except BudgetInfeasible as error:
                        located = _with_remedy(error, name, episode, cell.budget)
                        if not self.skip_infeasible:
                            raise located from None
                        cells.remove(cell)
                        key = (name, cell.policy.name, cell.budget.text)
                        results = [r for r in results if (r.trace, r.policy, r.budget) != key]
                        pictures = [p for p in pictures if (p.trace, p.policy, p.budget) != key]
                        settings[f"left out: {key[1]} at {key[2]} on {name}"] = str(located)
                        continue
                    results.append(result)
                    pictures += [picture] if picture else []
                    if advance:
                        advance(f"{name} {cell.policy.name}", episode.num_rows)
        settings |= _not_fitting(results, self.machine)
        return ReplayResult(
            tuple(results),
            tuple(pictures),
            settings,
            tuple(
                f"{name} {getattr(self.machine.profile, name)}"
                for name in self.machine.profile.assumed()
            ),
        )

    def _one(
        self, trace: str, episode: Episode, cell: Cell, picture: bool
    ) -> tuple[EpisodeResult, TreePicture | None]:
        meter = AttentionKept() if self.quality and episode.attention is not None else None
        meters: list[Meter] = [meter] if meter else []
        geometry = episode.info.geometry
        executor = self.machine.executor(cell.policy, episode.info)
        budget_tokens = cell.budget.in_tokens(episode.num_tokens)
        controller = Controller(
            cell.policy,
            executor,
            budget_tokens=budget_tokens,
            layers=geometry.layers,
            vocabulary=geometry.vocab,
            meters=meters,
        )
        frames: list[Frame] = []
        for event in play(episode):
            controller.handle(event)
            if picture and isinstance(event, Transition | Boundary | Answer):
                frames.append(_frame(controller, executor.clock(), event))
        result = EpisodeResult(
            trace,
            episode.index,
            cell.policy.name,
            cell.budget.text,
            budget_tokens,
            executor.measurements(),
            meter.share if meter else math.nan,
            (self.machine.geometry or geometry).kv_bytes_per_token,
        )
        if not picture:
            return result, None
        nodes = tuple(
            NodeRecord(n.parent, n.depth, controller.tree.num_node_tokens(i), n.reward, n.pruned,
                       n.closed)
            for i, n in enumerate(controller.tree.nodes)
        )  # fmt: skip
        shown = tuple(_padded(frame, len(nodes)) for frame in _thinned(frames))
        return result, TreePicture(
            cell.policy.name, cell.budget.text, trace, episode.index, nodes, shown
        )


def _with_remedy(
    error: BudgetInfeasible, trace: str, episode: Episode, budget: Budget
) -> ArborsimError:
    """The same error, saying where it happened and what to try.

    What is needed is known up to this point of the search; later it may be more.
    """
    share = math.ceil(100 * error.needed_tokens / episode.num_tokens) / 100
    least = f"{error.needed_tokens}" if budget.share is None else f"{share:g}"
    remedy = f"try --budget {least} or more, or --skip-infeasible to leave it out"
    if error.needed_tokens > episode.num_tokens:
        remedy = "no budget below full retention does; --skip-infeasible leaves it out"
    return ArborsimError(f"{trace}, episode {episode.index}: {error}; {remedy}")


def _not_fitting(results: Iterable[EpisodeResult], machine: Machine) -> dict[str, str]:
    """A line for each policy and budget of a trace whose memory the machine does not have."""
    found = {}
    for result in results:
        measured = result.measured
        if measured.fits:
            continue
        key = f"does not fit: {result.policy} at {result.budget} on {result.trace}"
        found[key] = (
            f"episode {result.episode} needs {measured.needed_hbm_bytes / 1e9:.1f} GB of HBM and "
            f"{measured.peak_ddr_bytes / 1e9:.1f} GB of DDR; {machine.profile.name} has "
            f"{measured.usable_hbm_bytes / 1e9:.1f} and {measured.usable_ddr_bytes / 1e9:.1f}"
        )
    return found


def _frame(controller: Controller, time_s: float, event: Transition | Boundary | Answer) -> Frame:
    """Where each node's tokens live now (shared over groups: the first group's tiers)."""
    tree = controller.tree
    tier = controller.executor.tier[0].astype(np.int64)
    owner = tree.node_of_token.values
    table = np.bincount(owner * NUM_TIERS + tier, minlength=len(tree) * NUM_TIERS)
    match event:
        case Transition(leaves, _):
            label = f"turn to {', '.join(map(str, leaves[:4]))}{' ...' if len(leaves) > 4 else ''}"
        case Boundary(node, _, _):
            label = f"block {node} complete"
        case Answer():
            label = "answer"
    return Frame(time_s, label, controller.view().leaves, table.reshape(len(tree), NUM_TIERS))


def _thinned(frames: list[Frame]) -> Iterator[Frame]:
    """At most `MAX_FRAMES`, evenly spread, first and last included."""
    if len(frames) <= MAX_FRAMES:
        return iter(frames)
    return (frames[i] for i in np.linspace(0, len(frames) - 1, MAX_FRAMES).round().astype(int))


def _padded(frame: Frame, nodes: int) -> Frame:
    """The same frame with a (zero) row for nodes that were opened later."""
    table = np.zeros((nodes, NUM_TIERS), dtype=np.int64)
    table[: len(frame.tokens_by_tier)] = frame.tokens_by_tier
    return replace(frame, tokens_by_tier=table)
