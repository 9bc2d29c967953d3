"""Copies that overlap with computation: on a thread for the CPU, on a side stream for CUDA.

A *copy engine* runs the copies of one direction, first in, first out; a `CopyQueue` knows when they
end, what they cost and who has been told of an error.  What is ordered together is a *block list*:
pairs of source and target that one ticket stands for, issued without anything in between, as vLLM's
``swap_blocks_batch`` does.  Which tensors may be copied is checked by `arborsim_torch.tiers.link`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

Block = tuple[Tensor, Tensor]  #: where a copy comes from, and where it goes


class HeldUp:
    """Time that copies held up, by who stood still; `host_s` are seconds that the host waited."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self._device_s = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def add(self, reached: torch.cuda.Event, passed: torch.cuda.Event) -> None:
        """Add a wait of the device's queue, between two events around it."""
        self._open.append((reached, passed))

    @property
    def device_s(self) -> float:
        """Seconds that the device's own queue stood still; of waits that have ended."""
        while self._open and self._open[0][1].query():
            reached, passed = self._open.popleft()
            self._device_s += float(reached.elapsed_time(passed)) / 1e3
        return self._device_s

    @property
    def seconds(self) -> float:
        return self.host_s + self.device_s


class Copy(Protocol):
    """A block list on its way."""

    def done(self) -> bool:
        """Whether it has finished, or failed."""

    def join(self) -> float:
        """Wait until it has; seconds that the computation stood still for it."""

    def order(self, held_up: HeldUp) -> bool:
        """Let the device's current stream wait for it; False if the host has to, or need not."""

    def busy_s(self) -> float:
        """Time the copy itself took; once it is done.  Raises the copy's error if it failed."""


class CopyEngine(Protocol):
    """Carries copies of one direction, in order."""

    @property
    def capturing(self) -> bool:
        """Whether what is started becomes part of a CUDA graph, and only happens with it."""

    def start(self, blocks: Sequence[Block]) -> Copy:
        """Begin to copy; all tensors must stay as they are until it is done."""

    def follow(self, other: Self) -> None:
        """Begin with what is started from now on after all that the other one has started."""

    def close(self) -> None:
        """Finish what has been started; nothing may be started after."""


class ThreadEngine:
    """One background thread; PyTorch's copies leave the interpreter to others."""

    capturing = False

    def __init__(self, name: str) -> None:
        # The pool keeps order, hands errors over, and ends with the interpreter or its owner.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"copy-{name}")

    def start(self, blocks: Sequence[Block]) -> Copy:
        return _ThreadCopy(self._pool.submit(_timed_copy, blocks))

    def follow(self, other: ThreadEngine) -> None:
        self._pool.submit(other._pool.submit(lambda: None).result)  # both keep order

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class _ThreadCopy:
    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def join(self) -> float:
        if self._future.done():
            return 0.0
        begun = time.perf_counter()
        self._future.exception()
        return time.perf_counter() - begun

    def order(self, held_up: HeldUp) -> bool:
        return False

    def busy_s(self) -> float:
        return self._future.result()


def _timed_copy(blocks: Sequence[Block]) -> float:
    begun = time.perf_counter()
    # Threads start outside inference mode, where the caller's inference tensors are read-only.
    with torch.inference_mode():
        for source, out in blocks:
            out.copy_(source)
    return time.perf_counter() - begun


