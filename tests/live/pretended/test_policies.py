"""Live searches under every policy on the pretended device: the CPU's decisions, and its waits."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import BudgetInfeasible
from arborsim.play.move_log import MoveLog
from arborsim.policies.registry import available, build
from arborsim.searches import make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.mover import Mover
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.feed import Feed
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.sources import TaskSource
from arborsim_torch.tiers.link import HostLink

from .arming import pretend
from .clocks import Gpu
from .device import caller

NAMES = sorted(set(available()) - {"oracle"})
#: Settings for searches of 40 tokens, by policy.
SMALL = {"rkv": {"interval": "8", "window": "4"}, "snapkv": {"window": "4"},
         "random-attention": {"interval": "2", "window": "4"},
         "lag-kv-official": {"lag": "8", "sinks": "4"},
         "kivi": {"residual": "16", "group": "16"},
         "freekv": {"page": "4", "sinks": "4", "recent": "8"}, "quest": {"page": "4"},
         "thinkv-paper": {"segment": "4", "recent": "4", "low": "0.65", "high": "1", "most": "3",
                          "least": "1", "pin_prompt": "false"}}  # fmt: skip


@dataclass
class Run:
    """What came of some searches, by policy."""

    moves: dict[str, MoveLog] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, Any] = field(default_factory=dict)


def run(
    names: Sequence[str], device: str, budget: int, *, recall: str = "stage", most: int = 130,
    overlap: bool = True, settings: dict[str, str] | None = None,
) -> Run:  # fmt: skip
    """Search one problem of the chain task under each policy, with `settings`, all in one batch.

    The prompt has 24 tokens; 44 are generated, or `most`.
    """
    loaded = load_model("chain", device=device, task_options={"lines": 4})
    source = TaskSource(loaded.task)
    setup = SearchSetup(loaded.model, source, lambda: make_search("linear"), 0.0, 0, most)
    found, searches = Run(), {}
    for name in names:
        small = SMALL.get(name, {"recent": "8"} if hasattr(build(name), "recent") else {})
        policy = build(name, {**small, **(settings or {})})
        log = found.moves[name] = MoveLog()
        one = PolicySearch(
            setup, source.problem(3), policy, budget, CacheOptions(recall=recall, overlap=overlap),
            meters=(log,),
        )  # fmt: skip
        searches[one] = name

    def done(search: PolicySearch, ended: Ended) -> None:
        if isinstance(ended, BudgetInfeasible):
            return
        columns = ended.columns
        found.tokens[searches[search]] = list(columns["token"])
        found.logprobs[searches[search]] = columns["logprob"]

    run_batched(list(searches), len(searches), done)
    return found


BUDGET = 60  # of 68 tokens


def compare(found: Run, wanted: Run) -> set[str]:
    """The same moves and tokens; the policies that moved something."""
    assert found.tokens == wanted.tokens
    for name, logprobs in wanted.logprobs.items():
        np.testing.assert_allclose(found.logprobs[name], logprobs, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(found.moves[name].rows, wanted.moves[name].rows, name)
    return {name for name, log in wanted.moves.items() if len(log.rows)}


#: They keep what the last thought needs, and have nothing to choose from in a short search.
WHOLE_THOUGHTS = ("arbor-epi", "arborkv")
#: They read vectors, not rows, and have to choose if the prompt is larger than the budget.
PROMPTS = ("rkv", "snapkv")


#: Waits of one decode iteration: its tokens are fetched, and what decisions are made of if one is
#: due in every iteration.
DRAWN, ROWS = "tolist arborsim_torch/sampling.py:choose", "token_signals.py:to_host"
#: Waits for copies that are named by what they are for: a search that is over lets its copies end;
#: tokens that change their format in DDR are there again before anything reads them.
ENDED, REQUANTISED = "the search is over", "requantising in DDR"
_FOR = {LiveExecutor.finish.__code__: ENDED, HostLink.close.__code__: ENDED,
        Mover._copy.__code__: REQUANTISED}  # fmt: skip


def purpose() -> str:
    """What a wait is for, or `caller`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _FOR:
            return _FOR[frame.f_code]
        frame = frame.f_back  # type: ignore[assignment]
    return caller()


def waits(gpu: Gpu) -> Counter[str]:
    """Of the decode iterations."""
    aside = ("reference/__init__.py:load", "recorder.py:_prefill", "torch.cuda.graph", ENDED)
    return Counter({
        why: count for why, count in gpu.waits.items() if not any(part in why for part in aside)
    })  # fmt: skip


@dataclass
class Handed:
    """Waits of the host for what it is handed at decisions, and for anything else between."""

    waits: list[int] = field(default_factory=list)
    between: int = 0


