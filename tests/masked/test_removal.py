"""Masks on a language model give the next token's distribution of a cache that loses tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from arborsim.core.tiers import Budget
from arborsim.play.episode import Cell
from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.decoder import run_together
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.masked.forced import forced
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sources import Source
from tests.helpers.smollm2 import smollm2

TEXT = (
    "A cache keeps the keys and values of every token that was read. When it is full, something "
    "has to go. Which token will be missed least? The oldest ones, says one school; those that "
    "nobody looked at, says another. Both are right now and then, and both are wrong about names."
)
NEW = 24


class Endless(Source):
    """One problem whose search never ends by itself."""

    name, max_tokens = "given", NEW + 1

    def __init__(self, prompt: Sequence[int]) -> None:
        self._problem = Problem("given", "test", 0, tuple(prompt), None)

    def count(self, first: int) -> int | None:
        return 1

    def problem(self, index: int) -> Problem:
        return self._problem

    def is_thought_end(self, problem: Problem, generated: Sequence[int], block_tokens: int) -> bool:
        return False

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        return False

    def text(self, ids: Sequence[int]) -> str:
        return ""


def removing(model: Any, prompt: list[int], given: list[int], cell: Cell) -> tuple[int, Any]:
    """The first token that a live search says, and distributions after it and after `given`."""
    setup = SearchSetup(
        model, Endless(prompt), lambda: make_search("linear"), 0.0, 0, len(given) + 2
    )
    budget = cell.budget.in_tokens(len(prompt) + NEW)
    problem = setup.source.problem(0)
    search = PolicySearch(setup, problem, cell.policy, budget, CacheOptions())
    steps = search.steps()
    tokens, found = next(steps), []
    first = tokens[0]
    for token in given:
        (logits,) = run_together([search.prepare(tokens)])
        found.append(logits[0, 0])
        said = torch.full_like(logits[:, 0], -100.0)
        said[0, token] = 100.0
        tokens = steps.send(said)
        assert tokens == [token]
    steps.close()
    return first, torch.stack(found).softmax(-1)


@pytest.mark.parametrize(
    ("policy", "budget", "settings"),
    [
        ("h2o", "0.6", {}),
        ("quest", "0.5", {"page": "4", "dense": "1"}),
        ("kivi", "1", {"residual": "16", "group": "16"}),
    ],
)
def test_masks_are_as_good_as_removal(policy: str, budget: str, settings: dict[str, str]) -> None:
    loaded = smollm2()
    model = loaded.model.requires_grad_(False)
    text = loaded.tokenizer(TEXT)["input_ids"]
    prompt, given = text[: -NEW + 1], text[-NEW + 1 :]
    cell = Cell(build(policy, settings), Budget.parse(budget))
    first, expected = removing(model, prompt, given, cell)
    found = []

    def take(number: int, position: int, logits: Any) -> None:
        found.append(logits)

    (run,) = forced(model, [*prompt, first, *given], len(prompt), [cell], take, block=16)
    masked = torch.cat(found).softmax(-1)[:-1]
    assert torch.allclose(masked, expected, atol=1e-4)
    assert np.mean(run.read) < len(prompt) + NEW / 2 or policy == "kivi"
