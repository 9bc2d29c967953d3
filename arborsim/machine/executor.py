"""The simulated executor: decisions become bytes in a ledger, and phases of a program.

A decode iteration appends its tokens, computes, and then carries out what the policy decided.  The
executor writes down what that asks of the machine, in bytes and tokens; SimPy plays it
(`arborsim.machine.writing`), and all seconds are read there.  A run of iterations is written as a
whole, cut where its moves start transfers.  While transfers are under way, iterations are written
one at a time: the end of a transfer can change what the next one reads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.events import TokenRun
from arborsim.core.formats import FP8, Format
from arborsim.core.measurements import Measurements
from arborsim.core.row_uses import ALL_QUERIES
from arborsim.core.tiers import NUM_TIERS, RECALLS, num_tiers
from arborsim.core.tree import ThoughtTree
from arborsim.machine.cost import CostModel
from arborsim.machine.counts import RECOMPUTED, Counts
from arborsim.machine.machine import (
    Machine,
    decode_rows,
    num_groups,
    parts_in_ddr,
    parts_read,
    row_queries,
    unsuited,
)
from arborsim.machine.program import ATTENDED_UNITS, Copied, DemandInfo, Op, SearchDemand
from arborsim.machine.reading import ActivePaths, Recall
from arborsim.machine.terms import Term
from arborsim.machine.transfers import Transfers, stretches
from arborsim.machine.windows import Windows
from arborsim.machine.writing import Levels, OpenProgram
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Changes, MostMoved, Moves
from arborsim.policies.base import Policy, hints_of
from arborsim.trace.schema import Geometry, TraceInfo


class SimulatedExecutor:
    """Implements `arborsim.play.controller.Executor` on a `Machine`.

    Raises `UsageError` for a name or number that cannot work, or if what a demand cannot describe
    is to be recorded.

    Bytes and seconds are charged for `geometry`, which need not be the recorded model's.  `groups`
    are the cache groups that plans distinguish: 1, layers, or layers x KV heads; `formats` are
    those of the policy's quantised tiers.  The profile may know what `policy` takes.  It is not
    `fused` if it reads attention rows, which then must be written out.  Attention reads the cache
    in `parts`, and rows of the prompt's last `row_queries` tokens count, and with `decode_rows`
    those of generated ones.  `bounds_page` is its `LiveHints.bounds_page`.  `compact` merges
    half-empty pages after every decision outside runs.  `record` keeps what `demand` needs.  Other
    searches may share the first `prefix_tokens`.  `tiers` is that of the `Ledger`.
    """

    def __init__(
        self,
        machine: Machine,
        geometry: Geometry,
        *,
        groups: int = 1,
        formats: tuple[Format, ...] = (FP8,),
        policy: str = "",
        fused: bool = True,
        parts: int = 1,
        ddr_parts: int = 0,
        row_queries: int = ALL_QUERIES,
        decode_rows: bool = True,
        bounds_page: int = 0,
        compact: bool = False,
        record: bool = False,
        prefix_tokens: int = 0,
        tiers: int = NUM_TIERS,
    ) -> None:
        recall = machine.recall
        if recall not in RECALLS:
            raise UnknownName("recall mode", recall, RECALLS)
        if machine.page_tokens < 1:
            raise UsageError(f"pages of {machine.page_tokens} tokens hold nothing: use 1 or more")
        if record and (why := not_recordable(geometry, recall, compact)):
            raise UsageError(why)
        self._machine = machine
        self._cost = CostModel(machine.profile, geometry)
        self._ledger = Ledger(
            groups,
            geometry.full_bytes_per_token,
            tuple(each.token_bytes(geometry) for each in formats),
            page_tokens=machine.page_tokens,
            tiers=tiers,
        )
        self._below = tuple(each.number for each in machine.profile.memories)
        info = DemandInfo(
            "", 0, policy, "", recall, geometry.name, geometry.kv_bytes_per_token, groups, fused,
            parts=parts, row_queries=row_queries, decode_rows=decode_rows, ddr_parts=ddr_parts,
        )  # fmt: skip
        self._recall = Recall(
            self._cost, self._ledger, recall, not info.eager, machine.tree_attention
        )
        self._program = OpenProgram(info, self._cost, self._levels, record or machine.explain)
        self._counts = Counts(self._program, self._ledger, self._cost, formats, prefix_tokens)
        self._compact = compact
        self._bounds_page, self._bounds_bytes = bounds_page, 0
        self._buffer_bytes = 0  # of what the last iterations streamed

    @classmethod
    def of(
        cls,
        machine: Machine,
        policy: Policy,
        recorded: TraceInfo,
        *,
        record: bool = False,
        prefix_tokens: int = 0,
    ) -> SimulatedExecutor:
        """A simulated machine for one search of a trace under `policy`.

        Raises `UsageError` if the policy has no meaning on the model: see `unsuited`.
        """
        geometry = machine.charged(recorded)
        if why := unsuited(policy, geometry, machine):
            raise UsageError(why)
        return cls(
            machine,
            geometry,
            groups=num_groups(policy, recorded),
            formats=policy.formats,
            policy=policy.name,
            fused=policy.fused,
            parts=parts_read(policy),
            ddr_parts=parts_in_ddr(policy),
            row_queries=row_queries(policy),
            decode_rows=decode_rows(policy),
            bounds_page=hints_of(policy).bounds_page,
            record=record,
            prefix_tokens=prefix_tokens,
            tiers=num_tiers(policy.tiers),
        )

    def bind(self, tree: ThoughtTree) -> None:
        """Follow the paths of `tree`, which the controller keeps up to date.  Call once, first."""
        self._paths = ActivePaths(tree, self._ledger)
        self._windows = Windows(tree, self._ledger, self._cost.geometry)
        self._transfers = Transfers(self._program, self._ledger, self._paths, self._recall.mode)

    # What happens to the search.

    def prefill(self, run: TokenRun) -> None:
        """Compute the prompt; its tokens enter HBM."""
        tokens = run.num_tokens
        self._ledger.append(run.leaves, run.steps)
        self._paths.activate(run.leaves)
        self._windows.activate(run.leaves)
        self._counts.look()
        cost, info = self._cost, self._program.info
        workspace = cost.workspace_bytes(cost.prompt_block(tokens))
        if not info.fused:
            kept = self._machine.keep_matrices and not cost.tiles_rows
            rows = cost.prompt_rows_bytes(tokens, 0, info.row_queries, info.groups)
            workspace += (cost.geometry.layers if kept else 1) * rows
        self._counts.measured.workspace_bytes = workspace
        self._counts.measured.prompt_tokens = tokens
        self._counts.prefix_tokens = min(self._counts.prefix_tokens, tokens)
        self._counts.count_prefix()
        self._program.put(Op.PREFILL, tokens)

    def activate(self, leaves: tuple[int, ...]) -> None:
        """The next tokens belong to `leaves`; waits for what their paths hold in DDR."""
        self._program.settle()
        self._program.wait_for_returned()
        self._paths.activate(leaves)
        forgotten = self._windows.activate(leaves)
        self._transfers.activate()
        self._recompute(forgotten)
        self._program.activate(len(leaves))
        self._counts.look()

    def advance(self, run: TokenRun, moves: Moves) -> None:
        """Decode the run; after iteration ``t`` carry out the moves of step ``t``."""
        first = 1 + int(moves.step[0]) if len(moves) and not self._counts.decided else run.steps
        if first < run.steps:  # what comes after the first decision is played by itself
            self.advance(run.part(0, first), moves.between_steps(0, first))
            self.advance(run.part(first, run.steps), moves.between_steps(first, run.steps))
            return
        self._program.settle()
        if not self._paths.are_active(run.leaves):
            self.activate(run.leaves)
        elif run.leaves != self._paths.leaves:  # some branches pause or have ended
            self._paths.read(run.leaves)
        decided = np.zeros(run.steps, dtype=bool)
        decided[moves.step] = True
        changes = self._ledger.resolve(moves, arriving=run.num_tokens)
        groups, one_by_one = self._ledger.groups, partial(self._one_by_one, bool(len(changes)))
        for first, last, together in stretches(run.steps, changes, groups, one_by_one):
            inside = moves.between_steps(first, last)
            if together:
                self._counts.count(self._iterate(decided[first:last], inside))
                self._counts.first_decision(held=False, moved=len(inside) > 0)
            else:
                self._iterate(decided[first:last], Moves.none())
                self._carry_out(self._ledger.resolve(inside))
        self._counts.measured.decisions += int(decided.sum())
        self._counts.measured.generated_tokens += run.num_tokens
        self._counts.measured.iterations += run.steps

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        """Carry out one decision taken over `examined_tokens` tokens."""
        self._counts.measured.decisions += 1
        self._program.put(Op.DECIDE, examined_tokens)
        self._program.settle()
        if self._paths.select(reads):
            self._read_bounds()
            self._program.settle()
            self._transfers.activate()
        self._carry_out(self._ledger.resolve(moves))
        if self._compact:
            copied_bytes = self._ledger.compact()
            if copied_bytes:
                self._program.put(Op.COPY, 2 * copied_bytes, Copied.PAGES)
            self._counts.look()

    def finish(self) -> None:
        """Let transfers end; nothing waits for them any more, so they count as hidden."""
        self._program.settle_levels()
        self._program.drain()

    # What can be asked of it.

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
        self._program.settle()
        return self._transfers.staging_bytes + self._buffer_bytes

    @property
    def most_moved(self) -> MostMoved:
        """The most that moves have asked for so far."""
        return replace(self._counts.moved, link_bytes=self._transfers.peak_link_bytes)

    def clock(self) -> float:
        """Simulated seconds since the search began."""
        self._program.play()
        return self._program.clock.now

    def measurements(self) -> Measurements:
        """The figures measured so far."""
        return self._counts.measurements()

    def terms(self) -> tuple[Term, ...]:
        """The terms of the time so far; empty unless it was to be explained."""
        if not self._machine.explain:
            return ()
        self._program.play()
        return self._program.terms()

    def demand(self, **known: Any) -> SearchDemand:
        """The demand of the search, once it has finished, with what is `known` of it."""
        return self._program.kept(replace(self._program.info, **known))

    # Writing.

    def _one_by_one(self, moves: bool) -> bool:
        """Whether iterations must be written one at a time now.

        So they must while copies to DDR are under way, if tokens are read from their old places
        until then; and where moves within the run share HBM with transfers.
        """
        if self._machine.event_by_event:
            self._program.play()
            return True
        return self._program.under_way and (moves or self._transfers.copies_are_read)

    def _iterate(self, decided: np.ndarray, moves: Moves) -> Changes:
        """Decode as many iterations as `decided` has entries; returns what the moves change."""
        steps, leaves = len(decided), self._paths.leaves
        landing = self._transfers.landing()
        if self._recall.mode == "stream" and self._paths.selected is not None:
            self._buffer_bytes = 0  # that of the last iteration is free again
        fetched = self._transfers.fetch(steps)
        run = self._ledger.advance(leaves, steps, moves)
        path = self._paths.advance(run)
        windows = self._windows.advance(leaves, steps)
        if windows is not None:
            run = run.with_windows(windows.held * self._cost.geometry.window_bytes_per_token)
            path = replace(path, windows=windows)
        reading = self._recall.reading(path, len(leaves), landing, fetched)
        near = self._recall.mode == "near"  # else what is read in DDR are bounds
        read = reading.read_bytes + near * reading.remote_bytes
        self._counts.measured.kv_read_bytes += int(np.sum(np.broadcast_to(read, steps)))
        held = np.maximum(run.hbm_page_bytes_before, run.hbm_page_bytes_after) + self._state_bytes
        if reading.buffer_bytes is not None:
            held = held + reading.buffer_bytes
            self._buffer_bytes = int(reading.buffer_bytes[-1])
        scale = ATTENDED_UNITS * self._ledger.groups * self._cost.geometry.layers
        table = np.empty((steps, 12), dtype=np.int64)
        columns: tuple[Any, ...] = (
            len(leaves), decided, reading.streamed_bytes, reading.remote_bytes,
            reading.window_bytes if self._recall.mode in ("near", "ondemand") else 0,
            reading.read_bytes, reading.quantised_bytes, np.rint(reading.attended * scale),
            np.rint(reading.rows * scale), np.where(decided, path.length, 0), held,
            self._counts.prefix_during(run.changes, steps),
        )  # fmt: skip
        for at, column in enumerate(columns):
            table[:, at] = column
        self._program.iterations(table)
        self._counts.look(run)
        return run.changes

    def _carry_out(self, changes: Changes) -> None:
        """Change tiers, recompute what was evicted, and wait for what decoding needs."""
        if not len(changes):
            return
        self._program.settle()
        if self._transfers.needs_link(changes):
            self._program.wait()
            self._program.settle()
        self._counts.count(changes)
        self._program.settle()
        self._transfers.carry_out(changes)
        self._counts.look()
        self._recompute(np.unique(changes.of(RECOMPUTED).token))
        self._transfers.wait_for_returning()
        if not self._machine.overlap:
            self._program.wait()
            self._program.settle()
        self._counts.count_prefix()
        self._program.settle_levels()
        self._counts.first_decision(held=True, moved=True)

    def _read_bounds(self) -> None:
        """Bounds are read of the pages on the paths, in the groups that leave tokens out."""
        selected = self._paths.selected
        if selected is None or not self._bounds_page:
            return
        choosing = float(np.mean(~selected.all(axis=1)))
        held = np.array([float(self._paths.readable_without(np.empty(0, dtype=np.int64)))])
        size = int(choosing * self._cost.ondemand_bounds_bytes(held, self._bounds_page)[0])
        self._program.put(Op.COPY, size, Copied.BOUNDS)
        self._counts.measured.bounds_read_bytes += size
        grown = max(0, size - self._bounds_bytes)  # they are held all the time
        self._counts.measured.workspace_bytes += grown
        self._bounds_bytes += grown

    def _recompute(self, recovered: np.ndarray) -> None:
        """One prefill over these tokens, with the rest of the active paths present."""
        if len(recovered):
            present = self._paths.readable_without(recovered)
            self._program.put(Op.RECOMPUTE, len(recovered), present)
            m = self._counts.measured
            m.rehydrations += 1
            m.workspace_bytes = max(m.workspace_bytes, self._cost.workspace_bytes(len(recovered)))

    @property
    def _state_bytes(self) -> int:
        """Recurrent states: one for each active path, and before there is any, the prompt's."""
        return max(1, self._paths.turned) * self._cost.geometry.state_bytes

    def _levels(self) -> Levels:
        """Pages and streaming buffers, what of them is the shared prefix, DDR, and what is below.

        In bytes.
        """
        ledger = self._ledger
        pages = ledger.hbm_page_bytes + self._windows.held_bytes + self._state_bytes
        below = map(ledger.bytes_in, self._below)
        return pages + self._buffer_bytes, self._counts.prefix_bytes, ledger.ddr_bytes, *below


def not_recordable(geometry: Geometry, recall: str, compact: bool = False) -> str:
    """Why a demand cannot describe searches like these; empty if it can."""
    if compact:
        return (
            f"recall '{recall}' with compact={compact} cannot be recorded for serving: "
            f"use {', '.join(RECALLS)} without compaction"
        )
    if recall in ("near", "ondemand") and geometry.window:
        return (
            f"recall '{recall}' cannot be recorded for serving {geometry.name}, "
            "which has layers with a sliding window: use stage or stream"
        )
    return ""
