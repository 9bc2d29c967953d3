"""What a plan found about policies whose right answers were counted: a small table, a sentence."""

from __future__ import annotations

import math

from arborsim.products.plan.results import (
    CandidateResult,
    PlanResult,
    compared_point,
    middle_solved,
    paid_solved,
    ranked,
)
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.words import load_of
from arborsim.report.table import LABEL, NAME, Column, Table
from arborsim.report.words import digits

_SAME = 0.005  # costs closer than this are the same


def counted(plan: PlanResult) -> list[CandidateResult]:
    """Candidates on the recommended machine whose answers were counted, full retention first.

    Empty without full retention, or without anything to compare it with.
    """
    rows = ranked(plan)
    if plan.recommendation.candidate is None:
        return []
    rows = [
        row for row in rows
        if row.hardware == rows[0].hardware and row.quality and row.quality.accuracy
        and math.isfinite(middle_solved(row))
    ]  # fmt: skip
    exact = [row for row in rows if row.quality is not None and row.quality.exact]
    others = [row for row in rows if row not in exact]
    return [exact[0], *others] if exact and others else []


def closing_table(plan: PlanResult, rows: list[CandidateResult]) -> Table[CandidateResult]:
    """Right answers, searches that fit at once, cost and time: one row per policy."""

    def cost(row: CandidateResult) -> str:
        point = compared_point(row)
        ends = None if point is None else paid_solved(row, point, plan.unit)
        return "-".join(dict.fromkeys(map(digits, ends))) if ends else "n/a"

    def seconds(row: CandidateResult) -> float:
        point = row.at_stated or row.at_largest
        return math.nan if point is None else point.search_s.p95

    return Table(
        rows,
        (
            Column("policy", "policy", NAME, text=_called),
            Column("right", "right,\ncounted live", LABEL, text=_right,
                   head=("right,", "counted live")),
            Column("fit", "fit at once", "count", fitting, head=("fit at", "once"),
                   text=lambda row: digits(fitting(row))),
            Column("cost", "cost", "count", middle_solved, text=cost,
                   head=(f"{plan.currency}/1000", "solved")),
            Column("p95", "p95", "count", seconds, text=lambda row: digits(seconds(row)),
                   head=("p95", "s")),
        ),
        look=lambda row: "chosen" if row.number == plan.recommendation.candidate else "",
    )  # fmt: skip


def fitting(row: CandidateResult) -> float:
    """Mean searches whose keys and values, at their largest, the machine holds side by side."""
    if row.pool is None or row.alone is None or not row.alone.peak_hbm_bytes:
        return math.nan
    return row.pool.kv_bytes / row.alone.peak_hbm_bytes


def finding(plan: PlanResult, rows: list[CandidateResult]) -> str:
    """One sentence: what the recommended policy saves, and which ones lose answers.

    A policy loses answers if the interval of its share lies below full retention's.
    """
    full, *others = rows
    base = _known(full)
    chosen = next((row for row in rows if row.number == plan.recommendation.candidate), full)
    lossy = [row for row in others if _known(row).high < base.low]
    point = compared_point(chosen)
    assert point is not None
    at = load_of(point.load, plan) if chosen.fleet else "the largest load of each"
    if chosen is full:
        found = f"At {at}, full retention is recommended, with {_right(full)} right"
        if kept := [row for row in others if row not in lossy]:
            costs = " and ".join(f"{_change(row, full)} under {_called(row)}" for row in kept)
            found += f"; a solved search costs {costs}"
    else:
        change = _change(chosen, full)
        than = "as" if change.endswith("much") else "than"
        found = (
            f"At {at}, a solved search costs {change} under {_called(chosen)} {than} under full "
            f"retention, with {_right(chosen)} right (full retention: {_right(full)})"
        )
    if lossy:
        names = " and ".join(f"{_called(row)} ({_right(row)})" for row in lossy)
        costs = " and ".join(_change(row, full) for row in lossy)
        found += f"; {names} lose{'s' * (len(lossy) == 1)} answers: a solved search costs {costs}"
    return f"{found}."


def _called(row: CandidateResult) -> str:
    name = "full retention" if row.policy == "full" else row.policy
    return name if row.budget == "-" else f"{name} at {row.budget}"


def _known(row: CandidateResult) -> Estimate:
    assert row.quality is not None
    assert row.quality.accuracy is not None
    return row.quality.accuracy


def _right(row: CandidateResult) -> str:
    share = _known(row)
    return f"{share.value:.1%} of {share.n}"


def _change(row: CandidateResult, full: CandidateResult) -> str:
    """What a solved search costs against full retention: ``"29% less"``."""
    ratio = middle_solved(row) / middle_solved(full)
    if abs(ratio - 1) < _SAME:
        return "about as much"
    if ratio >= 2:
        return f"{digits(ratio)} times as much"
    return f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'}"
