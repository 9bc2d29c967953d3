"""What happens before what: host threads and streams, each with a vector clock.

An operation's *moment* is its timeline and its number there.  A timeline knows, of every other,
the last moment that is certain to be over; nothing else may be relied on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .graphs import Capture, Note, Pool

_IDS = itertools.count()


class Race(AssertionError):
    """Two accesses that nothing puts in order, or memory freed under an access."""


class Timeline:
    """A host thread or a stream."""

    def __init__(self, name: str) -> None:
        self.id = next(_IDS)
        self.name = name
        self.known: dict[int, int] = {self.id: 0}
        self.pending: list[Callable[[], None]] = []  # copies that run when something waits for them

    @property
    def now(self) -> int:
        return self.known[self.id]

    def tick(self) -> None:
        self.known[self.id] += 1

    def learn(self, known: dict[int, int]) -> None:
        """Everything in `known` is over."""
        own = self.known
        if known is own:
            return
        for timeline, moment in known.items():
            if own.get(timeline, -1) < moment:
                own[timeline] = moment

    def flush(self) -> None:
        pending, self.pending = self.pending, []
        for copy in pending:
            copy()


@dataclass(slots=True)
class Access:
    """One access of a memory: bytes ``first <= byte < last``."""

    timeline: Timeline
    moment: int
    first: int
    last: int
    write: bool
    what: str


class Memory:
    """A block of device memory, or of page-locked host memory."""

    def __init__(self, gpu: Gpu, nbytes: int, pinned: bool) -> None:
        self.gpu, self.nbytes, self.pinned = gpu, nbytes, pinned
        self.stream = gpu.stream()
        self.recorded: set[int] = set()  # streams that `record_stream` named
        self.accesses: list[Access] = []
        if not pinned:
            gpu.allocated += nbytes
            gpu.peak = max(gpu.peak, gpu.allocated)

    def touch(self, by: Timeline, span: tuple[int, int], write: bool, what: str) -> None:
        """Note an access, which must come after all that it conflicts with."""
        self.accesses = self.ordered(self.accesses, by, span, write, what)

    def ordered(
        self, accesses: list[Access], by: Timeline, span: tuple[int, int], write: bool, what: str
    ) -> list[Access]:
        """Accesses and a new one, which must come after all of them that it conflicts with."""
        first, last = span
        known, kept = by.known, []
        for other in accesses:
            over = other.timeline is by or known.get(other.timeline.id, -1) >= other.moment
            if not over and (write or other.write) and first < other.last and other.first < last:
                self.gpu.fault(
                    f"{what} on {by.name} {'writes' if write else 'reads'} what {other.what} on "
                    f"{other.timeline.name} {'writes' if other.write else 'reads'}, and nothing "
                    "puts them in order"
                )
            # What is ordered after the new access is ordered after one that is over as well.
            superseded = over and (write or not other.write)
            if not (superseded and first <= other.first and other.last <= last):
                kept.append(other)
        return [*kept, Access(by, by.now, first, last, write, what)]

    def __del__(self) -> None:
        if self.pinned:  # the caching host allocator waits for the copies that use a block
            return
        self.gpu.allocated -= self.nbytes
        for access in self.accesses:
            stream = access.timeline
            if stream is self.stream or stream.id in self.recorded:
                continue
            known = (self.stream.known, self.gpu.host().known)
            if all(each.get(stream.id, -1) < access.moment for each in known):
                self.gpu.faults.append(
                    f"memory of {self.stream.name} is freed while {access.what} on {stream.name} "
                    "may still use it: no record_stream"
                )


@dataclass
class Gpu:
    """The pretended device.

    Attributes
    ----------
    patience : int
        How often an event that was not waited for says that it has not happened yet.
    faults : list of str
    waits : Counter of str
        What made the host wait for the device, by operation.
    """

    patience: int = 0
    faults: list[str] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    where: Callable[[], str] | None = None  # what to add to the name of a wait
    allocated: int = 0
    peak: int = 0
    sync_debug: int = 0  # 2 refuses operators that the host waits for, as PyTorch's debug mode

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._local = threading.local()
        self.default = Stream(self, "the default stream")
        self.streams = [self.default]
        self.pools: list[Pool] = []  # that graphs were captured into
        self.compiled: set[Any] = set()  # launches of kernels, as Triton tells them apart

    @property
    def capture(self) -> Capture | None:
        """What this thread captures."""
        return getattr(self._local, "capture", None)

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._local.capture = capture

    def host(self) -> Timeline:
        """This thread's timeline."""
        found = getattr(self._local, "host", None)
        if found is None:
            found = self._local.host = Timeline(f"thread {threading.current_thread().name}")
        return found

    def stream(self) -> Stream:
        """This thread's current stream."""
        return getattr(self._local, "stream", None) or self.default

    def turn_to(self, stream: Stream) -> None:
        self._local.stream = stream

    def fault(self, what: str) -> None:
        self.faults.append(what)
        if self.capture is not None:
            self.capture.failed = True
        raise Race(what)

    def wait(self, for_: dict[int, int], why: str) -> None:
        """This thread stands still until all that is in `for_` is over."""
        if self.capture is not None:
            self.fault(f"{why}: the host waits inside of a capture")
        if self.sync_debug == 2 and "synchronize" not in why and "torch.cuda" not in why:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.waits[why if self.where is None else f"{why} {self.where()}"] += 1
        self.host().learn(for_)

    def branch(self, stream: Stream) -> Timeline:
        """A capture's operations on a stream."""
        return Timeline(f"{stream.name} in a capture")

    def launch(self, what: str) -> Stream:
        """An operation enters the current stream."""
        stream, capture = self.stream(), self.capture
        if capture is not None:
            if stream not in capture.branches:
                self.fault(f"{what} on {stream.name} inside of a capture on another stream")
            capture.branches[stream].tick()
            capture.notes.append(Note(what))
            return stream
        stream.learn(self.host().known)
        stream.tick()
        stream.flush()
        self.launches[what] += 1
        return stream


