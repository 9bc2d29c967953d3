"""The memory gauge: what HBM and DDR hold at any moment, the exact peaks, and a sampled series."""

from __future__ import annotations

import numpy as np

from arborsim.core.measurements import MemorySeries
from arborsim.memory.ledger import Ledger
from arborsim.memory.run_profile import RunProfile

SERIES_POINTS = 512
_RUN_POINTS = 64  # at most this many of one run ...
_RUN_STRIDE = 16  # ... and no more than one in so many iterations
_KEEP = 8 * SERIES_POINTS  # thin out the samples beyond this

_Sample = tuple[float, int, int, int, int]  # time, KV pages, staging, in flight, DDR


class MemoryGauge:
    """Adds up the parts of HBM that a search uses.

    Attributes
    ----------
    staging_bytes : int
        Buffers that hold recalled tokens while they live in DDR.
    in_flight_bytes : int
        Pages whose tokens have left for DDR but whose copy is not finished.
    window_bytes : int
        What layers with a sliding window hold; counted with the KV pages.
    peak_bytes, peak_tokens, peak_ddr_bytes, peak_quantised_bytes, peak_staging_bytes : int
    """

    def __init__(self, ledger: Ledger) -> None:
        self.staging_bytes = 0
        self.in_flight_bytes = 0
        self.window_bytes = 0
        self.peak_bytes = 0
        self.peak_tokens = 0
        self.peak_ddr_bytes = 0
        self.peak_quantised_bytes = 0
        self.peak_staging_bytes = 0
        self._ledger = ledger
        self._samples: list[_Sample] = []
        self._peak_sample: _Sample | None = None

    def observe(self, time_s: float) -> None:
        """Take in the state of this moment."""
        kv_bytes = self._ledger.hbm_page_bytes + self.window_bytes
        ddr_bytes = self._ledger.ddr_bytes
        self._note(
            (time_s, kv_bytes, self.staging_bytes, self.in_flight_bytes, ddr_bytes),
            self._ledger.hbm_tokens,
        )
        self._note_quantised(self._ledger.quantised_bytes)

    def observe_run(self, time_s: np.ndarray, run: RunProfile, staging: np.ndarray) -> None:
        """Take in a run with nothing in flight; arrays ``[steps]``, times of iterations' ends.

        `staging` are the streaming buffers of each iteration; pages include what windows hold.
        """
        # Moves can open pages, too: a quantised token goes to a page of its kind.
        kv_bytes = np.maximum(run.hbm_page_bytes_before, run.hbm_page_bytes_after)
        top = int(np.argmax(kv_bytes + staging))
        stride = max(_RUN_STRIDE, -(-len(time_s) // _RUN_POINTS))
        points = range(len(time_s) - 1, -1, -stride)[::-1]
        for i in (i for i in points if i < top):
            self._sample(self._after(i, time_s, run, staging))
        # After the samples up to `top`, or the order in time would break at its own sample.
        peak = (
            float(time_s[top]), int(kv_bytes[top]), int(staging[top]),
            self.in_flight_bytes, int(run.ddr_bytes_after[top]),
        )  # fmt: skip
        self._note(peak, int(max(run.hbm_tokens_before.max(), run.hbm_tokens_after.max())))
        for i in (i for i in points if i >= top):
            self._sample(self._after(i, time_s, run, staging))
        self.peak_ddr_bytes = max(self.peak_ddr_bytes, int(run.ddr_bytes_after.max()))
        self.peak_staging_bytes = max(self.peak_staging_bytes, int(staging.max()))
        self._note_quantised(int(run.quantised_bytes_after.max()))
        self.staging_bytes = int(staging[-1])

    def series(self) -> MemorySeries:
        """At most `SERIES_POINTS` samples in order of time, the peak among them."""
        samples = self._samples
        if len(samples) >= SERIES_POINTS:
            picked = np.linspace(0, len(samples) - 1, SERIES_POINTS - 1).round().astype(int)
            samples = [samples[i] for i in picked.tolist()]
        if self._peak_sample is not None and self._peak_sample not in samples:
            samples = sorted([*samples, self._peak_sample], key=lambda sample: sample[0])
        columns = [list(column) for column in zip(*samples, strict=True)] or [[]] * 5
        return MemorySeries(*columns)

    def _after(self, i: int, time_s: np.ndarray, run: RunProfile, staging: np.ndarray) -> _Sample:
        return (
            float(time_s[i]), int(run.hbm_page_bytes_after[i]), int(staging[i]),
            self.in_flight_bytes, int(run.ddr_bytes_after[i]),
        )  # fmt: skip

    def _note(self, sample: _Sample, hbm_tokens: int) -> None:
        total = sum(sample[1:4])
        if total > self.peak_bytes or self._peak_sample is None:
            self.peak_bytes, self._peak_sample = total, sample
        self.peak_tokens = max(self.peak_tokens, hbm_tokens)
        self.peak_ddr_bytes = max(self.peak_ddr_bytes, sample[4])
        self.peak_staging_bytes = max(self.peak_staging_bytes, sample[2])
        self._sample(sample)

    def _note_quantised(self, held_bytes: int) -> None:
        self.peak_quantised_bytes = max(self.peak_quantised_bytes, held_bytes)

    def _sample(self, sample: _Sample) -> None:
        self._samples.append(sample)
        if len(self._samples) > _KEEP:
            self._samples = self._samples[::2]
