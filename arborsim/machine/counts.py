"""The figures of one simulated search, counted while it runs."""

from __future__ import annotations

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.formats import Format
from arborsim.core.measurements import Measurements, Stored
from arborsim.core.tiers import MEMORIES, Tier, by_tier
from arborsim.machine.cost import CostModel
from arborsim.machine.program import Op
from arborsim.machine.writing import OpenProgram
from arborsim.memory.ledger import Ledger, RunProfile
from arborsim.memory.moves import Changes, MostMoved, kinds

_EVICTING = kinds(lambda source, target: target == Tier.EVICTED)
RECOMPUTED = kinds(lambda source, target: source == Tier.EVICTED)
_OFFLOADING = kinds(lambda source, target: target.offloaded and not source.offloaded)
_QUANTISING = kinds(lambda source, target: target.rung > source.rung)
_COUNTED = np.stack([_EVICTING, RECOMPUTED, _OFFLOADING, _QUANTISING])
_ROUNDED_BY_GPU = kinds(lambda source, target: target.rung > source.rung and not source.offloaded)
_IN_HBM = by_tier(lambda tier: tier.in_hbm)


class Counts:
    """Peaks, moves and the shared prefix of a search; other searches may share `prefix_tokens`."""

    def __init__(
        self,
        program: OpenProgram,
        ledger: Ledger,
        cost: CostModel,
        formats: tuple[Format, ...],
        prefix_tokens: int,
    ) -> None:
        self.measured = Measurements()
        self.moved = MostMoved()
        self.decided = False  # something was moved or destroyed
        self.prefix_tokens, self.prefix_bytes = prefix_tokens, 0
        self._program, self._ledger, self._cost = program, ledger, cost
        self._too_wide = cost.geometry.kv_bytes_per_element == 1 and formats[0].bits == 8
        self._below = tuple(each.number for each in cost.profile.memories)
        self._stored_peaks = dict.fromkeys(self._below, 0)
        # Quantising on the GPU reads the one and writes the other.
        size = ledger.bytes_by_tier
        self._touched_bytes = _ROUNDED_BY_GPU * (size[:, None] + size[None]).ravel()

    def first_decision(self, held: bool, moved: bool) -> None:
        """Tell the machine when something has moved for the first time."""
        if moved and not self.decided:
            self.decided = True
            ledger = self._ledger
            kept = -(-ledger.held[Tier.HBM] // ledger.groups)
            self.moved.kept_tokens = self.moved.most_tokens = kept
            self._program.play()
            self._program.tally.first_decision(held)

    def count(self, changes: Changes) -> None:
        """Count moves by kind, and let the GPU quantise."""
        if not len(changes):
            return
        if self._too_wide and changes.count(_QUANTISING):
            raise UsageError(
                f"the policy moves tokens to 8 bits, and the cache of {self._cost.geometry.name} "
                "is in 8 bits already: set it not to, or use a cache in bf16"
            )
        self.moved.note(changes, first=not self.decided)
        m, groups = self.measured, self._ledger.groups
        evicted, rehydrated, offloaded, quantised = (_COUNTED @ changes.flow).tolist()
        m.evicted_tokens += evicted / groups
        m.rehydrated_tokens += rehydrated / groups
        m.offloaded_tokens += offloaded / groups
        m.quantised_tokens += quantised / groups
        touched_bytes = changes.count(self._touched_bytes)
        if touched_bytes:
            self._program.put(Op.COPY, touched_bytes)

    def look(self, run: RunProfile | None = None) -> None:
        """Take in what the ledger holds now, or held in each iteration of a run."""
        m, ledger = self.measured, self._ledger
        tokens, ddr_bytes = ledger.hbm_tokens, ledger.ddr_bytes
        quantised_bytes, exact = ledger.quantised_bytes, ledger.held[Tier.HBM]
        if run is not None:
            exact = int(run.counts_before[Tier.HBM].max())
            tokens = int(max(run.hbm_tokens_before.max(), run.hbm_tokens_after.max()))
            ddr_bytes = int(run.ddr_bytes_after.max())
            quantised_bytes = int(run.quantised_bytes_after.max())
        m.peak_hbm_kv_tokens = max(m.peak_hbm_kv_tokens, tokens)
        m.peak_ddr_bytes = max(m.peak_ddr_bytes, ddr_bytes)
        m.peak_quantised_bytes = max(m.peak_quantised_bytes, quantised_bytes)
        self.moved.most_tokens = max(self.moved.most_tokens, -(-exact // ledger.groups))
        for memory in self._below:
            held = ledger.bytes_in(memory)
            self._stored_peaks[memory] = max(self._stored_peaks[memory], held)

    def prefix_during(self, changes: Changes, steps: int) -> np.ndarray | int:
        """Bytes of the shared prefix in HBM once each iteration's moves are done."""
        if not self.prefix_tokens or not len(changes):
            return self.prefix_bytes
        mine = changes.where(changes.token < self.prefix_tokens)
        size = self._ledger.bytes_by_tier * _IN_HBM
        net = np.bincount(mine.step, size[mine.target] - size[mine.source], steps)
        held = self.prefix_bytes + np.cumsum(net).astype(np.int64)
        self.prefix_bytes = int(held[-1])
        return np.asarray(held)

    def count_prefix(self) -> None:
        """Count what HBM holds of the shared prefix now."""
        if self.prefix_tokens:
            size = self._ledger.bytes_by_tier * _IN_HBM
            self.prefix_bytes = int(size[self._ledger.tier[:, : self.prefix_tokens]].sum())

    def measurements(self) -> Measurements:
        """The figures measured so far."""
        program, m = self._program, self.measured
        program.play()
        tally, clock = program.tally, program.clock
        tally.look()
        m.peak_hbm_kv_bytes = tally.peak_hbm_bytes
        m.peak_staging_bytes = tally.peak_staging_bytes
        m.hbm_byte_seconds = tally.hbm_byte_s
        after = tally.peak_after_bytes
        m.peak_after_first_decision_bytes = tally.peak_hbm_bytes if after is None else after
        m.weight_bytes = self._cost.geometry.weight_bytes
        m.usable_hbm_bytes = self._cost.profile.usable_hbm_bytes
        m.usable_ddr_bytes = self._cost.profile.ddr_bytes
        m.to_ddr_bytes, m.from_ddr_bytes = clock.down.carried_bytes, clock.up.carried_bytes
        busy = tally.busy
        for memory in self._below:
            down, up = clock.link(memory, False), clock.link(memory, True)
            peak, usable = self._stored_peaks[memory], self._cost.profile.beside_hbm[memory].bytes
            traffic = down.carried_bytes, up.carried_bytes
            link_s = down.moving_s + up.moving_s
            m.stored[MEMORIES[memory]] = Stored(peak, *traffic, usable, link_s)
        m.time.prefill_s, m.time.decode_s = busy.prefill_s, busy.decode_s
        m.time.policy_s, m.time.rehydration_s = busy.policy_s, busy.recompute_s
        m.time.exposed_transfer_s = busy.exposed_s + tally.idle_s
        m.time.hidden_transfer_s = (
            program.behind_s
            + program.side_s
            - (busy.exposed_s - tally.link_wait_s - tally.moving_s)
        )
        m.series = tally.memory()
        return m
