"""What is said of answers, and the live run that would count them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.play.results import ReplayResult, Row
from arborsim.products.replay.answers import Searched, answered
from arborsim.products.replay.answers_words import deciding, footnotes, short, would_decide
from arborsim.products.replay.counting import known_answers
from arborsim.products.replay.words import summarise
from arborsim.trace.reader import TraceReader
from tests.show.synthetic import result

ROOT = Path(__file__).parents[2]


def replayed(trace: str, budget: str = "0.4", **settings) -> tuple[ReplayResult, list[Row]]:
    replay = result(traces=("t",), policies=("full", "h2o", "epikv"), budgets=(budget,))
    recording = TraceReader(ROOT / f"traces/{trace}.parquet").info.recording
    policies = {"full": {}, "h2o": {"per": "shared"}, "epikv": {"recent": 128}} | settings
    found = answered(
        ReplayResult(replay.episodes, (), {}, (), recordings={"t": recording}, policies=policies)
    )
    return found, list(found.rows())


def test_the_command_repeats_problems_search_and_settings():
    replay, rows = replayed("chain-tree", h2o={"sinks": 3})
    assert deciding(rows, replay) == (
        "arborsim live --task chain --lines 96 --search dpts --temperature 0.9 --set "
        "search.steps=150 --noise 0.15 --dead-penalty 0.8 --policy h2o,epikv --budget 0.4 "
        "--set h2o.sinks=3 --episodes 100 --out answers.jsonl"
    )


def test_a_composition_is_named_by_its_file():
    replay, _ = replayed("chain-tree", mine={"place.alpha": 0.5})
    own = tuple(
        replace(each, policy="mine") if each.policy == "epikv" else each for each in replay.episodes
    )
    replay = replace(replay, episodes=own)
    command = deciding(list(replay.rows()), replay)
    assert "--policy h2o,mine.toml --budget 0.4" in command
    assert "place.alpha" not in command  # the file says so


def test_the_command_runs_and_its_log_answers_the_replay(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    replay, rows = replayed("game24-tot", "0.9", epikv={"recent": 9})
    command = shlex.split(deciding(rows, replay))
    command[command.index("--episodes") + 1] = "1"
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0
    capsys.readouterr()
    again = answered(replay, known_answers([tmp_path / "answers.jsonl"]))
    found = {row.policy: row.answers for row in again.rows()}
    assert {policy: each.n for policy, each in found.items()} == {"full": 1, "h2o": 1, "epikv": 1}
    assert all(each.exact and each.source.endswith("answers.jsonl") for each in found.values())
    assert would_decide(list(again.rows()), again) == ""


def test_tasks_that_live_runs_do_not_judge_have_no_command():
    replay, rows = replayed("game24-tot")
    recording = replay.recordings["t"] | {"task": "prompts", "model": "mine"}
    other = replace(replay, recordings={"t": recording}, answers={})
    rows = list(other.rows())
    assert deciding(rows, other) == ""
    assert "live runs judge no answers of prompts" in would_decide(rows, other)
    assert would_decide(rows, replace(other, recordings={})) == ""
    assert Searched.of_recording(recording).family == ("prompts", "tot-bfs", "mine")


def test_what_is_not_the_same_is_marked_and_said():
    _, rows = replayed("chain-linear", "0.75")
    texts = {row.policy: short(row) for row in rows}
    assert texts["h2o"] == "0/40 @0.7*"
    assert texts["epikv"] == ""
    said = " ".join(footnotes(rows))
    assert "; @: at this budget, not the row's; " in said
    assert "*: other problems of the task than this trace's (lines 12" in said
    assert "tokens really removed, on chain (lines 12), " in said


def test_notes_tell_masked_tokens_from_removed_ones():
    """Full retention removes nothing; what was counted under a mask is known by its source."""
    _, rows = replayed("game24-tot", "0.5", epikv={"recent": 8})
    assert [row.policy for row in rows] == ["full", "h2o", "epikv"]
    assert "live, tokens really removed, on game24" in footnotes(rows)[0]
    masked = [
        replace(row, answers=replace(row.answers, source=f"{row.answers.source}, masked"))
        for row in rows
    ]
    both = [rows[0], masked[1], rows[2]]
    assert "live, tokens really removed, or masked (h2o), on game24" in footnotes(both)[0]
    assert "live, tokens masked, not removed, on game24" in footnotes([rows[0], *masked[1:]])[0]


def test_settings_that_are_not_the_defaults_stand_beside_the_name():
    _, rows = replayed("chain-tree", epikv={"recent": 128}, h2o={"per": "shared", "sinks": 3})
    assert [row.label for row in rows] == ["full", "h2o per=shared sinks=3", "epikv"]
    assert any("h2o per=shared sinks=3 at 0.4" in line for line in summarise(rows))
    _, rows = replayed("chain-tree", h2o={"per": "head"})
    assert [row.label for row in rows] == ["full", "h2o", "epikv"]
