"""What a plan leaves on the disk: tables, the log of an interrupted one, a timeline."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from arborsim.core.documents import RecordLog
from arborsim.core.errors import UsageError
from arborsim.core.tables import FORMATS, made_by
from arborsim.play.backends import LiveResult
from arborsim.products.plan import files
from arborsim.products.plan.answers import read_answers
from arborsim.products.plan.ask import PlanResults
from arborsim.products.plan.files import PlanLog
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.timeline import timeline, trace_events, write_perfetto
from tests.plan.make import small_plan, small_workload


def _log(path: Path, *changes: tuple[str, str]) -> PlanLog:
    return PlanLog(path, small_workload(*changes))


def test_a_log_gives_back_what_was_written(tmp_path: Path) -> None:
    log = _log(tmp_path / "log")
    first, *others = small_plan().candidates
    log.write([first])
    for each in others:
        log.add(each)
    found = _log(log.path).resume()
    assert repr(found) == repr({each.number: each for each in small_plan().candidates})


def test_a_torn_line_is_left_out_and_written_again(tmp_path: Path) -> None:
    log = _log(tmp_path / "log")
    log.write(small_plan().candidates)
    log.close()
    whole = log.path.read_text()
    log.path.write_text(whole[: -len(whole.splitlines()[-1]) // 2])
    again = _log(log.path)
    assert list(again.resume()) == [0, 1, 2]
    again.write(small_plan().candidates)
    assert log.path.read_text() == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: ["{}", *lines[1:]], "not a log of format arborsim-plan"),
        (lambda lines: [lines[0], "[]"], r"line 2: must be a table, not \[\]"),
        (lambda lines: [lines[0], lines[1].replace('"gpus":1,', '"gpus":"1",')], "gpus must be"),
        (lambda lines: [lines[0], "nonsense"], "line 2: no JSON"),
        (lambda lines: [lines[0].replace('"version":1', '"version":0')], "not a log of format"),
    ],
)
def test_damaged_logs_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    log = _log(tmp_path / "log")
    log.write(small_plan().candidates)
    log.path.write_text("\n".join(change(log.path.read_text().splitlines())) + "\n")
    with pytest.raises(UsageError, match=said):
        _log(log.path).resume()


def test_a_log_of_another_workload_is_refused(tmp_path: Path) -> None:
    _log(tmp_path / "log").write(small_plan().candidates)
    other = ("depth = 3", "depth = 2")
    with pytest.raises(UsageError, match="another workload"):
        _log(tmp_path / "log", other).resume()
    assert _log(tmp_path / "nothing", other).resume() == {}  # it begins


def test_tables_hold_every_candidate_with_its_figures(tmp_path: Path) -> None:
    plan = small_plan()
    for suffix in FORMATS:
        PlanResults(plan, made_by("plan", "test")).save(tmp_path / f"plan{suffix}")
    frame = pd.read_parquet(tmp_path / "plan.parquet")
    again = pd.read_csv(tmp_path / "plan.csv")
    for each, (_, row), (_, text) in zip(
        plan.candidates, frame.iterrows(), again.iterrows(), strict=True
    ):
        assert each.at_largest is not None
        for found in (row, text):
            assert found["hardware"] == each.hardware
            assert found["largest"] == pytest.approx(each.largest)
            assert found["search_s_p95"] == pytest.approx(each.at_largest.search_s.p95)
            assert found["cost_per_1000_low"] == pytest.approx(
                (each.at_largest.cost_per_1000 or (math.nan,))[0]
            )
            assert found["used_pcie_up"] == pytest.approx(each.at_largest.used.pcie_up)
            assert bool(found["recommended"]) == (each.number == plan.recommendation.candidate)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["recommendation"]["text"] == plan.recommendation.text
    assert document["candidates"][0]["at_largest"]["load"] == plan.candidates[0].largest
    assert files.to_json(plan) == files.to_json(small_plan())


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="format of --out"):
        PlanResults(small_plan(), {}).save(tmp_path / "plan.xlsx")


def _live_log(path: Path, shadow: bool = False) -> Path:
    log = RecordLog(path, LiveResult, "arborsim-live", 1)
    log.open({"request": {"shadow": shadow}})
    for policy, budget, correct, infeasible in (
        ("full", "any", True, ""), ("full", "any", False, ""), ("h2o", "0.5", True, ""),
        ("h2o", "0.5", None, ""), ("h2o", "0.5", None, "too small"),
    ):  # fmt: skip
        log.add(LiveResult(0, policy, budget, 9, correct, 1, 1, 1.0, infeasible=infeasible))
    log.close()
    path.write_text(path.read_text() + '{"torn')
    return path


def test_accuracies_come_from_live_runs(tmp_path: Path) -> None:
    judged = read_answers([_live_log(tmp_path / "a"), _live_log(tmp_path / "b")])
    found = {key: each.right for key, each in judged.items()}
    assert set(found) == {("full", "-"), ("h2o", "0.5")}
    assert (found["full", "-"].value, found["full", "-"].n) == (0.5, 4)
    assert (found["h2o", "0.5"].value, found["h2o", "0.5"].n) == (0.5, 4), "infeasible is wrong"
    assert found["full", "-"].low < 0.1


def test_other_files_are_no_live_runs(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(UsageError, match="--answers"):
            read_answers([path])
    with pytest.raises(UsageError, match="shadow"):
        read_answers([_live_log(tmp_path / "s", shadow=True)])


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    """Of a machine so small that searches lose their place."""
    workload = small_workload(
        ('gpus = ["rtx4090", "h100"]', 'gpus = ["rtx4090"]'),
        ('search = "20 s"', 'search = "100 s"'),
    )
    machine = workload.hardware[0]
    profile = replace(machine.profile, hbm_bytes=int(18.5e9))
    workload = replace(workload, hardware=(replace(machine, profile=profile),))
    planner = Planner(replace(workload, policies=workload.policies[:1]))
    (only,) = planner.run().candidates
    line = timeline(planner, only)
    assert any(each.kind == "swap" for each in line.slices), "no search lost a place"
    found: list[dict[str, Any]] = trace_events(line)["traceEvents"]
    return found


def test_perfetto_events_have_what_the_format_asks_for(events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"]
        elif event["ph"] == "C":
            assert list(event["args"]) == ["value"]
            assert event["args"]["value"] >= 0
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_perfetto_slices_of_a_track_never_overlap_partly(events: list[dict[str, Any]]) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, "neither apart nor within"
            open_until.append(end)


def test_every_track_has_a_name_and_every_kind_is_there(events: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= named
    kinds = {e["cat"] for e in events if e["ph"] == "X"}
    assert kinds >= {"waiting", "prefill", "decode", "swap", "down", "up"}
    counters = {e["name"].partition(" ")[0] for e in events if e["ph"] == "C"}
    assert counters == {"HBM", "DDR", "searches", "queue"}


def test_writing_the_timeline_names_what_is_wrong(tmp_path: Path) -> None:
    planner = Planner(small_workload())
    line = timeline(planner, small_plan().candidates[0])
    write_perfetto(line, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["seed"] == 0
    with pytest.raises(UsageError, match="cannot write"):
        write_perfetto(line, tmp_path / "no" / "t.json")
