"""Logs whose requests have blocks in common: plans serve them in order, and share the blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.machine.report import PrefixTokens
from arborsim.products.plan.demands import record, stretched
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.runs import Bench
from arborsim.products.plan.workload import Workload
from arborsim.products.plan.workload_file import parse_workload
from arborsim.trace.importers.request_logs import read_requests
from arborsim.trace.importers.requests import shared_prefix_tokens

BLOCK = 16
WORKLOAD = """
searches = 24
warm_up = 4
runs = 2
[model]
name = "llama-3.1-8b"
[[mix]]
trace = "log.parquet"
[arrivals]
kind = "recorded"
file = "log.parquet"
[candidates]
gpus = ["h100"]
policies = ["full", "kivi"]
[target]
percentile = 90
search = "20 s"
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """70 requests of 9 conversations, in each of which prompts grow."""
    rng = np.random.default_rng(0)
    history: dict[int, list[int]] = {}
    lines = []
    for number in range(70):
        blocks = history.setdefault(int(rng.integers(9)), [0])
        blocks += range(1000 * number + 1, 1000 * number + 1 + int(rng.integers(1, 5)))
        # The last block is not full: nobody else has it.
        tokens = BLOCK * len(blocks) + int(rng.integers(1, BLOCK))
        lines.append({
            "timestamp": 1.5 * number, "hash_ids": [*blocks, 1000 * number + 999], "type": "text",
            "input_length": tokens, "output_length": 5,
        })  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["import", "bailian", str(path), str(tmp_path / "log.parquet")]) == 0
    return path


def workload(log: Path, *changes: tuple[str, str]) -> Workload:
    text = WORKLOAD
    for old, new in changes:
        text = text.replace(old, new)
    return parse_workload(text, log.parent)


def test_requests_arrive_in_recorded_order_each_at_its_moment(log: Path) -> None:
    found = workload(log)
    for seed in found.seeds():
        served = found.served(seed, found.searches)
        first = served[0, 1]
        np.testing.assert_array_equal(served[:, 1], (first + np.arange(48)) % 70)
        np.testing.assert_array_equal(found.draws(seed), served[:24])
        np.testing.assert_array_equal(found.served(seed, 5)[:, 1], served[:10, 1])
        arrivals = found.arrivals.at(found.arrivals.stated or 0, 48, seed)
        assert isinstance(arrivals, np.ndarray)
        np.testing.assert_allclose(np.diff(arrivals), 1.5)
    assert len({int(found.served(seed, 1)[0, 1]) for seed in range(40)}) > 10


def test_a_run_finds_what_came_before_in_it(log: Path) -> None:
    """On a GPU that holds it all: the literal count over the requests of the run, in order."""
    found = workload(log)
    planner = Planner(found)
    with planner._traces() as traces:
        bench = Bench(found, found.hardware[0], record(found, planner.candidates[0], traces))
    requests = read_requests(log, "bailian").searches
    for seed in found.seeds():
        run = bench.run(0.01, seed)  # one by one
        served = [requests[n] for n in found.served(seed, found.searches)[:, 1]]
        seen = set[int]()
        hits, totals = [0], [0]
        for each in served:
            known = [block in seen for block in each.prefix_blocks]
            leading = [*known, False].index(False)
            hits.append(hits[-1] + min(leading * BLOCK, each.prompt_tokens - 1))
            totals.append(totals[-1] + each.prompt_tokens)
            seen.update(each.prefix_blocks)
        counted = run.report.prefixes
        began = totals.index(counted.hbm + counted.computed)  # when the run ended
        assert began >= 24
        assert counted == PrefixTokens(hbm=hits[began], ddr=0, computed=totals[began] - hits[began])
        assert hits[began] > 0.2 * totals[began]


def test_sharing_serves_more(log: Path) -> None:
    plans = [
        Planner(workload(log, ("[target]", f"[serving]\nprefix_sharing = {on}\n[target]"))).run()
        for on in ("true", "false")
    ]
    shared, whole = (plan.candidates[0] for plan in plans)
    assert shared.at_largest is not None
    assert whole.at_largest is not None
    assert shared.at_largest.prefixes.hbm > 0
    assert whole.at_largest.prefixes == PrefixTokens()
    assert shared.largest >= whole.largest
    assert any("arrive in recorded order" in note for note in plans[0].notes)


def test_stated_prefixes_take_the_place_of_blocks(log: Path) -> None:
    found = workload(
        log, ('trace = "log.parquet"', 'trace = "log.parquet"\nshared_prompt_tokens = 9')
    )
    planner = Planner(found)
    with planner._traces() as traces:
        demands = record(found, planner.candidates[0], traces).demands
    assert all(each.info.prefix_tokens == 9 and not each.info.prefix_blocks for each in demands)
    assert len(set(found.draws(0)[:, 1])) < 24, "drawn, as other traces are"


def test_longer_requests_share_longer_blocks(log: Path) -> None:
    found = workload(log)
    planner = Planner(found)
    with planner._traces() as traces:
        demand = record(found, planner.candidates[0], traces).demands[0]
    longer = stretched(demand, 2.0)
    assert longer.info.prefix_block_tokens == 2 * BLOCK
    assert longer.info.prefix_tokens == 2 * demand.info.prefix_tokens == longer.prompt_tokens
    assert longer.info.prefix_blocks == demand.info.prefix_blocks


def test_an_endless_cache_over_the_whole_log(log: Path) -> None:
    requests = read_requests(log, "bailian").searches
    total = sum(each.prompt_tokens for each in requests)
    assert 0.3 < shared_prefix_tokens(requests, BLOCK) / total < 0.9
