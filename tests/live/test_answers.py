"""Answers counted live: what comes with the package, what logs add, and how a setting is found."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim import load_results
from arborsim.core.documents import RecordLog
from arborsim.core.errors import UsageError
from arborsim.core.statistics import SIGNIFICANT, fisher_p
from arborsim.play.backends import LiveFacts, LiveResult
from arborsim.policies.registry import build, changed, resolved
from arborsim.products.replay import answers
from arborsim.products.replay.answers import Counted, Searched, shipped
from arborsim.products.replay.counting import Judged, count, known_answers
from arborsim.trace.reader import TraceReader
from benchmarks.answers import quality, validations

ROOT = Path(__file__).parents[2]
GAME = Searched.of_recording(TraceReader(ROOT / "traces/game24-tot.parquet").info.recording)
CHAIN = Searched.of_recording(TraceReader(ROOT / "traces/chain-linear.parquet").info.recording)
SHARED = {"per": "shared"}
PROBLEMS = Searched("chain", "linear", "arborsim-chain", {"lines": 32}, {}, 0.0)


def test_the_shipped_file_is_what_the_command_makes():
    text = (ROOT / "arborsim/products/replay/answers.csv").read_text(encoding="utf-8")
    assert text == answers.to_csv([*quality(), *validations()])
    assert answers.to_csv(answers.from_csv(text)) == text


def test_shipped_counts_are_those_of_the_quality_page():
    found = shipped().for_(GAME, "h2o", SHARED, "0.5")
    page = (ROOT / "reports/quality/README.md").read_text()
    counted = found.counted
    assert f"| h2o, shared | 0.5 | {counted.right} / {counted.n} |" in page
    assert (counted.right, counted.n, counted.full_right) == (140, 200, 144)
    assert f"{100 * counted.interval[0]:.1f} to {100 * counted.interval[1]:.1f}" in page
    assert found.exact
    assert counted.difference == pytest.approx(-0.02)
    assert not counted.loses


def test_settings_that_were_not_given_have_their_defaults():
    whole = resolved(build("h2o", SHARED))
    for settings in (SHARED, SHARED | {"pin_prompt": False}, whole):
        assert shipped().for_(GAME, "h2o", settings, "0.25").counted.right == 81
    assert shipped().for_(GAME, "h2o", SHARED | {"pin_prompt": True}, "0.25") is None
    assert shipped().for_(GAME, "epikv", {}, "0.5") is None, "counted with recent=8 only"
    assert shipped().for_(GAME, "epikv", {"recent": 8}, "0.50").exact
    others = shipped().others(GAME, "epikv", resolved(build("epikv")))
    assert "epikv recent=8" in {row.label for row in others}


def test_a_near_budget_is_said_and_a_far_one_is_none():
    near = shipped().for_(GAME, "h2o", SHARED, "0.55")
    assert near.counted.budget == "0.5", "of two as near, the smaller"
    assert near.differs == ("budget 0.5",)
    assert not near.own_budget
    assert shipped().for_(GAME, "h2o", SHARED, "0.9") is None
    assert shipped().for_(GAME, "h2o", SHARED, "200") is None, "tokens are no share"


def test_other_problems_of_the_task_are_said():
    found = shipped().for_(CHAIN, "streaming-llm", {}, "0.7")
    assert (found.counted.right, found.counted.n) == (35, 40)
    assert found.differs == ("lines 12",)
    assert found.own_budget
    assert not found.exact


def test_of_two_counts_that_on_the_traces_own_problems_is_taken():
    found = shipped().for_(CHAIN, "h2o", SHARED, "0.85")
    assert found.exact
    assert (found.counted.right, found.counted.n) == (0, 100)


def test_answers_are_not_carried_across_task_search_or_model():
    for other in ("task", "search", "model"):
        changed = replace(GAME, **{other: "another"})
        assert shipped().for_(changed, "h2o", SHARED, "0.5") is None
    assert not shipped().of(replace(GAME, model="llama-3.1-8b"))


def test_policies_that_know_no_budget_are_found_under_any():
    eight = {"bits": 8, "group": 8, "residual": 16}
    assert shipped().for_(GAME, "kivi", eight, "any").counted.right == 143
    assert shipped().for_(GAME, "kivi", eight, "0.5") is None
    assert shipped().for_(GAME, "full", {}, "any").counted.n == 200


def test_policies_that_were_changed_since_are_left_out():
    assert not [row for row in shipped().rows if row.policy in ("raas", "segment-hs")
                and row.source.endswith("chain-quality/results.parquet")]  # fmt: skip


def _log(path: Path, shadow: bool = False) -> Path:
    facts = LiveFacts("arborsim-game24", "game24", "cpu", "float32", 1, 1, False, {})
    log = RecordLog(path, LiveResult, "arborsim-live", 1)
    cells = [
        {"policy": "full", "budget": "any", "settings": {}},
        {"policy": "h2o", "budget": "0.9", "settings": resolved(build("h2o", SHARED))},
    ]
    request = {"shadow": shadow, "cells": cells, "search": "tot-bfs", "temperature": 0.7,
               "search_options": {"keep": "5"}, "task_options": {}}  # fmt: skip
    log.open({"request": request, "facts": asdict(facts)})
    for episode, right, infeasible in ((0, True, ""), (1, False, ""), (2, None, "too small")):
        log.add(LiveResult(episode, "full", "any", 9, True, 1, 1, 1.0))
        log.add(LiveResult(episode, "h2o", "0.9", 9, right, 1, 1, 1.0, infeasible=infeasible))
    log.close()
    return path


def test_a_users_log_comes_first(tmp_path: Path):
    known = known_answers([_log(tmp_path / "run.jsonl")])
    counted = known.for_(GAME, "h2o", SHARED, "0.9").counted
    assert (counted.right, counted.n, counted.infeasible, counted.full_right) == (1, 2, 1, 2)
    assert counted.source == str(tmp_path / "run.jsonl")
    assert known.for_(GAME, "h2o", SHARED, "0.5") == shipped().for_(GAME, "h2o", SHARED, "0.5")


def test_files_that_say_nothing_of_answers_are_refused(tmp_path: Path):
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(UsageError, match=r"--answers: .*x"):
        known_answers([tmp_path / "x"])
    with pytest.raises(UsageError, match="shadow"):
        known_answers([_log(tmp_path / "shadow.jsonl", shadow=True)])


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("wall_s", "-Infinity", "wall_s must be a finite number, not -inf"),
        ("prefill_s", "NaN", "problem 0, full at budget any: prefill_s is nan"),
        ("decode_s", "1e308", "decode_s must be a finite number, not 1e+308"),
    ],
)
def test_numbers_that_no_live_run_measures_are_refused(
    tmp_path: Path, name: str, number: str, said: str
):
    path = _log(tmp_path / "run.jsonl")
    head, first, *others = path.read_text().splitlines(True)
    damaged = re.sub(rf'"{name}":[\d.]+', f'"{name}":{number}', first)
    path.write_text("".join([head, damaged, *others]))
    for read in (lambda: known_answers([path]), lambda: load_results(path)):
        with pytest.raises(UsageError, match=re.escape(f"run.jsonl, line 2: {said}")) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_requests_that_no_live_run_writes_are_refused(tmp_path: Path):
    path = _log(tmp_path / "run.jsonl")
    path.write_text(path.read_text().replace('"shadow":false', '"shadow":false,"batch":{"a":1}'))
    with pytest.raises(UsageError, match="line 1: request batch must be a whole number"):
        load_results(path)


def test_rows_without_full_retention_have_no_difference():
    own = [Judged(i, "h2o", "0.5", i % 2 == 0, False) for i in range(4)]
    (row,) = count(PROBLEMS, own, {}, "x")
    assert row.full_right is None
    assert math.isnan(row.p)
    assert not row.loses


RIGHT = st.integers(0, 30)


@given(RIGHT, RIGHT, st.integers(30, 40), st.integers(0, 1), st.booleans())
def test_nothing_beats_another_unless_the_test_says_so(a, b, n, infeasible, same):
    def row(right: int, source: str = "x") -> Counted:
        return Counted(right, n, infeasible, 20, source, searched=PROBLEMS, policy="h2o",
                       settings={}, budget="0.5")  # fmt: skip

    first, second = row(a), row(b, "x" if same else "y")
    beats = first.beats(second)
    assert not (beats and second.beats(first))
    assert beats == (same and not infeasible and a > b and fisher_p(a, b, n) < SIGNIFICANT)
    low, high = first.interval
    assert low <= first.accuracy <= high
    assert first.loses == (a < 20 and fisher_p(a, 20, n) < SIGNIFICANT)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["0.5", "0.25"]),
                       st.sampled_from([True, False, None])), max_size=30)
)  # fmt: skip
def test_counting_is_that_of_a_loop(found):
    judged = {(episode, budget): right for episode, budget, right in found}
    results = [Judged(e, "h2o", b, right, right is None) for (e, b), right in judged.items()]
    results += [Judged(e, "full", "any", e % 2 == 0, False) for e in range(10)]
    rows = {row.budget: row for row in count(PROBLEMS, results, {}, "x") if row.policy == "h2o"}
    for budget in ("0.5", "0.25"):
        own = {e: right for (e, b), right in judged.items() if b == budget}
        if not own:
            assert budget not in rows
            continue
        row, feasible = rows[budget], [e for e, right in own.items() if right is not None]
        assert (row.n, row.infeasible) == (len(feasible), len(own) - len(feasible))
        assert row.right == sum(own[e] for e in feasible)
        assert row.full_right == sum(e % 2 == 0 for e in feasible)


@given(st.sampled_from(shipped().rows))
def test_what_was_counted_is_found_by_what_it_was_counted_with(row):
    found = shipped().for_(row.searched, row.policy, row.settings, row.budget)
    if row.n:
        assert found.exact
        assert found.counted.settings == row.settings
        assert changed(row.policy, row.settings) == changed(row.policy, found.counted.settings)
