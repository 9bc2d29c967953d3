"""Timing that other processes disturb little: the best round's median.

A round is a few repetitions right after each other, and its median is not moved by single hiccups.
Of several rounds the fastest counts: another process slows whole rounds down, and nothing makes
one faster than the machine is.  On a CPU with one thread it is that thread's CPU time that
counts: what it takes when nothing else runs.

On CUDA a kernel may be over before the host has launched the next one, and events around a single
call then time the host.  Therefore many calls are captured in one CUDA graph, launched at once.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from arborsim_torch.graphs import abandon, capture_into, reason

_LONG_S = 4e-3  # of a graph: the two events and the launch, some 10 us, are then next to nothing
_MOST_CALLS = 512  # in a graph, if one turn has fewer


@functools.cache
def side_stream(device: torch.device) -> Any:
    """The one stream that captures for measurements: libraries keep a workspace for each."""
    return torch.cuda.Stream(device)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On `side_stream`, after what came before and before what comes after."""
    here, there = torch.cuda.current_stream(device), side_stream(device)
    there.wait_stream(here)
    try:
        with torch.cuda.stream(there):
            yield
    finally:
        here.wait_stream(there)


def capture(work: Callable[[], Any], device: torch.device) -> tuple[Any, str]:
    """A CUDA graph of all that `work` launches; None and why, if none can hold it.

    `work` must have run `aside` before.  Whatever goes wrong, the process can go on.
    """
    # A pool of its own, by name: a capture that fails leaves it open.
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    here, stream = torch.cuda.current_stream(device), side_stream(device)
    stream.wait_stream(here)
    try:
        # The stream is turned back to, which a failed capture does not do.
        with torch.cuda.device(device), torch.cuda.stream(here):
            capture_into(graph, pool, stream, work)
    except BaseException as error:
        index = torch.cuda.current_device() if device.index is None else device.index
        with suppress(RuntimeError):
            if abandon(graph, pool, index):
                torch._C._cuda_releasePool(index, pool)
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
        if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
            raise
        return None, reason(error)
    return graph, ""


@dataclass(frozen=True)
class Timer:
    """Times functions on a device."""

    device: torch.device
    #: rounds, and repetitions in each
    rounds: int = 3
    repeats: int = 7
    limit_s: float = 1.0  #: no new repetition starts after this time, once there is one

    def seconds(self, *works: Callable[[], Any]) -> float:
        """Seconds of one call: on CUDA the device's own, without launching.

        Several works are called in turn: the same over buffers that no cache holds together.  On
        CUDA, what waits for the device or cannot be captured runs in a loop between events.
        """
        turn = works[0] if len(works) == 1 else functools.partial(_in_turn, works)
        if self.device.type == "cuda":
            return self._on_device(turn, len(works)) / len(works)
        return self._best(self.once, turn) / len(works)

    def queued_seconds(self, work: Callable[[], Any]) -> float:
        """Seconds from the first to the last of what `work` launches.

        On CUDA by events on the stream, so waits of the device for launches count and waits of the
        host for the device do not; elsewhere of one call.
        """
        return self._best(self._between if self.device.type == "cuda" else self.once, work)

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds since some moment; see above."""
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        return time.thread_time if alone else time.perf_counter

    def whole_seconds(self, work: Callable[[], Any]) -> float:
        """Seconds from the call of `work` until the device has done it, launching included."""
        return self._best(self.once, work)

    def once(self, work: Callable[[], Any]) -> float:
        """One call, from start to the end of what it started."""
        clock = self.clock
        self.synchronize()
        began = clock()
        work()
        self.synchronize()
        return clock() - began

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _on_device(self, turn: Callable[[], Any], calls: int) -> float:
        """Seconds of one turn, from a graph of several."""
        with torch.cuda.device(self.device):
            with aside(self.device):
                turn()  # compiles, allocates, and lets libraries set themselves up
            self.synchronize()
            alone_s = self._between(turn)
            most = max(1, _MOST_CALLS // calls)
            turns = min(most, max(1, math.ceil(_LONG_S / max(alone_s, 1e-6))))
            many = functools.partial(_in_turn, [turn] * turns)
            graph = None if self._waits(turn) else capture(many, self.device)[0]
            return self._best(self._between, many if graph is None else graph.replay) / turns

    def _waits(self, work: Callable[[], Any]) -> bool:
        """Whether PyTorch says that the host waits in `work`, which no capture survives."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with aside(self.device):
                work()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False

    def _between(self, work: Callable[[], Any]) -> float:
        """Seconds between two events around one call."""
        with torch.cuda.device(self.device):
            first = torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            first.record()
            work()
            last.record()
            last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def _best(self, once: Callable[[Callable[[], Any]], float], work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        warm = once(work)  # allocations and lazy initialisation are not the machine's speed
        best = float("inf")
        for _ in range(self.rounds):
            taken: list[float] = []
            while len(taken) < self.repeats and (
                time.perf_counter() - began < self.limit_s or not taken
            ):
                taken.append(once(work))
            best = min(best, statistics.median(taken))
            if time.perf_counter() - began >= self.limit_s:
                break
        # Where one call takes longer than the limit, the first one is as good as any.
        return min(best, warm) if warm > self.limit_s else best


def _in_turn(works: Sequence[Callable[[], Any]]) -> None:
    for work in works:
        work()
