"""What a simulated executor is made of: the machine, the books, the gauge and the bill of a search.

Here is how these are set up for a model, a machine and a way of recalling tokens, and what can be
asked of them.  What happens to them is `arborsim.machine.executor`'s.
"""

from __future__ import annotations

import numpy as np

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.measurements import Measurements
from arborsim.machine.bill import Bill
from arborsim.machine.cost import SCALE_BYTES, CostModel
from arborsim.machine.gauge import MemoryGauge
from arborsim.machine.iterations import RECALLS, IterationModel
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.replay_engine import Engine
from arborsim.machine.terms import Term
from arborsim.memory.census import kinds
from arborsim.memory.ledger import Ledger
from arborsim.trace.schema import Geometry

_ROUNDED_BY_GPU = kinds(
    lambda source, target: target.quantised and not source.quantised and not source.in_ddr
)


class ExecutorParts:
    """The parts of one search's executor on a hardware profile.

    Parameters
    ----------
    geometry : Geometry
        Model that bytes and seconds are charged for (it need not be the recorded one).
    profile : HardwareProfile
    groups : int
        Cache groups that plans distinguish: 1, layers, or layers x KV heads.
    page_tokens : int
        Slots per page.
    recall : {"stage", "stream", "near", "ondemand"}
        How tokens in DDR take part in attention.
    policy : str
        Name of the policy that decides: the profile may know what it takes.
    fused : bool
        False if the policy reads attention rows, which then must be written out.
    tree_attention : bool
        Whether a batch reads shared nodes once, or once per branch.
    overlap : bool
        False waits for every transfer at once, as the memory-hierarchy paper's prototype does.
    pinned : bool
        Whether host buffers are page-locked.
    compact : bool
        Merge half-empty pages after every decision outside runs.
    event_by_event : bool
        Simulate every iteration by itself.
    explain : bool
        Keep every term of the time apart, for `terms`.
    keep_matrices : bool
        A prefill that writes attention matrices out holds those of all layers at once.

    Raises
    ------
    UsageError
        A name or number that cannot work.
    """

    def __init__(
        self,
        geometry: Geometry,
        profile: HardwareProfile,
        *,
        groups: int = 1,
        page_tokens: int = 1,
        recall: str = "stage",
        policy: str = "",
        fused: bool = True,
        tree_attention: bool = True,
        overlap: bool = True,
        pinned: bool = True,
        compact: bool = False,
        event_by_event: bool = False,
        explain: bool = False,
        keep_matrices: bool = False,
    ) -> None:
        if recall not in RECALLS:
            raise UnknownName("recall mode", recall, RECALLS)
        if page_tokens < 1:
            raise UsageError(f"pages of {page_tokens} tokens hold nothing: use 1 or more")
        self._cost = CostModel(profile, geometry, pinned=pinned)
        self._engine = Engine(self._cost)
        self._ledger = Ledger(
            groups,
            geometry.full_bytes_per_token,
            self._cost.elements_per_token,
            scales_per_token=self._cost.scales_per_token,
            scale_bytes=SCALE_BYTES,
            page_tokens=page_tokens,
        )
        self._policy = profile.policy_seconds(policy, fused)
        self._iterations = IterationModel(
            self._cost, self._ledger.bytes_by_tier, groups, recall, fused, tree_attention,
            self._policy,
        )  # fmt: skip
        self._gauge = MemoryGauge(self._ledger)
        self._overlap = overlap
        self._compact = compact
        self._event_by_event = event_by_event
        self._keep_matrices = keep_matrices
        self._bill = Bill(groups, recall, explain)
        size = self._ledger.bytes_by_tier
        # Quantising on the GPU reads the one and writes the other.
        self._touched_bytes = _ROUNDED_BY_GPU * (size[:, None] + size[None]).ravel()

    @property
    def tier(self) -> np.ndarray:
        """Int8 ``[groups, tokens]``."""
        return self._ledger.tier

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def staging_bytes(self) -> int:
        """HBM buffers that hold recalled tokens now."""
        return self._gauge.staging_bytes

    def clock(self) -> float:
        """Simulated seconds since the search began."""
        return self._engine.now_s

    def measurements(self) -> Measurements:
        """What has been measured so far."""
        return self._bill.close(self._gauge, self._engine, self._cost)

    def terms(self) -> tuple[Term, ...]:
        """What the time so far consists of; empty unless it was to be explained."""
        return self._bill.explain(self._engine)
