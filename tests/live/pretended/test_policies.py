"""Live searches under every policy on the pretended device: the CPU's decisions, and its waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from arborsim.errors import BudgetInfeasible
from arborsim.meters import MoveLog
from arborsim.policies.registry import available, build
from arborsim.search import make_search
from arborsim_torch.live.drive import drive
from arborsim_torch.live.policy_search import Ended, Machine, PolicySearch, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.sources import TaskSource

from .arming import pretend
from .clocks import Gpu
from .device import caller

NAMES = sorted(set(available()) - {"oracle"})
SMALL = {"recent": "8"}


@dataclass
class Run:
    """What came of some searches, by policy."""

    moves: dict[str, MoveLog] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, Any] = field(default_factory=dict)


def run(
    names: Sequence[str], device: str, budget: int, recall: str = "stage", lines: int = 4
) -> Run:
    """Search one problem of the chain task under each policy, all in one batch."""
    loaded = load_model("chain", device=device, task_options={"lines": lines})
    source = TaskSource(loaded.task)
    setup = SearchSetup(loaded.model, source, lambda: make_search("linear"), 0.0, 0, 130)
    found, searches = Run(), {}
    for name in names:
        policy = build(name, SMALL if hasattr(build(name), "recent") else {})
        log = found.moves[name] = MoveLog()
        one = PolicySearch(
            setup, source.problem(3), policy, budget, Machine(recall=recall, overlap=False),
            meters=(log,),
        )  # fmt: skip
        searches[one] = name

    def done(search: PolicySearch, ended: Ended) -> None:
        if isinstance(ended, BudgetInfeasible):
            return
        columns = ended.columns
        found.tokens[searches[search]] = list(columns["token"])
        found.logprobs[searches[search]] = columns["logprob"]

    drive(list(searches), len(searches), done)
    return found


BUDGET = 60  # of 68 tokens


def compare(found: Run, wanted: Run) -> int:
    """The same moves and tokens; how many policies moved something."""
    assert found.tokens == wanted.tokens
    for name, logprobs in wanted.logprobs.items():
        np.testing.assert_allclose(found.logprobs[name], logprobs, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(found.moves[name].rows, wanted.moves[name].rows, name)
    return sum(len(log.rows) > 0 for log in wanted.moves.values())


def test_every_policy_decides_as_on_the_cpu() -> None:
    wanted = run(NAMES, "cpu", BUDGET)
    assert len(wanted.tokens) == len(NAMES)
    with pretend(patience=1) as gpu:
        found = run(NAMES, "cuda", BUDGET)
        assert gpu.launches["attend_split"] > 0  # rows of attention by the Triton kernel
    assert compare(found, wanted) == len(NAMES) - 4


@pytest.mark.parametrize("recall", ["stream", "near"])
def test_tokens_in_ddr_are_read_as_on_the_cpu(recall: str) -> None:
    names = ("staircase",)  # some of them in 8 bits
    wanted = run(names, "cpu", BUDGET, recall)
    with pretend() as gpu:
        found = run(names, "cuda", BUDGET, recall)
        assert gpu.launches["copy_ to the host"] > 0
    assert compare(found, wanted) == len(names)


#: Waits of one decode iteration: its tokens are fetched, and what decisions are made of if one is
#: due in every iteration.
DRAWN, ROWS = "tolist arborsim_torch/sampling.py:choose", "arborsim_torch/capture.py:_float16"


def waits(gpu: Gpu) -> Counter[str]:
    """Of the decode iterations."""
    aside = ("reference/__init__.py:load", "tiers/copies.py", "recorder.py:_prefill")
    return Counter({
        why: count for why, count in gpu.waits.items() if not any(part in why for part in aside)
    })  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("full", 1), ("streaming-llm", 1), ("h2o", 2), ("epikv", 2), ("hierarchy", 2),
        ("arkv", 2), ("arborkv", 2),
    ],
)  # fmt: skip
def test_decoding_makes_the_host_wait_for_tokens_and_signals_alone(name: str, most: int) -> None:
    with pretend() as gpu:
        gpu.where = caller
        found = run([name], "cuda", 50, lines=3)
    steps = gpu.waits[DRAWN]
    assert steps >= len(found.tokens[name]) // 2
    assert all(why == DRAWN or ROWS in why for why in waits(gpu)), waits(gpu)
    assert waits(gpu).total() <= most * steps + 1
