"""Searches that try what full retention said end as those that go one token at a time."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from arborsim.core.tiers import Budget
from arborsim.play.backends import LiveResult
from arborsim.play.episode import Cell
from arborsim.policies.registry import build
from arborsim_torch import reference
from arborsim_torch.masked import drafts
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sources import TaskSource
from tests.helpers import one_by_one


def both(
    model: Any, task: Any, problems: list[Problem], cell: Cell, **options: bool
) -> tuple[list[LiveResult], list[LiveResult]]:
    """Results with drafts, and token by token."""
    source, whole = TaskSource(task), Cell(build("full", {}), Budget.parse("1"))
    fast, full = [], []
    for problem in problems:
        hopeless = (lambda done, of=problem: task.judge(of, done).dead) if options else None
        said = drafts.search(model, source, problem, whole, task.max_tokens).generated
        found = drafts.search(model, source, problem, cell, task.max_tokens, said, hopeless)
        fast.append(found.result)
        full.append(found.result.full_tokens)
    return fast, list(one_by_one.search(model, task, problems, cell, full, **options))


def same(fast: list[LiveResult], slow: list[LiveResult], most: int) -> None:
    for a, b in zip(fast, slow, strict=True):
        # Token by token, the last that a search may have is computed, too.
        more = 1 if a.tokens == most else 0
        assert (a.correct, a.tokens, a.budget_tokens) == (b.correct, b.tokens, b.budget_tokens)
        assert a.measured.evicted_tokens == pytest.approx(
            b.measured.evicted_tokens, abs=more + 1e-6
        )
        assert b.measured.peak_hbm_kv_tokens - a.measured.peak_hbm_kv_tokens in (0, more)
        assert (a.steps_right, a.steps) == (b.steps_right, b.steps)


@pytest.mark.parametrize(
    ("policy", "budget", "settings"),
    [
        ("h2o", "0.85", {}),
        ("rkv", "0.6", {"interval": "16"}),
        ("raas", "0.6", {}),
        ("tova", "0.85", {}),
        ("adakv", "0.85", {}),
    ],
)
def test_drafts_change_no_answer(policy: str, budget: str, settings: dict[str, str]) -> None:
    model, task = reference.load("chain", lines=10)
    cell = Cell(build(policy, settings), Budget.parse(budget))
    problems = [task.problem("test", i) for i in range(2)]
    fast, slow = both(model.requires_grad_(False), task, problems, cell)
    same(fast, slow, task.max_tokens)


def test_searches_end_when_they_are_hopeless() -> None:
    """On the long tail, where a search that has lost its way would go on for 900 tokens."""
    model, task = reference.load("tail", lines=6)
    cell = Cell(build("h2o", {}), Budget.parse("0.5"))
    fast, slow = both(
        model.requires_grad_(False), task, [task.problem("test", 0)], cell, give_up=True
    )
    same(fast, slow, task.max_tokens)
    assert not fast[0].correct
