"""The file of a validation, and what is said of the numbers in it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from arborsim.core.errors import UsageError
from arborsim.products.validate.compare import BytesOverTime
from arborsim.products.validate.files import merged, read_results, write_results
from arborsim.products.validate.report import parts, report_of
from arborsim.products.validate.results import (
    CellCheck,
    Validation,
    lines_of,
    rank_agreements,
    term_errors,
)
from arborsim.report.report import html
from arborsim.report.text import print_report

CHECK = CellCheck(
    episode=0, policy="h2o", budget="0.5", budget_tokens=50, full_tokens=100, shadow_moves=10,
    equal_moves=10, parity=True, calls=5, equal_calls=5, off_bytes=(0,) * 5,
    live_peaks=(600, 0, 0, 0), simulated_peaks=(600, 0, 0, 0), live_counters=(3.0,) * 8,
    simulated_counters=(3.0,) * 8, allocated_bytes=900, weight_bytes=1000,
    thread_s=3.0,
    live_s=(1.0, 2.0, 1.0, 0.0, 0.0, 4.0), simulated_s=(1.0, 3.0, 0.5, 0.0, 0.0, 4.5),
    generated_tokens=10, iterations=10, same_iterations=8, shadow_iterations=10,
    jaccard_before=1.0, jaccard_after=0.5, jaccard_iteration=(0, 10), jaccard=(1.0, 0.5),
    attention_kept=0.9, output_error=0.1, correct=1,
)  # fmt: skip


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    small = replace(CHECK, policy="<b>", infeasible="too small", output_error=math.nan)
    write_results(Validation((CHECK, small), {"device": "cpu"}, ("x",)), {"seed": 0}, path)
    found, request = read_results(path)
    assert found.checks[0] == CHECK
    assert math.isnan(found.checks[1].output_error)
    assert (found.about, found.left_out, request) == ({"device": "cpu"}, ("x",), {"seed": 0})
    assert not list(tmp_path.glob("*.part"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "results.parquet"
    for make in (lambda: path.write_text("no"), lambda: pq.write_table(pa.table({"a": [1]}), path)):
        make()
        with pytest.raises(UsageError, match="choose another --out"):
            read_results(path)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("output_error", math.inf, "row 2 output_error is infinite: the file is damaged"),
        ("live_s", (math.inf,) * 6, "row 2 live_s is infinite: the file is damaged"),
        ("live_s", (1.0, 2.0), "row 2 live_s has 2 numbers, not 6: the file is damaged"),
        ("live_peaks", (), "row 2 live_peaks has 0 numbers, not 4: the file is damaged"),
        ("policy", None, "row 2 policy must be a text, not None"),
        ("simulated_s", (1.0, None, 3.0, 4.0, 5.0, 6.0), "row 2 simulated_s item 2 must be"),
    ],
)
def test_rows_that_no_validation_writes_are_refused(
    tmp_path: Path, column: str, value: object, said: str
) -> None:
    path = tmp_path / "results.parquet"
    damaged = replace(CHECK, **{column: value})  # type: ignore[arg-type]
    write_results(Validation((CHECK, damaged), {}), {}, path)
    with pytest.raises(UsageError, match=re.escape(f"{path}: {said}")):
        read_results(path)


def test_results_of_one_problem_replace_older_ones() -> None:
    newer = replace(CHECK, correct=0)
    other = replace(CHECK, episode=1)
    assert merged((other, CHECK), (newer,)) == (newer, other)


def test_errors_of_time_by_hand() -> None:
    twice = [CHECK, replace(CHECK, episode=1, simulated_s=(1.0, 1.0, 0.5, 0.0, 0.0, 2.5))]
    (line,) = lines_of(twice)
    assert line.error("decode_s") == pytest.approx((3 + 1) / (2 + 2) - 1)
    assert line.error("policy_s") == pytest.approx(-0.5)
    assert math.isnan(line.error("exposed_transfer_s"))  # nobody waited
    assert line.per_token_s() == pytest.approx(((8 - 2) / 20, (7 - 2) / 20))
    found = {error.term: error for error in term_errors([line])}
    assert found["per_token_s"].median == found["per_token_s"].worst == pytest.approx(1 / 6)
    assert found["rehydration_s"].lines == 0


def test_the_pace_of_the_machine_cancels_out_against_full_retention() -> None:
    """Twice as slow today: only what a policy costs beside full retention is left to be wrong."""
    full = replace(CHECK, policy="full", simulated_s=(1.0, 1.5, 0.0, 0.0, 0.0, 2.5))
    right = replace(CHECK, policy="right", simulated_s=full.simulated_s)
    dear = replace(CHECK, policy="dear", simulated_s=(9.0, 1.8, 0.0, 0.0, 0.0, 10.8))
    assert full.live_s == right.live_s == dear.live_s
    found = {error.term: error for error in term_errors(lines_of([full, right, dear]))}
    assert found["per_token_s"].median == pytest.approx(0.5)
    assert found["against_full_s"].lines == 2
    assert found["against_full_s"].median == pytest.approx(0.1)
    assert found["against_full_s"].worst == pytest.approx(0.2)
    assert found["against_full_s"].worst_name == "dear 0.5"
    assert "multiples of full retention's in this run, off by 20.0%" in parts([full, dear])["Time"]
    alone = {error.term: error for error in term_errors(lines_of([right]))}
    assert alone["against_full_s"].lines == 0
    assert "multiples" not in parts([right])["Time"]


def _problems(count: int) -> list[CellCheck]:
    """Six policies whose accuracy rises with what they keep, with some luck in it."""
    rng = np.random.default_rng(1)
    return [
        replace(CHECK, episode=number, policy=f"p{k}", attention_kept=0.1 * k,
                output_error=1 - 0.1 * k, correct=int(rng.random() < 0.15 * k))
        for number in range(count) for k in range(1, 7)
    ]  # fmt: skip


def test_ranks_need_enough_problems() -> None:
    assert rank_agreements(_problems(39)) == []
    assert "too few to rank" in parts(_problems(39))["Quality"]
    assert parts(_problems(1))["Quality"].startswith("1 problem and")
    kept, error = rank_agreements(_problems(60))
    assert (kept.figure, kept.lines, kept.problems) == ("attention_kept", 6, 60)
    assert 0.7 < kept.rho <= 1.0
    assert kept.low <= kept.rho <= kept.high
    assert error.rho == pytest.approx(-kept.rho)
    assert "too few" not in parts(_problems(60))["Quality"]


def test_ranks_leave_out_whose_figure_is_not_known() -> None:
    nan = float("nan")
    checks = [
        replace(c, attention_kept=nan) if c.policy in ("p1", "p3") else c for c in _problems(60)
    ]
    kept, error = rank_agreements(checks)
    assert (kept.figure, kept.lines, error.lines) == ("attention_kept", 4, 6)
    known = [check for check in checks if check.policy not in ("p1", "p3")]
    assert kept.rho == rank_agreements(known)[0].rho
    assert "nan" not in html(report_of(Validation(tuple(checks)))).partition("<script")[0]
    few = [c if c.policy in ("p2", "p4") else replace(c, attention_kept=nan) for c in checks]
    assert [rank.figure for rank in rank_agreements(few)] == ["output_error"]


def test_a_line_with_infeasible_problems_is_not_ranked() -> None:
    checks = _problems(60)
    checks[0] = replace(checks[0], infeasible="too small")
    assert rank_agreements(checks)[0].lines == 5


def test_bytes_that_differ_are_counted() -> None:
    live = np.array([[10, 0, 0, 0, 0], [20, 0, 5, 0, 0], [20, 0, 5, 0, 5]])
    simulated = live + np.array([[0, 0, 0, 0, 0], [-2, 0, 0, 0, 0], [1, 0, 0, 0, 7]])
    found = BytesOverTime(np.array([1, 2, 2]), live, simulated, 0)
    assert found.equal == 1
    assert found.off == (-2, 0, 0, 0, 7)
    assert found.thinned(5)[:, 0].tolist() == [1, 2]
    assert found.thinned(5)[1].tolist() == [2, 20, 0, 5, 0, 5, 21, 0, 5, 0, 12]
    assert len(found.thinned(1)) == 1


def test_the_table() -> None:
    small = replace(CHECK, policy="arborkv", infeasible="too small")
    off = replace(CHECK, policy="x", parity=False, equal_moves=9, equal_calls=4, correct=0)
    out = StringIO()
    print_report(report_of(Validation((CHECK, small, off))), Console(file=out, width=116))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert [re.sub(" +", " ", line) for line in lines[1:7]] == [
        " policy budget n plans bytes peaks time token share same J J after kept right",
        " " + "─" * 103,
        " h2o 0.5 1 all all all +12% +17% 25.0/11.1% 80.0% 1.000 0.500 0.900 1/1",
        " arborkv 0.5 0+1 all",
        " x 0.5 1 0/1 80.0% all +12% +17% 25.0/11.1% 80.0% 1.000 0.500 0.900 0/1",
        "",
    ]
    narrow = StringIO()
    print_report(report_of(Validation((CHECK, small, off))), Console(file=narrow, width=80))
    assert "…" not in narrow.getvalue(), "a cell was cut"
    text = " ".join(" ".join(lines).split())
    assert "Plans: 2 of 3 shadow runs" in text
    assert "(29 of 30 moves)" in text
    assert "Policies: 25.0% of the seconds in the median, 11.1% simulated; most under x 0.5" in text
    assert "Equal to the byte after 9 of 10 steps of 2 live searches" in text


def test_the_page_escapes_and_needs_no_network() -> None:
    evil = replace(
        CHECK, policy="<script>x</script>", bytes_over_time=(0, *range(10), 5, *range(10))
    )
    page = html(report_of(Validation((CHECK, evil), {"device": "<img>"})))
    assert "<script>x" not in page
    assert "<img>" not in page.partition("<script")[0]
    assert page == html(report_of(Validation((CHECK, evil), {"device": "<img>"})))
