"""The log of a live run: what is written is read, and what does not belong is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.documents import plain
from arborsim.core.errors import UsageError
from arborsim.core.measurements import Measurements, MemorySeries, TimeSplit
from arborsim.core.records import convert
from arborsim.core.tiers import Budget
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult
from arborsim.play.episode import Cell
from arborsim.play.live_log import FORMAT, VERSION, Collector, LiveLog
from arborsim.policies.registry import build
from arborsim.products.live.results import LiveResults
from arborsim.products.replay.counting import read_log

CELLS = (Cell(build("full"), Budget.parse("1")), Cell(build("h2o"), Budget.parse("0.5")))
REQUEST = LiveRequest(model="chain", cells=CELLS, episodes=2)
FACTS = LiveFacts("m", "chain", "cpu", "float32", 10, 4, False, {"torch": "2"})


def result(episode: int = 0, policy: str = "full", budget: str = "1", **other: Any) -> LiveResult:
    measured = Measurements(
        generated_tokens=7, peak_hbm_kv_bytes=96, evicted_tokens=2.5,
        time=TimeSplit(0.1, 0.25), series=MemorySeries([0.0, 0.5], [4, 96], [0, 0], [0, 1], [0, 0]),
    )  # fmt: skip
    given = {"correct": True, "tokens": 7, "full_tokens": 12, "wall_s": 0.5, **other}
    return LiveResult(episode, policy, budget, 12, measured=measured, **given)


def written(path: Path, *results: LiveResult) -> Path:
    log = LiveLog(path, REQUEST)
    watch = Collector(log)
    watch.began(FACTS, 2)
    for each in results:
        watch.finished(each)
    log.close()
    return path


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    results = [result(), result(0, "h2o", "0.5", correct=None, infeasible="too small")]
    path = written(tmp_path / "log", *results)
    assert LiveLog(path, REQUEST, resume=True).records == results
    assert len(path.read_bytes().splitlines()) == 3


numbers = st.floats(0, 1e9, allow_nan=False)


@given(
    st.builds(
        result, episode=st.integers(0, 9), policy=st.text(), budget=st.text(),
        correct=st.sampled_from([None, True, False]), wall_s=numbers, infeasible=st.text(),
        allocated_bytes=st.integers(0, 2**62),
    )
)  # fmt: skip
def test_any_result_survives_json(given: LiveResult) -> None:
    assert convert(LiveResult, json.loads(json.dumps(plain(given)))) == given


def test_a_long_series_is_thinned_but_keeps_its_peak(tmp_path: Path) -> None:
    peak = [1] * 5000
    peak[3210] = 77
    times = [i / 7 for i in range(5000)]
    series = MemorySeries(times, peak, [0] * 5000, [0] * 5000, [0] * 5000)
    path = written(tmp_path / "log", replace(result(), measured=Measurements(series=series)))
    kept = LiveLog(path, REQUEST, resume=True).records[0].measured.series
    assert len(kept.time_s) <= 602
    assert max(kept.hbm_kv_bytes) == 77
    assert kept.time_s[-1] == pytest.approx(4999 / 7)


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_line_that_was_being_written_is_dropped(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "log", result(0), result(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    log = LiveLog(path, REQUEST, resume=True)
    assert [r.episode for r in log.records] == [0]
    watch = Collector(log)
    watch.began(FACTS, 2)
    assert not watch.wants(0, CELLS[0])
    assert watch.wants(1, CELLS[0])
    assert watch.full_tokens(0) == 12
    assert watch.full_tokens(1) == 0
    watch.finished(result(1))
    log.close()
    assert path.read_bytes() == whole


def test_a_log_whose_first_line_was_being_written_begins_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    log = LiveLog(path, REQUEST, resume=True)
    log.began(FACTS, 2)
    log.close()
    assert path.read_bytes() == whole


def test_what_is_handed_over_twice_is_kept_once(tmp_path: Path) -> None:
    path = written(tmp_path / "log", result(0), result(0, tokens=99))
    assert [r.tokens for r in LiveLog(path, REQUEST, resume=True).records] == [7]


def changed(**other: Any) -> str:
    return json.dumps({**plain(result(1)), **other})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 3: no JSON"),
        ("[]", "line 3: must be a table, not []"),
        ("{}", "line 3:"),
        (changed(tokens="7"), "line 3: tokens must be a whole number, not '7'"),
        (changed(tokens=True), "line 3: tokens must be a whole number, not True"),
        (changed(more=1), "line 3: unknown key or table 'more'"),
        (changed(measured=1), "line 3: [measured] must be a table, not 1"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = written(tmp_path / "log", result(0))
    path.write_bytes(path.read_bytes() + f"{line}\n".encode())
    with pytest.raises(UsageError, match="the log is damaged") as raised:
        LiveLog(path, REQUEST, resume=True)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"cells": CELLS[:1]}, "other policies, settings or budgets"),
        ({"task_options": {"lines": 3}}, "task options"),
    ],
)
def test_the_log_of_another_request_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = written(tmp_path / "log", result(0))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="another request") as raised:
        LiveLog(path, replace(REQUEST, **change), resume=True)
    assert says in str(raised.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("other", [{"top_p": 0.9}, {"chat": True}, {"stop": ("\n\n",)}])
def test_every_option_counts(tmp_path: Path, other: dict[str, Any]) -> None:
    path = written(tmp_path / "log", result())
    with pytest.raises(UsageError, match="another request"):
        LiveLog(path, replace(REQUEST, **other), resume=True)


def test_an_option_that_a_log_does_not_know_has_its_default(tmp_path: Path) -> None:
    path = written(tmp_path / "log", result())
    head, *rest = path.read_text().splitlines()
    known = json.loads(head)
    for name in ("chat", "masked", "problem_fields", "graphs"):
        del known["request"][name]
    path.write_text("\n".join([json.dumps(known), *rest, ""]))
    log = LiveLog(path, REQUEST, resume=True)
    log.began(replace(FACTS, software={"torch": "2", "python": "3.12"}), 2)
    log.close()
    assert len(log.records) == 1
    with pytest.raises(UsageError, match="graphs True there, False here"):
        LiveLog(path, replace(REQUEST, graphs=False), resume=True)


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "log", result(0))
    log = LiveLog(path, REQUEST, resume=True)
    with pytest.raises(UsageError, match=r"software .*'3'"):
        log.began(replace(FACTS, software={"torch": "3"}), 2)


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b'{"a": 1}\n'])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        LiveLog(path, REQUEST, resume=True)
    with pytest.raises(UsageError, match="--resume goes on"):
        LiveLog(path, REQUEST)
    assert path.read_bytes() == content
    LiveLog(path, REQUEST, overwrite=True)  # not before the run has begun
    assert path.read_bytes() == content


def test_every_setting_of_a_policy_counts(tmp_path: Path) -> None:
    cells = (Cell(build("random"), Budget.parse("0.5")),)
    request = replace(REQUEST, cells=cells)
    path = tmp_path / "log"
    log = LiveLog(path, request)
    log.began(FACTS, 2)
    log.close()
    LiveLog(path, request, resume=True)
    other = (Cell(build("random", {"sinks": "4"}), Budget.parse("0.5")),)
    with pytest.raises(UsageError, match="other policies, settings or budgets"):
        LiveLog(path, replace(request, cells=other), resume=True)


@pytest.mark.parametrize(
    "head",
    [
        {"request": []}, {"request": {"cells": 1}}, {"request": {"cells": [{"policy": "h2o"}]}},
        {"request": {"cells": [{"policy": 1, "budget": "1", "settings": {}}]}}, {"facts": "none"},
        {"request": {"gpu": "h100"}}, {"request": {"temperature": "warm"}},
    ],
)  # fmt: skip
def test_a_damaged_head_is_one_line(tmp_path: Path, head: dict[str, Any]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **head}) + "\n")
    for read in (LiveResults.read_log, read_log):
        with pytest.raises(UsageError, match=r"line 1: (request|facts)"):
            read(path)


def test_a_log_of_deep_lists_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, result())
    path.write_text(path.read_text() + "[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(UsageError, match="line 3: no JSON: the log is damaged"):
        LiveResults.read_log(path)
