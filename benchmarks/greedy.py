"""Greedy searches side by side, a token of each at a time, on tables of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from arborsim_torch.masked.drafts import LOOK
from arborsim_torch.masked.table import Table
from arborsim_torch.reference.tasks import Problem, Task


class Batch(Protocol):
    """Searches side by side."""

    logits: Tensor  #: after each one's newest token, ``[rows, vocabulary]``

    def step(self, tokens: Tensor) -> None:
        """Append a token to each search, ``[rows]``."""

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these searches only, in rising order; logits are read before."""


def greedy(
    batch: Batch,
    task: Task,
    problems: Sequence[Problem],
    tokens: list[list[int]],
    give_up: bool = False,
) -> Iterator[tuple[int, list[int], list[int]]]:
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


class _Plain(Table):
    """Searches with everything kept."""

    wants_weights = False
    logits: Tensor

    def step(self, tokens: Tensor) -> None:
        self.logits = self.model.lm_head(self.forward(tokens[:, None])[:, -1])


@torch.no_grad()
def said_with_all(model: Any, task: Task, problems: Sequence[Problem]) -> list[list[int]]:
    """Tokens that full retention generates; prompts must be of one length."""
    prompts = torch.tensor([each.prompt for each in problems], device=model.device)
    plain = _Plain(model, len(problems), prompts.shape[1] + task.max_tokens)
    plain.logits = model.lm_head(plain.forward(prompts)[:, -1])
    tokens: list[list[int]] = [[] for _ in problems]
    for _ in greedy(plain, task, problems, tokens):
        pass
    return tokens
