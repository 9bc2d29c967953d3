"""Run a `LiveRequest`: every problem under every cell, `batch` searches at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.tiers import Budget
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult
from arborsim.play.controller import Meter
from arborsim.play.episode import Cell
from arborsim.policies.methods.baselines import Full
from arborsim.searches import make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.decoder import prefill_block
from arborsim_torch.hardware.facts import conditions, software
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import LoadedModel, device_name, geometry
from arborsim_torch.recording_plan import RecordingPlan, attention_top
from arborsim_torch.static import kind_of_steps

#: Of an episode and a cell: meters for its controller.
MetersOf = Callable[[int, Cell], Sequence[Meter]]


def facts(loaded: LoadedModel, request: LiveRequest) -> LiveFacts:
    """The facts that the numbers of a run rest on."""
    shape = geometry(loaded)
    return LiveFacts(
        loaded.name,
        loaded.task.name if loaded.task else getattr(request.problems, "name", "prompts"),
        device_name(loaded.model.device),
        str(loaded.model.dtype).removeprefix("torch."),
        shape.weight_bytes,
        shape.kv_bytes_per_token,
        loaded.random_weights,
        software(loaded.model) | {"decode steps": kind_of_steps(loaded.model, request.graphs)},
        conditions(loaded.model.device),
    )


def numbers(request: LiveRequest, plan: RecordingPlan) -> range:
    """The problems to search."""
    return range(request.first, request.first + plan.episodes)


def make_setup(request: LiveRequest, loaded: LoadedModel, plan: RecordingPlan) -> SearchSetup:
    """The setup of every policy's searches."""
    longest = plan.max_tokens + max(
        len(plan.source.problem(i).prompt) for i in numbers(request, plan)
    )
    top = request.attention_top or attention_top(longest)
    return SearchSetup(
        model=loaded.model,
        source=plan.source,
        make_search=lambda: make_search(request.search, **request.search_options),
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=plan.max_tokens,
        dedupe=request.dedupe,
        attention_top=top,
        prefill_block=prefill_block(loaded.model.device),
        reward=plan.reward,
        embedder=plan.embedder,
        top_p=request.top_p,
        graphs=request.graphs,
    )


class Run:
    """A request on a loaded model, with a plan that was checked against the model.

    `watch` says what it wants, and gets the results; `meters` are by episode and cell.
    """

    def __init__(
        self,
        request: LiveRequest,
        loaded: LoadedModel,
        plan: RecordingPlan,
        watch: Any,
        meters: MetersOf | None = None,
    ) -> None:
        self.request, self.loaded, self.plan, self.watch = request, loaded, plan, watch
        self.setup = make_setup(request, loaded, plan)
        self._meters = meters or (lambda episode, cell: ())

    def begin(self) -> range:
        """Tell the watch the facts; the numbers of the problems."""
        self.watch.began(facts(self.loaded, self.request), self.plan.episodes)
        return numbers(self.request, self.plan)


