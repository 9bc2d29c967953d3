"""What two runs have in common, and how differences are said."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from arborsim.core.errors import UsageError
from arborsim.play.backends import LiveResult
from arborsim.products.compare.match import Pair, change, compare
from arborsim.products.compare.report import report_of, said
from arborsim.products.live.tables import LiveReport
from arborsim.report.table import Column
from arborsim.report.text import print_report
from tests.live.test_live_log import FACTS
from tests.live.test_live_log import result as live_result
from tests.show.plan_synthetic import plan
from tests.show.synthetic import result

VALUES = st.one_of(st.floats(0, 1e9), st.just(math.nan))
SIZE: Column[float] = Column("size", "Size", "bytes", lambda value: value)
SHARE: Column[float] = Column("share", "Share", "percent", lambda value: value)


def pair(a: float, b: float) -> Pair:
    return Pair("", ("h2o", "0.5"), 1, a, b)


@given(a=VALUES, b=VALUES)
def test_a_change_is_what_turns_the_one_into_the_other(a: float, b: float) -> None:
    for column in (SIZE, SHARE):
        found = change(column, pair(a, b))
        if math.isnan(a) or math.isnan(b):
            assert found == (0.0 if math.isnan(a) and math.isnan(b) else math.inf)
        elif math.isfinite(found):
            turned = a * (1 + found) if column is SIZE else a + found
            assert turned == pytest.approx(b, rel=1e-9, abs=1e-12 * a)
        else:
            assert a == 0 != b or b / a > 1e300
    assert change(SIZE, pair(a, a)) == 0


@pytest.mark.parametrize(
    ("column", "a", "b", "text"),
    [
        (SIZE, 100.0, 112.0, "+12.0%"), (SIZE, 100.0, 99.99, "-<0.1%"), (SIZE, 5.0, 5.0, "="),
        (SIZE, 0.0, 5.0, "new"), (SIZE, 5.0, 0.0, "-100.0%"), (SIZE, 5.0, math.nan, "gone"),
        (SHARE, 0.99, 0.987, "-0.3 pp"), (SHARE, math.nan, 0.5, "new"),
    ],
)  # fmt: skip
def test_a_change_in_words(column, a, b, text) -> None:
    assert said(column, pair(a, b)) == text


def report(*results: LiveResult, **request: object) -> LiveReport:
    return LiveReport(FACTS, results, {"cells": [], **request}, "arborsim live")


def test_live_runs_are_matched_by_problem() -> None:
    verdicts = {"a": (True, True, False, None, True), "b": (True, False, True, True, False)}
    runs = [
        report(
            *(live_result(n, "full", "any") for n in range(5)),
            *(live_result(n, "h2o", budget, correct=correct) for n, correct in enumerate(own)),
            *more,
        )
        for own, budget, more in (
            (verdicts["a"], "0.5", ()),
            (verdicts["b"], "0.50", (live_result(7, "h2o", "0.5"), live_result(0, "tova", "0.5"))),
        )
    ]
    said_of = [
        {"facts": {"device": "cpu", "software": {"torch": torch}},
         "request": {"cells": [{"policy": "h2o", "settings": {"sinks": 0, "recent_share": share}}]}}
        for torch, share in (("2.13", 0.5), ("2.14", 0.2))
    ]  # fmt: skip
    found = compare("live", *runs, *said_of)
    full, h2o = found.pairs
    assert (full.gained, full.lost, h2o.gained, h2o.lost) == (0, 0, 1, 2)
    assert (h2o.first.correct, h2o.first.judged) == (3, 4)
    assert (h2o.second.correct, h2o.second.judged) == (3, 5)
    assert found.only_second == ("tova 0.5",)
    assert found.settings == {
        "policy h2o": ("recent_share 0.5", "recent_share 0.2"),
        "version of torch": ("2.13", "2.14"),
    }
    page = io.StringIO()
    print_report(report_of(found, ("a", "b"), ("", "")), Console(file=page, width=80))
    assert "+1 -2" in page.getvalue()


def test_plans_are_matched_by_candidate() -> None:
    one = plan()
    dearer = replace(one, candidates=tuple(
        replace(each, largest=each.largest and 2 * each.largest) for each in one.candidates[1:]
    ))  # fmt: skip
    found = compare("plan", one, dearer, {}, {})
    assert found.only_first == (one.candidates[0].name,)
    largest = next(column for column in found.columns if column.key == "largest")
    for each in found.pairs:
        known = each.first.largest is not None
        assert change(largest, each) == (pytest.approx(1.0) if known else 0.0)


def test_a_kind_without_rows_to_match_is_one_line() -> None:
    with pytest.raises(UsageError, match="validate results cannot be compared: replay, search"):
        compare("validate", None, None, {}, {})


def test_nothing_in_common_is_one_line() -> None:
    one = result(traces=("a.parquet",), pictures=False)
    other = result(traces=("b.parquet",), pictures=False)
    other = replace(other, settings={"trace b.parquet": "sha256 fedcba9876543210"})
    with pytest.raises(UsageError, match="nothing in common: one holds full on a"):
        compare("replay", one, other, {}, {})


@given(policies=st.sets(st.sampled_from(["full", "h2o", "epikv", "arborkv"]), min_size=1))
def test_a_run_and_itself_never_differ(policies) -> None:
    one = result(policies=tuple(sorted(policies)), episodes=1, pictures=False)
    found = compare("replay", one, one, {"gpu": "h100"}, {"gpu": "h100"})
    assert found.largest() == 0
    assert found.changed() == []
    assert found.settings == {}
