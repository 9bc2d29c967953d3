"""Bytes by tier while a live search runs, counted in the pools and in the allocator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arborsim.core.measurements import Measurements
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.places import Place

_MOST_SAMPLES = 2048
_STAGING = (Place.STAGING, Place.STAGING_QUANTISED)
_HBM = (Place.HBM, Place.HBM_QUANTISED)
_DDR = (Place.DDR, Place.DDR_QUANTISED)


class LiveGauge:
    """Peaks and a series of what a mover's cache holds.

    Attributes
    ----------
    allocated_bytes : int
        Largest size of the pools' tensors on the model's device, gaps included.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.allocated_bytes = 0
        self._peak_hbm = self._peak_tokens = self._peak_ddr = 0
        self._peak_quantised = self._peak_staging = 0
        self._samples: list[tuple[float, int, int, int, int]] = []
        self._every = 1
        self._seen = 0

    def observe(self, time_s: float) -> None:
        """Look at the pools."""
        pools = self._mover.cache.pools
        used = {place: pool.used_bytes for place, pool in pools.items()}
        staging = used[Place.STAGING] + used[Place.STAGING_QUANTISED]
        staging += self._mover.cache.buffer_bytes
        hbm = used[Place.HBM] + used[Place.HBM_QUANTISED]
        ddr = used[Place.DDR] + used[Place.DDR_QUANTISED]
        held = sum(pools[place].slots.used for place in _HBM) - self._mover.leaving_tokens
        quantised = used[Place.HBM_QUANTISED] + used[Place.DDR_QUANTISED]
        self._peak_hbm = max(self._peak_hbm, hbm + staging)
        self._peak_tokens = max(self._peak_tokens, int(np.max(held)))
        self._peak_ddr = max(self._peak_ddr, ddr)
        self._peak_quantised = max(self._peak_quantised, quantised)
        self._peak_staging = max(self._peak_staging, staging)
        self._note_allocated(self._mover.cache.buffer_bytes)
        if self._seen % self._every == 0:
            flying = self._mover.in_flight_bytes
            self._samples.append((time_s, hbm - flying, staging, flying, ddr))
            if len(self._samples) > _MOST_SAMPLES:
                del self._samples[1::2]
                self._every *= 2
        self._seen += 1

    def observe_peak(self) -> None:
        """The device holds more than before or after: see `Mover.on_peak`."""
        held = {place: self._mover.cache.pools[place].used_bytes for place in (*_HBM, *_STAGING)}
        buffers = self._mover.staging_in_flight_bytes + self._mover.cache.buffer_bytes
        staging = buffers + sum(held[place] for place in _STAGING)
        self._peak_hbm = max(self._peak_hbm, staging + sum(held[place] for place in _HBM))
        self._peak_staging = max(self._peak_staging, staging)
        self._note_allocated(buffers)

    def _note_allocated(self, beside_bytes: int) -> None:
        allocated = self._mover.cache.capacity_bytes(*_HBM, *_STAGING)
        self.allocated_bytes = max(self.allocated_bytes, allocated + beside_bytes)

    def fill(self, m: Measurements) -> None:
        """Write peaks and the series into `m`."""
        m.peak_hbm_kv_bytes = self._peak_hbm
        m.peak_hbm_kv_tokens = self._peak_tokens
        m.peak_ddr_bytes = self._peak_ddr
        m.peak_quantised_bytes = self._peak_quantised
        m.peak_staging_bytes = self._peak_staging
        s = m.series
        columns: list[list[Any]] = [
            s.time_s, s.hbm_kv_bytes, s.staging_bytes, s.in_flight_bytes, s.ddr_bytes,
        ]  # fmt: skip
        for i, column in enumerate(columns):
            column[:] = [sample[i] for sample in self._samples]


def device_peak_bytes(device: torch.device) -> int:
    """Largest memory that PyTorch's allocator has held since it was last reset; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
