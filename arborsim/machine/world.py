"""Time in the closed-form engine: a heap of events, and two directions of a link."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

Callback = Callable[[], None]

#: Moments whose relative difference is smaller happen together: it may be rounding alone.
TOGETHER = 1e-12


class Link(Protocol):
    """One direction of PCIe: one transfer at a time, first come, first served.

    Attributes
    ----------
    busy_s : float
    carried_bytes : int
    """

    busy_s: float
    carried_bytes: int

    def send(self, size_bytes: int, seconds: float, done: Callback) -> None:
        """Ask for a transfer; `done` is called when it has ended."""
        ...


class World(Protocol):
    """Where time passes."""

    @property
    def now(self) -> float:
        """Seconds since the run began; in a callback, the time of its event."""
        ...

    @property
    def down(self) -> Link: ...

    @property
    def up(self) -> Link: ...

    def at(self, time_s: float, call: Callback) -> None:
        """Call at that time."""
        ...


class HeapLink:
    """A link whose transfers are priced when they are asked for."""

    def __init__(self, world: HeapWorld) -> None:
        self.busy_s = 0.0
        self.carried_bytes = 0
        self.free_s = 0.0
        self._world = world

    def send(self, size_bytes: int, seconds: float, done: Callback) -> None:
        """Ask for a transfer; `done` is called when it has ended."""
        self.free_s = max(self._world.now, self.free_s) + seconds
        self.busy_s += seconds
        self.carried_bytes += size_bytes
        self._world.at(self.free_s, done)


class HeapWorld:
    """Events in order of time, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self.down = HeapLink(self)
        self.up = HeapLink(self)
        self._events: list[tuple[float, int, Callback]] = []
        self._made = 0

    @property
    def next_s(self) -> float:
        """When the next event is; infinite if there is none."""
        return self._events[0][0] if self._events else float("inf")

    def at(self, time_s: float, call: Callback) -> None:
        """Call at that time."""
        self._made += 1
        heapq.heappush(self._events, (time_s, self._made, call))

    def spend(self, seconds: float) -> None:
        """Let time pass, with the events that lie in it."""
        self._until(self.now + seconds)

    def skip(self) -> None:
        """Let time pass up to the next event."""
        assert self._events, "somebody waits for something that will never happen"
        self._until(max(self.now, self._events[0][0]))

    def _until(self, until: float) -> None:
        events = self._events
        last = until * (1.0 + TOGETHER)
        while events and events[0][0] <= last:
            time_s, _, call = heapq.heappop(events)
            self.now = min(max(self.now, time_s), until)
            call()
        self.now = until