@contextmanager
def watched(gpu: Gpu) -> Iterator[Handed]:
    """Count them while searches run."""
    handed, observed, iteration = Handed(), Feed._observed, Feed.iteration

    def count_observed(feed: Feed, *args: Any) -> Any:
        before = gpu.waits.total()
        found = observed(feed, *args)
        handed.waits.append(gpu.waits.total() - before)
        return found

    def count_iteration(feed: Feed, *args: Any) -> None:
        before, times = gpu.waits.total(), len(handed.waits)
        iteration(feed, *args)
        if len(handed.waits) == times:
            handed.between += gpu.waits.total() - before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "_observed", count_observed)
        patch.setattr(Feed, "iteration", count_iteration)
        yield handed


@pytest.mark.parametrize(
    ("names", "budget", "most", "idle"),
    [
        ([n for n in NAMES if n not in WHOLE_THOUGHTS], 40, 20, {"full", "rkv", "snapkv"}),
        (WHOLE_THOUGHTS, BUDGET, 130, set()),
        (PROMPTS, 20, 20, set()),
    ],
    ids=["most of them", "whole thoughts", "prompts"],
)
def test_every_policy_decides_as_on_the_cpu(
    names: Sequence[str], budget: int, most: int, idle: set[str]
) -> None:
    wanted = run(names, "cpu", budget, most=most)
    assert len(wanted.tokens) == len(names)
    with pretend(patience=1) as gpu, watched(gpu) as handed:
        gpu.where = purpose
        found = run(names, "cuda", budget, most=most)
    assert compare(found, wanted) == set(names) - idle
    assert all(why == DRAWN or ROWS in why for why in waits(gpu)), waits(gpu)
    assert max(handed.waits) == 1
    assert handed.between == 0


@pytest.mark.parametrize(
    ("names", "recall"),
    [
        (("staircase",), "stream"), (("staircase",), "near"),  # some of them in 8 bits
        (("freekv",), "stream"),  # heads of which nothing lies there
    ],
)  # fmt: skip
def test_tokens_in_ddr_are_read_as_on_the_cpu(names: Sequence[str], recall: str) -> None:
    wanted = run(names, "cpu", 40, recall=recall, most=20)
    with pretend() as gpu:
        found = run(names, "cuda", 40, recall=recall, most=20)
        assert gpu.launches["copy_ to the host"] > 0
    assert compare(found, wanted) == set(names)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("full", 1), ("streaming-llm", 1), ("h2o", 2), ("epikv", 2), ("hierarchy", 2),
        ("arkv", 2), ("arborkv", 2),
    ],
)  # fmt: skip
def test_decoding_makes_the_host_wait_for_tokens_and_signals_alone(name: str, most: int) -> None:
    with pretend() as gpu:
        gpu.where = purpose
        whole = name in WHOLE_THOUGHTS
        found = run([name], "cuda", BUDGET if whole else 40, most=130 if whole else 20)
    steps = gpu.waits[DRAWN]
    assert steps >= min(15, len(found.tokens[name]) // 2)
    assert all(why == DRAWN or ROWS in why for why in waits(gpu)), waits(gpu)
    assert waits(gpu).total() <= most * steps + 1


def test_tokens_that_are_requantised_in_ddr_are_waited_for_once_a_decision() -> None:
    settings = {"hbm_ratio": "0.2", "quantised_ratio": "0.5", "interval": "8"}
    with pretend(patience=2) as gpu, watched(gpu) as handed:
        gpu.where = purpose
        run(["hierarchy"], "cuda", 40, most=40, settings=settings)
    counted = waits(gpu)
    requantised = sum(count for why, count in counted.items() if REQUANTISED in why)
    assert 0 < requantised <= len(handed.waits)
    assert all(why == DRAWN or ROWS in why or REQUANTISED in why for why in counted), counted


@pytest.mark.parametrize(
    ("recall", "fetched"), [("near", "near.py:work"), ("ondemand", "ondemand.py:_order")]
)
def test_layers_wait_for_queries_alone(recall: str, fetched: str) -> None:
    """Where the host attends, or chooses pages, it needs the queries of every layer, no more."""
    with pretend(patience=2) as gpu:
        gpu.where = purpose
        run(["hierarchy"], "cuda", 40, recall=recall, most=20, overlap=False)
    aside = (DRAWN, ROWS, "tiers/copies.py:join")  # without overlap every copy is waited for
    of_layers = [why for why in waits(gpu) if not any(part in why for part in aside)]
    assert any(fetched in why for why in of_layers)
    assert all(fetched in why for why in of_layers), of_layers
