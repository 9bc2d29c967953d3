"""Logs of the tree-of-thoughts program: what a trace holds is what the log said."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.cli.app import main
from arborsim.trace.episode import Episode
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.sources import read_list
from arborsim.trace.importers.tot import TotLog
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import KINDS, End, Kind
from tests.trace.import_helpers import Change, imported, parents, recording, rows, tot_problem

SMALL = {
    "steps": [
        {"x": "1 2", "ys": [""], "new_ys": ["ab\n", "c\n", "ab\n"], "values": [60.0, 0, 3],
         "select_new_ys": ["ab\n", "c\n"]},
        {"x": "1 2", "ys": ["ab\n", "c\n"], "new_ys": ["ab\nd\n", "c\nefg\n"],
         "values": [0.003, 30], "select_new_ys": ["c\nefg\n", "ab\nd\n"]},
    ],
    "ys": ["c\nefg\n", "ab\nd\n"],
    "infos": [{"r": 0}, {"r": 1}],
}  # fmt: skip


def read_one(path: Path, item: Any, log: TotLog) -> Episode:
    path.mkdir(exist_ok=True)
    source = path / "log.json"
    source.write_text(json.dumps([item]))
    reader = imported(source, read_list(source, log.search_of), path / "out.parquet")
    return next(reader.episodes(text=True))


def test_a_small_log_row_by_row(tmp_path: Path) -> None:
    episode = read_one(tmp_path, SMALL, TotLog(tokens_per_character=1, prompt_tokens=2))
    found = list(
        zip(
            [KINDS[kind] for kind in episode.kind],
            episode.node.tolist(),
            episode.parent.tolist(),
            episode.iteration.tolist(),
            strict=True,
        )
    )
    tokens = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (1, 3), (3, 3)]
    later = [(4, 1, 4), (5, 2, 4), (4, 1, 5), (5, 2, 5), (5, 2, 6), (5, 2, 7)]
    assert found == [
        *[("prefill", 0, -1, 0)] * 2,
        *[("transition", node, 0, 0) for node in (1, 2, 3)],
        *[("token", node, 0, step) for node, step in tokens],
        *[("boundary", node, 0, 3) for node in (1, 2, 3)],
        ("prune", 3, 0, 3),  # the second of the equal proposals
        ("transition", 4, 1, 3),
        ("transition", 5, 2, 3),
        *[("token", *rest) for rest in later],
        ("boundary", 4, 1, 7),
        ("boundary", 5, 2, 7),
        ("answer", 4, 1, 7),  # the right one, though it was selected second
    ]
    closed = rows(episode, Kind.BOUNDARY)
    assert episode.reward[closed] == pytest.approx([1, 0, 0.05, 0.00005, 0.5])
    assert episode.text is not None
    assert [episode.text[row] for row in closed] == ["ab\n", "c\n", "ab\n", "d\n", "efg\n"]
    assert episode.text[0] == "1 2"
    assert episode.text[-1] == "ab\nd\n"
    assert episode.correct[closed].tolist() == [-1, -1, -1, 1, 0]
    assert episode.correct[-1] == 1
    assert episode.end is not None
    assert episode.end[closed].tolist() == [0, 0, 0, 1, 1]
    assert episode.answer == (None,) * episode.num_rows  # no line says "Answer:"
    assert (episode.token == -1).all()


def relogged(episode: Episode, scale: float) -> list[dict[str, Any]]:
    """The steps of a log, made from nothing but the trace."""
    assert episode.text is not None
    up, whole, pruned = parents(episode), {0: ""}, set(episode.node[rows(episode, Kind.PRUNE)])
    steps: list[dict[str, Any]] = []
    for row in rows(episode, Kind.BOUNDARY):
        node = int(episode.node[row])
        text = episode.text[row]
        assert text is not None
        whole[node] = whole[up[node]] + text
        if len(steps) < episode.depth[row]:
            steps.append({"new_ys": [], "values": [], "kept": []})
        steps[-1]["new_ys"].append(whole[node])
        steps[-1]["values"].append(float(episode.reward[row]) * scale)
        if node not in pruned:
            steps[-1]["kept"].append(whole[node])
    return steps


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), per_character=st.floats(0.01, 2))
def test_the_log_can_be_written_again_from_the_trace(
    tmp_path_factory: pytest.TempPathFactory, seed: int, per_character: float
) -> None:
    item = tot_problem(seed)
    episode = read_one(tmp_path_factory.mktemp("log"), item, TotLog(per_character))
    steps = relogged(episode, 60.0)
    assert len(steps) == len(item["steps"])
    for found, logged in zip(steps, item["steps"], strict=True):
        assert found["new_ys"] == logged["new_ys"]
        assert found["values"] == pytest.approx(logged["values"])
        assert Counter(found["kept"]) == Counter(logged["select_new_ys"])
    assert episode.correct[-1] == max(info["r"] for info in item["infos"])


def change(*keys: Any, to: Any) -> Change:
    def apply(item: Any) -> None:
        for key in keys[:-1]:
            item = item[key]
        item[keys[-1]] = to

    return apply


DAMAGE = {
    "no steps": (change("steps", to=[]), "no steps"),
    "steps are text": (change("steps", to="x"), "steps is 'x'"),
    "a value too few": (change("steps", 0, "values", to=[1, 2]), "2 values for 3 proposals"),
    "a value is text": (change("steps", 0, "values", 1, to="1"), "value 1 is '1'"),
    "a value is no number": (change("steps", 0, "values", 1, to=math.nan), "value 1 is nan"),
    "a value is huge": (change("steps", 0, "values", 1, to=10**400), "a huge number"),
    "a value beyond the scale": (change("steps", 0, "values", 0, to=61), "more than 60"),
    "a negative value": (change("steps", 0, "values", 0, to=-1), "value 0 is -1"),
    "an orphan": (change("steps", 1, "new_ys", 0, to="x\n"), "step 1: proposal 0 continues none"),
    "an invented selection": (change("steps", 0, "select_new_ys", 0, to="zz\n"), "not proposed"),
    "a selection twice": (change("steps", 0, "select_new_ys", to=["c\n", "c\n"]), "selection 1"),
    "other states": (change("steps", 1, "ys", to=["ab\n"]), "step 1: ys are not"),
    "another problem": (change("steps", 1, "x", to="3 4"), "step 1: x differs"),
    "a state is a number": (change("steps", 1, "ys", 0, to=5), "ys is 5 instead of text"),
    "half a character": (change("steps", 0, "x", to="\ud800"), "surrogate"),
    "a verdict too few": (change("infos", to=[{"r": 1}]), "1 verdicts for 2"),
    "a verdict of 2": (change("infos", 0, "r", to=2), "verdict 0 is 2"),
    "a verdict without r": (change("infos", 0, to={}), "r is missing"),
    "other final states": (change("ys", to=["c\n"]), "final ys"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str) -> None:
    item = json.loads(json.dumps(SMALL))
    apply, named = DAMAGE[case]
    apply(item)
    with pytest.raises(Damage, match=re.escape(named)):
        TotLog().search_of(item)


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv}  # fmt: skip


def value_of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    assert isinstance(node, ast.Constant)
    return Fraction(str(node.value))


def makes_24(problem: str, state: str) -> bool:
    """Does the last line use exactly the problem's numbers, and make 24 of them?"""
    said = state.strip().split("\n")[-1].lower().replace("answer: ", "").split("=")[0].strip()
    if sorted(re.findall(r"\d+", said)) != sorted(re.findall(r"\d+", problem)):
        return False
    try:
        return value_of(ast.parse(said, mode="eval").body) == 24
    except (SyntaxError, ZeroDivisionError, KeyError, AssertionError):
        return False


