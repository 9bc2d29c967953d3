"""The page of searches is made of the committed figures, and its statistics are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.searches_depth import Depths  # noqa: E402
from benchmarks.searches_figures import Cell, Ratio, Results, Searches  # noqa: E402
from benchmarks.searches_page import page  # noqa: E402
from docs.tools import depth  # noqa: E402

REPORT = ROOT / "reports" / "search"
REBASE = Cell("rebase", "", 16)


@pytest.fixture(scope="module")
def depths() -> Depths:
    return Depths.read(ROOT / "reports" / "claims" / "ets.parquet")


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.read(REPORT / "results.parquet")


def test_the_page_is_made_of_the_committed_searches(results: Results, depths: Depths) -> None:
    assert (REPORT / "README.md").read_text() == page(results, depths)


def test_the_figure_is_drawn_from_the_committed_searches(depths: Depths) -> None:
    assert depth.FIGURE.read_text() == depth.figure(depths)


def test_what_ets_saves_grows_with_depth(depths: Depths) -> None:
    """The page says so."""
    for width in depths.widths:
        saved = {levels: depths.kv(levels, width, "ets", 2.0) for levels in (3, 6, 10, 16)}
        found = [ratio for ratio in saved.values() if ratio]
        assert [each.value for each in found] == sorted(each.value for each in found)
        assert found[0].high < found[1].low < found[1].high < found[2].low


def test_every_search_ran_on_every_problem_of_its_bank(results: Results) -> None:
    for name, facts in results.facts.items():
        for cell, rows in results.bank(name).groups.items():
            if cell.policy == "full":
                assert sorted(rows.index) == list(range(facts["problems"])), (name, cell)


def test_thoughts_were_missed_by_no_search(results: Results) -> None:
    """A bank is grown for exactly the searches that run on it."""
    missed = results.rows[results.rows["bank_misses"] > 0]
    assert missed.empty, missed[["bank", "algorithm", "swept", "width"]].drop_duplicates()


def searches(**cells: tuple[list[bool], list[int]]) -> Searches:
    """REBASE and ETS at some values, from answers and KV sizes per problem."""
    groups = {}
    for name, (correct, kv) in cells.items():
        algorithm, _, value = name.partition("_")
        swept = f"lambda_b={value.replace('_', '.')}" if value else ""
        rows = {"correct": correct, "kv_tokens": kv, "bank_misses": 0, "model_calls": 4}
        groups[Cell(algorithm, swept, 16)] = pd.DataFrame(rows)
    return Searches("made", {"widths": [16]}, groups)


def test_a_ratio_is_of_sums_and_its_interval_of_problems() -> None:
    made = searches(rebase=([True] * 4, [30, 10, 10, 10]), ets=([True] * 4, [10, 10, 10, 10]))
    found = made.ratio(Cell("ets", "", 16), REBASE, "kv_tokens")
    assert (found.value, found.problems) == (1.5, 4)
    # The first problem is drawn k of 4 times: 1 + k / 2, and k is binomial(4, 1/4): 0 in 32%, 3 or
    # 4 in 5.1% and 4 in 0.4% of all draws.
    assert (found.low, found.high) == (1.0, 2.5)


def test_a_constant_ratio_has_no_width() -> None:
    made = searches(rebase=([True] * 3, [20, 40, 80]), ets=([True] * 3, [10, 20, 40]))
    assert made.ratio(Cell("ets", "", 16), REBASE, "kv_tokens") == Ratio(2.0, 2.0, 2.0, 3)


def test_ratios_are_of_the_problems_that_both_have() -> None:
    made = searches(rebase=([True] * 3, [20, 40, 80]), ets=([True] * 2, [10, 10]))
    assert made.ratio(Cell("ets", "", 16), REBASE, "kv_tokens").value == 3.0
    assert made.paired(Cell("ets", "", 16), REBASE).judged == 2


def test_the_papers_rule_takes_the_largest_value_that_loses_nothing() -> None:
    right, worse = [True, True, False], [True, False, False]
    made = searches(
        rebase=(right, [1, 1, 1]), ets=(worse, [1, 1, 1]), ets_1_25=(right, [1, 1, 1]),
        ets_1_5=([False, True, True], [1, 1, 1]), ets_2=(worse, [1, 1, 1]),
    )  # fmt: skip
    chosen, tried = made.chosen("ets", 16)
    assert chosen == Cell("ets", "lambda_b=1.5", 16)
    assert [cell.lambda_b for cell in tried] == [1.0, 1.25, 1.5, 2.0]
    assert searches(rebase=(right, [1] * 3), ets=(worse, [1] * 3)).chosen("ets", 16)[0] is None


def test_a_swept_lambda_d_is_no_lambda_b() -> None:
    assert np.isnan(Cell("ets", "lambda_d=1.5", 16).lambda_b)


def test_facts_of_a_bank_say_how_it_was_made(results: Results) -> None:
    for name, facts in results.facts.items():
        assert facts["problems"] >= 30, name
        assert facts["seed"] == 0, name
        assert json.dumps(facts["software"]).count("torch") == 1
