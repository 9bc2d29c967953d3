"""An executor that writes down what its search asks of the machine, while it simulates it.

What is computed and moved is seen where it is priced: at the cost model, the engine, the links and
the memory gauge, each replaced by a subclass that takes notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import simpy

from arborsim.core.errors import UsageError
from arborsim.core.events import TokenRun
from arborsim.core.tiers import Tier
from arborsim.machine.cost import Array, CostModel, DecodeCost, PrefillCost, Reads, SideCost
from arborsim.machine.demand import ATTENDED_UNITS, DemandInfo, SearchDemand
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.gauge import MemoryGauge
from arborsim.machine.iterations import IterationCosts, IterationModel
from arborsim.machine.notes import Notes
from arborsim.machine.paths import PathProfile
from arborsim.machine.profile import Direction
from arborsim.machine.replay_engine import Engine, Link, Steps
from arborsim.memory.census import Changes
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Moves
from arborsim.memory.run_profile import RunProfile

#: Recall modes whose iterations a demand can describe.
RECORDED_RECALLS = ("stage", "stream", "near", "ondemand")


class _SeenCosts(CostModel):
    """Keeps what the decode iterations were last priced for."""

    def __init__(self, other: CostModel) -> None:
        super().__init__(other.profile, other.geometry, pinned=other.pinned)
        self.recomputes: Callable[[int, int], None] | None = None  # told of passes
        self.forget()

    def forget(self) -> None:
        self.reads: Reads | None = None
        self.rows: Array = 0.0
        self.streamed: Array = 0.0
        self.remote: Array = 0.0

    def prefill(self, new_tokens: int, present_tokens: float = 0.0) -> PrefillCost:
        if self.recomputes is not None:
            self.recomputes(new_tokens, int(present_tokens))
        return super().prefill(new_tokens, present_tokens)

    def decode(self, reads: Reads, fused: bool = True) -> DecodeCost:
        self.reads = reads
        return super().decode(reads, fused)

    def eager_rows_s(self, attended_tokens: Array) -> Array:
        self.rows = attended_tokens
        return super().eager_rows_s(attended_tokens)

    def stream(self, compute_s: Array, ddr_bytes: Array) -> SideCost:
        self.streamed = ddr_bytes
        return super().stream(compute_s, ddr_bytes)

    def ondemand(
        self, attention_s: Array, fetched_bytes: Array, bounds_bytes: Array, sequences: int
    ) -> SideCost:
        self.streamed, self.remote = fetched_bytes, bounds_bytes
        return super().ondemand(attention_s, fetched_bytes, bounds_bytes, sequences)

    def near(self, attention_s: Array, ddr_bytes: Array, sequences: int) -> SideCost:
        self.remote = ddr_bytes
        return super().near(attention_s, ddr_bytes, sequences)


@dataclass(frozen=True)
class _SeenIterations(IterationModel):
    """Keeps how long the paths were that the last run of iterations was priced for."""

    def price(
        self, path: PathProfile, sequences: int, landing: PathProfile, decided: np.ndarray
    ) -> IterationCosts:
        assert isinstance(self.cost, _SeenCosts)
        self.cost.forget()
        object.__setattr__(self, "length", path.length)
        return super().price(path, sequences, landing, decided)

    length = np.zeros(1, dtype=np.int64)


class _SeenLink(Link):
    """Notes every transfer in the chain of the process that sends it."""

    def __init__(
        self, env: simpy.Environment, cost: CostModel, direction: Direction, notes: Notes
    ) -> None:
        super().__init__(env, cost, direction)
        self._notes = notes
        self._up = direction == "h2d"

    def send(self, size_bytes: int) -> Steps:
        chain = self._notes.chain_of(self._env.active_process)
        self._notes.leg_begins(chain, self._up, size_bytes)
        yield from super().send(size_bytes)
        self._notes.leg_ends(chain)


class _SeenEngine(Engine):
    """Notes what is started in the background and what is waited for."""

    def __init__(self, cost: CostModel, notes: Notes) -> None:
        super().__init__(cost)
        self.down = _SeenLink(self._env, cost, "d2h", notes)
        self.up = _SeenLink(self._env, cost, "h2d", notes)
        self._notes = notes

    @property
    def active(self) -> simpy.Process | None:
        """The background process that runs now, if any does."""
        return self._env.active_process

    def start(self, steps: Steps) -> simpy.Process:
        process = super().start(steps)
        self._notes.starts(process)
        return process

    def wait(self, processes: Iterable[simpy.Process] | None = None) -> float:
        awaited = None if processes is None else list(processes)
        self._notes.waits(awaited)
        return super().wait(awaited)


class _SeenGauge(MemoryGauge):
    """Notes every change of what HBM holds beside the pages."""

    def __init__(self, ledger: Ledger, engine: _SeenEngine, notes: Notes, staged: bool) -> None:
        self._held = {"staging": 0, "in_flight": 0}
        self._seen_engine, self._notes, self._stages = engine, notes, False
        super().__init__(ledger)
        self._stages = staged

    def _set(self, what: str, value: int, noted: bool) -> None:
        delta, self._held[what] = value - self._held[what], value
        if noted and delta:
            self._notes.holds(self._seen_engine.active, delta)

    @property
    def in_flight_bytes(self) -> int:
        return self._held["in_flight"]

    @in_flight_bytes.setter
    def in_flight_bytes(self, value: int) -> None:
        self._set("in_flight", value, noted=True)

    @property
    def staging_bytes(self) -> int:
        return self._held["staging"]

    @staging_bytes.setter
    def staging_bytes(self, value: int) -> None:
        # Streaming buffers are part of what each iteration holds.
        self._set("staging", value, noted=self._stages)


class RecordingExecutor(SimulatedExecutor):
    """A `SimulatedExecutor` whose search can be had as a `SearchDemand` afterwards.

    Parameters
    ----------
    prefix_tokens : int
        First tokens of the prompt, which other searches may share.
    options
        As of `SimulatedExecutor`; `compact` is not available.

    Raises
    ------
    UsageError
        Compaction, or a recall mode on a model that make iterations a demand cannot describe.
    """

    def __init__(self, *args: Any, prefix_tokens: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        recall = self._iterations.recall
        if recall not in RECORDED_RECALLS or self._compact:
            raise UsageError(
                f"recall '{recall}' with compact={self._compact} cannot be recorded for serving: "
                f"use {', '.join(RECORDED_RECALLS)} without compaction"
            )
        if recall in ("near", "ondemand") and self._cost.geometry.window:
            raise UsageError(
                f"recall '{recall}' cannot be recorded for serving {self._cost.geometry.name}, "
                "which has layers with a sliding window: use stage or stream"
            )
        self._seen = _SeenCosts(self._cost)
        self._cost = self._seen
        self._iterations = _SeenIterations(**{
            f.name: getattr(self._iterations, f.name) for f in fields(IterationModel)
        } | {"cost": self._seen})  # fmt: skip
        self._notes = Notes(self._levels)
        engine = _SeenEngine(self._cost, self._notes)
        self._engine = engine
        self._gauge = _SeenGauge(self._ledger, engine, self._notes, recall == "stage")
        self._prefix_tokens = prefix_tokens
        self._prefix_bytes = 0

    def demand(self, info: DemandInfo) -> SearchDemand:
        """What the search asked for, once it has finished."""
        return self._notes.demand(info)

    def prefill(self, run: TokenRun) -> None:
        super().prefill(run)
        self._prefix_tokens = min(self._prefix_tokens, run.num_tokens)
        self._count_prefix()
        self._notes.prefill(run.num_tokens)
        self._seen.recomputes = self._notes.recomputes  # whatever is prefilled from now on

    def activate(self, leaves: tuple[int, ...]) -> None:
        self._notes.settle()
        super().activate(leaves)
        self._notes.turns(len(leaves))

    def apply(self, moves: Moves, examined_tokens: int) -> None:
        self._notes.decides(examined_tokens)
        super().apply(moves, examined_tokens)

    def finish(self) -> None:
        self._notes.close()
        super().finish()

    def _levels(self) -> tuple[int, int, int]:
        """Pages and streaming buffers, what of them is the shared prefix, and DDR; bytes."""
        buffers = 0 if self._iterations.recall == "stage" else self._gauge.staging_bytes
        pages = self._ledger.hbm_page_bytes + self._gauge.window_bytes
        return pages + buffers, self._prefix_bytes, self._ledger.ddr_bytes

    def _price(self, decided: np.ndarray, moves: Moves) -> tuple[RunProfile, IterationCosts]:
        run, costs = super()._price(decided, moves)
        buffers = self._buffers(costs)
        held = np.maximum(run.hbm_page_bytes_before, run.hbm_page_bytes_after)
        held = held if buffers is None else held + buffers
        seen, steps = self._seen, len(decided)
        assert seen.reads is not None
        assert isinstance(self._iterations, _SeenIterations)
        scale = ATTENDED_UNITS * self._ledger.groups * self._cost.geometry.layers
        fixed = (seen.reads.sequences, decided, seen.streamed, seen.remote)
        linear = (
            seen.reads.bytes,
            seen.reads.quantised_bytes,
            np.rint(np.asarray(seen.reads.attended_tokens) * scale),
            np.rint(np.asarray(seen.rows) * scale),
            np.where(decided, self._iterations.length, 0),
            held,
            self._prefix_during(run.changes, steps),
        )
        self._notes.iterations(_table(fixed, steps), _table(linear, steps))
        return run, costs

    def _prefix_during(self, changes: Changes, steps: int) -> np.ndarray | int:
        """Bytes of the shared prefix in HBM once each iteration's moves are done."""
        if not self._prefix_tokens or not len(changes):
            return self._prefix_bytes
        mine = changes.where(changes.token < self._prefix_tokens)
        size = self._ledger.bytes_by_tier * np.array([tier.in_hbm for tier in Tier])
        net = np.bincount(mine.step, size[mine.target] - size[mine.source], steps)
        held = self._prefix_bytes + np.cumsum(net).astype(np.int64)
        self._prefix_bytes = int(held[-1])
        return np.asarray(held)

    def _count_prefix(self) -> None:
        if self._prefix_tokens:
            tier = self._ledger.tier[:, : self._prefix_tokens]
            size = self._ledger.bytes_by_tier * np.array([tier.in_hbm for tier in Tier])
            self._prefix_bytes = int(size[tier].sum())

    def _carry_out(self, changes: Changes) -> None:
        super()._carry_out(changes)
        if len(changes):
            self._count_prefix()
            self._notes.sync()

    def _count(self, changes: Changes) -> None:
        self._notes.copies(changes.count(self._touched_bytes))
        super()._count(changes)


def _table(columns: Iterable[Any], steps: int) -> np.ndarray:
    """Columns side by side; int64 ``[steps, columns]``."""
    return np.stack([np.broadcast_to(c, steps) for c in columns], axis=1).astype(np.int64)
