"""Masked searches (`benchmarks.claims.masked`) against live ones, transformers and literal sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch")
import torch
from transformers import DynamicCache

from arborsim.core.tiers import Budget
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult, get_backend
from arborsim.play.episode import Cell
from arborsim.policies.registry import build
from arborsim_torch import reference
from benchmarks.claims import Store
from benchmarks.claims.hierarchy import counted, counting, sizes, transfers
from benchmarks.claims.masked import Batch, Rule, observe, search
from benchmarks.register.claims import read_papers

LINES = 10
CLAIMS = Path(__file__).parents[2] / "reports" / "claims"


class Results:
    """Keeps what a live run reports."""

    def __init__(self) -> None:
        self.found: dict[int, LiveResult] = {}

    def began(self, facts: LiveFacts, episodes: int) -> None: ...
    def running(self, episode: int, what: str, tokens: int) -> None: ...

    def wants(self, episode: int, cell: Cell) -> bool:
        return True

    def full_tokens(self, episode: int) -> int:
        return 0

    def finished(self, result: LiveResult) -> None:
        self.found[result.episode] = result


@pytest.fixture(scope="module")
def chain() -> tuple[Any, Any]:
    model, task = reference.load("chain", lines=LINES)
    model.requires_grad_(False)
    return model, task


def prompts_of(task: Any, n: int) -> torch.Tensor:
    return torch.tensor([task.problem("test", i).prompt for i in range(n)])


@pytest.mark.parametrize("total", [False, True])
def test_masked_searches_end_as_live_ones(chain: tuple[Any, Any], total: bool) -> None:
    model, task = chain
    rule = Rule(ratio=0.15, total=total, interval=6, window=12)
    masked = search(model, task, [task.problem("test", i) for i in range(2)], rule)
    live = Results()
    policy = build("hierarchy", {
        "evict_ratio": "0.15", "evict": "of-total" if total else "of-candidates",
        "interval": "6", "recent": "12",
    })  # fmt: skip
    request = LiveRequest(
        model="chain", cells=(Cell(policy, Budget.parse("1")),), episodes=2, batch=2,
        task_options={"lines": LINES},
    )  # fmt: skip
    get_backend("torch").live(request, live)
    for i, found in enumerate(masked):
        assert found.correct == live.found[i].correct
        if found.correct:  # others end as soon as they cannot succeed
            assert found.steps == live.found[i].tokens
            steps = (found.steps - 1, found.steps)  # live decides once more, after the last token
            own, of_live = (
                [*counted(n, 0.15, 0.5, 6, total, window=12)][-1]["evicted"] for n in steps
            )
            assert found.destroyed == own > 0
            assert live.found[i].measured.evicted_tokens == of_live


def test_gradients_are_those_of_the_loss(chain: tuple[Any, Any]) -> None:
    model, task = chain
    prompts = prompts_of(task, 2)
    batch = Batch(model, prompts, prompts.shape[1] + 4, gradient=True)
    token = batch.logits.argmax(-1)
    batch.step(token)
    model.set_attn_implementation("sdpa")
    past = model(prompts, use_cache=True).past_key_values
    leaves = [
        (layer.keys.detach().requires_grad_(), layer.values.detach().requires_grad_())
        for layer in past.layers
    ]
    logits = model(token[:, None], past_key_values=DynamicCache(leaves)).logits[:, -1]
    torch.log_softmax(logits, -1).max(-1).values.sum().backward()
    norms = [each.grad.norm(dim=-1).mean(1) for pair in leaves for each in pair]
    expected = torch.stack(norms).sum(0) / len(leaves)
    assert torch.allclose(batch.logits, logits.detach(), atol=1e-4)
    assert torch.allclose(batch.moved[:, : prompts.shape[1]].float(), expected, rtol=1e-3)


def test_errors_are_those_of_attention_without_the_tokens(chain: tuple[Any, Any]) -> None:
    model, task = chain
    prompts = prompts_of(task, 1)
    batch = Batch(model, prompts, prompts.shape[1] + 2, gradient=False)
    batch.step(batch.logits.argmax(-1))
    gone = np.zeros(batch.length, dtype=bool)
    gone[5:20] = True
    errors, limits = batch.errors(torch.from_numpy(gone)[None])
    at = 0
    for weights, values in zip(batch.weights, batch.values, strict=True):
        for head in range(weights.shape[1]):
            w = weights[0, head].double().numpy()
            v = values[0, head * values.shape[1] // weights.shape[1], : batch.length].double()
            without = (w[~gone] / w[~gone].sum()) @ v.numpy()[~gone]
            error = np.linalg.norm(without - w / w.sum() @ v.numpy())
            limit = 2 * sum(w[i] * np.linalg.norm(v[i]) for i in np.flatnonzero(gone))
            assert float(errors[0, at]) == pytest.approx(error, rel=1e-3, abs=1e-6)
            assert float(limits[0, at]) == pytest.approx(limit, rel=1e-6)
            at += 1


def test_nothing_is_evicted_while_observing(chain: tuple[Any, Any]) -> None:
    model, task = chain
    problems = [task.problem("test", i) for i in range(2)]
    full = search(model, task, problems, Rule(ratio=0))
    for one, seen in zip(full, observe(model, task, problems, (0.5,), Rule()), strict=True):
        assert len(seen.attended) == seen.prompt + one.steps - 1  # the last token is never read
        assert seen.attended.sum() == pytest.approx(one.steps - 1, rel=1e-5)


def test_two_claims_worked_out_anew() -> None:
    (paper,) = (each for each in read_papers(CLAIMS, CLAIMS.parents[1]) if each.key == "hierarchy")
    rows = {row.claim.id: row.numbers for row in paper.rows}
    raw = pd.read_parquet(CLAIMS / "hierarchy.parquet")
    masked = raw[raw["experiment"].eq("masked") & raw["score"].eq("attention")]
    masked = masked[masked["ratio"].eq(0.1) & masked["window"].eq(24) & masked["interval"].eq(12)]
    right = masked["correct"].astype(float).groupby(masked["total"].astype(bool)).mean()
    difference = rows["hierarchy-table-3-same-ratio"][2]
    assert difference.ours == pytest.approx(right[False] - right[True])
    served = raw[raw["experiment"].eq("serving")].set_index(["label", "clients"])["tokens_per_s"]
    ratio = served["hierarchy, stream", 32] / served["full", 32]
    assert rows["hierarchy-section-4-10-serving"][0].ours == pytest.approx(ratio)


def test_what_is_counted_comes_out_as_stored(tmp_path: Path) -> None:
    anew, stored = Store("hierarchy", tmp_path), Store("hierarchy", CLAIMS)
    for experiment in (counting, sizes, transfers):
        experiment(anew)
    assert anew.rows
    for row in anew.rows:
        same = [each for each in stored.rows if all(each.get(key) == row[key] for key in row)]
        assert same, row
