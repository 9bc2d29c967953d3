"""Simulated against measured, on a loaded model: the searches of `arborsim validate`.

Each problem is searched once with all policies in shadow mode, which is recorded and replayed, and
then once under each policy and budget, on the live and on a simulated machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.outputs import scratch
from arborsim.core.tiers import CAPTURED_RECALLS, Budget
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import served_live
from arborsim.play.backends import (
    LayerChoice,
    LiveFacts,
    LiveRequest,
    LiveResult,
    RecordRequest,
    ValidationObserver,
)
from arborsim.play.episode import Cell
from arborsim.play.move_log import MoveLog
from arborsim.policies.base import Policy
from arborsim.products.validate import compare
from arborsim.products.validate.results import COUNTERS, PEAKS, TERMS, CellCheck
from arborsim.trace.schema import Capture as Level
from arborsim.trace.schema import TraceInfo
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import LiveOutcome, PolicySearch
from arborsim_torch.live.run import Run
from arborsim_torch.live.setup import CacheOptions
from arborsim_torch.live.shadow import ShadowRun, record_request
from arborsim_torch.models import LoadedModel
from arborsim_torch.recording_plan import RecordingPlan

_SERIES_POINTS = 48


def validation_recording(request: LiveRequest, loaded: LoadedModel) -> RecordRequest:
    """The recording that a validation's shadow runs make.

    Reference models are small enough to record all vectors, which the output error is made of; of
    other models only what the policies read.
    """
    recording = record_request(request)
    if loaded.task is None:
        return recording
    rows: LayerChoice = "all" if recording.attention_layers else ()
    hidden: LayerChoice = "all" if recording.hidden_layers else ()
    return replace(
        recording, capture=Level.QKV, qkv_layers="all", attention_layers=rows, hidden_layers=hidden
    )


class ValidationRun(Run):
    """Compares simulated with measured searches of every problem.

    The request has a `machine`, whose profile is that of the device for the seconds to mean
    anything.  `info` is of the recordings that are replayed: plans per layer or head are about its
    captured layers, so that they must be all of the model's.
    """

    def __init__(
        self,
        request: LiveRequest,
        loaded: LoadedModel,
        plan: RecordingPlan,
        info: TraceInfo,
        watch: ValidationObserver,
    ) -> None:
        if request.machine is None:
            raise UsageError("a validation needs a machine to simulate: give --gpu")
        super().__init__(request, loaded, plan, watch)
        self.info, self.machine = info, request.machine
        self.alone = loaded.model.device.type == "cpu" and torch.get_num_threads() == 1
        if self.alone:  # other processes change the clock, and not the thread's CPU time
            self.setup = replace(self.setup, clock=time.thread_time)

    def run(self) -> None:
        """All problems that the watch still wants."""
        for number in self.begin():
            if self.watch.wants(number):
                self.watch.checked(self._problem(number))

    def _problem(self, number: int) -> tuple[CellCheck, ...]:
        cells = self.request.cells
        with scratch("arborsim-validate-") as folder:
            trace = folder / "shadow.parquet"
            shadows = self._shadow(number, trace)
            # Budgets in tokens: shares were of the search that the shadow run made first.
            played = [
                Cell(cell.policy, Budget(cell.budget.text, tokens=shadow.result.budget_tokens))
                for cell, shadow in zip(cells, shadows, strict=True)
            ]
            generated, replayed = compare.replay_cells(trace, played, self.machine)
        checks = []
        for cell, shadow, replay in zip(cells, shadows, replayed, strict=True):
            check = _parity(shadow, replay)
            checks.append(self._live(check, cell, generated, shadow.moves))
        return tuple(checks)

    def _shadow(self, number: int, trace: Path) -> list[_Shadow]:
        """Search with all policies in shadow mode, and record it."""
        watch = _Collect(self.watch)
        logs: dict[tuple[str, str], MoveLog] = {}

        def meters(episode: int, cell: Cell) -> Sequence[MoveLog]:
            return (logs.setdefault((cell.policy.name, cell.budget.text), MoveLog()),)

        alone = replace(self.request, shadow=True, trace=trace, first=number, episodes=1)
        plan = replace(self.plan, episodes=1)
        ShadowRun(alone, self.loaded, plan, self.info, watch, meters).run()
        return [_Shadow(r, logs[r.policy, r.budget].rows) for r in watch.results]

    def _live(
        self, check: CellCheck, cell: Cell, generated: compare.Generated, shadow_moves: np.ndarray
    ) -> CellCheck:
        """Search under a policy that really removes tokens, and compare."""
        request, number = self.request, check.episode
        made: list[compare.DualExecutor] = []

        def wrap(live: LiveExecutor, mover: Mover) -> compare.DualExecutor:
            made.append(
                compare.DualExecutor(live, self._simulated(cell.policy), lambda: held(mover))
            )
            return made[0]

        label = f"{cell.policy.name} {cell.budget.text}"
        search = PolicySearch(
            self.setup,
            self.plan.source.problem(number),
            cell.policy,
            check.budget_tokens,
            CacheOptions(request.recall, request.overlap, request.page_tokens),
            on_tokens=lambda tokens: self.watch.running(number, label, tokens),
            wrap=wrap,
        )
        ends: list[Ended] = []
        begun = time.thread_time()
        run_batched([search], 1, lambda _, ended: ends.append(ended))
        thread_s = time.thread_time() - begun - made[0].overhead_thread_s
        if isinstance(ends[0], BudgetInfeasible):
            return replace(check, infeasible=str(ends[0]))
        outcome = search.outcome(ends[0])
        groups = search.cache.layout.groups
        alike = compare.agreement(
            generated, shadow_moves, compare.Generated.of(ends[0].columns), made[0].log.rows, groups
        )
        check = _compared(check, outcome, made[0], number == request.first, self.alone)
        if self.loaded.model.device.type == "cuda":
            simulated = made[0].simulated
            memory = search.memory(
                simulated.measurements(), self.info.geometry, simulated.most_moved
            )
            predicted_bytes = memory.device_bytes(check.weight_bytes)
            check = replace(check, simulated_device_bytes=predicted_bytes)
        return replace(
            check,
            thread_s=thread_s if self.alone else float("nan"),
            same_iterations=alike.same,
            shadow_iterations=generated.iterations,
            jaccard_before=alike.before,
            jaccard_after=alike.after,
            jaccard_iteration=tuple(alike.iteration.tolist()),
            jaccard=tuple(alike.jaccard.round(4).tolist()),
        )

    def _simulated(self, policy: Policy) -> SimulatedExecutor:
        """The machine that the live one is compared with; it accounts for single tokens."""
        profile = self.machine.profile
        if self.loaded.model.device.type == "cuda":
            captured = self.request.recall in CAPTURED_RECALLS
            captured |= not any(tier.offloaded for tier in policy.tiers)
            profile = served_live(profile, graphs=self.setup.graphs and captured)
        recall, overlap = self.request.recall, self.request.overlap
        machine = replace(self.machine, recall=recall, overlap=overlap, page_tokens=1)
        machine = replace(machine, profile=profile)
        return SimulatedExecutor.of(machine, policy, self.info)


def held(mover: Mover) -> compare.Held:
    """Bytes of the tokens in the pools, by `arborsim.products.validate.compare.PARTS`."""
    pools = mover.cache.pools
    used = {place: pool.used_bytes for place, pool in pools.items()}
    staging = sum(size for place, size in used.items() if place.staged)
    return (
        used[Place.HBM],
        sum(size for place, size in used.items() if place.in_hbm and place.quantised),
        used[Place.DDR],
        sum(size for place, size in used.items() if place.on_host and place.quantised),
        staging + mover.cache.buffer_bytes,  # what streamed tokens pass through
    )


@dataclass(frozen=True)
class _Shadow:
    """One cell of a shadow run."""

    result: LiveResult
    moves: np.ndarray


class _Collect:
    """A `LiveObserver` that keeps the results and passes progress on."""

    def __init__(self, outer: ValidationObserver) -> None:
        self._outer = outer
        self.results: list[LiveResult] = []

    def began(self, facts: LiveFacts, episodes: int) -> None:
        pass

    def wants(self, episode: int, cell: Cell) -> bool:
        return True

    def full_tokens(self, episode: int) -> int:
        return 0

    def running(self, episode: int, what: str, tokens: int) -> None:
        self._outer.running(episode, what, tokens)

    def finished(self, result: LiveResult) -> None:
        self.results.append(result)


def _parity(shadow: _Shadow, replay: compare.Replayed) -> CellCheck:
    """Part (a): whether the replay of a recording decides as the run that was recorded."""
    result, one, other = shadow.result, shadow.moves, replay.moves
    shorter = min(len(one), len(other))
    equal = int((one[:shorter] == other[:shorter]).all(axis=1).sum())
    return CellCheck(
        episode=result.episode,
        policy=result.policy,
        budget=result.budget,
        budget_tokens=result.budget_tokens,
        full_tokens=result.full_tokens,
        shadow_moves=len(one),
        equal_moves=equal,
        parity=equal == len(one) == len(other) and result.infeasible == replay.infeasible,
        attention_kept=replay.attention_kept,
        output_error=replay.output_error,
    )


def _compared(
    check: CellCheck, outcome: LiveOutcome, both: compare.DualExecutor, draw: bool, by_thread: bool
) -> CellCheck:
    """Parts (b) and (c): bytes and seconds of the same search on both machines."""
    live, simulated = outcome.measured, both.simulated.measurements()
    # The simulator ran inside the feed's handling of events.
    overhead_s = both.overhead_thread_s if by_thread else both.overhead_s
    live.time.policy_s = max(0.0, live.time.policy_s - overhead_s)
    over_time = both.bytes_over_time()
    drawn = over_time.thinned(_SERIES_POINTS).reshape(-1).tolist() if draw else []
    correct = outcome.episode.correct
    return replace(
        check,
        calls=len(over_time),
        equal_calls=over_time.equal,
        tiers_differ=over_time.tiers_differ,
        off_bytes=over_time.off,
        live_peaks=tuple(getattr(live, name) for name in PEAKS),
        simulated_peaks=tuple(getattr(simulated, name) for name in PEAKS),
        live_counters=tuple(float(getattr(live, name)) for name in COUNTERS),
        simulated_counters=tuple(float(getattr(simulated, name)) for name in COUNTERS),
        allocated_bytes=outcome.allocated_bytes,
        device_peak_bytes=outcome.device_peak_bytes,
        weight_bytes=simulated.weight_bytes,
        bytes_over_time=tuple(drawn),
        live_s=tuple(getattr(live.time, name) for name in TERMS),
        simulated_s=tuple(getattr(simulated.time, name) for name in TERMS),
        generated_tokens=outcome.episode.tokens,
        iterations=outcome.episode.iterations,
        correct=-1 if correct is None else int(correct),
    )
