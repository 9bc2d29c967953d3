"""Plots of results: which there are, and what is written of them."""

from __future__ import annotations

import builtins
import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import arborsim
from arborsim.core.errors import UsageError
from arborsim.play.results import Answered, aggregate
from arborsim.products.plan.page import PlanReport
from arborsim.products.plan.page import report_of as plan_report
from arborsim.products.plot import plots
from arborsim.products.replay import report as replay_report
from arborsim.products.sweep import report as sweep
from arborsim.report import images
from arborsim.report.report import Report, write
from arborsim.trace.reader import TraceReader
from tests.show.plan_synthetic import plan as plan_of
from tests.show.synthetic import result
from tests.sweep.grids import small

SHIPPED = Path(__file__).parents[2] / "traces" / "game24-tot.parquet"
TRACES = ("tree.parquet", "linear.parquet")


def plots_of(kind: str, raw: Any, *chosen: str) -> list[images.Plot]:
    report = replay_report.report_of(raw) if kind == "replay" else plan_report(PlanReport(raw))
    return plots.plots_of(report, *chosen)


@pytest.fixture(scope="module")
def replayed():
    return result(traces=TRACES, budgets=("0.1", "0.5"), pictures=False)


def test_a_replay_has_a_plot_for_each_trace(replayed) -> None:
    for kind in ("pareto", "heat"):
        made = plots_of("replay", replayed, kind)
        assert [plot.title.split(": ")[1].split(", ")[0] for plot in made] == list(TRACES)


@pytest.mark.parametrize("metric", ["kept", "time", ""])
def test_the_metric_that_is_named_is_drawn(replayed, metric) -> None:
    made = plots_of("replay", replayed, "pareto", metric)[0]
    rows = [row for row in aggregate(replayed.episodes) if row.trace == "tree.parquet"]
    values = [plots.METRICS[metric or "kept"].value(row) for row in rows]
    drawn = [y for trace in made.figure["data"] for y in trace["y"]]
    assert sorted(set(drawn)) == pytest.approx(sorted({round(value, 5) for value in values}))


@pytest.mark.parametrize("metric", ["error", "right"])
def test_a_metric_that_is_not_known_is_refused(replayed, metric) -> None:
    with pytest.raises(UsageError, match=rf"--metric {metric}: .* is not known of tree"):
        plots_of("replay", replayed, "pareto", metric)


def test_answers_counted_live_come_first(replayed) -> None:
    """Where they are known; the other trace is drawn by attention kept, with what that leaves."""
    recorded = TraceReader(SHIPPED).info.recording
    row = Answered(140, 200, 0, 144, "a run", budget="0.1", problems="game24")
    more = {"0.5": replace(row, right=150, budget="0.5"), "0.1": replace(row, right=90)}
    answers = {("tree.parquet", "h2o", "0.1"): row} | {
        ("tree.parquet", "streaming-llm", budget): each for budget, each in more.items()
    }  # fewer than three points are not drawn
    known = replace(replayed, recordings={"tree.parquet": recorded}, answers=answers)
    tree, linear = plots_of("replay", known)
    assert tree.title == "What memory buys: tree.parquet, Right answers"
    assert linear.title == "What memory buys: linear.parquet, Attention kept"
    drawn = [trace for trace in tree.figure["data"] if 70.0 in trace["y"]]
    assert drawn, "140 of 200"
    said = " ".join(linear.notes)
    assert "It does not rank answers" in said


def test_the_cliff_is_that_of_the_trace_s_problems(replayed) -> None:
    recorded = TraceReader(SHIPPED).info.recording
    known = replace(replayed, recordings={"tree.parquet": recorded})
    made = plots_of("replay", known, "cliff")
    assert all(plot.title.startswith("Answers by budget: tree.parquet, game24") for plot in made)
    assert any("h2o" in trace["name"] for trace in made[0].figure["data"])
    assert max(map(len, made[0].lines(80)[:-1])) <= 80
    with pytest.raises(UsageError, match="no answers were counted live on such problems"):
        plots_of("replay", replayed, "cliff")


def test_efficient_settings_are_said_below_their_numbers(replayed) -> None:
    made = plots_of("replay", replayed)[0]
    texts = next(t["text"] for t in made.figure["data"] if "text" in t)
    assert [note.split()[0] for note in made.notes[: len(texts)]] == list(texts)
    assert "\n".join(made.notes) in "\n".join(made.lines())


def test_a_heat_map_holds_every_policy_and_budget(replayed) -> None:
    (trace,) = plots_of("replay", replayed, "heat")[0].figure["data"]
    rows = {row.policy for row in aggregate(replayed.episodes) if not row.is_baseline}
    assert set(trace["y"]) == rows
    assert trace["x"] == ["budget 0.1", "budget 0.5"]
    assert all(len(row) == 2 for row in trace["z"])


@pytest.mark.parametrize(
    ("kind", "metric", "said"),
    [
        ("paretto", "", "unknown plot of replay results 'paretto': did you mean pareto?"),
        ("pareto", "tme", "unknown metric 'tme': did you mean time?"),
    ],
)
def test_unknown_names_are_one_line(replayed, kind, metric, said) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        plots_of("replay", replayed, kind, metric)


