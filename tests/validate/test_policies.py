"""Policies on engines: rows of a file, the demands they become, and what is said of them."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from arborsim.cli.app import main
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.machine.program import LINEAR, iterations
from arborsim.policies.registry import build
from arborsim.products.generate.lengths import TreeSpec, fixed, write_generated
from arborsim.products.validate.policies import Setting, compare, sawtooth
from arborsim.products.validate.policies_report import lines
from arborsim.products.validate.policy_runs import PolicyRun, read_policy_runs
from arborsim.products.validate.published import Kept, request
from tests.helpers.demands import record_demands

HEAD = (
    "id,policy,variant,budget_tokens,buffer_tokens,engine,graphs,model,gpu,kv_pool_tokens,"
    "baseline_kv_pool_tokens,requests,concurrency,prompt_tokens,output_tokens,tokens_per_s,"
    "baseline_tokens_per_s,peak_concurrency,baseline_peak_concurrency,pairing"
)
STRESS = (
    "00000001,rkv,,256,128,vllm,piecewise,Qwen/Qwen2.5-Math-7B-Instruct,H100-80GB,{own},{pool},"
    "256,256,700,1024,{rate},{full},{peak},{full_peak},same-setting"
)
#: What R-KV's authors measured in vLLM 0.25 with pools of four sizes
POOLS = {
    430_000: (12177, 13902, 256, 256), 282_000: (12282, 10503, 256, 231),
    134_000: (10371, 7838, 256, 100), 60_000: (6566, 4958, 124, 60),
}  # fmt: skip


def stress(pool: int) -> str:
    rate, full, peak, full_peak = POOLS[pool]
    return STRESS.format(own="", pool=pool, rate=rate, full=full, peak=peak, full_peak=full_peak)


def rows_of(tmp_path: Path, *rows: str) -> list[PolicyRun]:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return read_policy_runs(path)


@pytest.mark.parametrize(("prompt", "output", "budget", "buffer"), [
    (700, 1024, 256, 128), (118, 600, 256, 128), (50, 40, 512, 16), (700, 220, 512, 16),
    (30, 90, 20, 1),
])  # fmt: skip
def test_a_cache_is_cut_when_the_buffer_is_full(
    prompt: int, output: int, budget: int, buffer: int
) -> None:
    """A literal loop over tokens, as R-KV's patch of an engine counts them."""
    held, since, tokens, cuts = prompt, 0, [], []
    for _ in range(output - 1):
        if since >= buffer and held >= budget + buffer:
            held, since = budget, 0
            cuts.append(len(tokens))
        held, since = held + 1, since + 1
        tokens.append(held)
    found, decided = sawtooth(prompt, output, budget, buffer)
    assert found.tolist() == tokens
    assert np.flatnonzero(decided).tolist() == cuts


def test_as_many_cuts_as_the_measured_run_counted() -> None:
    """About 1,790 in 256 requests of 1,024 tokens with a buffer of 128."""
    assert 256 * int(sawtooth(700, 1024, 256, 128)[1].sum()) == 1792


def test_a_request_is_what_a_recording_of_the_policy_asks_for(tmp_path: Path) -> None:
    """A window of 200 tokens on a generated chain: from the first cut on, the same bytes."""
    geometry, output = load_geometry("qwen2.5-7b"), 120
    trace = tmp_path / "linear.parquet"
    write_generated(TreeSpec(fixed(300), fixed(output)), 1, 0, geometry, trace)
    machine = Machine(load_profile("h100"), geometry)
    policy = build("streaming-llm", {"pin_prompt": "false"})
    (recorded,) = record_demands(trace, policy, Budget("200t", tokens=200), machine)
    made = request(geometry, 300, output, Kept(policy.name, *sawtooth(300, output, 200, 1)))
    (fixed_, mine), (its_fixed, its) = iterations(made.pieces), iterations(recorded.pieces)
    read, held = LINEAR.index("read_bytes"), LINEAR.index("hbm_bytes")
    for column in (read, held):
        assert mine[2:, column].tolist() == its[2 : output - 1, column].tolist()
    assert fixed_[2:].tolist() == its_fixed[2 : output - 1].tolist()


