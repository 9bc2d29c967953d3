"""Copies that run beside the computation: on a thread for the CPU, on a side stream for CUDA.

An *engine* carries one direction, first in, first out.  It knows nothing of the other direction,
of tickets or of accounts (`arborsim_torch.tiers.lane`).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

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


class Engine(Protocol):
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