@pytest.fixture(scope="module")
def gpt4(tmp_path_factory: pytest.TempPathFactory) -> TraceReader:
    log = recording("tot-gpt4-game24-bfs.json")
    out = tmp_path_factory.mktemp("gpt4") / "game24.parquet"
    return imported(log, read_list(log, TotLog().search_of), out)


def test_gpt4_solves_69_of_100_puzzles_by_what_the_trace_says(gpt4: TraceReader) -> None:
    by_verdict = by_arithmetic = states = proposals = selections = 0
    for episode in gpt4.episodes(text=True):
        assert episode.text is not None
        steps = relogged(episode, 60.0)
        kept = steps[-1]["kept"]
        states += len(kept)
        by_arithmetic += any(makes_24(episode.text[0] or "", state) for state in kept)
        by_verdict += int(episode.correct[-1])
        proposals += sum(len(step["new_ys"]) for step in steps)
        # The program keeps the five best, the first ones of equal value.
        for step in steps:
            best = sorted(range(len(step["values"])), key=lambda i: -step["values"][i])[:5]
            selections += Counter(step["kept"]) == Counter(step["new_ys"][i] for i in best)
    assert (gpt4.num_episodes, by_verdict, by_arithmetic) == (100, 69, 69)
    assert (states, proposals, selections) == (500, 8412, 400)


def test_gpt4s_answers_are_read_off_its_last_lines(gpt4: TraceReader) -> None:
    finished = answers = right = 0
    for episode in gpt4.episodes(text=True):
        assert episode.end is not None
        assert episode.answer is not None
        ended = np.flatnonzero(episode.end)
        assert set(episode.end[ended]) == {End.FINISHED}
        assert set(episode.depth[ended]) == {4}
        finished += len(ended)
        for row in ended:
            answer = episode.answer[row]
            answers += answer is not None
            if answer is not None and episode.correct[row] == 1:
                right += value_of(ast.parse(answer.split("=")[0], mode="eval").body) == 24
    assert (finished, answers, right) == (2240, 162, 119)


def test_inspect_shows_the_logs_own_result(
    gpt4: TraceReader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(gpt4.path), "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    assert (accuracy["correct"], accuracy["judged"]) == (69, 100)