class Stream(Timeline):
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        super().__init__(name)
        self.gpu = gpu
        self.cuda_stream = self.id

    def wait_stream(self, other: Stream) -> None:
        with self.gpu.lock:
            if self.gpu.capture is not None:
                return self.wait_event(other.record_event())
            other.flush()
            self.learn(self.gpu.host().known)
            self.learn(other.known)

    def wait_event(self, event: Event) -> None:
        with self.gpu.lock:
            capture = self.gpu.capture
            if event.capture is not None:
                if event.capture is not capture:
                    raise RuntimeError("an event of a capture is waited for outside of it")
                if self not in capture.branches:
                    capture.branches[self] = self.gpu.branch(self)
                capture.branches[self].learn(event.known)
                return
            if capture is not None and self in capture.branches:
                self.gpu.fault(f"{self.name} waits inside of a capture for what is outside")
            event.happen()
            self.learn(self.gpu.host().known)
            self.learn(event.known)

    def record_event(self, event: Any = None) -> Event:
        event = Event(self.gpu) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        with self.gpu.lock:
            self.flush()
            self.gpu.wait(self.known, "Stream.synchronize")

    def query(self) -> bool:
        with self.gpu.lock:
            self.flush()
            self.gpu.host().learn(self.known)
            return True


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, gpu: Gpu, enable_timing: bool = False) -> None:
        self.gpu, self._timing = gpu, enable_timing
        self.known: dict[int, int] = {}
        self._stream: Stream | None = None
        self._recorded_s = 0.0
        self._patience = gpu.patience
        self.capture: Capture | None = None  # that it was recorded in

    def record(self, stream: Stream | None = None) -> None:
        with self.gpu.lock:
            self._stream = stream or self.gpu.stream()
            capture = self.gpu.capture
            self.capture = capture if capture and self._stream in capture.branches else None
            if self.capture is not None:
                self.known = dict(self.capture.branches[self._stream].known)
                return
            self._stream.learn(self.gpu.host().known)
            self.known = dict(self._stream.known)
            self._recorded_s = time.perf_counter()

    def happen(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream()).wait_event(self)

    def _over(self) -> bool:
        host = self.gpu.host().known
        return all(host.get(timeline, -1) >= moment for timeline, moment in self.known.items())

    def query(self) -> bool:
        """True says that it has happened, so the host knows then."""
        with self.gpu.lock:
            if self.gpu.capture is not None or self.capture is not None:
                self.gpu.fault("an event is asked inside of a capture, or is one of a capture")
            if not self._over() and self._patience > 0:
                self._patience -= 1
                return False
            self.happen()
            self.gpu.host().learn(self.known)
            return True

    def synchronize(self) -> None:
        with self.gpu.lock:
            if self.capture is not None:
                self.gpu.fault("the host waits for an event of a capture")
            self.happen()
            self.gpu.wait(self.known, "Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._stream is None or end._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self._over() and end._over()):
            raise RuntimeError("CUDA error: device not ready")
        return max(1e-3, (end._recorded_s - self._recorded_s) * 1e3)
