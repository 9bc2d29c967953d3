"""From searches to rows, against REBASE, and the paper's choice of lambda_b."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.measurements import Measurements, TimeSplit
from arborsim.products.search.results import (
    Paired,
    SearchResult,
    Simulated,
    paired,
    rows_of,
    verdicts,
)
from arborsim.searches import find_search, make_search, search_names
from arborsim.searches.arms import Sweep, arms_of, split_settings

PLAIN = SearchResult(
    "t", 0, "rebase", "", 16, "full", "any", True, 100, 120, 2, 8, 30, 200, 10, 3, 1, 4,
    Simulated(Measurements(generated_tokens=200, time=TimeSplit(decode_s=2.0)), 210, math.nan,
              50.0, 800, 40.0),
)  # fmt: skip


def result(algorithm: str, episode: int, correct: bool | None, **others: object) -> SearchResult:
    known = {"by_levels": find_search(algorithm).by_levels, **others}
    return replace(PLAIN, algorithm=algorithm, episode=episode, correct=correct, **known)


def test_rows_by_hand() -> None:
    half = replace(
        PLAIN.simulated,
        measured=Measurements(generated_tokens=100, time=TimeSplit(decode_s=0.5)),
        hbm_kv_byte_s=10.0,
    )
    found = rows_of([
        result("rebase", 0, True), result("rebase", 1, False),
        result("ets", 0, True, kv_tokens=40, simulated=half, generated_tokens=100),
        result("ets", 1, None, kv_tokens=60, simulated=half, generated_tokens=100),
        result("ets", 0, True, width=64),
    ])  # fmt: skip
    rebase, ets, alone = found
    assert (rebase.right, rebase.judged, rebase.searches, rebase.accuracy) == (1, 2, 2, 0.5)
    assert (rebase.low, rebase.high) == pytest.approx((0.01258, 0.98742), abs=1e-5)
    assert (ets.right, ets.judged, ets.searches, ets.accuracy) == (1, 1, 2, 1.0)
    assert ets.low == pytest.approx(0.025)  # one of one: alpha / 2
    assert ets.figures["kv_tokens"] == 50
    assert ets.times("kv_tokens") == 0.5
    assert rebase.times("kv_tokens") == 1.0
    assert ets.times("total_s") == 0.25
    assert ets.times("hbm_kv_byte_s") == 0.2
    assert ets.figures["tokens_per_s"] == 200.0
    assert ets.missed == 2 / 18  # one miss beside eight thoughts, twice
    assert alone.reference == {}
    assert math.isnan(alone.times("kv_tokens"))


def test_pairs_and_their_interval() -> None:
    mine = [result("ets", i, c) for i, c in enumerate([True, True, False, None, True])]
    theirs = [result("rebase", i, c) for i, c in enumerate([True, False, True, True, False])]
    found = paired(mine, theirs)
    assert found == Paired(judged=4, right=3, reference_right=2, gained=2, lost=1, kv_times=1.0)
    assert found is not None
    assert found.difference == 0.25
    low, high = found.interval()
    assert -1 <= low < 0.25 < high <= 1
    low, high = Paired(2, 0, 0, 0, 0).interval()  # two problems that tell nothing apart
    assert low == -high
    assert high == pytest.approx(1 - 0.0125**0.5)
    assert paired([result("ets", 0, None)], theirs) is None


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 200))
def test_the_interval_holds_the_difference(gained: int, lost: int, same: int) -> None:
    if gained + lost + same:
        found = Paired(gained + lost + same, 0, 0, gained, lost)
        low, high = found.interval()
        assert low <= found.difference <= high


def sweep_results(rights: dict[str, int], reference: int, problems: int) -> list[SearchResult]:
    found = [result("rebase", i, i < reference) for i in range(problems)]
    for value, right in rights.items():
        swept = f"lambda_b={value}"
        found += [result("ets", i, i < right, swept=swept, kv_tokens=50) for i in range(problems)]
    return found


def test_the_paper_takes_the_largest_that_costs_nothing() -> None:
    (line,) = verdicts(sweep_results({"1": 52, "1.5": 50, "1.75": 49, "2": 48}, 50, 100))
    assert line.startswith("ets at width 16: lambda_b 1.5 is the largest within 0.2 points")
    assert "50 right against 50 of 100" in line
    assert "KV size 0.50 times REBASE's" in line
    (line,) = verdicts(sweep_results({"1": 500, "1.25": 499, "1.5": 498, "2": 497}, 500, 1000))
    assert "lambda_b 1.5 is the largest" in line  # 0.2 points of 1000 are two problems
    (line,) = verdicts(sweep_results({"1": 9, "2": 8, "3": 20}, 10, 20))  # 3 is out of range
    assert "no lambda_b is within 0.2 points of REBASE; 1 comes closest" in line
    assert verdicts([result("ets", 0, True)]) == []


def test_searches_take_their_width_or_run_once() -> None:
    once = {"linear": 1, "dpts": 4, "mcts": 1, "tot-dfs": 1}
    for name in search_names():
        arms = arms_of(name, [16, 64], {})
        slots = [arm.make().slots for arm in arms]
        if name in once:
            assert [(arm.width, arm.make().slots) for arm in arms] == [(once[name], once[name])]
        elif name == "tot-bfs":
            assert slots == [15, 60]  # 5 states with 3 and with 12 children
        else:
            assert slots == [16, 64]
    assert [arm.width for arm in arms_of("tot-bfs", [16, 64], {"children": "7"})] == [35]
    # A width that is set is the width, whatever was asked for besides.
    assert [arm.width for arm in arms_of("rebase", [16, 64], {"width": "8"})] == [8]
    assert arms_of("tot-bfs", [4], {"keep": "2"})[0].make().slots == 4
    with pytest.raises(UsageError, match="width 4 is less than one child for each of the 5"):
        arms_of("tot-bfs", [4], {})
    with pytest.raises(UsageError, match="subtrees must be 1 to width"):
        arms_of("dvts-4", [2], {})


def test_settings_go_to_the_searches_that_have_them() -> None:
    options, rest = split_settings(
        ["ets", "rebase"], ["depth=9", "ets.lambda_b=1.5", "recent=32", "arborkv.alpha=2"]
    )
    assert options == {"ets": {"depth": "9", "lambda_b": "1.5"}, "rebase": {"depth": "9"}}
    assert rest == ["recent=32", "arborkv.alpha=2"]
    search = make_search("ets", **options["ets"])
    assert (search.depth, search.lambda_b) == (9, 1.5)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="beam-4 is not among ets"):
        split_settings(["ets"], ["beam-4.keep=2"])
    with pytest.raises(UnknownName, match="lambda_b"):
        split_settings(["ets"], ["ets.lambda_c=2"])
    with pytest.raises(UsageError, match="expected name=value"):
        split_settings(["ets"], ["lambda_b"])


def test_sweeps() -> None:
    assert Sweep.parse("lambda_b = 1,1.5 ,1", ["ets"]) == Sweep("lambda_b", ("1", "1.5"))
    for text in ("lambda_b", "lambda_b=", "=1"):
        with pytest.raises(UsageError):
            Sweep.parse(text, ["ets"])
    with pytest.raises(UnknownName, match="lambda_b"):
        Sweep.parse("lambda_c=1", ["ets"])
