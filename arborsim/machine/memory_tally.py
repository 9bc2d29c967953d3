"""The memory of a server with one search over time."""

from __future__ import annotations

import numpy as np

from arborsim.core.measurements import MemorySeries
from arborsim.machine.batch import IterationTime, Span, Sums
from arborsim.machine.clock import Clock
from arborsim.machine.report import Tally
from arborsim.machine.state import State

SERIES_POINTS = 512
_RUN_POINTS = 64  # at most this many of one stretch of iterations ...
_RUN_STRIDE = 16  # ... and no more than one in that many iterations
_KEEP = 8 * SERIES_POINTS  # thin out the samples beyond this

_Sample = tuple[float, int, int, int, int]  # time, KV pages, staging, in flight, DDR


class MemoryTally(Tally):
    """Counts of a server with one search, and what its memory holds over time."""

    def __init__(self, clock: Clock, points: int) -> None:
        super().__init__(clock, points)
        self.peak_staging_bytes = 0  # of buffers that hold recalled tokens
        self.peak_after_bytes: int | None = None  # since `first_decision`; None before
        self._seen: list[_Sample] = []
        self._peak: _Sample | None = None
        self._peak_to_come = False

    def watch(self, state: State) -> None:
        """Count in this server, which has served nothing yet."""
        self._state = state
        self._time = IterationTime(state.price)

    def hbm(self, used_bytes: int, decoding: bool = False) -> None:
        sample = self._now(used_bytes)
        self.peak_staging_bytes = max(self.peak_staging_bytes, sample[2])
        if self.peak_after_bytes is not None:
            self.peak_after_bytes = max(self.peak_after_bytes, used_bytes)
        if used_bytes > self.peak_hbm_bytes or self._peak is None:
            self.peak_hbm_bytes, self._peak = used_bytes, sample
            if decoding:  # it lies somewhere in the iterations to come
                self._peak_to_come = True
            else:
                self._take(sample)

    def iterations(self, span: Span, k: int, sums: Sums) -> None:
        super().iterations(span, k, sums)
        if k <= _RUN_STRIDE or not sums.hbm_g:
            return
        stride = max(_RUN_STRIDE, -(-k // _RUN_POINTS))
        began_s, outside = self._clock.now - span.seconds, self._state.hbm.value
        for i in range(stride - 1, k - 1, stride):
            used_bytes = outside + sums.hbm + i * sums.hbm_g
            held = self._now(used_bytes)[1:]
            self._take((began_s + self._time.seconds(sums, i + 1), *held))

    def sample(self, hbm_bytes: int, host_bytes: int, decoding: int) -> None:
        if self._peak_to_come and self._peak is not None:
            self._peak_to_come = False
            self._peak = (self._clock.now, *self._peak[1:])
            self._take(self._peak)
        self._take(self._now(hbm_bytes))

    def first_decision(self, held: bool) -> None:
        """Count peaks anew from here; `held`: what memory holds now is what the decision left."""
        self.peak_after_bytes = self._state.used_bytes if held else 0

    @property
    def hbm_byte_s(self) -> float:
        """Bytes in use times seconds, up to now."""
        return self.decoding_byte_s + self._state.hbm.byte_s()

    def look(self) -> None:
        """Take in the state of this moment."""
        self.sample(self._state.used_bytes, 0, 0)

    def memory(self) -> MemorySeries:
        """At most `SERIES_POINTS` samples in order of time, the peak among them."""
        samples = self._seen
        if len(samples) >= SERIES_POINTS:
            picked = np.linspace(0, len(samples) - 1, SERIES_POINTS - 1).round().astype(int)
            samples = [samples[i] for i in picked.tolist()]
        if self._peak is not None and self._peak not in samples:
            samples = sorted([*samples, self._peak], key=lambda sample: sample[0])
        columns = [list(column) for column in zip(*samples, strict=True)] or [[]] * 5
        return MemorySeries(*columns)

    def _now(self, used_bytes: int) -> _Sample:
        state = self._state
        if not state.searches:
            return 0.0, used_bytes, 0, 0, 0
        search = state.searches[0]
        buffers = search.buffer_bytes
        in_flight = search.extra_bytes - search.staging_bytes
        pages = used_bytes - buffers - search.extra_bytes
        staging = search.staging_bytes + buffers
        return self._clock.now, pages, staging, in_flight, state.host.level.value

    def _take(self, sample: _Sample) -> None:
        self._seen.append(sample)
        if len(self._seen) > _KEEP:
            self._seen = self._seen[::2]
