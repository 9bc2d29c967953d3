"""Copies that overlap with computation: on a thread for the CPU, on a side stream for CUDA.

A *copy engine* runs the copies of one direction, first in, first out; a `CopyQueue` knows when they
end, what they cost and who has been told of an error.  Which tensors may be copied is checked by
`arborsim_torch.tiers.link`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Copy(Protocol):
    """A copy on its way."""

    def done(self) -> bool:
        """Whether it has finished, or failed."""

    def join(self) -> float:
        """Wait until it has; seconds that the computation stood still for it."""

    def busy_s(self) -> float:
        """Time the copy itself took; once it is done.  Raises the copy's error if it failed."""


class CopyEngine(Protocol):
    """Carries copies of one direction, in order."""

    def start(self, source: Tensor, out: Tensor) -> Copy:
        """Begin to copy `source` into `out`; both must stay as they are until it is done."""

    def close(self) -> None:
        """Finish what has been started; nothing may be started after."""


class ThreadEngine:
    """One background thread; PyTorch's copies leave the interpreter to others."""

    def __init__(self, name: str) -> None:
        # The pool keeps order, hands errors over, and ends with the interpreter or its owner.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"copy-{name}")

    def start(self, source: Tensor, out: Tensor) -> Copy:
        return _ThreadCopy(self._pool.submit(_timed_copy, source, out))

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

    def busy_s(self) -> float:
        return self._future.result()


def _timed_copy(source: Tensor, out: Tensor) -> float:
    begun = time.perf_counter()
    # Threads start outside inference mode, where the caller's inference tensors are read-only.
    with torch.inference_mode():
        out.copy_(source)
    return time.perf_counter() - begun


class StreamEngine:
    """One CUDA stream; copies between pinned memory and the device run on a DMA engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, source: Tensor, out: Tensor) -> Copy:
        # What the computation has been told to do so far may write `source` or read `out`.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            begun.record()
            out.copy_(source, non_blocking=True)
            ended.record()
        on_device = source if source.is_cuda else out
        on_device.record_stream(self._stream)  # so that its memory outlives a dropped ticket
        return _StreamCopy(begun, ended, self._device)

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

    def busy_s(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1e3


@dataclass(frozen=True)
class CopyTotals:
    """What one direction of a link has finished carrying.

    Attributes
    ----------
    copies, carried_bytes : int
    busy_s : float
        Sum of the times of the copies themselves, without waiting in the queue.
    """

    copies: int = 0
    carried_bytes: int = 0
    busy_s: float = 0.0

    def __add__(self, other: CopyTotals) -> CopyTotals:
        return CopyTotals(
            self.copies + other.copies,
            self.carried_bytes + other.carried_bytes,
            self.busy_s + other.busy_s,
        )


class Ticket:
    """A copy that has been ordered."""

    def __init__(self, seq: CopyQueue, copy: Copy, source: Tensor, out: Tensor) -> None:
        self._seq, self._copy = seq, copy
        self._tensors: tuple[Tensor, Tensor] | None = (source, out)  # alive until done
        self._bytes = source.numel() * source.element_size()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the copy has finished, or failed."""
        return self._copy.done()

    def wait(self) -> float:
        """Wait for the copy; raise its error if it failed.

        Returns
        -------
        float
            Seconds that the caller was held up: the *exposed* part of the copy.  On CUDA, seconds
            that the device's current stream stood idle at this point; the host waits as well.
        """
        held_up_s = self.join()
        self._seq.settle(held_up_s)
        if self._error is not None:
            self._seq.told(self)
            raise self._error
        return held_up_s

    def join(self) -> float:
        """Wait without accounts and errors; seconds held up."""
        return self._copy.join()

    def settle(self) -> CopyTotals | Exception:
        """Let go of the tensors; what a finished copy has carried, or why it failed."""
        self._tensors = None
        try:
            return CopyTotals(1, self._bytes, self._copy.busy_s())
        except Exception as error:
            self._error = error
            return error


class CopyQueue:
    """One direction: its engine, the copies on their way, and its accounts."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._pending: deque[Ticket] = deque()
        self._failed: list[Ticket] = []  # whose errors have not been raised
        self._lock = threading.RLock()
        self._traffic = CopyTotals()
        self._exposed_s = 0.0

    def send(self, source: Tensor, out: Tensor) -> Ticket:
        with self._lock:
            self.settle()
            ticket = Ticket(self, self._engine.start(source, out), source, out)
            self._pending.append(ticket)
            return ticket

    def settle(self, held_up_s: float = 0.0) -> None:
        """Account for the copies that are done, and for time that a caller was held up."""
        with self._lock:
            self._exposed_s += held_up_s
            while self._pending and self._pending[0].done():
                ticket = self._pending.popleft()
                result = ticket.settle()
                if isinstance(result, CopyTotals):
                    self._traffic += result
                else:
                    self._failed.append(ticket)

    def told(self, ticket: Ticket) -> None:
        """The caller knows of this ticket's error."""
        with self._lock:
            self._failed = [other for other in self._failed if other is not ticket]

    def wait_all(self) -> float:
        with self._lock:
            waiting = list(self._pending)
        held_up_s = sum(ticket.join() for ticket in waiting)
        self.settle(held_up_s)
        return held_up_s

    def failed(self) -> list[Ticket]:
        """Copies whose errors have not been raised, oldest first; they count as raised now."""
        with self._lock:
            failed, self._failed = self._failed, []
            return failed

    def traffic(self) -> CopyTotals:
        self.settle()
        return self._traffic

    def exposed_s(self) -> float:
        return self._exposed_s

    def close(self) -> None:
        self._engine.close()
        self.settle()


def to_device(table: np.ndarray, device: torch.device) -> Tensor:
    """A table as a tensor on the device; the host does not wait until the device gets to it.

    CUDA copies ordinary memory aside before the call returns, so the table may change afterwards;
    a copy that blocks would wait for everything that the device still computes.  On the CPU the
    tensor is the table.
    """
    return torch.from_numpy(table).to(device, non_blocking=True)
