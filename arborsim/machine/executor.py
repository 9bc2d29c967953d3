"""The simulated executor: decisions become bytes in a ledger and seconds in a simulated machine.

A decode iteration appends its tokens, computes, and then carries out what the policy decided.
While nothing runs in the background, any number of iterations is one step in *closed form*: their
costs are computed as arrays and their sum is one timeout.  Iterations that start transfers, or run
beside some, are simulated one by one.  Both ways agree to rounding, which the tests check by
forcing the second one (``event_by_event=True``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import TokenRun
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.iterations import IterationCosts
from arborsim.machine.parts import ExecutorParts
from arborsim.machine.paths import ActivePaths
from arborsim.machine.runs import between_steps, cut
from arborsim.machine.transfers import Transfers
from arborsim.machine.windows import Windows
from arborsim.memory.census import Changes, kinds
from arborsim.memory.moves import Moves
from arborsim.memory.run_profile import RunProfile

_RECOMPUTED = kinds(lambda source, target: source == Tier.EVICTED)
_QUANTISING = kinds(lambda source, target: target.quantised and not source.quantised)
_FETCHING = ("stream", "ondemand")


class SimulatedExecutor(ExecutorParts):
    """Implements `arborsim.run.controller.Executor` on a hardware profile.

    Parameters and errors are those of `ExecutorParts`.
    """

    def bind(self, tree: ThoughtTree) -> None:
        """Follow the paths of `tree`, which the controller keeps up to date.  Call once, first."""
        self._paths = ActivePaths(tree, self._ledger)
        self._windows = Windows(tree, self._ledger, self._cost.geometry)
        self._transfers = Transfers(
            self._engine, self._ledger, self._paths, self._gauge, self._iterations.recall
        )

    def prefill(self, run: TokenRun) -> None:
        """Compute the prompt; its tokens enter HBM."""
        tokens = run.num_tokens
        self._ledger.append(run.leaves, run.steps)
        self._paths.turn(run.leaves)
        self._windows.turn(run.leaves)
        self._gauge.window_bytes = self._windows.held_bytes
        self._gauge.observe(self._engine.now_s)
        cost, workspace = self._cost.prefill(tokens), self._cost.workspace_bytes(tokens)
        self._engine.spend(cost.total_s)
        if not self._iterations.fused:
            layers = self._cost.geometry.layers if self._keep_matrices else 1
            workspace += layers * self._cost.eager_prefill_bytes(tokens)
            matrices_s = self._cost.eager_prefill_s(tokens)
            self._spend_on_policy(matrices_s, "attention matrices of the prefill")
        self._bill.workspace(workspace)
        self._bill.prefill(cost)
        self._bill.measured.prompt_tokens = tokens

    def activate(self, leaves: tuple[int, ...]) -> None:
        """The next tokens belong to `leaves`; waits for what their paths hold in DDR."""
        self._paths.turn(leaves)
        forgotten = self._windows.turn(leaves)
        self._gauge.window_bytes = self._windows.held_bytes
        self._bill.expose(self._transfers.turn())
        self._recompute(forgotten)
        self._spend_on_policy(self._policy.turning_s(len(leaves)), "turns")
        self._gauge.observe(self._engine.now_s)

    def advance(self, run: TokenRun, moves: Moves, decided_from: int | None) -> None:
        """Decode the run; after iteration ``t`` carry out the moves of step ``t``."""
        if not self._paths.are_active(run.leaves):
            self.activate(run.leaves)
        elif run.leaves != self._paths.leaves:  # some branches pause or have ended
            self._paths.read(run.leaves)
        decided = np.zeros(run.steps, dtype=bool)
        if decided_from is not None:
            decided[decided_from:] = True
        changes = self._ledger.resolve(moves, arriving=run.num_tokens)
        parts = cut(run.steps, changes, self._ledger.groups, self._one_by_one)
        for first, last, together in parts:
            inside = between_steps(moves, first, last)
            if together:
                self._iterate_together(decided[first:last], inside)
            else:
                self._iterate_once(decided[first:last])
                self._carry_out(self._ledger.resolve(inside))
        self._bill.measured.decisions += int(decided.sum())
        self._bill.measured.generated_tokens += run.num_tokens
        self._bill.measured.iterations += run.steps

    def apply(self, moves: Moves, examined_tokens: int) -> None:
        """Carry out one decision taken over `examined_tokens` tokens."""
        self._bill.measured.decisions += 1
        self._spend_on_policy(float(self._policy.decision_s(examined_tokens)), "decisions")
        self._carry_out(self._ledger.resolve(moves))
        if self._compact:
            copied_bytes = self._ledger.compact()
            self._spend_on_policy(float(self._cost.copy_s(2 * copied_bytes)), "compaction")
            self._gauge.observe(self._engine.now_s)

    def finish(self) -> None:
        """Let transfers end; nobody waits for them any more, so they count as hidden."""
        self._engine.wait()

    def _one_by_one(self) -> bool:
        """Whether iterations must be simulated by themselves now."""
        return self._event_by_event or self._engine.busy

    def _iterate_together(self, decided: np.ndarray, moves: Moves) -> None:
        """Decode as many iterations as `decided` has entries, in closed form."""
        run, costs = self._price(decided, moves)
        buffers = self._buffers(costs)
        if buffers is None:
            buffers = np.full(len(decided), self._gauge.staging_bytes)
        passed_s = np.cumsum(costs.total_s)
        self._gauge.observe_run(self._engine.now_s + passed_s, run, buffers)
        self._spend(costs, float(passed_s[-1]))
        self._count(run.changes)

    def _iterate_once(self, decided: np.ndarray) -> None:
        """Decode one iteration; transfers may end while it runs."""
        _, costs = self._price(decided, Moves.none())
        buffers = self._buffers(costs)
        if buffers is not None:
            self._gauge.staging_bytes = int(buffers[0])
        self._gauge.observe(self._engine.now_s)
        self._spend(costs, float(costs.total_s[0]))

    def _buffers(self, costs: IterationCosts) -> np.ndarray | None:
        """Buffers of what each iteration fetches; None in recall modes that fetch nothing."""
        if self._iterations.recall not in _FETCHING or costs.beside is None:
            return None
        return costs.beside.staging_bytes

    def _price(self, decided: np.ndarray, moves: Moves) -> tuple[RunProfile, IterationCosts]:
        """Let tokens enter and move in the books, and price the iterations that this takes."""
        landing, leaves = self._transfers.landing(), self._paths.leaves
        run = self._ledger.advance(leaves, len(decided), moves)
        path = self._paths.advance(run)
        windows = self._windows.advance(leaves, len(decided))
        if windows is not None:
            self._gauge.window_bytes = self._windows.held_bytes
            token_bytes = self._cost.geometry.window_bytes_per_token
            run = run.with_windows(windows.held * token_bytes)
            path = replace(path, windows=windows)
        return run, self._iterations.price(path, len(leaves), landing, decided)

    def _spend(self, costs: IterationCosts, seconds: float) -> None:
        """Let the `seconds` that decode iterations cost pass."""
        beside = costs.beside
        fetches = self._iterations.recall in _FETCHING
        if fetches and beside and beside.from_ddr_bytes.any():
            self._bill.expose(self._engine.spend_streaming(seconds))
        else:
            self._engine.spend(seconds)
        self._bill.iterations(costs)
        if beside:
            self._engine.down.carried_bytes += int(beside.to_ddr_bytes.sum())
            self._engine.up.carried_bytes += int(beside.from_ddr_bytes.sum())

    def _carry_out(self, changes: Changes) -> None:
        """Change tiers, recompute what was evicted, and wait for what decoding needs."""
        if not len(changes):
            return
        if self._transfers.needs_link(changes):
            self._bill.expose(self._engine.wait())
        self._count(changes)
        self._transfers.carry_out(changes)
        self._rehydrate(changes)
        self._bill.expose(self._transfers.wait_for_returning())
        if not self._overlap:
            self._bill.expose(self._engine.wait())

    def _rehydrate(self, changes: Changes) -> None:
        """One prefill over the recovered tokens, with the rest of the active paths present."""
        if changes.count(_RECOMPUTED):
            self._recompute(np.unique(changes.of(_RECOMPUTED).token))

    def _recompute(self, recovered: np.ndarray) -> None:
        """One prefill over these tokens."""
        if not len(recovered):
            return
        seconds = self._cost.prefill(len(recovered), self._paths.readable_beside(recovered)).total_s
        self._engine.spend(seconds)
        self._bill.rehydration(seconds)
        self._bill.workspace(self._cost.workspace_bytes(len(recovered)))

    def _count(self, changes: Changes) -> None:
        """Count moves by kind, and pay for quantising on the GPU."""
        if not len(changes):
            return
        if self._cost.geometry.kv_bytes_per_element == 1 and changes.count(_QUANTISING):
            raise UsageError(
                f"the policy moves tokens to 8 bits, and the cache of {self._cost.geometry.name} "
                "is in 8 bits already: set it not to, or use a cache in bf16"
            )
        self._bill.moves(changes)
        rounding_s = float(self._cost.copy_s(changes.count(self._touched_bytes)))
        self._spend_on_policy(rounding_s, "quantising")

    def _spend_on_policy(self, seconds: float, what: str) -> None:
        self._engine.spend(seconds)
        self._bill.policy(seconds, what)