class LiveRun(Run):
    """Searches every problem under every cell, `LiveRequest.batch` at a time."""

    def run(self) -> None:
        """All that the watch still wants."""
        for together in batched(self.begin(), self.request.batch):
            self._problems(together)

    def _problems(self, together: Sequence[int]) -> None:
        """Some problems under every cell; full retention first, which shares are of."""
        first, then = [], []
        lengths = {number: self.watch.full_tokens(number) for number in together}
        for number in together:
            wanted = [cell for cell in self.request.cells if self.watch.wants(number, cell)]
            full = [cell for cell in wanted if isinstance(cell.policy, Full)]
            first += [_Task(number, cell) for cell in full]
            then += [_Task(number, cell) for cell in wanted if cell not in full]
            shares = any(cell.budget.share is not None for cell in wanted if cell not in full)
            if shares and not full and not lengths[number]:
                first.append(_Task(number, Cell(Full(), Budget.parse("1")), silent=True))
        for tasks in (first, then):
            self._run(tasks, lengths)

    def _run(self, tasks: list[_Task], lengths: dict[int, int]) -> None:
        """Search; `lengths` are those under full retention, brought up to date."""
        of: dict[int, _Task] = {}

        def searches() -> Iterator[PolicySearch]:
            for task in tasks:
                search = self._begin(task, lengths[task.number])
                of[id(search)] = task
                yield search

        def done(search: PolicySearch, ended: Ended) -> None:
            task = of.pop(id(search))
            result = self._result(task, search, ended, lengths)
            if not task.silent:
                self.watch.finished(result)

        try:
            run_batched(searches(), self.request.batch, done)
        except torch.OutOfMemoryError as error:
            running = ", ".join(sorted({task.label for task in of.values()}))
            raise _out_of_memory(self.loaded, running, error) from error

    def _begin(self, task: _Task, full_tokens: int) -> PolicySearch:
        request, problem = self.request, self.plan.source.problem(task.number)
        # Full retention keeps no budget: the longest that the search may get.
        task.budget_tokens = task.cell.budget.in_tokens(
            full_tokens or len(problem.prompt) + self.plan.max_tokens
        )
        task.begun_s = time.perf_counter()
        device = self.loaded.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return PolicySearch(
            self.setup,
            problem,
            task.cell.policy,
            task.budget_tokens,
            CacheOptions(request.recall, request.overlap, request.page_tokens),
            meters=self._meters(task.number, task.cell),
            on_tokens=lambda tokens: self.watch.running(task.number, task.label, tokens),
        )

    def _result(
        self, task: _Task, search: PolicySearch, ended: Ended, lengths: dict[int, int]
    ) -> LiveResult:
        wall_s, cell = time.perf_counter() - task.begun_s, task.cell
        correct, tokens, known = None, 0, dict[str, Any]()
        if isinstance(ended, BudgetInfeasible):
            known["infeasible"] = str(ended)
        else:
            outcome, correct, tokens = search.outcome(ended), ended.correct, ended.tokens
            if isinstance(cell.policy, Full):
                task.budget_tokens = lengths[task.number] = ended.prompt_tokens + tokens
            known["measured"], known["allocated_bytes"] = outcome.measured, outcome.allocated_bytes
            known["device_peak_bytes"] = outcome.device_peak_bytes
            known["steps_right"], known["steps"] = ended.steps or (None, None)
        of_cell = (task.number, cell.policy.name, cell.budget.text, task.budget_tokens)
        return LiveResult(*of_cell, correct, tokens, lengths[task.number], wall_s, **known)


@dataclass
class _Task:
    """One problem under one cell; a silent one is run for its length alone."""

    number: int
    cell: Cell
    silent: bool = False
    budget_tokens: int = 0
    begun_s: float = 0.0

    @property
    def label(self) -> str:
        return (
            "full retention" if self.silent else f"{self.cell.policy.name} {self.cell.budget.text}"
        )


def batched(items: Iterable[int], size: int) -> Iterator[list[int]]:
    """Consecutive items, `size` at a time."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def _out_of_memory(loaded: LoadedModel, what: str, error: torch.OutOfMemoryError) -> UsageError:
    """One line: what was asked, what was free, and a budget that would fit."""
    device, shape = loaded.model.device, geometry(loaded)
    free, total = torch.cuda.mem_get_info(device)
    tokens = tokens_that_fit(total, shape.weight_bytes, shape.kv_bytes_per_token)
    advice = (
        f"prompt and budget together of at most {tokens} tokens should fit"
        if tokens
        else "the weights leave no room: use a smaller model or a larger device"
    )
    return UsageError(
        f"{what}: out of memory on {torch.cuda.get_device_name(device)}: "
        f"{str(error).splitlines()[0]}; {free / 1e9:.1f} of {total / 1e9:.1f} GB were free, the "
        f"weights take {shape.weight_bytes / 1e9:.1f}; finished searches are kept: {advice}"
    )


def tokens_that_fit(total_bytes: int, weight_bytes: int, kv_bytes_per_token: int) -> int:
    """Tokens whose keys and values fit in addition to the weights; 0 if nothing does.

    A fifth of the memory is left to activations, attention rows and fragmentation, and a pool that
    grows holds its old tensor and the new one.
    """
    spare = 0.8 * total_bytes - weight_bytes
    return max(0, int(spare / (2.25 * kv_bytes_per_token)))
