"""The bill: counts what a search did and what it waited for, and makes `Measurements` of it."""

from __future__ import annotations

import numpy as np

from arborsim.core.measurements import Measurements, TimeSplit
from arborsim.core.tiers import Tier
from arborsim.machine.cost import CostModel, PrefillCost
from arborsim.machine.gauge import MemoryGauge
from arborsim.machine.iterations import IterationCosts
from arborsim.machine.replay_engine import Engine
from arborsim.machine.terms import BACKGROUND, Term, Terms
from arborsim.memory.census import Changes, kinds

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
    terms : Terms or None
        The same seconds term by term, if they were asked for.
    """

    def __init__(self, groups: int, recall: str = "stage", explain: bool = False) -> None:
        self.measured = Measurements()
        self.terms = Terms() if explain else None
        self._recall = recall
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
        if self.terms:
            self.terms.add(BACKGROUND, seconds)

    def prefill(self, cost: PrefillCost) -> None:
        """The prompt has been computed."""
        self.time.prefill_s += cost.total_s
        if self.terms:
            self.terms.prefill(cost)

    def policy(self, seconds: float, what: str) -> None:
        """Decisions, or what scoring and moving cost; `what` is the term ``policy: ...``."""
        self.time.policy_s += seconds
        if self.terms:
            self.terms.add(f"policy: {what}", seconds)

    def rehydration(self, seconds: float) -> None:
        """A prefill over what had been evicted."""
        self.time.rehydration_s += seconds
        self.measured.rehydrations += 1
        if self.terms:
            self.terms.add("rehydration", seconds)

    def iterations(self, costs: IterationCosts) -> None:
        """A run of decode iterations."""
        self.time.decode_s += float(costs.decode_s.sum())
        self.time.policy_s += float(costs.policy_s.sum())
        if costs.beside is not None:
            exposed_s, total_s = costs.beside.exposed_s, costs.beside.total_s
            self.time.exposed_transfer_s += float(exposed_s.sum())
            self._beside_s += float((total_s - exposed_s).sum())
        if self.terms:
            self.terms.iterations(costs, self._recall)

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

    def explain(self, engine: Engine) -> tuple[Term, ...]:
        """The terms up to now; none if they were not asked for."""
        if not self.terms:
            return ()
        return self.terms.close(self._behind_s(engine), engine.down.busy_s, engine.up.busy_s)

    def _behind_s(self, engine: Engine) -> float:
        """Transfers in the background that nobody waited for."""
        background_s = engine.down.busy_s + engine.up.busy_s
        return max(0.0, background_s - self._background_exposed_s)

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
        self.time.hidden_transfer_s = self._behind_s(engine) + self._beside_s
        m.series = gauge.series()
        return m