@pytest.mark.parametrize("pool", POOLS)
def test_memory_pressure_turns_the_sign(tmp_path: Path, pool: int) -> None:
    """12% slower with a large pool, 32% faster with a small one: R-KV in vLLM on an H100."""
    (row,) = map(compare, rows_of(tmp_path, stress(pool)))
    assert row.reason == ""
    assert row.sign is True
    assert abs(row.error) < 0.2
    assert row.baseline is not None
    assert row.baseline.peak_concurrency == pytest.approx(POOLS[pool][3], rel=0.15)


def test_sglang_reserves_the_most_that_a_request_will_hold(tmp_path: Path) -> None:
    """Peaks in flight: pool / (prompt + output), and pool / (prompt + buffer) under R-KV."""
    row = STRESS.replace("vllm,piecewise", "sglang,full").format(
        own=340_000, pool=466_000, rate=11654, full=12550, peak=410, full_peak=270
    )
    (played,) = map(compare, rows_of(tmp_path, row.replace(",256,256,700", ",512,512,700")))
    assert played.policy is not None
    assert played.baseline is not None
    assert played.policy.peak_concurrency == pytest.approx(410, abs=1)
    assert played.baseline.peak_concurrency == pytest.approx(270, abs=1)


def test_queries_that_a_build_keeps_are_taken_from_the_pool(tmp_path: Path) -> None:
    """R-KV in SGLang keeps 8 queries for as many requests as the pool holds: 45k of 466k tokens."""
    row = STRESS.replace("vllm,piecewise", "sglang,full").format(
        own="", pool=466_000, rate=12335, full=13005, peak=256, full_peak=256
    )
    (run,) = rows_of(tmp_path, row)
    setting = Setting(run)
    tokens, decided = sawtooth(700, 1024, 256, 128)
    left = setting._kv_bytes(setting.geometry, Kept("rkv", tokens, decided), False)
    assert left is not None
    assert left / setting.geometry.kv_bytes_per_token == pytest.approx(421_000, rel=0.01)


def test_shipped_rows_are_read_and_most_of_them_can_be_told_apart() -> None:
    runs = read_policy_runs()
    assert len(runs) > 100
    assert len({run.text("id") for run in runs}) == len(runs)
    assert 0.3 < np.mean([run.fitted for run in runs]) < 0.7
    assert sum(math.isfinite(run.ratio) for run in runs) > 80


def test_every_column_is_kept_next_to_what_was_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, page = tmp_path / "rows.csv", tmp_path / "out.csv", tmp_path / "page.html"
    odd = stress(134_000).replace(",256,256,700", ",,,700").replace("00000001", "00000003")
    file.write_text("\n".join([HEAD, stress(134_000), odd]) + "\n")
    asked = ["validate", "policies", str(file), "--out", str(out)]
    assert main([*asked, "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 signs are right" in said
    assert "how many requests run at once is not stated" in said
    table = pd.read_csv(out)
    assert list(table.columns[:20]) == HEAD.split(",")
    assert table.simulated_ratio[0] > 1
    assert table.simulated_baseline_peak_concurrency[0] == pytest.approx(100, rel=0.15)
    assert math.isnan(table.simulated_ratio[1])
    assert "Every row" in page.read_text()


@pytest.mark.parametrize(("text", "message"), [
    ("policy,engine,model\n", "column gpu is missing"),
    (f"{HEAD}\n", "holds no row"),
    (f"{HEAD},policy\n{stress(60_000)},rkv\n", "column policy is there twice"),
    (f"{HEAD}\n{stress(60_000)},1\n", "row 1: has 21 columns"),
    (f"{HEAD}\n{stress(60_000).replace('1024', 'many')}\n", "row 1, column output_tokens"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    assert main(["validate", "policies", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_lines_tell_judged_rows_from_the_others(tmp_path: Path) -> None:
    """A row with an even identifier may have been fitted on, and is not counted."""
    even = stress(60_000).replace("00000001", "00000002")
    flags = stress(60_000).replace("same-setting", "unequal-flags").replace("00000001", "00000005")
    found = lines([compare(run) for run in rows_of(tmp_path, stress(60_000), even, flags)])
    by_name = {line.name: line for line in found}
    assert by_name["all judged"].ratio.n == 1
    assert by_name["fitted"].ratio.n == 1
    assert by_name["other flags or batch"].ratio.n == 1
