"""Timing that other processes disturb little: the best round's median.

A round is a few repetitions right after each other, and its median is not moved by single hiccups.
Of several rounds the fastest counts: another process slows whole rounds down, and nothing makes
one faster than the machine is.  On a CPU with one thread it is that thread's CPU time that
counts: what it takes when nothing else runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timer:
    """Times functions on a device.

    Attributes
    ----------
    device : torch.device
    rounds, repeats : int
        Rounds, and repetitions in each.
    limit_s : float
        No new repetition starts after this time, once there is one.
    """

    device: torch.device
    rounds: int = 3
    repeats: int = 7
    limit_s: float = 1.0

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of one call of `work`: on CUDA the device's own, without launching."""
        return self._best(self._on_device if self.device.type == "cuda" else self.once, work)

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

    def _on_device(self, work: Callable[[], Any]) -> float:
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
