"""Demands of policies that use DDR: recorded on each GPU; of others, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arborsim.policies.methods.pages import Quest
from arborsim.products.plan.demands import MixDemands
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.provenance import cautions
from arborsim.products.plan.workload import Workload
from arborsim.products.plan.workload_file import parse_workload
from tests.helpers.traces import trace_for
from tests.plan.make import SMALL

_TREE = """name = "tree-ddr"
[score]
use = "position"
[allocate]
use = "tree"
use_attention = false
[place]
ddr = inf
[schedule]
use = "tree-events"
[protect]
recent = 16
[recover]
use = "fetch"
"""
_SLOW = 'name = "slow"\nbase = "rtx4090"\nh2d_bytes_per_s = 2e5\nd2h_bytes_per_s = 2e5\n'


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    """Levels in batches, so that the search turns away from branches and comes back."""
    (tmp_path / "tree.toml").write_text(_TREE)
    (tmp_path / "slow.toml").write_text(_SLOW)
    text = SMALL
    for old, new in (
        ('gpus = ["rtx4090", "h100"]', 'gpus = ["rtx4090", "slow.toml"]'),
        ('policies = ["full", "streaming-llm"]',
         'policies = ["full", "tree.toml"]\nrecalls = ["stage", "near"]'),
        ('prompt_tokens = "uniform:low=100,high=900"', "prompt_tokens = 20"),
        ("first = 4", "first = 6"),
        ("depth = 3", "depth = 2"),
        ("budgets = [0.5]", "budgets = [0.7]"),
        ("pruned = 0.5", 'pruned = 0.5\nparallel = 2\nrewards = "uniform"'),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    return parse_workload(text, tmp_path)


def _tables(found: MixDemands) -> list[np.ndarray]:
    return [part for each in found.demands for part in (each.ops, each.pieces, each.legs)]


def _same(a: MixDemands, b: MixDemands) -> bool:
    return all(map(np.array_equal, _tables(a), _tables(b)))


def test_candidates_keep_the_order_of_the_workload(workload: Workload) -> None:
    planner = Planner(workload)
    named = [
        (each.number, each.hardware.name, each.policy.name, each.shown_recall)
        for each in planner.candidates
    ]
    kinds = [("full", "-"), ("tree-ddr", "stage"), ("tree-ddr", "near")]
    expected = [(gpu, *kind) for gpu in ("rtx4090", "slow") for kind in kinds]
    assert named == [(number, *each) for number, each in enumerate(expected)]


def test_what_uses_ddr_is_recorded_on_its_own_gpu(workload: Workload) -> None:
    planner = Planner(workload)
    keys = [each.recorded_as for each in planner.candidates]
    assert keys[0] == keys[3], "full retention is recorded once"
    assert len(set(keys)) == 5
    assert {planner.candidates[1].offloads, planner.candidates[4].offloads} == {True}
    fast, slow = planner.demands_of(1), planner.demands_of(4)
    assert not fast.infeasible
    assert any(len(each.legs) for each in fast.demands), "nothing went to DDR"
    assert not _same(fast, slow), "transfers that take long are found in flight"
    alone = Planner(only(workload, "slow"))
    assert _same(alone.demands_of(1), slow)


def only(workload: Workload, gpu: str) -> Workload:
    """The same workload with one of its GPUs only."""
    kept = tuple(each for each in workload.hardware if each.name == gpu)
    return replace(workload, hardware=kept)


def test_groups_of_gpus_say_that_one_of_them_decided(workload: Workload) -> None:
    assert cautions(workload, []) == ()
    pair = replace(workload.hardware[0], gpus=2, name="2x rtx4090")
    (said,) = cautions(replace(workload, hardware=(pair,)), [])
    assert said.startswith("Policies that use DDR decided what to fetch on one GPU of each kind")


def test_what_is_held_but_not_read_is_not_as_good_as_full_retention(tmp_path: Path) -> None:
    """Quest evicts nothing and leaves pages unread: its answers are not those of `full`."""
    trace_for(Quest(), tmp_path / "x.parquet", episodes=2, kind="linear", prompt=40, nodes=8)
    text = SMALL[: SMALL.index("[mix.generated]")] + SMALL[SMALL.index("[arrivals]") :]
    for old, new in (
        ("shared_prompt_tokens = 50", 'trace = "x.parquet"'),
        ('"streaming-llm"]', '{ use = "quest", set = { page = 4, dense = 0 } }]'),
        ("budgets = [0.5]", "budgets = [0.3, 1.0]"),
    ):
        assert old in text
        text = text.replace(old, new)
    planner = Planner(parse_workload(text, tmp_path))
    found = {}
    for number, candidate in enumerate(planner.workload.candidates()):
        demands = planner.demands_of(number)
        budget = candidate.budget.text if candidate.budget else "-"
        quality = demands.quality(np.ones(len(demands.demands)))
        found[candidate.policy.policy.name, budget] = quality
    assert found["full", "-"].exact
    assert found["quest", "1.0"].exact  # reads all
    sparse = found["quest", "0.3"]
    assert not sparse.exact
    assert (sparse.unread, sparse.evicted) == (1.0, 0.0)
    assert sparse.attention_kept is not None
    assert sparse.attention_kept < 0.9
