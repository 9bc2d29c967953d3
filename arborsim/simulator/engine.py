"""Simulated time, and the two directions of the PCIe link that transfers queue up for.

The controller drives the simulation: whoever spends time runs the SimPy environment until that time
has passed, and whatever was started in the background happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import simpy

from arborsim.hardware.cost import CostModel
from arborsim.hardware.profile import Direction

Steps = Generator[simpy.Event, Any, Any]


class Link:
    """One direction of PCIe: carries one transfer at a time, first come, first served.

    Attributes
    ----------
    carried_bytes : int
    busy_s : float
        Time spent on transfers.
    """

    def __init__(self, env: simpy.Environment, cost: CostModel, direction: Direction) -> None:
        self.carried_bytes = 0
        self.busy_s = 0.0
        self._env = env
        self._cost = cost
        self._direction = direction
        self._turn = simpy.Resource(env, capacity=1)

    def send(self, size_bytes: int) -> Steps:
        """A transfer of tokens that a gather kernel packs layer by layer."""
        if not size_bytes:
            return
        with self._turn.request() as turn:
            yield turn
            block_bytes = self._cost.packed_block_bytes(size_bytes)
            seconds = float(self._cost.transfer_s(size_bytes, block_bytes, self._direction))
            yield self._env.timeout(seconds)
        self.carried_bytes += size_bytes
        self.busy_s += seconds

    def hold(self, seconds: float) -> Steps:
        """Keep the link for iterations that stream over it; returns the wait for it before that."""
        asked_s = self._env.now
        with self._turn.request() as turn:
            yield turn
            waited_s = self._env.now - asked_s
            yield self._env.timeout(seconds)
        return float(waited_s)


class Engine:
    """The clock, the link and the processes in the background."""

    def __init__(self, cost: CostModel) -> None:
        self._env = simpy.Environment()
        self.down = Link(self._env, cost, "d2h")
        self.up = Link(self._env, cost, "h2d")
        self._background: list[simpy.Process] = []

    @property
    def now_s(self) -> float:
        return float(self._env.now)

    @property
    def busy(self) -> bool:
        """Whether anything runs in the background."""
        self._background = [process for process in self._background if process.is_alive]
        return bool(self._background)

    def start(self, steps: Steps) -> simpy.Process:
        """Run `steps` in the background from now on."""
        process = self._env.process(steps)
        self._background.append(process)
        return process

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        if seconds > 0:
            self._env.run(until=self._env.timeout(seconds))

    def spend_streaming(self, seconds: float) -> float:
        """Let time pass with the upward link in use; returns the wait for the link before that."""
        waited_s: Any = self._env.run(until=self._env.process(self.up.hold(seconds)))
        return float(waited_s)

    def wait(self, processes: Iterable[simpy.Process] | None = None) -> float:
        """Wait for these processes, or for all in the background; returns the time it took."""
        before = self.now_s
        awaited = self._background if processes is None else list(processes)
        pending = [process for process in awaited if process.is_alive]
        if pending:
            self._env.run(until=self._env.all_of(pending))
        return self.now_s - before
