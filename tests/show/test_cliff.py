"""The eviction cliff: what is drawn are the answers that come with the package."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.play.results import ReplayResult
from arborsim.products.plot.plots import plots_of
from arborsim.products.replay import figures as replay_figures
from arborsim.products.replay.answers import (
    Answers,
    Counted,
    Searched,
    answered,
    defaults_of,
    shipped,
)
from arborsim.products.replay.cliff import MOST, MOST_INFEASIBLE, cliffs, of_replay
from arborsim.products.replay.report import report_of
from arborsim.trace.reader import TraceReader
from docs.tools import cliff as drawing
from tests.show.synthetic import result

ROOT = Path(__file__).parents[2]
GAME = TraceReader(ROOT / "traces/game24-tot.parquet").info.recording
PROBLEMS = Searched("chain", "linear", "arborsim-chain", {"lines": 32}, {}, 0.0)


def test_the_committed_figure_is_that_of_the_shipped_answers():
    assert drawing.FIGURE.read_text() == drawing.figure(), "run `python docs/tools/cliff.py`"


def test_the_points_of_the_figure_are_rows_of_the_file():
    """Read from the picture on one side, from the file by a loop of its own on the other."""
    (text,) = re.findall("<metadata>(.*?)</metadata>", drawing.FIGURE.read_text())
    drawn = json.loads(unescape(text))
    assert {title for title, *_ in drawn} == set(drawing.PANELS)
    with (ROOT / "arborsim/products/replay/answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    for title, label, budget, right, n in drawn:
        policy, lines = label.split()[0], re.search(r"lines (\d+)", title)
        options = {"lines": int(lines.group(1))} if lines else {}
        drawn_here = policy, budget, str(right), str(n), options
        assert any(
            (r["policy"], r["budget"], r["right"], r["n"], json.loads(r["options"])) == drawn_here
            for r in rows
        ), label
    policies = {label.split()[0] for _, label, *_ in drawn}
    assert {"h2o", "streaming-llm", "epikv", "random", "pyramidkv"} <= policies


def test_circles_stand_where_their_accuracy_is():
    picture = drawing.FIGURE.read_text()
    found = re.findall(r'cy="([\d.]+)" r="4.5" [^>]*><title>[^:]*: (\d+) of (\d+) right', picture)
    assert len(found) > 20
    for y, right, n in found:
        share, height = int(right) / int(n), drawing.PANEL - drawing.TOP - drawing.BOTTOM
        feet = [panel.top + drawing.PANEL - drawing.BOTTOM for panel in drawing.panels()]
        assert min(abs(float(y) - (foot - share * height)) for foot in feet) < 0.06


def test_a_colour_stands_for_one_setting_and_its_legend_says_which():
    """Settings that are not those of a policy's authors stand beside its name."""
    picture = drawing.FIGURE.read_text()
    circles = re.findall(r'r="4.5" fill="var\((--\w+)\)"><title>(.*?) at budget', picture)
    legend = dict(re.findall(r'stroke="var\((--\w+)\)" stroke-width="3"/>\s*'
                             r'<text [^>]*>([^<]*)</text>', picture))  # fmt: skip
    by_colour: dict[str, set[str]] = {}
    for colour, label in circles:
        by_colour.setdefault(colour, set()).add(unescape(label))
    assert all(len(labels) == 1 for labels in by_colour.values()), by_colour
    labels = [label for (label,) in by_colour.values()]
    assert len(set(labels)) == len(labels) > 8
    values = [picture.split(f"{colour}: ")[number].split(";")[0]
              for colour in by_colour for number in (1, 2)]  # fmt: skip
    assert len(set(values[::2])) == len(set(values[1::2])) == len(labels)
    counted = {row.label: row for row in shipped().rows}
    for colour, (label,) in by_colour.items():
        row = counted[label]
        theirs = defaults_of(row.policy)
        differ = {name for name, value in row.settings.items() if theirs[name] != value}
        assert legend[colour].count(",") == len(differ) - ("inverted" in label)
    assert defaults_of("h2o")["per"] == "head"
    assert legend[drawing.colours()["h2o"]] == "h2o"
    assert legend[drawing.colours()["h2o per=shared"]] == "h2o, one ranking"


