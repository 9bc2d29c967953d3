"""What a walked search would cost on a machine: its episode, replayed under a policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from arborsim.core.events import Decode, Event, Prefill, Prune
from arborsim.core.measurements import Measurements
from arborsim.machine.executor import SimulatedExecutor
from arborsim.run.controller import Controller
from arborsim.run.episode import Cell, Machine, foresee
from arborsim.run.meters import AttentionKept
from arborsim.trace.episode import Episode
from arborsim.trace.play import play
from arborsim.trace.schema import Geometry


@dataclass(frozen=True)
class Simulated:
    """One search under one policy and budget.

    Attributes
    ----------
    measured : Measurements
    budget_tokens : int
    attention_kept : float
        Share of the recorded attention that fell on readable tokens; NaN if unknown.
    hbm_kv_byte_s : float
        Integral over time of the KV bytes in HBM under the policy, staging buffers included
        (trapezoids between events).
    peak_held_kv_bytes : int
        Largest KV size of the nodes that the search has not given up, whatever the policy keeps.
    held_kv_byte_s : float
        Its integral over time.
    """

    measured: Measurements
    budget_tokens: int
    attention_kept: float
    hbm_kv_byte_s: float
    peak_held_kv_bytes: int
    held_kv_byte_s: float


def simulate(
    episode: Episode,
    cell: Cell,
    machine: Machine,
    quality: bool,
    watch: Callable[[Event, Controller], None] | None = None,
) -> Simulated:
    """Replay one episode under one policy and budget.

    Parameters
    ----------
    episode : Episode
        With the observations that the policy reads.
    cell : Cell
        A share of a budget is one of this search's own tokens.
    machine : Machine
    quality : bool
        Measure the attention kept; the episode then holds attention.
    watch : callable, optional
        Called before each event is handled.

    Raises
    ------
    BudgetInfeasible
    """
    geometry = episode.info.geometry
    budget_tokens = cell.budget.in_tokens(episode.num_tokens)
    kept = AttentionKept() if quality else None
    executor = machine.executor(cell.policy, episode.info)
    assert isinstance(executor, SimulatedExecutor)
    controller = Controller(
        cell.policy,
        executor,
        budget_tokens=budget_tokens,
        layers=geometry.layers,
        vocabulary=geometry.vocab,
        meters=[kept] if kept else [],
    )
    gauge = _ByteSeconds(controller, executor, machine.geometry or geometry)
    for event in play(foresee(cell.policy, episode, budget_tokens)):
        if watch:
            watch(event, controller)
        controller.handle(event)
        gauge.take(event)
    return Simulated(
        executor.measurements(),
        budget_tokens,
        kept.share if kept else math.nan,
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

    def __init__(
        self, controller: Controller, executor: SimulatedExecutor, geometry: Geometry
    ) -> None:
        self._tree, self._executor = controller.tree, executor
        self._per_token = int(geometry.kv_bytes_per_token)
        self._tokens = 0
        self.hbm, self.held = _Integral(), _Integral()
        self.peak_held_bytes = 0

    def take(self, event: Event) -> None:
        match event:
            case Prefill(run) | Decode(run):
                self._tokens += run.num_tokens
            case Prune(node):
                self._tokens -= self._tree.num_node_tokens(node)
        held = self._tokens * self._per_token
        self.peak_held_bytes = max(self.peak_held_bytes, held)
        time_s, executor = self._executor.clock(), self._executor
        self.held.to(time_s, held)
        self.hbm.to(time_s, executor.ledger.hbm_page_bytes + executor.staging_bytes)
