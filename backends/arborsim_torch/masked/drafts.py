"""Greedy searches under masks, many tokens at a time: what full retention says is the draft.

A window of drafted tokens is computed as if it were given (`arborsim_torch.masked.forced`).  Up to
the first token that the policy's cache makes less probable than another, it stands, as in
speculative decoding; the other one takes its place, and the rest of the draft is tried behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim.core.tiers import Budget
from arborsim.play.backends import LiveResult
from arborsim.play.episode import Cell
from arborsim.policies.methods.baselines import Full
from arborsim_torch.live.run import Run
from arborsim_torch.masked.follower import Follower, check
from arborsim_torch.masked.forced import PROMPT_BLOCK, Forcing, Windows
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sources import Source

LOOK = 16  #: steps between two looks for searches that can no longer succeed
_WINDOW = 32  # tokens of a draft that are tried at once, at most


@dataclass
class MaskedSearch:
    """One greedy search under one policy.

    `draft` is what full retention generated, `hopeless` says of generated tokens whether they can
    no longer lead to an answer, which ends the search.
    """

    model: Any
    source: Source
    problem: Problem
    max_tokens: int
    draft: Sequence[int] = ()
    hopeless: Callable[[Sequence[int]], bool] | None = None
    generated: list[int] = field(default_factory=list)
    _over: bool = False

    @torch.inference_mode()
    def run(self, cell: Cell, budget_tokens: int) -> Follower:
        """Search; the follower of the policy at the end, and `generated`."""
        prompt = self.problem.prompt
        capacity = len(prompt) + self.max_tokens
        table = Windows(self.model, 1, capacity)
        readers = partial(self._readers, self.problem)
        follower = Follower(self.model, cell.policy, budget_tokens, capacity, readers)
        table.observe(follower.needs, follower.uses)
        ids = torch.tensor([prompt], device=self.model.device)
        last, (found,) = table.prompt(ids, PROMPT_BLOCK)
        follower.prompt(prompt, found)
        way = Forcing(table, follower, _WINDOW)
        self._append(int(self.model.lm_head(last)[0].argmax()))
        while not self._over and not way.follower.infeasible:
            at = len(self.generated)
            stop = min(at + way.window - 1, self.max_tokens - 1)
            tokens = [self.generated[-1], *self.draft[at:stop]]
            way.advance(tokens, accept=self._accept(tokens))
        return way.follower

    def _accept(self, tokens: Sequence[int]) -> Callable[[Tensor], int]:
        """Takes what is said after drafted tokens, as far as they stand."""

        def accept(hidden: Tensor) -> int:
            says = self.model.lm_head(hidden).argmax(-1).tolist()
            for i, token in enumerate(says, 1):
                self._append(token)
                if self._over or i == len(tokens) or token != tokens[i]:
                    return i
            return len(says)

        return accept

    def _append(self, token: int) -> None:
        self.generated.append(token)
        done = self.generated
        self._over = self.source.is_finished(self.problem, done) or len(done) == self.max_tokens
        if self.hopeless is not None and len(done) % LOOK == 0 and not self._over:
            self._over = self.hopeless(done)

    def _readers(self, problem: Problem, generated: Sequence[int], start: int) -> Any:
        found = self.source.readers(problem, generated, start)
        if found is None:
            raise UsageError("a policy needs a task that knows what reads each token: leave it out")
        return found


@dataclass(frozen=True)
class Searched:
    """A search's result, and what it generated."""

    result: LiveResult
    generated: list[int]


def search(
    model: Any,
    source: Source,
    problem: Problem,
    cell: Cell,
    max_tokens: int,
    draft: Sequence[int] = (),
    hopeless: Callable[[Sequence[int]], bool] | None = None,
) -> Searched:
    """Search greedily under a policy; `draft` is what full retention generated.

    A budget that is a share is one of what that took.  With `hopeless` (`MaskedSearch`) no steps
    are counted.
    """
    check(cell.policy)
    begun, prompt = time.perf_counter(), len(problem.prompt)
    one = MaskedSearch(model, source, problem, max_tokens, draft, hopeless)
    budget = cell.budget.in_tokens(prompt + (len(draft) or max_tokens))
    follower = one.run(cell, budget)
    said, good = one.generated, not follower.infeasible
    full = prompt + len(draft or said)
    right, steps = None, None
    if good and hopeless is None:
        right, steps = source.steps(problem, said) or (None, None)
    found = LiveResult(
        problem.index,
        cell.policy.name,
        cell.budget.text,
        full if isinstance(cell.policy, Full) else budget,
        source.correct(problem, said) if good else None,
        len(said),
        full,
        time.perf_counter() - begun,
        follower.executor.measurements(),
        infeasible=follower.infeasible,
        steps_right=right,
        steps=steps,
    )
    return Searched(found, said)


class MaskedRun(Run):
    """Searches every problem under every cell with masks, full retention first."""

    def run(self) -> None:
        """All that the watch still wants."""
        whole, most = Cell(Full(), Budget.parse("1")), self.plan.max_tokens
        for number in self.begin():
            wanted = [cell for cell in self.request.cells if self.watch.wants(number, cell)]
            if not wanted:
                continue
            problem = self.plan.source.problem(number)
            problem = replace(problem, index=number)
            find = partial(search, self.loaded.model, self.plan.source, problem)
            self.watch.running(number, "full retention", 0)
            full = find(whole, most)
            for cell in wanted:
                found = full
                if not isinstance(cell.policy, Full):
                    self.watch.running(number, cell.policy.name, 0)
                    found = find(cell, most, full.generated)
                self.watch.running(number, cell.policy.name, found.result.tokens)
                self.watch.finished(replace(found.result, budget=cell.budget.text))
