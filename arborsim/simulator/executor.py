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

from arborsim.errors import UnknownName, UsageError
from arborsim.events import TokenRun
from arborsim.hardware.cost import SCALE_BYTES, CostModel
from arborsim.hardware.profile import HardwareProfile
from arborsim.measurements import Measurements
from arborsim.memory.census import Changes, kinds
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Moves
from arborsim.memory.run_profile import RunProfile
from arborsim.memory.tiers import Tier
from arborsim.simulator.bill import Bill
from arborsim.simulator.engine import Engine
from arborsim.simulator.gauge import MemoryGauge
from arborsim.simulator.iterations import RECALLS, IterationCosts, IterationModel
from arborsim.simulator.paths import ActivePaths
from arborsim.simulator.runs import between_steps, cut
from arborsim.simulator.terms import Term
from arborsim.simulator.transfers import Transfers
from arborsim.simulator.windows import Windows
from arborsim.trace.schema import Geometry
from arborsim.tree import ThoughtTree

_RECOMPUTED = kinds(lambda source, target: source == Tier.EVICTED)
_ROUNDED_BY_GPU = kinds(
    lambda source, target: target.quantised and not source.quantised and not source.in_ddr
)
_QUANTISING = kinds(lambda source, target: target.quantised and not source.quantised)
_FETCHING = ("stream", "ondemand")


class SimulatedExecutor:
    """Implements `arborsim.controller.Executor` on a hardware profile.

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

    def bind(self, tree: ThoughtTree) -> None:
        """Follow the paths of `tree`, which the controller keeps up to date.  Call once, first."""
        self._paths = ActivePaths(tree, self._ledger)
        self._windows = Windows(tree, self._ledger, self._cost.geometry)
        self._transfers = Transfers(
            self._engine, self._ledger, self._paths, self._gauge, self._iterations.recall
        )

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

    def measurements(self) -> Measurements:
        """What has been measured so far."""
        return self._bill.close(self._gauge, self._engine, self._cost)

    def terms(self) -> tuple[Term, ...]:
        """What the time so far consists of; empty unless it was to be explained."""
        return self._bill.explain(self._engine)

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
