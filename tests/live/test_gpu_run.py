"""How a GPU validation is planned, watched, judged and started; none of it needs PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from arborsim.core.errors import UsageError
from benchmarks import validate_gpu
from benchmarks.gpu import packing
from benchmarks.gpu.estimate import Estimate, shipped_profile
from benchmarks.gpu.plan import (
    PARTS,
    REPEATS,
    SIZES,
    TINY_SIZES,
    YARDSTICKS,
    Plan,
    Step,
    arms,
    expected_s,
    timetable,
)
from benchmarks.gpu.resume import alike, keep_profile, take_over
from benchmarks.gpu.targets import Results, Verdict, verdicts
from benchmarks.gpu.watchdog import Lines, Watchdog
from tests.live import watched

ROOT = Path(__file__).parents[2]
BUDGET_S = 570
DYNAMIC, STATIC = YARDSTICKS


def plan(tiny: bool = False, parts: tuple[str, ...] = PARTS, gpu: str = "h100") -> Plan:
    return Plan(
        "config:llama-3.1-8b", "cuda", tiny, TINY_SIZES if tiny else SIZES, 64, 1024, REPEATS,
        1024, 1 << 24, ("start", *parts), Path("out"), "", gpu,
    )  # fmt: skip


#: Parts of the first and the second of two calls, and what each may take.
CALLS = (
    (("yardsticks", "smoke", "correctness"), 150), (("calibration", "search", "trace"), 420),
)  # fmt: skip


def searches(steps: tuple[Step, ...]) -> list[Step]:
    return [step for step in steps if step.part == "search"]


# The plan.


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_plan_fits_one_call_of_nine_minutes_and_two_shorter_ones(gpu: str) -> None:
    assert 0.6 * BUDGET_S < expected_s(plan(gpu=gpu)) <= BUDGET_S
    for parts, seconds in CALLS:
        assert 0.6 * seconds < expected_s(plan(parts=parts, gpu=gpu)) <= seconds


def test_minutes_are_those_of_the_gpu() -> None:
    fast, slow = expected_s(plan(gpu="h200")), expected_s(plan(gpu="h100"))
    assert 1.05 * fast < slow < 4.8 / 3.35 * fast, "their memories read 4.8 and 3.35 TB/s"
    full = {arm.label: arm for arm in arms(64)}["full"]
    seconds = [Estimate(gpu).search_s(full, 32768, "auto", 64) for gpu in ("h200", "h100")]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA GeForce GTX 1080", "h100"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)  # fmt: skip
def test_rates_are_of_the_profile_that_is_shipped_for_a_gpu(device: str, profile: str) -> None:
    assert shipped_profile(device) == profile


def test_compiling_is_counted_in_the_first_search_of_an_arm() -> None:
    """In the smoke searches, where they are part of a run; once in any case."""
    parts = CALLS[1][0]
    alone, after = (searches(plan(parts=each).steps) for each in (parts, ("smoke", *parts)))
    longer = [one.facts["arm"] for one, other in zip(alone, after, strict=True)
              if one.expected_s > other.expected_s]  # fmt: skip
    assert sorted(longer) == sorted([*YARDSTICKS, *(arm.label for arm in arms(64))])


def test_what_tells_most_comes_first() -> None:
    steps = plan().steps
    assert list(dict.fromkeys(step.part for step in steps if not step.spare)) == list(PARTS[:-1])
    labels = [step.facts["arm"] for step in searches(steps)[: 2 + len(arms(64))]]
    assert [name.split(",")[0] for name in dict.fromkeys(labels)][:9] == [
        DYNAMIC, STATIC, "full", "streaming-llm", "h2o per=shared", "epikv", "arkv",
        "arborkv (tree)", "half in DDR",
    ]  # fmt: skip
    kinds = [
        (step.part, step.facts.get("repeat"), step.facts["prompt_tokens"], step.facts.get("graphs"))
        for step in steps if step.part in ("search", "trace")
    ]  # fmt: skip
    assert list(dict.fromkeys(kinds)) == [
        ("search", 1, 8192, "auto"), ("search", 1, 32768, "auto"), ("search", 2, 8192, "auto"),
        ("search", 2, 32768, "auto"), ("trace", None, 8192, None), ("search", 1, 8192, "off"),
        ("search", 1, 32768, "off"), ("search", 1, 65536, "auto"), ("search", 3, 8192, "auto"),
        ("search", 3, 32768, "auto"), ("search", 2, 65536, "auto"), ("search", 3, 65536, "auto"),
    ]  # fmt: skip


def test_long_prompts_third_repeats_and_contexts_wait_for_what_is_left() -> None:
    steps = plan().steps
    spare = [step.spare for step in steps]
    assert spare == sorted(spare), "nothing that is counted on comes after what is not"
    for step in steps:
        late = step.facts.get("prompt_tokens", 0) > 32768 or step.facts.get("repeat") == 3
        late |= step.part == "context" or step.facts.get("checks") == "more checks"
        assert step.spare == late


def test_every_arm_runs_once_in_smoke_and_full_also_without_graphs() -> None:
    found = [(label, graphs) for label, _, graphs in plan().smoke]
    every = [*YARDSTICKS, *(arm.label for arm in arms(64))]
    assert found == [*((label, "auto") for label in every), ("full", "off")]
    assert (plan().smoke_load.prompt_tokens, plan().smoke_load.new_tokens) == (2048, 24)


def test_every_arm_is_repeated_at_every_length() -> None:
    steps = plan().steps
    for arm in (*YARDSTICKS, *(arm.label for arm in arms(64))):
        for size in SIZES:
            found = [
                step.facts["repeat"] for step in searches(steps)
                if (step.facts["arm"], step.facts["prompt_tokens"]) == (arm, size)
                and step.facts["graphs"] == "auto"
            ]  # fmt: skip
            left_out = size > 32768 and arm.endswith(("stream", "near"))
            assert found == ([] if left_out else [1, 2, 3])
    eager = {step.facts["arm"] for step in searches(steps) if step.facts["graphs"] == "off"}
    assert eager == {arm.label for arm in arms(64) if arm.graphs}
    assert {step.facts["arm"] for step in steps if step.part == "trace"} == {
        arm.label for arm in arms(64)
    }


def test_no_two_steps_are_the_same() -> None:
    for tiny in (False, True):
        keys = [json.dumps([step.part, step.facts]) for step in plan(tiny).steps]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_dry_run_needs_no_torch_and_adds_up(gpu: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None;"
        f"sys.argv = ['validate_gpu.py', '--dry-run', '--gpu', '{gpu}'];"
        "import runpy; runpy.run_path('benchmarks/validate_gpu.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines == timetable(plan(gpu=gpu), BUDGET_S)
    counted = [line for line in lines[:-1] if " min " in line]
    seconds = sum(float(line.split("min")[1].split(" s ")[0]) for line in counted)
    assert seconds == pytest.approx(expected_s(plan(gpu=gpu)), abs=0.5 * len(counted))
    assert lines[-1].endswith(f"{expected_s(plan(gpu=gpu)):.0f} s of {BUDGET_S} s, on {gpu}")


# The watchdog.


def watch(work: Any, seconds: float = 60.0, idle_s: float = 30.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    Watchdog(work, end, found.append, idle_s=idle_s, grace_s=0.3).run()
    return found


def test_what_hangs_or_dies_is_a_record_and_the_rest_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    records = watch(watched.hangs_and_dies)
    assert "what no handler knows" in capfd.readouterr().err
    assert [(r["of"]["name"], r["outcome"]) for r in records] == [
        ("first", "done"), ("sleeps", "hung"), ("crashes", "died"), ("leaves", "died"),
        ("raises", "died"), ("last", "done"),
    ]  # fmt: skip
    assert [r["exit_code"] for r in records if r["outcome"] == "died"] == [-11, 3, 1]
    assert records[0]["pid"] != records[-1]["pid"]
    assert records[0]["ended"] == "memory"


def test_a_process_without_its_device_is_replaced() -> None:
    records = watch(watched.loses_its_device)
    assert [(r["of"]["name"], r["outcome"]) for r in records] == [
        ("first", "failed"), ("second", "done")
    ]  # fmt: skip


def test_what_cannot_start_is_not_started_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert watch(watched.never_begins) == [{"part": "watchdog", "outcome": "died", "exit_code": 1}]
    assert "no such thing" in capfd.readouterr().err


def test_nothing_outlasts_the_budget() -> None:
    began = time.monotonic()
    assert [r["outcome"] for r in watch(watched.never_ends, seconds=1.0)] == ["out of time"]
    assert time.monotonic() - began < watched.FOREVER_S


def test_lines_survive_an_interruption(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "new" / "results.jsonl")
    assert lines.read() == []
    lines.write({"a": 1})
    with lines.path.open("a") as file:
        file.write('{"b": 2, "c"')
    lines.write({"d": 3})
    assert lines.read() == [{"a": 1}, {"d": 3}]


# Files, and going on elsewhere.


def trace_names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        return file.namelist()


def test_traces_are_packed_one_by_one_and_the_file_is_whole_after_each(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "traces.zip"
    for number, name in enumerate("abc"):
        assert packing.add(path, name, name.encode() * 100)
        assert trace_names(path) == list("abc")[: number + 1]
    assert packing.add(path, "b", b"again")
    assert sorted(trace_names(path)) == list("abc")
    with zipfile.ZipFile(path) as file:
        assert file.read("b") == b"again"
    assert [each.name for each in path.parent.iterdir()] == ["traces.zip"]


def test_a_trace_that_is_too_large_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_BYTES", 5000)
    path = tmp_path / "traces.zip"
    assert packing.add(path, "a", bytes(1000))
    assert not packing.add(path, "b", bytes(4000))
    assert trace_names(path) == ["a"]
    assert packing.add(path, "c", bytes(1000))


H100 = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "sources": "1234"}


def earlier(folder: Path, *records: dict[str, Any]) -> Path:
    lines = Lines(folder / "results.jsonl")
    for record in records:
        lines.write(record)
    return lines.path


def started(**apart: str) -> dict[str, Any]:
    state = {"driver": apart.pop("driver", "580.1"), "revision": "a"}
    return {"part": "start", "outcome": "done", "identity": {**H100, **apart}, "conditions": state}


def calibrated(text: str) -> dict[str, Any]:
    return {"part": "calibration", "of": {}, "outcome": "done", "toml": text}


def test_another_machine_with_the_same_gpu_goes_on(tmp_path: Path) -> None:
    """Of the file all counts that goes with its last start; profile and traces come along."""
    old, kept = search("h2o per=shared", 8192, 10), search("full", 8192, 20)
    path = earlier(tmp_path / "one", started(torch="2.10.0"), old, started(), kept, calibrated("x"))
    packing.add(path.with_name("traces.zip"), "full.json.gz", b"...")
    lines = Lines(tmp_path / "two" / "gpu" / "results.jsonl")
    take_over(path, lines, H100)
    assert lines.read() == [started(), kept, calibrated("x")]
    assert trace_names(lines.path.with_name("traces.zip")) == ["full.json.gz"]
    keep_profile(lines.read(), lines.path.parent)
    assert (lines.path.parent / "profile.toml").read_text() == "x"
    lines.write(started(driver="590.2"))
    assert [r["tokens_per_s"] for r in Results(lines.read()).done] == [20]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([started(device="NVIDIA H200")], "device NVIDIA H200 there, NVIDIA H100 80GB HBM3 here"),
        ([started(), started(sources="99", torch="2.9")], "torch 2.9 there, 2.11.0 here; sources"),
        ([started(triton="3.6")], "triton 3.6 there, unknown here"),
        ([{"a": 1}], "holds no results"),
        ([], "no such file"),
    ],
)
def test_a_file_of_something_else_is_one_line(
    tmp_path: Path, records: list[dict[str, Any]], said: str
) -> None:
    path = earlier(tmp_path / "one", *records) if records else tmp_path / "none.jsonl"
    lines = Lines(tmp_path / "two" / "results.jsonl")
    with pytest.raises(UsageError) as found:
        take_over(path, lines, H100)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
    assert not lines.path.exists()


def test_records_of_other_code_are_not_taken_over() -> None:
    one, other = ({"part": "start", "identity": {"sources": name}} for name in "ab")
    a, b, c = ({"part": "search", "of": {"arm": name}} for name in "abc")
    records = [one, a, other, b, one, c]
    assert alike(records, {"sources": "a"}) == [one, a, one, c]
    assert alike(records, {"sources": "c"}) == []


# The verdicts.


def start(revision: str = "1") -> dict[str, Any]:
    return {"part": "start", "outcome": "done", "identity": {"revision": revision}}


def search(arm: str, size: int, tokens_per_s: float, repeat: int = 1, **facts: Any) -> Any:
    of = {"arm": arm, "prompt_tokens": size, "graphs": "auto", "repeat": repeat}
    return {
        "part": "search", "outcome": "done", "of": of, "tokens_per_s": tokens_per_s,
        "step_s": 1 / tokens_per_s, "policy_share": 0.0, "exposed_share": 0.0,
        "predicted_s": {"total_s": 1.0}, "live_s": {"total_s": 1.0},
        "predicted_hbm_bytes": 100, "allocator_peak_bytes": 100,
        "kv_bytes_at_end": {"hbm": 1000, "hbm_quantised": 0, "ddr": 5, "staging": 0}, **facts,
    }  # fmt: skip


def of(records: list[Any], word: str) -> Verdict:
    (found,) = (verdict for verdict in verdicts(Results(records)) if word in verdict.target)
    return found


def test_nothing_is_judged_without_results() -> None:
    assert {verdict.met for verdict in verdicts(Results([start()]))} == {None}


def test_full_retention_is_judged_by_its_worst_length_with_an_interval() -> None:
    records = [start()]
    for repeat, (ours, theirs) in enumerate([(96, 100), (98, 100), (100, 100)], 1):
        records += [search("full", 8192, ours, repeat), search(DYNAMIC, 8192, theirs, repeat)]
    records += [search("full", 32768, 99), search(DYNAMIC, 32768, 100)]
    verdict = of(records, "fastest cache")
    assert verdict.met
    # t(0.975, 2) = 4.3027; the standard error is 0.02 / sqrt(3)
    assert verdict.said == "worst of 2 0.98x [0.93x, 1.03x] (DynamicCache, 8,192 tokens), n 3"
    records.append(search("full", 65536, 80))
    assert of(records, "fastest cache").met, "there is nothing to compare it with"
    records.append(search(DYNAMIC, 65536, 100))
    assert not of(records, "fastest cache").met


def test_the_faster_of_transformers_caches_is_what_counts() -> None:
    records = [start(), search("full", 8192, 100), search(DYNAMIC, 8192, 90)]
    assert of(records, "fastest cache").met
    verdict = of([*records, search(STATIC, 8192, 110)], "fastest cache")
    assert (verdict.met, verdict.said) == (False, "0.91x (StaticCache, 8,192 tokens), n 1")
    assert of([*records, search(STATIC, 8192, 80)], "fastest cache").met


def test_smoke_is_judged_by_running_and_by_bytes() -> None:
    def smoke(arm: str, equal: int = 9, outcome: str = "done", differ: int = 0) -> dict[str, Any]:
        found = search(arm, 2048, 1.0, calls=9, calls_with_equal_bytes=equal, tiers_differ=differ)
        return {**found, "part": "smoke", "outcome": outcome}

    good = [start(), smoke("full"), smoke(STATIC), smoke("half in DDR, near", 3)]
    assert of(good, "short search").line.endswith("simulated: 3 of 3")
    assert of([*good, smoke("h2o per=shared", outcome="left out")], "short search").met
    for bad in (
        smoke("h2o per=shared", 8),
        smoke("h2o per=shared", outcome="died"),
        smoke("h2o per=shared", differ=1),
    ):
        verdict = of([*good, bad], "short search")
        assert (verdict.met, verdict.said) == (False, "3 of 4; not: h2o per=shared, graphs auto")
    assert of(good, "seconds within 8%").met is None, "nothing else is judged by them"


@pytest.mark.parametrize(
    ("word", "name", "arm", "good", "bad"),
    [
        ("policy's share", "policy_share", "h2o per=shared", 0.009, 0.011),
        ("exposed", "exposed_share", "half in DDR, stage", 0.04, 0.06),
        ("peak within 3%", "allocator_peak_bytes", "h2o per=shared", 98, 96),
        ("seconds within 8%", "live_s", "h2o per=shared", {"total_s": 1.05}, {"total_s": 0.9}),
    ],
)
def test_single_figures_are_judged(word: str, name: str, arm: str, good: Any, bad: Any) -> None:
    assert of([start(), search(arm, 8192, 10, **{name: good})], word).met
    verdict = of([start(), search(arm, 8192, 10, **{name: bad})], word)
    assert verdict.met is False
    assert arm in verdict.said


def test_streamed_tokens_may_be_waited_for() -> None:
    records = [start(), search("half in DDR, stream", 8192, 10, exposed_share=0.9)]
    assert of(records, "exposed").met is None


def test_a_smaller_cache_must_be_faster_everywhere() -> None:
    records = [
        start(),
        search("full", 8192, 10),
        search("h2o per=shared", 8192, 11),
        search("arkv", 8192, 12),
    ]
    assert of(records, "decodes faster").met
    slower = of([*records, search("epikv", 8192, 9)], "decodes faster")
    assert slower.line == (
        "MISSED: a quarter of the cache decodes faster than all of it: worst of 3 0.90x "
        "(epikv, 8,192 tokens), n 1"
    )


def test_copies_and_the_floor_are_shares_of_what_the_machine_does() -> None:
    known = {
        "part": "yardsticks", "outcome": "done", "of": {}, "read_bytes_per_s": 80.0,
        "copy_bytes_per_s": 100.0, "pinned_up_bytes_per_s": 50.0, "pinned_down_bytes_per_s": 40.0,
        "step_weight_bytes": 2000,
    }  # fmt: skip
    ddr = search("half in DDR, stage", 8192, 10, up_bytes_per_s=45.0, down_bytes_per_s=31.0)
    verdict = of([start(), known, ddr], "pinned")
    assert verdict.said == "worst of 2 78% (down, 8,192 tokens), n 1"
    assert not verdict.met
    # 3000 bytes at 100 a second: 30 seconds
    assert of([start(), known, search("full", 32768, 1 / 44)], "floor").said == "1.47x (full), n 1"
    assert not of([start(), known, search("full", 32768, 1 / 46)], "floor").met


def test_checks_that_ran_decide() -> None:
    def check(name: str, outcome: str = "done", **facts: Any) -> dict[str, Any]:
        return {"part": "correctness", "outcome": outcome, "of": {"check": name}, **facts}

    good, late = check("a", ok=True), check("b", "left out")
    assert of([start(), good, late], "correctness").line.endswith("1 of 1")
    for bad in (check("c", ok=False), check("c", "hung"), check("c", "failed")):
        verdict = of([start(), good, bad], "correctness")
        assert (verdict.met, verdict.said) == (False, "1 of 2; wrong: c")


def test_only_what_goes_with_the_last_start_counts_and_of_that_the_newest() -> None:
    failed = {**search("full", 8192, 1), "outcome": "failed"}
    records = [
        start("1"), search("h2o per=shared", 8192, 10), start("2"), failed, start("2"),
        search("full", 8192, 30),
    ]  # fmt: skip
    results = Results(records)
    assert [r["tokens_per_s"] for r in results.done] == [30]
    assert len(results.searches) == 1


def test_an_unknown_part_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["validate_gpu.py", "--dry-run", "--parts", "serach"])
    assert validate_gpu.main() == 2
    assert "search" in capsys.readouterr().err
