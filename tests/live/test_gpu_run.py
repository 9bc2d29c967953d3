"""How a GPU validation is planned, watched, judged and started; none of it needs PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import validate_gpu
from benchmarks.gpu.plan import (
    PARTS,
    REPEATS,
    SIZES,
    TINY_SIZES,
    YARDSTICK,
    Plan,
    Step,
    arms,
    expected_s,
    timetable,
)
from benchmarks.gpu.targets import Results, Verdict, verdicts
from benchmarks.gpu.watchdog import Lines, Watchdog
from tests.live import watched

ROOT = Path(__file__).parents[2]
BUDGET_S = 540


def plan(tiny: bool = False) -> Plan:
    return Plan(
        "config:llama-3.1-8b", "cuda", tiny, TINY_SIZES if tiny else SIZES, 64, 1024, REPEATS,
        1024, 1 << 24, PARTS, Path("out"), "",
    )  # fmt: skip


def searches(steps: tuple[Step, ...]) -> list[Step]:
    return [step for step in steps if step.part == "search"]


# The plan.


def test_the_plan_fits_nine_minutes() -> None:
    assert 0.8 * BUDGET_S < expected_s(plan()) <= BUDGET_S


def test_what_tells_most_comes_first() -> None:
    steps = plan().steps
    first = searches(steps)[: 1 + len(arms(64))]
    labels = [step.facts["arm"] for step in first]
    assert labels[0] == YARDSTICK
    assert labels[1].startswith("half in DDR")
    assert [name.split(",")[0] for name in dict.fromkeys(labels[4:])] == [
        "arborkv (tree)", "arkv", "full", "streaming-llm", "h2o", "epikv"
    ]  # fmt: skip
    rounds = [step.facts["repeat"] for step in searches(steps)]
    assert rounds == sorted(rounds), "repeats come when every arm has been searched once"
    sizes = [step.facts["prompt_tokens"] for step in searches(steps) if step.facts["repeat"] == 1]
    assert list(dict.fromkeys(sizes)) == [8192, 32768, 65536]


def test_every_arm_is_repeated_at_every_length() -> None:
    steps = plan().steps
    for arm in (YARDSTICK, *(arm.label for arm in arms(64))):
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


def test_the_dry_run_needs_no_torch_and_adds_up() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['validate_gpu.py', '--dry-run'];"
        "import runpy; runpy.run_path('benchmarks/validate_gpu.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines == timetable(plan(), BUDGET_S)
    counted = [line for line in lines[:-1] if " min " in line]
    seconds = sum(float(line.split("min")[1].split(" s ")[0]) for line in counted)
    assert seconds == pytest.approx(expected_s(plan()), abs=0.5 * len(counted))
    assert lines[-1].endswith(f"{expected_s(plan()):.0f} s of {BUDGET_S} s")


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
        records += [search("full", 8192, ours, repeat), search(YARDSTICK, 8192, theirs, repeat)]
    records += [search("full", 32768, 99), search(YARDSTICK, 32768, 100)]
    verdict = of(records, "DynamicCache")
    assert verdict.met
    # t(0.975, 2) = 4.3027; the standard error is 0.02 / sqrt(3)
    assert verdict.said == "worst of 2 0.98x [0.93x, 1.03x] (8,192 tokens), n 3"
    records.append(search("full", 65536, 80))
    assert of(records, "DynamicCache").met, "there is nothing to compare it with"
    records.append(search(YARDSTICK, 65536, 100))
    assert not of(records, "DynamicCache").met


@pytest.mark.parametrize(
    ("word", "name", "arm", "good", "bad"),
    [
        ("policy's share", "policy_share", "h2o", 0.009, 0.011),
        ("exposed", "exposed_share", "half in DDR, stage", 0.04, 0.06),
        ("peak within 3%", "allocator_peak_bytes", "h2o", 98, 96),
        ("seconds within 8%", "live_s", "h2o", {"total_s": 1.05}, {"total_s": 0.9}),
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
    records = [start(), search("full", 8192, 10), search("h2o", 8192, 11), search("arkv", 8192, 12)]
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
        start("1"), search("h2o", 8192, 10), start("2"), failed, start("2"),
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