def test_a_plan_is_drawn_by_what_its_page_weighs() -> None:
    plan = plan_of()
    made = plots_of("plan", plan)
    assert "against cost" in made[0].title
    names = {trace["name"] for trace in made[0].figure["data"]}
    assert {row.machine for row in plan.met()} <= names
    assert plots_of("plan", plan, "load")
    with pytest.raises(UsageError, match="only replays have a choice"):
        plots_of("plan", plan, "pareto", "time")


def test_results_that_only_their_page_shows_are_refused() -> None:
    with pytest.raises(UsageError, match="no plots of validation results"):
        plots.plots_of(Report("validation", "", "", ()))


# --- files ---


@pytest.mark.parametrize("dark", [False, True])
def test_no_colour_is_left_a_name(replayed, dark) -> None:
    made = images.themed(images.stacked(plots_of("replay", replayed)), dark)
    assert "var(" not in repr(made)
    assert made["layout"]["paper_bgcolor"] == ("#1b2128" if dark else "#ffffff")


def test_plots_below_each_other_do_not_overlap(replayed) -> None:
    made = images.stacked(plots_of("replay", replayed))
    ends = [made["layout"][axis]["domain"] for axis in ("yaxis", "yaxis2")]
    assert all(0 <= low < high <= 1 for low, high in ends)
    assert all(below[1] < above[0] for above, below in itertools.pairwise(ends))
    legends = [made["layout"][legend]["y"] for legend in ("legend", "legend2")]
    assert all(legend > end[1] for legend, end in zip(legends, ends, strict=True))
    assert legends[1] < ends[0][0]


def test_a_page_asks_nobody_and_fits(replayed, tmp_path: Path, browser) -> None:
    path = tmp_path / "plot.html"
    images.write(plots_of("replay", replayed), path, command="arborsim replay", settings={})
    for width, scheme in ((1280, "light"), (390, "dark")):
        complaints: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened = context.new_page()
        opened.on("console", lambda said, to=complaints: to.append(said.text))
        opened.on("pageerror", lambda error, to=complaints: to.append(str(error)))
        opened.on("request", lambda asked, to=complaints: to.append(asked.url)
                  if not asked.url.startswith(("file:", "data:", "blob:")) else None)  # fmt: skip
        opened.goto(path.as_uri())
        for number in range(len(TRACES)):
            opened.wait_for_selector(f"#plot-{number} .main-svg")
        size = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        scrolled, seen = opened.evaluate(size)
        assert scrolled == seen
        context.close()
        assert complaints == []


def test_images_show_every_policy_and_are_the_same_again(replayed, tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no Chrome or Chromium on this machine")
    made = plots_of("replay", replayed)
    first, again, dots = tmp_path / "a.svg", tmp_path / "b.svg", tmp_path / "a.png"
    try:
        images.write(made, first)
        images.write(made, again)
        images.write(made, dots, dark=True)
    except UsageError as error:
        if "no answer within" in str(error):
            pytest.skip("Chrome does not answer kaleido on this machine")
        raise
    assert first.read_bytes() == again.read_bytes()
    text = first.read_text()
    for name in ("h2o", "hierarchy", "attention kept (%)", "tree.parquet"):
        assert name in text
    assert dots.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_at_the_width_of_a_phone(tmp_path: Path, browser: Any) -> None:
    """Groups are called so, none right is 0%, and no text covers another."""
    arborsim.sweep(small(tmp_path), tmp_path / "cells")
    report = arborsim.results(tmp_path / "cells", by="policy,budget").raw
    answers = Answered(0, 2, 0, None, "cells", budget="", problems="")
    wrong = [
        replace(row, answers=answers) if row.trace == "a.parquet" else row for row in report.rows
    ]
    made = sweep.report_of(replace(report, rows=tuple(wrong)), "arborsim results")
    write(made, tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    assert page.inner_text("#h-cells") == "Groups"
    page.locator("#plot-0-section").scroll_into_view_if_needed()
    page.wait_for_selector("#plot-0 .scatterlayer .point")
    assert "right answers 0%" in page.inner_text("body")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(OVERLAPS) == []


#: Texts, but for those of markers drawn in one place, whose boxes share more than an edge.
OVERLAPS = """() => {
  const all = [...document.querySelectorAll("#plot-0 text, .note, h2")].filter(
    each => each.textContent.trim() && each.getBoundingClientRect().width > 0);
  const boxes = all.map(each => each.getBoundingClientRect()), found = [];
  for (let i = 0; i < all.length; i++)
    for (let j = 0; j < i; j++) {
      const a = boxes[i], b = boxes[j];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const up = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1.5 && up > 3) found.push([all[i].textContent, all[j].textContent]);
    }
  return found;
}"""


def test_without_kaleido_it_says_what_to_install(replayed, tmp_path: Path, monkeypatch) -> None:
    there = builtins.__import__

    def lacking(name: str, *rest, **more):
        if name == "kaleido":
            raise ImportError(name)
        return there(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(UsageError, match=r"pip install 'arborsim\[images\]', or write \.html"):
        images.write(plots_of("replay", replayed), tmp_path / "a.svg")


def test_an_ending_without_a_format_is_refused(replayed, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="format of --out"):
        images.write(plots_of("replay", replayed), tmp_path / "a.pdf")