def row(policy: str, budget: str, right: int = 5, n: int = 10, infeasible: int = 0) -> Counted:
    return Counted(right, n, infeasible, 8, "x", searched=PROBLEMS, policy=policy, settings={},
                   budget=budget)  # fmt: skip


def test_budgets_that_hold_few_searches_are_left_out_and_said():
    """What is left of them are short searches: more of these are right."""
    (made,) = cliffs([row("h2o", "0.5"), row("h2o", "0.25", 9, 9, 11), row("h2o", "0.3", 4, 9, 1)])
    (line,) = made.lines
    assert [point.budget for point in line.points] == ["0.3", "0.5"]
    assert MOST_INFEASIBLE == 0.1
    assert "Not drawn, for the budget could not hold many: h2o at 0.25 (11 of 20)" in made.note


@given(st.lists(st.tuples(st.sampled_from(["h2o", "tova", "raas"]), st.integers(1, 9),
                          st.integers(0, 10)), min_size=1))  # fmt: skip
def test_a_line_has_each_budget_once_in_order(found):
    rows = [row(policy, f"0.{tenth}", right) for policy, tenth, right in found]
    (made,) = cliffs(rows)
    first = {}
    for policy, tenth, right in found:
        first.setdefault((policy, f"0.{tenth}"), right)
    seen = {}
    for line in made.lines:
        assert [p.share for p in line.points] == sorted({p.share for p in line.points})
        seen |= {(line.policy, p.budget): p.right for p in line.points}
    assert seen == first, "of two counts the first, as where a setting is looked up"


def game(**settings) -> ReplayResult:
    replay = result(traces=("g",), policies=("full", "h2o", "epikv"), budgets=("0.5",))
    policies = {"full": {}, "h2o": {"per": "shared"}, "epikv": {"recent": 8}} | settings
    return ReplayResult(replay.episodes, (), {}, (), recordings={"g": GAME}, policies=policies)


def test_a_replay_is_plotted_by_what_was_counted_for_its_task():
    (made,) = plots_of(report_of(answered(game())), "cliff")
    assert made.title == "Answers by budget: g, game24, tot-bfs"
    assert "h2o" in "".join(made.lines())
    (by_memory,) = plots_of(report_of(answered(game())))
    assert by_memory.title == "What memory buys: g, Right answers"


def test_a_replays_page_shows_its_own_task_and_settings():
    (made,) = of_replay(game(), "g")
    coloured = [t["name"] for t in made.figure["data"] if t.get("name") != "others"]
    assert {"h2o per=shared", "epikv recent=8"} <= set(coloured)
    assert made.labels[1] == "game24, tot-bfs"
    assert not of_replay(game(), "other")
    assert not of_replay(game(), "g", Answers())[:0]


def test_rows_of_a_replay_have_their_answers():
    rows = {row.policy: row.answers for row in answered(game()).rows()}
    assert (rows["h2o"].right, rows["h2o"].n) == (140, 200)
    assert rows["epikv"].right == 138
    assert rows["full"].right == 144
    assert rows["full"].source == rows["h2o"].source
    assert all(each.exact for each in rows.values())
    others = {row.policy: row.answers for row in answered(game(h2o={"sinks": 3})).rows()}
    assert others["h2o"] is None


@pytest.mark.parametrize(
    "searched", {row.searched.family: row.searched for row in shipped().rows}.values()
)
def test_every_figure_is_of_one_kind_of_problems(searched):
    for made in cliffs(shipped().of(searched)):
        assert all(p.searched == made.searched for line in made.lines for p in line.points)
        assert made.full is not None
        figure = made.figure(made.chosen())
        assert len([t for t in figure["data"] if t.get("name") != "others"]) <= MOST + 1


def test_equal_answers_are_named_together_and_oracles_have_no_row_of_answers():
    rows = answered(game()).rows()
    texts = replay_figures.pareto(rows, replay_figures.RIGHT).texts
    assert "not visibly different" in texts[0]
    assert all(name in texts[0] for name in ("h2o", "epikv"))
    oracle = replace(rows[-1], policy="oracle", answers=None)
    first = replay_figures.heat([*rows, oracle], replay_figures.RIGHT)
    assert set(first.figure["data"][0]["y"]) == {"h2o per=shared", "epikv recent=8"}
