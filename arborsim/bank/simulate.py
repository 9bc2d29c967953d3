"""What a walked search would cost on a machine: its episode, replayed under a policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from arborsim.core.events import Decode, Event, Prefill, Prune
from arborsim.core.measurements import Measurements
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.run.controller import Controller
from arborsim.run.episode import Cell, Quality, Watch, play_episode
from arborsim.trace.episode import Episode


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
    watch: Watch | None = None,
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
        See `arborsim.run.episode.Watch`.

    Raises
    ------
    BudgetInfeasible
    """
    executor = machine.executor(cell.policy, episode.info)
    gauge = _ByteSeconds(executor, machine.charged(episode.info).kv_bytes_per_token)

    def watched(events: Iterable[Event], controller: Controller) -> Iterable[Event]:
        return gauge.watch(watch(events, controller) if watch else events, controller)

    played = play_episode(
        episode, cell, executor, quality=Quality(attention_kept=quality), watch=watched
    )
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
