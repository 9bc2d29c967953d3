"""The clock: a SimPy environment, the two directions of the link, and levels of memory over time.

The server is a process of the environment; arrivals and transfers are its events.  A link is first
come, first served, and every transfer is priced when it is asked for: its queue is known, so the
link keeps the moment from which it is free and a transfer is one timeout.  `simpy.Resource` would
say the same with three events per transfer, two of them at the present moment, which would cut the
server's stretches of iterations for nothing.

At the end: what the server's rules ask of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from arborsim.core.tiers import DDR
from arborsim.machine.program import NOTHING, Extra, PricedProgram

Callback = Callable[[], None]
#: What a process of the environment waits for.
Steps = Generator[simpy.Event, Any, None]

#: Moments whose relative difference is smaller happen together: it may be rounding alone.
SAME_MOMENT = 1e-12


class Clock:
    """Time, and what happens in it; `down` and `up` are PCIe to the host, and from it."""

    def __init__(self, link: type[Link] | None = None) -> None:
        self.env = simpy.Environment()
        self._link = link or Link
        self.down, self.up = self._link(self), self._link(self)
        self._links = {(DDR, False): self.down, (DDR, True): self.up}

    def link(self, memory: int, up: bool) -> Link:
        """One direction of the link to a memory (`Tier.memory`)."""
        if (memory, up) not in self._links:
            self._links[memory, up] = self._link(self)
        return self._links[memory, up]

    @property
    def links(self) -> list[Link]:
        """All directions of all links that were used, and PCIe's."""
        return list(self._links.values())

    @property
    def now(self) -> float:
        """Seconds since the run began; in a callback, the time of its event."""
        return float(self.env.now)

    @property
    def next_s(self) -> float:
        """When the next event is; infinite if there is none."""
        return float(self.env.peek())

    def at(self, time_s: float, call: Callback) -> None:
        """Call at that time."""
        timeout = self.env.timeout(max(0.0, time_s - self.env.now))
        timeout.callbacks.append(lambda _: call())

    def spend(self, seconds: float) -> Steps:
        """Let time pass in a process, with the events that lie in it."""
        yield self.env.timeout(seconds)
        yield from self.settle()

    def skip(self) -> Steps:
        """Let time pass up to the next event, in a process."""
        assert self.next_s < float("inf"), "waiting for something that will never happen"
        yield from self.spend(max(0.0, self.next_s - self.now))

    def settle(self) -> Steps:
        """Let everything else that happens now happen first."""
        env = self.env
        while env.peek() <= env.now * (1.0 + SAME_MOMENT):
            yield env.timeout(max(0.0, env.peek() - env.now))


class Link:
    """One direction of a link: one transfer at a time, first come, first served."""

    def __init__(self, clock: Clock) -> None:
        self.moving_s = 0.0  # time spent on transfers ...
        self.streamed_s = 0.0  # ... and on what iterations stream
        self.carried_bytes = 0
        self.free_s = 0.0  # when all that was asked for so far has been carried
        self._clock = clock

    @property
    def busy_s(self) -> float:
        return self.moving_s + self.streamed_s

    def send(self, size_bytes: int, seconds: float, done: Callback) -> None:
        """Ask for a transfer; `done` is called when it has ended."""
        self.free_s = max(self._clock.now, self.free_s) + seconds
        self.moving_s += seconds
        self.carried_bytes += size_bytes
        self._clock.at(self.free_s, done)


class Level:
    """A number of bytes over time."""

    def __init__(self, clock: Clock) -> None:
        self.value = 0
        self.peak = 0
        self._clock = clock
        self._since = 0.0
        self._byte_s = 0.0

    def add(self, delta: int) -> None:
        if not delta:
            return
        now = self._clock.now
        self._byte_s += self.value * (now - self._since)
        self._since = now
        self.value += delta
        self.peak = max(self.peak, self.value)

    def byte_s(self) -> float:
        """The integral up to now."""
        return self._byte_s + self.value * (self._clock.now - self._since)


@dataclass(frozen=True, slots=True)
class Spend:
    """Let seconds pass, for a phase of this kind (`Op`) of one search."""

    seconds: float
    op: int = -1
    search: int = -1


@dataclass(frozen=True, slots=True)
class Iterate:
    """Decode up to `most` iterations, one if something joins it."""

    most: int
    extra: Extra = NOTHING


@dataclass(frozen=True, slots=True)
class Idle:
    """Let time pass up to the next event."""


@dataclass(frozen=True, slots=True)
class Starve:
    """Wait until more of this program has been written."""

    program: PricedProgram


Command = Spend | Iterate | Idle | Starve
Commands = Generator[Command, None, None]
Tries = Generator[Command, None, bool]
