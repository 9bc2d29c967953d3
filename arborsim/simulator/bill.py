"""The bill: counts what a search did and what it waited for, and makes `Measurements` of it."""

from __future__ import annotations

import numpy as np

from arborsim.hardware.cost import CostModel
from arborsim.measurements import Measurements, TimeSplit
from arborsim.memory.census import Changes, kinds
from arborsim.memory.tiers import Tier
from arborsim.simulator.engine import Engine
from arborsim.simulator.gauge import MemoryGauge
from arborsim.simulator.iterations import IterationCosts

_COUNTED = np.stack([
    kinds(lambda source, target: target == Tier.EVICTED),
    kinds(lambda source, target: source == Tier.EVICTED),
    kinds(lambda source, target: target.in_ddr and not source.in_ddr),
    kinds(lambda source, target: target.quantised and not source.quantised),
])  # fmt: skip


class Bill:
    """Collects the counters of one search.

    Attributes
    ----------
    measured : Measurements
        Counters that executors add to directly; `close` fills in the rest.
    """

    def __init__(self, groups: int) -> None:
        self.measured = Measurements()
        self._groups = groups
        self._workspace_bytes = 0
        self._background_exposed_s = 0.0
        self._beside_s = 0.0  # streaming and CPU attention that iterations did not wait for

    @property
    def time(self) -> TimeSplit:
        return self.measured.time

    def expose(self, seconds: float) -> None:
        """Decoding has waited so long for transfers in the background."""
        self.time.exposed_transfer_s += seconds
        self._background_exposed_s += seconds

    def iterations(self, costs: IterationCosts) -> None:
        """A run of decode iterations."""
        self.time.decode_s += float(costs.decode_s.sum())
        self.time.policy_s += float(costs.policy_s.sum())
        if costs.beside is not None:
            exposed_s, total_s = costs.beside.exposed_s, costs.beside.total_s
            self.time.exposed_transfer_s += float(exposed_s.sum())
            self._beside_s += float((total_s - exposed_s).sum())

    def workspace(self, needed_bytes: int) -> None:
        """A forward pass needs so much HBM beside weights and cache."""
        self._workspace_bytes = max(self._workspace_bytes, needed_bytes)

    def moves(self, changes: Changes) -> None:
        """Tokens have changed their tier."""
        m, groups = self.measured, self._groups
        evicted, rehydrated, offloaded, quantised = (_COUNTED @ changes.flow).tolist()
        m.evicted_tokens += evicted / groups
        m.rehydrated_tokens += rehydrated / groups
        m.offloaded_tokens += offloaded / groups
        m.quantised_tokens += quantised / groups

    def close(self, gauge: MemoryGauge, engine: Engine, cost: CostModel) -> Measurements:
        """All figures up to now."""
        m = self.measured
        m.peak_hbm_kv_bytes = gauge.peak_bytes
        m.peak_hbm_kv_tokens = gauge.peak_tokens
        m.peak_ddr_bytes = gauge.peak_ddr_bytes
        m.peak_quantised_bytes = gauge.peak_quantised_bytes
        m.peak_staging_bytes = gauge.peak_staging_bytes
        m.weight_bytes = cost.geometry.weight_bytes
        m.workspace_bytes = self._workspace_bytes
        m.usable_hbm_bytes = cost.profile.usable_hbm_bytes
        m.usable_ddr_bytes = cost.profile.ddr_bytes
        m.to_ddr_bytes = engine.down.carried_bytes
        m.from_ddr_bytes = engine.up.carried_bytes
        background_s = engine.down.busy_s + engine.up.busy_s
        behind_s = max(0.0, background_s - self._background_exposed_s)
        self.time.hidden_transfer_s = behind_s + self._beside_s
        m.series = gauge.series()
        return m
