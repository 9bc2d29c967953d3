"""Simulated time, and the two directions of the PCIe link that transfers queue up for.

The controller drives the simulation: whoever spends time runs the SimPy environment until that time
has passed, and whatever was started in the background happens meanwhile.  While nothing is in the
background no event can happen: then time passes without SimPy, which catches up at the next start.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import simpy

from arborsim.machine.cost import CostModel
from arborsim.machine.profile import Direction

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
        self._free_s = 0.0  # when all that was asked for so far has been carried

    def send(self, size_bytes: int) -> Steps:
        """A transfer of tokens that a gather kernel packs layer by layer."""
        if not size_bytes:
            return
        block_bytes = self._cost.packed_block_bytes(size_bytes)
        seconds = float(self._cost.transfer_s(size_bytes, block_bytes, self._direction))
        yield self._env.timeout(self._queue(seconds) + seconds)
        self.carried_bytes += size_bytes
        self.busy_s += seconds

    def hold(self, seconds: float) -> Steps:
        """Keep the link for iterations that stream over it; returns the wait for it before that."""
        waited_s = self._queue(seconds)
        yield self._env.timeout(waited_s + seconds)
        return waited_s

    def _queue(self, seconds: float) -> float:
        """Ask for the link for so long; returns the wait for what was asked for before."""
        now_s = float(self._env.now)
        begins_s = max(now_s, self._free_s)
        self._free_s = begins_s + seconds
        return begins_s - now_s


class Engine:
    """The clock, the link and the processes in the background."""

    def __init__(self, cost: CostModel) -> None:
        self._env = simpy.Environment()
        self.down = Link(self._env, cost, "d2h")
        self.up = Link(self._env, cost, "h2d")
        self._background: list[simpy.Process] = []
        self._ahead_s = 0.0  # what time it is, if SimPy has not been told yet

    @property
    def now_s(self) -> float:
        return max(self._ahead_s, float(self._env.now))

    @property
    def busy(self) -> bool:
        """Whether anything runs in the background."""
        if self._background:
            self._background = [process for process in self._background if process.is_alive]
        return bool(self._background)

    def start(self, steps: Steps) -> simpy.Process:
        """Run `steps` in the background from now on."""
        self._catch_up()
        process = self._env.process(steps)
        self._background.append(process)
        return process

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        if seconds <= 0:
            return
        if self.busy:
            self._env.run(until=self._env.timeout(seconds))
        else:
            self._ahead_s = self.now_s + seconds

    def spend_streaming(self, seconds: float) -> float:
        """Let time pass with the upward link in use; returns the wait for the link before that."""
        self._catch_up()
        waited_s: Any = self._env.run(until=self._env.process(self.up.hold(seconds)))
        return float(waited_s)

    def wait(self, processes: Iterable[simpy.Process] | None = None) -> float:
        """Wait for these processes, or for all in the background; returns the time it took."""
        before = self.now_s
        awaited = self._background if processes is None else list(processes)
        pending = [process for process in awaited if process.is_alive]
        if pending:
            self._env.run(until=pending[0] if len(pending) == 1 else self._env.all_of(pending))
        return self.now_s - before

    def _catch_up(self) -> None:
        """Tell SimPy what time it is."""
        if self._ahead_s > self._env.now:
            self._env.run(until=self._ahead_s)
