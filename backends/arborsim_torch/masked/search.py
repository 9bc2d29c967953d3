"""Greedy searches side by side, token by token, under a policy and a mask.

The policies, their scores and the controller are those of live runs.  Caches are not: the keys and
values of all searches lie in one table; what a policy destroys is masked, what it quantises is
rounded to the format and back.  So one forward pass serves all searches, in a fraction of the time
of live runs with their paged pools.  Bytes and seconds are live runs' to measure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from arborsim.play.backends import LiveResult
from arborsim.play.episode import Cell
from arborsim_torch.masked.executor import MaskedExecutor, Rounding
from arborsim_torch.masked.follower import Follower, check
from arborsim_torch.masked.observed import Observing
from arborsim_torch.masked.table import Table
from arborsim_torch.reference.tasks import Problem, Task

PROMPT_BLOCK = 256
LOOK = 16  #: steps between two looks for searches that can no longer succeed


class Batch(Protocol):
    """Searches side by side."""

    logits: Tensor  #: after each one's newest token, ``[rows, vocabulary]``

    def step(self, tokens: Tensor) -> None:
        """Append a token to each search, ``[rows]``."""

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these searches only, in rising order; logits are read before."""


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


def carry_out(table: Observing, row: int, executor: MaskedExecutor) -> None:
    """Round what a search's executor has decided to round so far."""
    for each in executor.roundings:
        round_tokens(table, row, executor, each)
    executor.roundings.clear()


def round_tokens(table: Observing, row: int, executor: MaskedExecutor, each: Rounding) -> None:
    """Round tokens of one search's cache to a format."""
    layers, heads = table.layers, table.kv_heads
    cells = layers * heads // len(executor.tier)
    for group in np.unique(each.group).tolist():
        token = torch.from_numpy(each.token[each.group == group])
        for cell in range(group * cells, (group + 1) * cells):
            layer, head = divmod(cell, heads)
            kept = table.keys[layer][row, head], table.values[layer][row, head]
            both = torch.stack([own[token] for own in kept])[:, None]  # [2, 1, tokens, head_dim]
            for own, rounded in zip(kept, executor.rounded(each.codec, both), strict=True):
                own[token] = rounded[0]


def greedy(
    batch: Batch, task: Task, problems: Sequence[Problem], tokens: list[list[int]],
    give_up: bool = False,
) -> Iterator[tuple[int, list[int], list[int]]]:  # fmt: skip
    """Search greedily, and write each problem's tokens down.

    After every step of the batch its number, which rows of the last step go on, and the problem of
    each row now.  With `give_up` searches end that can no longer succeed, too.
    """
    rows = list(range(len(problems)))
    for step in range(1, task.max_tokens + 1):
        picked = batch.logits.argmax(-1)
        for i, token in zip(rows, picked.tolist(), strict=True):
            tokens[i].append(token)
        over = [task.is_finished(problems[i], tokens[i]) for i in rows]
        if give_up and step % LOOK == 0:
            over = [
                over[row] or task.judge(problems[i], tokens[i]).dead for row, i in enumerate(rows)
            ]
        still = [row for row in range(len(rows)) if not over[row]]
        if not still:
            return
        if len(still) < len(rows):
            rows = [rows[row] for row in still]
            batch.keep(still)
            picked = picked[still]
        batch.step(picked)
        yield step, still, rows


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
    check(policy)
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
            each[i].token(tokens[i][-1], own, tokens[i])
        searches.settle()
    wall_s = (time.perf_counter() - begun) / len(problems)
    for problem, said, one, full, budget in zip(
        problems, tokens, each, full_tokens, budgets, strict=True
    ):
        one.finish()
        verdict, good = task.judge(problem, said), not one.infeasible
        steps = task.steps(problem, said) if good and not give_up else (None, None)
        yield LiveResult(
            problem.index, policy.name, cell.budget.text, budget,
            (verdict.finished and verdict.correct) if good else None, len(said),
            full or len(problem.prompt) + len(said), wall_s,
            one.executor.measurements(), infeasible=one.infeasible,
            steps_right=steps[0] if good else None, steps=steps[1] if good else None,
        )  # fmt: skip


class _Plain(Table):
    """Searches with everything kept."""

    wants_weights = False
    logits: Tensor

    def step(self, tokens: Tensor) -> None:
        self.logits = self.model.lm_head(self.forward(tokens[:, None])[:, -1])


@torch.no_grad()
def said_with_all(model: Any, task: Task, problems: Sequence[Problem]) -> list[list[int]]:
    """What full retention generates; prompts must be of one length."""
    prompts = torch.tensor([each.prompt for each in problems], device=model.device)
    plain = _Plain(model, len(problems), prompts.shape[1] + task.max_tokens)
    plain.logits = model.lm_head(plain.forward(prompts)[:, -1])
    tokens: list[list[int]] = [[] for _ in problems]
    for _ in greedy(plain, task, problems, tokens):
        pass
    return tokens
