"""Given tokens run by windows under masks: the logits are those of one token at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arborsim.core.tiers import Budget  # noqa: E402
from arborsim.play.episode import Cell  # noqa: E402
from arborsim.policies.registry import build  # noqa: E402
from arborsim_torch import reference  # noqa: E402
from arborsim_torch.masked.follower import Follower  # noqa: E402
from arborsim_torch.masked.forced import PROMPT_BLOCK, ForcedRun, forced  # noqa: E402
from tests.helpers.one_by_one import Searches  # noqa: E402

TOKENS = 104


@pytest.fixture(scope="module")
def chain() -> tuple[Any, Any, Any, list[int]]:
    """A model, its task, a problem, and its program with what full retention might have said."""
    model, task = reference.load("chain", lines=8)
    problem = task.problem("test", 0)
    said = task.problem("test", 1).prompt  # any tokens do
    return model.requires_grad_(False), task, problem, [*problem.prompt, *said, *said][:TOKENS]


def cell(policy: str, budget: str = "0.6", **settings: str) -> Cell:
    return Cell(build(policy, settings), Budget.parse(budget))


@torch.inference_mode()
def one_by_one(chain: tuple[Any, Any, Any, list[int]], each: Cell) -> Any:
    """Logits after every token that follows the prompt."""
    model, task, problem, tokens = chain
    budget, prompt = each.budget.in_tokens(len(tokens)), len(problem.prompt)
    readers = partial(task.readers, problem)
    follower = Follower(model, each.policy, budget, len(tokens), readers)
    searches = Searches(model, 1, len(tokens), [follower])
    _, (found,) = searches.prompt(torch.tensor([problem.prompt]), PROMPT_BLOCK)
    follower.prompt(problem.prompt, found)
    logits = []
    for at in range(prompt, len(tokens)):
        searches.settle()
        searches.step(torch.tensor(tokens[at : at + 1]))
        logits.append(searches.logits[0])
        (found,) = searches.take(1)
        follower.take(tokens[at : at + 1], found, tokens[prompt : at + 1])
    return torch.stack(logits)


def by_windows(
    chain: tuple[Any, Any, Any, list[int]], cells: list[Cell]
) -> tuple[list[Any], list[ForcedRun]]:
    model, task, problem, tokens = chain
    logits = [torch.full((len(tokens), model.config.vocab_size), float("nan")) for _ in cells]

    def take(number: int, first: int, found: Any) -> None:
        assert logits[number][first : first + len(found)].isnan().all(), "a position came twice"
        logits[number][first : first + len(found)] = found

    prompt, readers = len(problem.prompt), partial(task.readers, problem)
    runs = forced(model, tokens, prompt, cells, take, block=32, readers=readers)
    return [each[prompt:] for each in logits], runs


CELLS = {
    "sums of heads": cell("h2o"),
    "newest rows of layers": cell("tova"),
    "queries now and then": cell("rkv", interval="8"),
    "hidden states": cell("epikv", recent="8"),
    "values": cell("vatp"),
    "chance": cell("random"),
    "medians": cell("raas", variant="median"),
    "readers": cell("needed"),
    "lag": cell("lag-kv", recent="8"),
    "a prompt cut once": cell("snapkv", "0.3"),
    "pages that are read": cell("quest", "0.5"),
    "keys quantised together": cell("kivi", group="16", residual="16"),
    "two precisions": cell("arkv-quant"),
}


@pytest.mark.parametrize("name", CELLS)
def test_windows_are_as_one_by_one(name: str, chain: tuple[Any, Any, Any, list[int]]) -> None:
    expected = one_by_one(chain, CELLS[name])
    (found, full), (run, _) = by_windows(chain, [CELLS[name], cell("full", "1")])
    assert run.infeasible == ""
    assert torch.allclose(found, expected, atol=2e-3)  # roundings may fall to the other side
    assert len(run.read) == len(found)
    assert not torch.allclose(found, full, atol=0.05)
    assert run.passes < len(found)


def test_a_budget_that_is_too_small_ends_a_run(chain: tuple[Any, Any, Any, list[int]]) -> None:
    (found, other), (run, fine) = by_windows(
        chain, [cell("streaming-llm", "0.1", sinks="30"), cell("random")]
    )
    assert "budget infeasible" in run.infeasible
    assert found.isnan().all()
    assert fine.infeasible == ""
    assert not other.isnan().any()