class StreamEngine:
    """One CUDA stream; copies between pinned memory and the device run on a DMA engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def start(self, blocks: Sequence[Block]) -> Copy:
        # What the computation has been told to do so far may write sources or read targets.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self.capturing:  # the side stream has joined the capture
            with torch.cuda.stream(self._stream), torch.inference_mode():
                for source, out in blocks:
                    out.copy_(source, non_blocking=True)
                return _CapturedCopy(self._stream.record_event(), self._device)
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            begun.record()
            for source, out in blocks:
                out.copy_(source, non_blocking=True)
            ended.record()
        for source, out in blocks:
            on_device = source if source.is_cuda else out
            on_device.record_stream(self._stream)  # so that its memory outlives a dropped ticket
        return _StreamCopy(begun, ended, self._device)

    def follow(self, other: StreamEngine) -> None:
        self._stream.wait_stream(other._stream)

    def close(self) -> None:
        self._stream.synchronize()


class _StreamCopy:
    def __init__(
        self, begun: torch.cuda.Event, ended: torch.cuda.Event, device: torch.device
    ) -> None:
        self._begun, self._ended, self._device = begun, ended, device

    def done(self) -> bool:
        return bool(self._ended.query())

    def join(self) -> float:
        """Wait on the host; what counts is how long the device's own queue then had run dry."""
        if self._ended.query():
            return 0.0
        reached = torch.cuda.Event(enable_timing=True)
        reached.record(torch.cuda.current_stream(self._device))
        self._ended.synchronize()
        if not reached.query():  # the device is still at work: the copy came in time
            return 0.0
        return max(0.0, float(reached.elapsed_time(self._ended)) / 1e3)

    def order(self, held_up: HeldUp) -> bool:
        if self._ended.query():
            return False
        stream = torch.cuda.current_stream(self._device)
        reached, passed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        reached.record(stream)
        stream.wait_event(self._ended)
        passed.record(stream)
        held_up.add(reached, passed)
        return True

    def busy_s(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1e3


@dataclass(frozen=True)
class _CapturedCopy:
    """A branch of a CUDA graph: nothing can be asked of its event, and no time is taken."""

    _ended: torch.cuda.Event
    _device: torch.device

    def done(self) -> bool:
        return False

    def join(self) -> float:
        raise RuntimeError("the host cannot wait for a copy that is captured")

    def order(self, held_up: HeldUp) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        return True

    def busy_s(self) -> float:
        return 0.0


@dataclass(frozen=True)
class CopyTotals:
    """The copies that one direction of a link has carried to their end."""

    copies: int = 0
    carried_bytes: int = 0
    busy_s: float = 0.0  #: sum of the times of the copies themselves, without waiting in the queue
    untimed_bytes: int = 0  #: carried within CUDA graphs, where no copy's time is taken

    def __add__(self, other: CopyTotals) -> CopyTotals:
        return CopyTotals(
            self.copies + other.copies,
            self.carried_bytes + other.carried_bytes,
            self.busy_s + other.busy_s,
            self.untimed_bytes + other.untimed_bytes,
        )


class Ticket:
    """A block list that has been ordered."""

    def __init__(self, queue: CopyQueue, copy: Copy, blocks: Sequence[Block]) -> None:
        self._queue, self._copy = queue, copy
        self._tensors: Sequence[Block] | None = blocks  # alive until done
        self._copies = len(blocks)
        self._bytes = sum(source.numel() * source.element_size() for source, _ in blocks)
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the copy has finished, or failed."""
        return self._copy.done()

    def wait(self) -> float:
        """Wait on the host; raise the copy's error if it failed.

        Returns float: seconds that the caller was held up: the *exposed* part of the copy.  On
        CUDA, seconds that the device's current stream stood idle at this point.  The host waits as
        well.
        """
        held_up_s = self.join()
        self._queue.settle()
        if self._error is not None:
            self._queue.told(self)
            raise self._error
        return held_up_s

    def order(self, held_up: HeldUp) -> None:
        """Let all that is computed from now on come after the copy.

        On CUDA the device's current stream waits and the host goes on; else the host waits, and the
        copy's error is raised if it failed.  `held_up` takes the time that anything stood still.
        """
        if self._copy.order(held_up):
            self._tensors = None  # the device keeps their memory until the copy has ended
        else:
            held_up.host_s += self.wait()

    def join(self) -> float:
        """Wait without errors; seconds held up."""
        return self._copy.join()

    def settle(self) -> CopyTotals | Exception:
        """Let go of the tensors; the totals of a finished copy, or why it failed."""
        self._tensors = None
        try:
            return CopyTotals(self._copies, self._bytes, self._copy.busy_s())
        except Exception as error:
            self._error = error
            return error


class CopyQueue:
    """One direction: its engine, the copies on their way, and what it has carried."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._pending: deque[Ticket] = deque()
        self._failed: list[Ticket] = []  # whose errors have not been raised
        self._lock = threading.RLock()
        self._traffic = CopyTotals()

    def send(self, blocks: Sequence[Block]) -> Ticket:
        with self._lock:
            if self._engine.capturing:  # counted when it happens: `replayed`
                return Ticket(self, self._engine.start(blocks), ())
            self.settle()
            ticket = Ticket(self, self._engine.start(blocks), blocks)
            self._pending.append(ticket)
            return ticket

    def follow(self, other: CopyQueue) -> None:
        """Begin what is sent from now on once all that the other one was sent has ended."""
        self._engine.follow(other._engine)

    def settle(self) -> None:
        """Account for the copies that are done."""
        with self._lock:
            while self._pending and self._pending[0].done():
                ticket = self._pending.popleft()
                result = ticket.settle()
                if isinstance(result, CopyTotals):
                    self._traffic += result
                else:
                    self._failed.append(ticket)

    def replayed(self, copies: int, carried_bytes: int) -> None:
        """Count the copies of a CUDA graph, each time that it is launched."""
        with self._lock:
            self._traffic += CopyTotals(copies, carried_bytes, untimed_bytes=carried_bytes)

    def idle(self) -> bool:
        """Whether all that was ordered has ended."""
        self.settle()
        return not self._pending

    def told(self, ticket: Ticket) -> None:
        """Note that the caller knows of this ticket's error."""
        with self._lock:
            self._failed = [other for other in self._failed if other is not ticket]

    def wait_all(self) -> float:
        with self._lock:
            waiting = list(self._pending)
        held_up_s = sum(ticket.join() for ticket in waiting)
        self.settle()
        return held_up_s

    def failed(self) -> list[Ticket]:
        """Copies whose errors have not been raised, oldest first; they count as raised now."""
        with self._lock:
            failed, self._failed = self._failed, []
            return failed

    def traffic(self) -> CopyTotals:
        self.settle()
        return self._traffic

    def close(self) -> None:
        self._engine.close()
        self.settle()


def to_device(table: np.ndarray, device: torch.device) -> Tensor:
    """A table as a tensor on the device; the host does not wait until the device gets to it.

    CUDA copies ordinary memory aside before the call returns, so the table may change afterwards.
    A copy that blocks would wait for everything that the device still computes.  On the CPU the
    tensor is the table.
    """
    return torch.from_numpy(table).to(device, non_blocking=True)
