"""A plan's legend, candidates that did not work, and policies by their right answers."""

from __future__ import annotations

import math
from collections.abc import Callable

from arborsim.products.plan.costs import compared_point, middle_solved, ranked
from arborsim.products.plan.results import MISSED, Alone, CandidateResult, PlanResult
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.tables import BEYOND, cost_columns
from arborsim.products.plan.target import KINDS
from arborsim.products.plan.words import load_of
from arborsim.report.table import LABEL, NAME, Column, Table
from arborsim.report.words import digits

_MOST_NAMED = 6  # candidates that are named where all are too slow
_SAME = 0.005  # costs closer than this are the same


def legend(plan: PlanResult) -> list[str]:
    """Lines for what is in the tables; the marks first, then the columns as they come."""
    clients, stated = plan.unit == "clients", None
    limits = {each.limited_by for each in plan.met()}
    lines = ["*  recommended"]
    if any(each.fleet for each in plan.candidates):
        stated = plan.stated_load
    if any(each.at_largest and each.at_largest.cost_per_1000 for each in plan.met()):
        at = "each one's largest load, as none is stated"
        if stated is not None:
            at = f"{load_of(stated, plan)}, idle time included"
        per = "served search" if clients else "offered search (in the long run all are served)"
        lines += [
            f"{plan.currency}: at {at};",
            f"  per {per}",
            "  its range is that of prices and of the error of seconds, where that is known",
        ]
        if any(point.cost_per_solved for each in plan.met() if (point := compared_point(each))):
            lines.append("  solved: n/a where nothing tells how many answers stay right")
    if stated is not None:
        lines.append(f"GPUs, per hour: of the machines for {load_of(stated, plan)}")
    lines += [
        "offered: the most that one machine is offered while every run meets the target;",
        "  latencies, shares and what runs out are at that load",
        *(["  no mark: some run missed the target at the next larger load"] * ("target" in limits)),
        *(f"  {mark}  {meaning}" for why, (mark, meaning) in BEYOND.items() if why in limits),
        "runs out: HBM or host memory if searches wait for a place (at peaks, long before",
        "  HBM space, a mean, is 100%); else what is busy most",
        "kept: attention on tokens that are still readable; it is not accuracy",
        "served: what ended per second; less in short runs, as machines begin empty",
    ]
    if plan.runs > 1:
        lines.append(f"by seed: how much more the best of the {plan.runs} runs carries")
    return [*lines, "HBM speed, comp., PCIe: shares of the time; pre-empt.: per 1,000 searches"]


def telling(plan: PlanResult) -> list[str]:
    """Notes that can change the decision, those that can most first."""
    notes = [] if plan.complete else ["The plan was interrupted: candidates are missing."]
    said = plan.recommendation
    if len(plan.met()) > MOST_ROWS:
        notes.append(f"{len(plan.met()) - MOST_ROWS} more candidates meet the target: --notes.")
    if rows := counted(plan):
        notes.append(finding(plan, rows))
    return [*notes, *said.doubts[:1], *failures(plan)[:1], *said.doubts[1:], *said.unknown]


#: Candidates of a screen.
MOST_ROWS = 12


def failures(plan: PlanResult) -> list[str]:
    """One line per reason, with all that it holds for; those too slow alone, together."""
    lines, reasons = [], dict[tuple[str, str], list[str]]()
    slow = [(row.alone, row.name) for row in plan.candidates if row.status == MISSED if row.alone]
    if slow:
        slow.sort(key=lambda each: each[0].at_percentile_s)
        named = "; ".join(f"{name} {_times(alone, plan)}" for alone, name in slow[:_MOST_NAMED])
        more = f"; and {len(slow) - _MOST_NAMED} more" if len(slow) > _MOST_NAMED else ""
        take = f"missed ({plan.target.strictest:g}% of the {plan.noun} take up to, alone)"
        lines.append(f"{take}: {named}{more}")
    for row in plan.candidates:
        if row.reason and not (row.status == MISSED and row.alone):
            reasons.setdefault((row.status, row.reason), []).append(row.name)
    for (status, reason), names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{status}: {', '.join(names[:3])}{more}: {reason}")
    return lines


def _times(alone: Alone, plan: PlanResult) -> str:
    """The times of a search alone, at the target's percentile."""
    kinds = [(KINDS[each.kind], each.kind) for each in plan.target.limits]
    return ", ".join(
        f"{digits(kind.per_s * getattr(alone.at_percentiles, name))} {kind.unit}{kind.mark}"
        for kind, name in kinds
    )


def counted(plan: PlanResult) -> list[CandidateResult]:
    """Candidates on the recommended machine whose answers were counted, full retention first.

    Empty without full retention, or without anything to compare it with.
    """
    rows = ranked(plan) if plan.recommendation.candidate is not None else []
    rows = [row for row in rows if row.hardware == rows[0].hardware and row.quality]
    rows = [row for row in rows if _right(row) and math.isfinite(middle_solved(row))]
    exact = [row for row in rows if row.quality and row.quality.exact]
    others = [row for row in rows if row not in exact]
    return [exact[0], *others] if exact and others else []


def closing_table(plan: PlanResult, rows: list[CandidateResult]) -> Table[CandidateResult]:
    """Right answers, searches that fit at once, cost and time: one row per policy."""

    def seconds(row: CandidateResult) -> float:
        point = row.at_stated or row.at_largest
        return math.nan if point is None else point.search_s.p95

    def column(value: Callable[[CandidateResult], float], *head: str) -> Column[CandidateResult]:
        return Column(head[0], head[0], "count", value, head=head, text=lambda r: digits(value(r)))

    solved, *_ = cost_columns(plan)
    columns = (
        Column("policy", "policy", NAME, text=_called),
        Column("right", "right", LABEL, text=_right, head=("right,", "counted live")),
        column(fitting, "fit at", "once"),
        solved,
        column(seconds, "p95", "s"),
    )
    chosen = plan.recommendation.candidate
    return Table(rows, columns, look=lambda row: "chosen" if row.number == chosen else "")


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
    chosen = next((row for row in rows if row.number == plan.recommendation.candidate), full)
    lossy = [row for row in others if _share(row).high < _share(full).low]
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


def _share(row: CandidateResult) -> Estimate:
    """The counted share of right answers."""
    assert row.quality is not None
    assert row.quality.accuracy is not None
    return row.quality.accuracy


def _right(row: CandidateResult) -> str:
    """The same as text; "" where none were counted."""
    share = row.quality.accuracy if row.quality else None
    return f"{share.value:.1%} of {share.n}" if share else ""


def _change(row: CandidateResult, full: CandidateResult) -> str:
    """The cost of a solved search against full retention: ``"29% less"``."""
    ratio = middle_solved(row) / middle_solved(full)
    if abs(ratio - 1) < _SAME:
        return "about as much"
    if ratio >= 2:
        return f"{digits(ratio)} times as much"
    return f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'}"
