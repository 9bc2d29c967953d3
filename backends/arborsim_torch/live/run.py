"""Run a `LiveRequest`: every problem under every cell, one search at a time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers

import arborsim
from arborsim.controller import Meter
from arborsim.errors import BudgetInfeasible, UsageError
from arborsim.live.request import LiveCell, LiveFacts, LiveRequest, LiveResult, LiveWatch
from arborsim.policies.full import Full
from arborsim.search import make_search
from arborsim_torch.decoder import PREFILL_BLOCK
from arborsim_torch.live.session import Machine, SearchSetup, run_policy
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.plan import DENSE_UP_TO, Plan
from arborsim_torch.reference.tasks import Problem

#: Of an episode and a cell: meters for its controller.
MetersOf = Callable[[int, LiveCell], Sequence[Meter]]
_SPARSE_TOP = 256
_BIG_MODEL_BLOCK = 1024  # prompt tokens per forward pass of a model that fills a GPU


def facts(loaded: LoadedModel, request: LiveRequest) -> LiveFacts:
    """What the numbers of a run are made with."""
    shape = geometry(loaded)
    device = loaded.model.device
    return LiveFacts(
        loaded.name,
        loaded.task.name if loaded.task else "prompts",
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        str(loaded.model.dtype).removeprefix("torch."),
        shape.weight_bytes,
        shape.kv_bytes_per_token,
        loaded.random_weights,
        {
            "arborsim": arborsim.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    )


def numbers(request: LiveRequest, plan: Plan) -> range:
    """The problems to search."""
    return range(request.first, request.first + plan.episodes)


def make_setup(request: LiveRequest, loaded: LoadedModel, plan: Plan) -> SearchSetup:
    """What every policy searches."""
    longest = plan.max_tokens + max(
        len(plan.source.problem(i).prompt) for i in numbers(request, plan)
    )
    top = request.attention_top or (0 if longest <= DENSE_UP_TO else _SPARSE_TOP)
    on_gpu = loaded.model.device.type == "cuda"
    return SearchSetup(
        model=loaded.model,
        source=plan.source,
        make_search=lambda: make_search(request.search, **request.search_options),
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=plan.max_tokens,
        dedupe=request.dedupe,
        attention_top=top,
        prefill_block=_BIG_MODEL_BLOCK if on_gpu else PREFILL_BLOCK,
    )


class LiveRun:
    """A request on a loaded model.

    Parameters
    ----------
    request : LiveRequest
    loaded : LoadedModel
    plan : Plan
        Problems and lengths, checked against the model.
    watch : LiveWatch
    meters : callable, optional
        Of an episode and a cell: meters for its controller.
    """

    def __init__(
        self,
        request: LiveRequest,
        loaded: LoadedModel,
        plan: Plan,
        watch: LiveWatch,
        meters: MetersOf | None = None,
    ) -> None:
        self.request, self.loaded, self.plan, self.watch = request, loaded, plan, watch
        self._meters = meters or (lambda episode, cell: ())
        self.setup = make_setup(request, loaded, plan)

    def run(self) -> None:
        """All that the watch still wants."""
        self.watch.began(facts(self.loaded, self.request), self.plan.episodes)
        for number in numbers(self.request, self.plan):
            wanted = [cell for cell in self.request.cells if self.watch.wants(number, cell)]
            if not wanted:
                continue
            self._each(self.plan.source.problem(number), wanted)

    def _each(self, problem: Problem, cells: list[LiveCell]) -> None:
        full_tokens = self.watch.full_tokens(problem.index)
        # Shares need the length under full retention: a cell that has it anyway goes first.
        cells = sorted(cells, key=lambda cell: not isinstance(cell.policy, Full))
        for cell in cells:
            if not full_tokens and cell.budget.share is not None:
                if isinstance(cell.policy, Full):
                    full_tokens = len(problem.prompt) + self.plan.max_tokens
                else:
                    full_tokens = self._full_tokens(problem)
            result = self._search(problem, cell, full_tokens)
            if isinstance(cell.policy, Full):
                full_tokens = result.full_tokens
            self.watch.finished(result)

    def _full_tokens(self, problem: Problem) -> int:
        """Tokens of the search when nothing is removed."""
        on_tokens = self._progress(problem, "full retention")
        episode = self.setup.recorder(problem, None, None, None, on_tokens).run(problem)
        return episode.prompt_tokens + episode.tokens

    def _progress(self, problem: Problem, what: str) -> Callable[[int], None]:
        return lambda tokens: self.watch.running(problem.index, what, tokens)

    def _search(self, problem: Problem, cell: LiveCell, full_tokens: int) -> LiveResult:
        request, policy = self.request, cell.policy
        budget_tokens = cell.budget.in_tokens(full_tokens)
        machine = Machine(request.recall, request.overlap, request.page_tokens)
        begun = time.perf_counter()
        label = f"{policy.name} {cell.budget.text}"
        try:
            outcome = run_policy(
                self.setup, problem, policy, budget_tokens, machine,
                meters=self._meters(problem.index, cell), on_tokens=self._progress(problem, label),
            )  # fmt: skip
        except BudgetInfeasible as error:
            return LiveResult(
                problem.index, policy.name, cell.budget.text, budget_tokens, None, 0, full_tokens,
                time.perf_counter() - begun, infeasible=str(error),
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(self.loaded, label, error) from error
        episode = outcome.episode
        if isinstance(policy, Full):
            full_tokens = budget_tokens = episode.prompt_tokens + episode.tokens
        return LiveResult(
            problem.index, policy.name, cell.budget.text, budget_tokens, episode.correct,
            episode.tokens, full_tokens, time.perf_counter() - begun, outcome.measured,
            outcome.allocated_bytes, outcome.device_peak_bytes,
        )  # fmt: skip


def _out_of_memory(loaded: LoadedModel, what: str, error: torch.OutOfMemoryError) -> UsageError:
    device = loaded.model.device
    free, total = torch.cuda.mem_get_info(device)
    weights = geometry(loaded).weight_bytes
    return UsageError(
        f"{what}: out of memory on {torch.cuda.get_device_name(device)}: "
        f"{str(error).splitlines()[0]}; {free / 1e9:.1f} of {total / 1e9:.1f} GB were free, the "
        f"weights take {weights / 1e9:.1f}; finished searches are kept: lower --max-tokens or "
        "--budget"
    )
