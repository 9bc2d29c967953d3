"""Shadow runs: policies decide over a live search, nothing is removed.

One search with full retention serves any number of policies and budgets, each with a simulated
machine of its own.  Their decisions are those of a replay of the same search, so recording it in
the same run shows whether both agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.events import Event
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.play.backends import (
    LiveObserver,
    LiveRequest,
    LiveResult,
    RecordRequest,
    SearchRequest,
    captured_for,
)
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell
from arborsim.policies.base import NEVER
from arborsim.trace.schema import VECTORS, TraceInfo
from arborsim.trace.writer import TraceWriter
from arborsim_torch.capture import ALL_SIGNALS
from arborsim_torch.live.feed import Feed
from arborsim_torch.live.run import MetersOf, Run
from arborsim_torch.live.setup import capture_of_signals, make_controller
from arborsim_torch.models import LoadedModel
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.recording_plan import RecordingPlan
from arborsim_torch.reference.tasks import Problem

_NOWHERE = Path("nowhere.parquet")


class ShadowController:
    """A controller that stops handling events once its budget turns out to be infeasible."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.infeasible = ""

    @property
    def tree(self) -> ThoughtTree:
        return self.controller.tree

    def handle(self, event: Event) -> None:
        if self.infeasible:
            return
        try:
            self.controller.handle(event)
        except BudgetInfeasible as error:
            self.infeasible = str(error)

    def due(self) -> int:
        return NEVER  # its state can be brought up to date at any time


class ShadowRun(Run):
    """Searches every problem once, with all policies in shadow mode.

    The request has a `machine`; `info` is of the trace that is recorded, or would be.
    """

    def __init__(
        self,
        request: LiveRequest,
        loaded: LoadedModel,
        plan: RecordingPlan,
        info: TraceInfo,
        watch: LiveObserver,
        meters: MetersOf | None = None,
    ) -> None:
        if request.machine is None:
            raise UsageError("a shadow run needs a machine to simulate: give --gpu")
        super().__init__(request, loaded, plan, watch, meters)
        self.info, self.machine = info, request.machine
        self._needs = frozenset[Signal]().union(*(c.policy.reads() for c in request.cells))

    def run(self) -> None:
        """Search every problem once."""
        problems = self.begin()
        if self.request.trace is None:
            for number in problems:
                if any(self.watch.wants(number, cell) for cell in self.request.cells):
                    self._search(self.plan.source.problem(number))
            return
        with TraceWriter(self.request.trace, self.info) as writer:
            for number in problems:
                episode = self._search(self.plan.source.problem(number))
                writer.write_episode(episode.columns)

    def _search(self, problem: Problem) -> EpisodeResult:
        full_tokens = 0
        if any(cell.budget.share is not None for cell in self.request.cells):
            # How long the search will be is known only afterwards: run it before.
            first = self._record(problem, [], "full retention")
            full_tokens = first.prompt_tokens + first.tokens
        shadows = [
            self._shadow_controller(problem, cell, full_tokens) for cell in self.request.cells
        ]
        begun = time.perf_counter()
        episode = self._record(problem, shadows, "shadow")
        wall_s = time.perf_counter() - begun
        for cell, shadow in zip(self.request.cells, shadows, strict=True):
            result = LiveResult(
                episode=problem.index,
                policy=cell.policy.name,
                budget=cell.budget.text,
                budget_tokens=shadow.controller.budget_tokens,
                correct=None if shadow.infeasible else episode.correct,
                tokens=episode.tokens,
                full_tokens=episode.prompt_tokens + episode.tokens,
                wall_s=wall_s,
                measured=shadow.controller.executor.measurements(),
                infeasible=shadow.infeasible,
            )
            if episode.steps and not shadow.infeasible:
                right, steps = episode.steps
                result = replace(result, steps_right=right, steps=steps)
            self.watch.finished(result)
        return episode

    def _shadow_controller(
        self, problem: Problem, cell: Cell, full_tokens: int
    ) -> ShadowController:
        executor = SimulatedExecutor.of(self.machine, cell.policy, self.info)
        budget, meters = cell.budget.in_tokens(full_tokens), self._meters(problem.index, cell)
        shape = (self.loaded.model, self.info.cache_shape)
        return ShadowController(make_controller(cell.policy, executor, budget, *shape, meters))

    def _record(
        self, problem: Problem, shadows: Sequence[ShadowController], what: str
    ) -> EpisodeResult:
        def on_tokens(count: int) -> None:
            self.watch.running(problem.index, what, count)

        setup = self.setup
        if not shadows:
            return setup.recorder(problem, None, None, None, on_tokens).run(problem)
        keep = self.request.trace is not None
        info = self.info  # all of them are the same layers, where the policies want them
        layers = info.qkv_layers or info.attention_layer_ids or info.hidden_layers
        needs = self._needs | ALL_SIGNALS if keep else self._needs
        if keep and self.info.qkv_layers:  # a trace can hold more than the policies read
            needs |= frozenset(VECTORS)
        capture = capture_of_signals(needs, layers, setup.attention_top, setup.make_search(), keep)
        feed = Feed(shadows, capture, self._needs, layers)
        return setup.recorder(problem, capture, feed, None, on_tokens).run(problem)


def record_request(request: LiveRequest) -> RecordRequest:
    """The recording that a shadow run makes, or would make."""
    shared = {f.name: getattr(request, f.name) for f in fields(SearchRequest)}
    out = request.trace
    return RecordRequest(
        **shared,
        out=out if out is not None else _NOWHERE,
        **captured_for((cell.policy for cell in request.cells), request.qkv_layers),
        attention="sparse" if request.attention_top else "auto",
        attention_top=request.attention_top or 256,
        command=request.command,
    )
