"""The small table and the sentence at the end of a plan whose answers were counted."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from arborsim.products.plan.page import PlanReport, report_of
from arborsim.products.plan.printed import counted, finding, fitting
from arborsim.products.plan.recommend import Demanded, recommend
from arborsim.products.plan.results import Fleet, PlanResult
from arborsim.products.plan.statistics import Estimate, cost_per_solved
from arborsim.report.text import print_report
from tests.plan.make import small_plan

#: Cost of 1,000 searches, and the share of right answers with its interval.
FULL = (0.10, (0.97, 0.94, 0.99))
CHEAPER = (0.08, (0.96, 0.92, 0.98))
WRONG = (0.08, (0.5, 0.45, 0.6))


def plan_of(*policies: tuple[float, tuple[float, float, float]]) -> PlanResult:
    """Full retention and one more policy on the first GPU, at these costs and shares."""
    plan = small_plan()
    rows = []
    for row, (cost, share) in zip(plan.candidates, policies, strict=False):
        assert row.quality is not None
        assert isinstance(row.fleet, Fleet)
        right = Estimate(*share, 200)
        solved = cost_per_solved(cost / 1000, right)
        fleet = replace(row.fleet, cost_per_1000=(cost, cost), cost_per_solved=(solved, solved))
        rows.append(replace(row, quality=replace(row.quality, accuracy=right), fleet=fleet))
    both = replace(plan, candidates=tuple(rows))
    return replace(both, recommendation=recommend(both, Demanded(accuracy=0.9)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (CHEAPER, "a solved search costs 19% less under streaming-llm at 0.5 than under full "
                  "retention, with 96.0% of 200 right (full retention: 97.0% of 200)."),
        (WRONG, "full retention is recommended, with 97.0% of 200 right; streaming-llm at 0.5 "
                "(50.0% of 200) loses answers: a solved search costs 55% more."),
        ((0.12, (0.96, 0.92, 0.98)), "97.0% of 200 right; a solved search costs 21% more under "
                                     "streaming-llm at 0.5."),
        ((0.08, (0.02, 0.0, 0.05)), "loses answers: a solved search costs 38.8 times as much."),
    ],
)  # fmt: skip
def test_the_sentence_says_what_is_saved_and_what_is_lost(
    other: tuple[float, tuple[float, float, float]], words: str
) -> None:
    plan = plan_of(FULL, other)
    rows = counted(plan)
    assert [row.policy for row in rows] == ["full", "streaming-llm"]
    said = finding(plan, rows)
    assert words in said
    assert said.startswith("At 20 searches/s, ")


def test_the_table_and_the_sentence_are_printed() -> None:
    plan = plan_of(FULL, CHEAPER)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_report(report_of(PlanReport(plan)), console, notes=True)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    last = text[text.index("counted live") :]
    assert "97.0% of 200" in last
    assert "96.0% of 200" in last
    assert finding(plan, counted(plan)) in " ".join(last.split())
    assert max(map(len, last.splitlines())) <= 80


def test_searches_fit_by_their_peaks() -> None:
    row = small_plan().candidates[0]
    assert row.pool is not None
    assert row.alone is not None
    assert fitting(row) == row.pool.kv_bytes / row.alone.peak_hbm_bytes
    assert fitting(replace(row, pool=None)) != fitting(row)


def test_nothing_is_compared_where_nobody_counted() -> None:
    assert counted(small_plan()) == []
    assert counted(plan_of(FULL)) == []
