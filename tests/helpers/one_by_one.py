"""Searches under masks literally: one token at a time, several side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arborsim.play.backends import LiveResult
from arborsim.play.episode import Cell
from arborsim_torch.masked.follower import Follower
from arborsim_torch.masked.forced import PROMPT_BLOCK, carry_out
from arborsim_torch.masked.observed import Observing
from arborsim_torch.reference.tasks import Problem, Task
from benchmarks.greedy import greedy


class Searches(Observing):
    """Searches under one policy: what queries read by what their executors say."""

    logits: Tensor

    def __init__(self, model: Any, rows: int, capacity: int, followers: Sequence[Follower]) -> None:
        super().__init__(model, rows, capacity)
        self.followers = list(followers)
        one = self.followers[0]
        self._groups_of = len(one.executor.tier)
        self._dead = torch.zeros(rows, self._groups_of, capacity, dtype=torch.bool)
        self.observe(one.needs, one.uses)

    def gone(self, layer: int, end: int) -> Tensor:
        dead = self._dead[:, :, :end]
        if self._groups_of > 1:
            each = self._groups_of // self.layers
            dead = dead[:, layer * each : (layer + 1) * each]
        return dead[:, :, None, None]

    def step(self, tokens: Tensor) -> None:
        self.logits = self.model.lm_head(self.forward(tokens[:, None])[:, -1])

    def settle(self) -> None:
        """Carry out what executors have decided."""
        for row, each in enumerate(self.followers):
            unread = each.executor.unread(self.length, 1)[:, 0, : self.length]
            self._dead[row, :, : self.length] = torch.from_numpy(unread)
            carry_out(self, row, each.executor)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._dead = self._dead[list(rows)]
        self.followers = [self.followers[row] for row in rows]


@torch.no_grad()
def search(
    model: Any, task: Task, problems: Sequence[Problem], cell: Cell, full_tokens: Sequence[int],
    give_up: bool = False,
) -> Iterator[LiveResult]:  # fmt: skip
    """Search greedily under a policy; prompts must be of one length.

    A budget that is a share is one of `full_tokens`, what a search takes with everything kept; of
    `full`, which needs none, 0.  With `give_up` searches end that can no longer succeed, and no
    steps are counted.
    """
    policy, begun = cell.policy, time.perf_counter()
    prompts = torch.tensor([each.prompt for each in problems], device=model.device)
    capacity = prompts.shape[1] + task.max_tokens
    budgets = [cell.budget.in_tokens(each) for each in full_tokens]
    each = [
        Follower(model, policy, budget, capacity, partial(task.readers, problem))
        for problem, budget in zip(problems, budgets, strict=True)
    ]
    searches = Searches(model, len(problems), capacity, each)
    last, found = searches.prompt(prompts, PROMPT_BLOCK)
    searches.logits = model.lm_head(last)
    for one, own, problem in zip(each, found, problems, strict=True):
        one.prompt(problem.prompt, own)
    searches.settle()
    tokens: list[list[int]] = [[] for _ in problems]
    for _, _, rows in greedy(searches, task, problems, tokens, give_up):
        for i, own in zip(rows, searches.take(1), strict=True):
            if not each[i].infeasible:
                each[i].take(tokens[i][-1:], own, tokens[i])
        searches.settle()
    wall_s = (time.perf_counter() - begun) / len(problems)
    for problem, said, one, full, budget in zip(
        problems, tokens, each, full_tokens, budgets, strict=True
    ):
        verdict, good = task.judge(problem, said), not one.infeasible
        steps = task.steps(problem, said) if good and not give_up else (None, None)
        yield LiveResult(
            problem.index, policy.name, cell.budget.text, budget,
            (verdict.finished and verdict.correct) if good else None, len(said),
            full or len(problem.prompt) + len(said), wall_s,
            one.executor.measurements(), infeasible=one.infeasible,
            steps_right=steps[0] if good else None, steps=steps[1] if good else None,
        )  # fmt: skip
