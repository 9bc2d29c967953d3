"""A replay event by event: every iteration is priced and spent by itself, copies are processes.

Nothing is written down: no program, no pieces, no server, no price by parts.  The cost model's
formulas are asked for one iteration at a time, links are SimPy resources, and what memory holds is
looked at whenever anything changes.  It is slow, and exists so that `SimulatedExecutor` can be
compared with it; ledger, paths and what a recall mode reads are shared.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import simpy

from arborsim.core.events import TokenRun
from arborsim.core.formats import FP8
from arborsim.core.measurements import Measurements
from arborsim.core.tiers import DDR, NUM_TIERS, RUNGS, Tier, by_tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.cost import CostModel
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.reading import ActivePaths, Reading, Recall
from arborsim.machine.windows import Windows
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Changes, Moves, kinds
from arborsim.trace.schema import Geometry

_OFFLOADED = by_tier(lambda tier: tier.offloaded)
_LEAVING = kinds(lambda source, target: target.offloaded and not source.offloaded)
_PASSED_ON = kinds(
    lambda source, target: source.offloaded and target.offloaded and source.memory != target.memory
)
_RETURNING = kinds(lambda source, target: source.offloaded and target.in_hbm)
_FREEING = kinds(lambda source, target: target.is_below(source)) * (1 - _LEAVING)
_RECOMPUTED = kinds(lambda source, target: source == Tier.EVICTED)
_ROUNDED = kinds(lambda source, target: target.rung > source.rung and not source.offloaded)
Steps = Generator[simpy.Event, Any, None]
Cells = tuple[np.ndarray, np.ndarray]


class LiteralExecutor:
    """As `SimulatedExecutor`, of whose measurements it takes seconds, peaks and traffic."""

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
        compact: bool = False,
        bounds_page: int = 0,
        tiers: int = NUM_TIERS,
    ) -> None:
        self.cost = CostModel(profile, geometry)
        self.ledger = Ledger(
            groups, geometry.full_bytes_per_token, (FP8.token_bytes(geometry),),
            page_tokens=page_tokens, tiers=tiers,
        )  # fmt: skip
        size = self.ledger.bytes_by_tier
        self.recall = Recall(self.cost, self.ledger, recall, fused, tree_attention)
        self.policy = profile.policy_seconds(policy, fused, not fused)
        self.overlap, self.compact, self.bounds_page = overlap, compact, bounds_page
        self.env = simpy.Environment()
        self.links = {
            (memory, up): simpy.Resource(self.env)
            for memory in profile.beside_hbm
            for up in (False, True)
        }
        self.carried = dict.fromkeys(self.links, 0)
        self.stored_peaks = dict.fromkeys(profile.beside_hbm, 0)
        self.measured = Measurements()
        self.staging_bytes = self.buffer_bytes = self.in_flight_bytes = 0
        self.staged: set[tuple[int, int]] = set()
        self.flying: set[tuple[int, int]] = set()
        self.background: list[simpy.Process] = []
        self.promotions: list[tuple[simpy.Process, np.ndarray]] = []
        self.touched = _ROUNDED * (size[:, None] + size[None]).ravel()

    @property
    def tier(self) -> np.ndarray:
        return self.ledger.tier

    def clock(self) -> float:
        return float(self.env.now)

    def measurements(self) -> Measurements:
        return self.measured

    def bind(self, tree: ThoughtTree) -> None:
        self.paths = ActivePaths(tree, self.ledger)
        self.windows = Windows(tree, self.ledger, self.cost.geometry)

    def prefill(self, run: TokenRun) -> None:
        tokens = run.num_tokens
        self.ledger.append(run.leaves, run.steps)
        self.paths.activate(run.leaves)
        self.windows.activate(run.leaves)
        self._look()
        self._spend("prefill_s", self.cost.prefill_s(tokens))
        if not self.recall.fused:
            self._spend("policy_s", self.cost.prompt_rows_s(tokens))

    def activate(self, leaves: tuple[int, ...]) -> None:
        self.paths.activate(leaves)
        forgotten = self.windows.activate(leaves)
        self._wait_for_returning()
        self._stage_needed()
        self._recompute(forgotten)
        self._spend("policy_s", self.policy.turning_s(len(leaves)))
        self._look()

    def _stage_needed(self) -> None:
        if self.recall.mode == "stage":
            missing = self._missing()
            if missing:
                self._wait([self._start(each) for each in self._stages(missing)])

    def _missing(self) -> set[tuple[int, int]]:
        """What needs a buffer and has none; the buffers that nothing needs are given up."""
        selected = self.paths.selected
        where = np.nonzero(_OFFLOADED[self.tier])
        active = self.paths.active(where[1]).tolist()
        cells = list(zip(*(column.tolist() for column in where), strict=True))
        wanted = {
            cell
            for cell, on_path in zip(cells, active, strict=True)
            if on_path and (selected is None or selected[cell])
        }
        if self.recall.mode == "stream" and selected is None:
            wanted = set()
        self._unstage(self.staged - wanted)
        return wanted - self.staged - self.flying

    def advance(self, run: TokenRun, moves: Moves) -> None:
        if not self.paths.are_active(run.leaves):
            self.activate(run.leaves)
        elif run.leaves != self.paths.leaves:
            self.paths.read(run.leaves)
        for step in range(run.steps):
            self._iterate(bool((moves.step == step).any()))
            self._carry_out(self.ledger.resolve(moves.between_steps(step, step + 1)))

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        self._spend("policy_s", float(self.policy.decision_s(examined_tokens)))
        if self.paths.select(reads):
            if reads is not None and not reads.all() and self.bounds_page:
                self._spend("policy_s", self._bounds_s(reads))
            self._wait_for_returning()
            self._stage_needed()
            self._look()
        self._carry_out(self.ledger.resolve(moves))
        if self.compact:
            copied_bytes = self.ledger.compact()
            self._spend("policy_s", float(self.cost.copy_s(2 * copied_bytes)))
            self._look()

    def _bounds_s(self, reads: np.ndarray) -> float:
        """Two vectors a page, in every KV head of the groups that choose."""
        g, groups = self.cost.geometry, self.ledger.groups
        on_path = self.paths.read_now(np.arange(self.ledger.num_tokens))
        there = int(np.count_nonzero(self.tier[:, on_path] != Tier.EVICTED)) // groups
        pages = -(-there // self.bounds_page)
        vectors = 2 * pages * g.full_layers * g.kv_heads
        choosing = sum(not row.all() for row in reads) / groups
        vector_bytes = g.head_dim * g.kv_bytes_per_element
        size = int(choosing * vectors * vector_bytes)
        self.measured.bounds_read_bytes += size
        return float(self.cost.copy_s(size))

    def finish(self) -> None:
        for process in self.background:
            if process.is_alive:
                self.env.run(until=process)

    # One iteration.

    def _iterate(self, decided: bool) -> None:
        leaves = self.paths.leaves
        landing = None
        if self.flying and self.recall.mode != "stage":
            groups, tokens = zip(*sorted(self.flying), strict=True)
            landing = self.paths.count(np.array(groups), np.array(tokens))
        fetched = self._fetch() if self.recall.mode == "stream" else None
        path = self.paths.advance(self.ledger.advance(leaves, 1, Moves.none()))
        path = replace(path, windows=self.windows.advance(leaves, 1))
        reading = self.recall.reading(path, len(leaves), landing, fetched)
        near = self.recall.mode == "near"
        self.measured.kv_read_bytes += int(np.sum(reading.read_bytes))
        self.measured.kv_read_bytes += int(np.sum(reading.remote_bytes)) if near else 0
        model_s = float(
            self.cost.decode_s(
                len(leaves), reading.attended, reading.read_bytes, reading.quantised_bytes,
                self.recall.fused,
            )[0]
        )  # fmt: skip
        if self.recall.mode == "ondemand":
            model_s += float(np.sum(self.cost.page_choice_s(reading.remote_bytes)))
        attention_s = self.cost.kv_read_s(reading.read_bytes)
        attention_s = attention_s + self.cost.dequantise_s(reading.quantised_bytes)
        policy_s = self.policy.observing_s(len(leaves))
        policy_s += self.policy.decision_s(int(path.length[0])) if decided else 0.0
        policy_s += float(np.sum(self.cost.eager_rows_s(reading.rows)))
        exposed_s = self._exposed_s(reading, model_s, float(np.sum(attention_s)), len(leaves))
        if reading.buffer_bytes is not None:
            self.buffer_bytes = int(reading.buffer_bytes[0])
        self._look()
        if np.sum(reading.streamed_bytes):
            self._stream(model_s + exposed_s + policy_s)
        else:
            self.env.run(until=self.env.timeout(model_s + exposed_s + policy_s))
        time = self.measured.time
        time.decode_s += model_s
        time.policy_s += policy_s
        time.exposed_transfer_s += exposed_s

    def _fetch(self) -> np.ndarray | None:
        """Bytes of the selection that the iteration brings into buffers; None without one."""
        missing = self._missing()
        if self.paths.selected is None:
            return None
        size, self.buffer_bytes = self._bytes(missing), 0
        self.staged |= missing
        self.staging_bytes += size
        self._look()
        return np.array([size])

    def _exposed_s(
        self, reading: Reading, model_s: float, attention_s: float, sequences: int
    ) -> float:
        """What the iteration waits for streaming, or the CPU; counts what crosses the link."""
        mode, m, layers = self.recall.mode, self.measured, self.cost.geometry.full_layers
        streamed, remote = (
            float(np.sum(reading.streamed_bytes)),
            float(np.sum(reading.remote_bytes)),
        )
        queries, partials = self.cost.near_message_bytes(sequences)
        side_s, hidden_s = 0.0, 0.0
        if mode == "stream":
            side_s, hidden_s = float(self.cost.stream_s(streamed)), model_s
        elif mode != "stage":
            fetched_s = float(self.cost.kv_read_s(streamed))
            hidden_s = attention_s - fetched_s
            hidden_s -= float(np.sum(self.cost.kv_read_s(reading.window_bytes)))
            if mode == "near":
                side_s = float(self.cost.near_s(remote, sequences))
                m.from_ddr_bytes += layers * partials if remote else 0
                m.to_ddr_bytes += layers * queries if remote else 0
            else:
                side_s = float(self.cost.ondemand_s(streamed))
        m.from_ddr_bytes += int(streamed)
        return max(0.0, side_s - hidden_s) if side_s else 0.0

    def _stream(self, seconds: float) -> None:
        """An iteration that keeps the link up, once it is free."""

        def hold() -> Steps:
            with self.links[DDR, True].request() as turn:
                before = self.env.now
                yield turn
                self.measured.time.exposed_transfer_s += self.env.now - before
                yield self.env.timeout(seconds)

        self.env.run(until=self.env.process(hold()))

    # Moves.

    def _carry_out(self, changes: Changes) -> None:
        if not len(changes):
            return
        leaving = changes.of(_LEAVING)
        back = changes.of(_RETURNING)
        held = self.staged | self.flying
        passed = changes.of(_PASSED_ON)
        if len(leaving) or len(passed) or not held.issuperset(_cells(back)):
            self._wait(self.background)
        self._spend("policy_s", float(self.cost.copy_s(changes.count(self.touched))))
        held = self.staged | self.flying
        away = np.array([cell not in held for cell in _cells(back)], dtype=bool)
        self._release_staging(changes)
        self._look()  # buffers of tokens that are no longer quantised grow before anything is freed
        parts = [leaving.where(own) for own in _memories(leaving.target).values()]
        for part, freed_bytes in zip(parts, self._record(changes, parts), strict=True):
            self.flying |= set(_cells(part))
            self.in_flight_bytes += freed_bytes
            self._start(self._leave(part, freed_bytes))
        back = back.where(away)
        for memory, own in _memories(back.source).items():
            size = int(self.ledger.bytes_by_tier[back.source[own]].sum())
            started = self._start(self._send(size, True, memory))
            self.promotions.append((started, back.token[own]))
        self._pass_on(passed)
        self._look()
        self._recompute(np.unique(changes.of(_RECOMPUTED).token))
        self._wait_for_returning()
        if not self.overlap:
            self._wait(self.background)

    def _pass_on(self, passed: Changes) -> None:
        """From one memory beside HBM to another, over the link of the farther one."""
        size = self.ledger.bytes_by_tier
        for memory, own in _memories(np.maximum(passed.source, passed.target)).items():
            for up in (False, True):
                there = passed.where(own & ((passed.source > passed.target) == up))
                stored = there.source if up else there.target
                if len(there):
                    self._start(self._send(int(size[stored].sum()), up, memory))

    def _record(self, changes: Changes, parts: list[Changes]) -> list[int]:
        """Change tiers, what frees memory first; bytes that each part keeps until it is copied."""
        ledger, size = self.ledger, self.ledger.bytes_by_tier
        others = changes.of(1 - _FREEING - _LEAVING)
        freed = []
        for part in (changes.of(_FREEING), *parts, others):
            before = ledger.hbm_page_bytes
            lost = int(size[part.source[part.source != Tier.EVICTED]].sum())
            ledger.record(part)
            self.paths.change(part)
            if ledger.has_pages:
                lost = before - ledger.hbm_page_bytes
            recomputed = int(np.count_nonzero(part.source == Tier.EVICTED))
            freed.append(lost + recomputed * int(size[Tier.HBM]))
        return freed[1:-1]

    def _leave(self, leaving: Changes, freed_bytes: int) -> Steps:
        cells = _cells(leaving)
        size = self.ledger.bytes_by_tier
        memory = Tier(leaving.target[0]).memory
        yield from self._send(int(size[leaving.target].sum()), False, memory)
        self.flying -= set(cells)
        if self.recall.mode == "stage":
            read = self.paths.read_now(leaving.token)
            if self.paths.selected is not None:
                read &= self.paths.selected[leaving.group, leaving.token]
            came_from = np.where(leaving.source == Tier.EVICTED, Tier.HBM, leaving.source)
            needed = [
                number
                for number, (cell, is_read) in enumerate(zip(cells, read.tolist(), strict=True))
                if is_read and _OFFLOADED[self.tier[cell]] and cell not in self.staged
            ]
            kept_bytes = freed_bytes
            if not self.ledger.has_pages:
                kept_bytes = int(size[came_from[needed]].sum())
            self.in_flight_bytes -= freed_bytes - kept_bytes
            freed_bytes = kept_bytes
            yield from self._stage({cells[number] for number in needed}, memory)
        self.in_flight_bytes -= freed_bytes
        self._look()

    def _stages(self, cells: set[tuple[int, int]]) -> list[Steps]:
        """One transfer for each memory that tokens lie in, nearest first."""
        memories = {cell: Tier(self.tier[cell]).memory for cell in cells}
        return [
            self._stage({cell for cell in cells if memories[cell] == memory}, memory)
            for memory in sorted(set(memories.values()))
        ]

    def _stage(self, cells: set[tuple[int, int]], memory: int) -> Steps:
        self.staged |= cells
        size = self._bytes(cells)
        self.staging_bytes += size
        self._look()
        yield from self._send(size, True, memory)

    def _unstage(self, cells: set[tuple[int, int]]) -> None:
        self.staging_bytes -= self._bytes(cells)
        self.staged -= cells

    def _release_staging(self, changes: Changes) -> None:
        """Staged tokens that leave DDR, or shrink there, give up (part of) their buffer."""
        size = self.ledger.bytes_by_tier
        for cell, target in zip(_cells(changes), changes.target.tolist(), strict=True):
            if cell in self.staged:
                self.staging_bytes -= int(size[self.tier[cell]])
                if _OFFLOADED[target]:
                    self.staging_bytes += int(size[target])
                else:
                    self.staged.remove(cell)

    def _recompute(self, recovered: np.ndarray) -> None:
        if len(recovered):
            present = self.paths.readable_without(recovered)
            self._spend("rehydration_s", self.cost.prefill_s(len(recovered), present))
            self.measured.rehydrations += 1

    # Time.

    def _wait_for_returning(self) -> None:
        self._wait(p for p, tokens in self.promotions if self.paths.active(tokens).any())

    def _spend(self, part: str, seconds: float) -> None:
        self.env.run(until=self.env.timeout(seconds))
        setattr(self.measured.time, part, getattr(self.measured.time, part) + seconds)

    def _start(self, steps: Steps) -> simpy.Process:
        process = self.env.process(steps)
        self.background.append(process)
        self.env.run(until=self.env.timeout(0))  # it has begun
        return process

    def _wait(self, processes: Iterable[simpy.Process]) -> None:
        before = self.env.now
        for process in list(processes):
            if process.is_alive:
                self.env.run(until=process)
        self.measured.time.exposed_transfer_s += self.env.now - before

    def _send(self, size: int, up: bool, memory: int) -> Steps:
        if not size:
            return
        block_bytes = self.cost.packed_block_bytes(size)
        direction = "h2d" if up else "d2h"
        seconds = float(self.cost.transfer_s(size, block_bytes, direction))
        if memory != DDR:  # PCIe or its own link, whichever is slower
            below = self.cost.profile.beside_hbm[memory]
            own_s = below.latency_s + size / float(below.bytes_per_s(block_bytes, direction))
            seconds = max(seconds, own_s)
        with self.links[memory, up].request() as turn:
            yield turn
            yield self.env.timeout(seconds)
        self.carried[memory, up] += size
        if memory == DDR:
            self.measured.from_ddr_bytes += size if up else 0
            self.measured.to_ddr_bytes += 0 if up else size

    def _bytes(self, cells: Iterable[tuple[int, int]]) -> int:
        return sum(int(self.ledger.bytes_by_tier[self.tier[cell]]) for cell in cells)

    def _look(self) -> None:
        """Take in what memory holds now."""
        m, ledger = self.measured, self.ledger
        pages = ledger.hbm_page_bytes + self.windows.held_bytes
        staging_bytes = self.staging_bytes + self.buffer_bytes
        held = pages + staging_bytes + self.in_flight_bytes
        m.peak_hbm_kv_bytes = max(m.peak_hbm_kv_bytes, held)
        m.peak_hbm_kv_tokens = max(m.peak_hbm_kv_tokens, ledger.hbm_tokens)
        m.peak_ddr_bytes = max(m.peak_ddr_bytes, ledger.ddr_bytes)
        for memory, peak in self.stored_peaks.items():
            self.stored_peaks[memory] = max(peak, ledger.bytes_in(memory))
        m.peak_quantised_bytes = max(m.peak_quantised_bytes, ledger.quantised_bytes)
        m.peak_staging_bytes = max(m.peak_staging_bytes, staging_bytes)


def _memories(tiers: np.ndarray) -> dict[int, np.ndarray]:
    """Which of tiers ``[m]`` lie in each memory that any lies in, bool ``[m]``; nearest first."""
    memory = tiers // RUNGS
    return {int(each): memory == each for each in np.unique(memory)}


def _cells(changes: Changes) -> list[tuple[int, int]]:
    return list(zip(changes.group.tolist(), changes.token.tolist(), strict=True))
