"""The bill: counts what a search did and what it waited for, and makes `Measurements` of it."""

from __future__ import annotations

import numpy as np

from arborsim.hardware.cost import CostModel
from arborsim.measurements import Measurements, TimeSplit
from arborsim.memory.census import Changes
from arborsim.memory.tiers import Tier
from arborsim.simulator.engine import Engine
from arborsim.simulator.gauge import MemoryGauge
from arborsim.simulator.iterations import IterationCosts

_QUANTISED = np.array([tier.quantised for tier in Tier])
_IN_DDR = np.array([tier.in_ddr for tier in Tier])


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
        self.time.exposed_transfer_s += float(costs.exposed_s.sum())
        self._beside_s += float((costs.side_s - costs.exposed_s).sum())

    def workspace(self, needed_bytes: int) -> None:
        """A forward pass needs so much HBM beside weights and cache."""
        self._workspace_bytes = max(self._workspace_bytes, needed_bytes)

    def moves(self, changes: Changes) -> None:
        """Tokens have changed their tier."""
        m, source, target = self.measured, changes.source, changes.target
        m.evicted_tokens += self._tokens(target == Tier.EVICTED)
        m.rehydrated_tokens += self._tokens(source == Tier.EVICTED)
        m.offloaded_tokens += self._tokens(~_IN_DDR[source] & _IN_DDR[target])
        m.quantised_tokens += self._tokens(~_QUANTISED[source] & _QUANTISED[target])

    def _tokens(self, cells: np.ndarray) -> float:
        return int(np.count_nonzero(cells)) / self._groups

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
