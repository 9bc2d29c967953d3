"""A plan in a terminal: what to take, a table of all candidates, and what did not work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from arborsim.products.plan.closing import closing_table, counted, finding
from arborsim.products.plan.results import (
    MISSED,
    Alone,
    CandidateResult,
    Fleet,
    LoadPoint,
    PlanResult,
    compared_point,
    paid,
    paid_solved,
    ranked,
)
from arborsim.products.plan.sentences import kept, kept_note, middle, shared_prefixes
from arborsim.products.plan.tables import at_largest
from arborsim.products.plan.words import limits_of, load_of
from arborsim.report.lines import print_tables
from arborsim.report.table import LABEL, NAME, NOTHING, Column, Table, shown, terminal
from arborsim.report.words import digits, hundredths, plain

if TYPE_CHECKING:
    from rich.console import Console

_MOST_SLOW = 6  # candidates that are named where all are too slow
_RUNS_OUT = {
    "hbm": "HBM space",
    "host": "DDR space",
    "below": "space below DDR",
    "compute": "compute",
    "memory": "HBM speed",
    "pcie_down": "PCIe down",
    "pcie_up": "PCIe up",
}
#: Why there is no larger load, where it is not the target: a mark and what it means.
_BEYOND = {
    "throughput": ("=", "beyond it searches arrive faster than they end"),
    "run length": ("+", "runs are too short to tell: longer ones can show more or less"),
}
#: Reads a range of costs (`arborsim.products.plan.results.paid`).
Paid = Callable[[CandidateResult, LoadPoint | Fleet, str], tuple[float, float] | None]
_NAMES = {"policy": "policy", "budget": "budget", "recall": "recall", "GPU": "hardware"}


def print_plan(plan: PlanResult, console: Console | None = None) -> None:
    """Print the answer in three lines, the candidates as `ranked`, then notes.

    Where right answers were counted live, a small table and one sentence sum up what that makes of
    policies.
    """
    console = console or terminal()

    def say(text: str, style: str = "") -> None:
        console.print(plain(text), style=style, markup=False)

    chosen = plan.recommendation.candidate
    for line in plan.recommendation.answer:
        say(line, "bold")
    rows = ranked(plan)
    if rows:
        if chosen is not None:
            console.print()
        say(
            f"{plan.workload}: {plan.percentile:g}% of searches within {limits_of(plan)}; "
            f"{'* recommended, others' if chosen is not None else 'candidates'} by cost"
        )
        number = _text("#", lambda row: f"{'*' if row.number == chosen else ''}{row.number}")
        names = [_text(head, attrgetter(part), NAME) for head, part in _NAMES.items()
                 if any(getattr(row, part) != "-" for row in rows)]  # fmt: skip
        whole = Table(rows, (), look=lambda row: "chosen" if row.number == chosen else "")
        groups = [("", whole.under((number, *names, *shown(columns, rows))))
                  for columns in _columns(plan)]  # fmt: skip
        print_tables(console, groups, names=list(_NAMES))
    if chosen is not None:
        say(plan.recommendation.text)
    if prefixes := shared_prefixes(plan):
        say(prefixes)
    for line in legend(plan) if rows else ():
        say(line, "dim")
    for line in _failures(plan):
        say(line)
    for note in (*plan.notes, *plan.recommendation.unknown):
        say(note, "dim")
    if known := counted(plan):
        console.print()
        say("In short: searches solved under each policy")
        print_tables(console, [("", closing_table(plan, known))])
        say(finding(plan, known), "bold")


def _text(
    head: str, show: Callable[[CandidateResult], str], kind: str = LABEL
) -> Column[CandidateResult]:
    return Column(head, head, kind, text=show, head=tuple(head.split("\n")))


def _number(
    head: str, value: Callable[[CandidateResult], float], show: Callable[[CandidateResult], str],
    hide: str = "",
) -> Column[CandidateResult]:  # fmt: skip
    return Column(head, head, "count", value, text=show, hide=hide, head=tuple(head.split("\n")))


def _figure(
    head: str, read: Callable[[LoadPoint], float], show: Callable[[float], str] | None = None,
    hide: str = "",
) -> Column[CandidateResult]:  # fmt: skip
    """A figure at the largest load."""
    value = at_largest(read)
    return _number(head, value, lambda row: (show or _digits)(value(row)), hide)


def _digits(value: float) -> str:
    """Three significant digits."""
    return "n/a" if math.isnan(value) else digits(value) if value else "-"


def _share(value: float) -> str:
    return "-" if value < 0.0005 else f"{100 * value:.0f}" if value >= 0.01 else "<1"


def _range(bounds: tuple[float, float] | None) -> str:
    return "-".join(dict.fromkeys(map(_digits, bounds))) if bounds else "n/a"


def _columns(plan: PlanResult) -> Iterator[list[Column[CandidateResult]]]:
    """Costs, loads and times of searches, and times of tokens and the use of the machine."""

    def point(head: str, show: Callable[[LoadPoint], str]) -> Column[CandidateResult]:
        return _text(head, lambda row: show(row.at_largest) if row.at_largest else "n/a")

    def largest(row: CandidateResult) -> str:
        """Marked where it is not the target that stops a larger one."""
        load = row.at_largest.load if row.at_largest else math.nan
        mark, _ = _BEYOND.get(row.limited_by, ("", ""))
        return (f"{load:,.0f}" if plan.unit == "clients" else _digits(load)) + mark

    def by_seed(row: CandidateResult) -> str:
        """How far the runs' own largest loads lie apart."""
        return f"+{100 * (max(row.largest_by_seed) / min(row.largest_by_seed) - 1):.0f}%"

    def paid_for(head: str, range_of: Paid) -> Column[CandidateResult]:
        """A range of costs where candidates are compared."""

        def ends(row: CandidateResult) -> tuple[float, float] | None:
            point = compared_point(row)
            return None if point is None else range_of(row, point, plan.unit)

        return _number(head, lambda row: middle(ends(row)), lambda row: _range(ends(row)))

    def hourly(row: CandidateResult) -> tuple[float, float] | None:
        return row.fleet.price_per_hour if row.fleet else row.price_per_hour

    def readable(row: CandidateResult) -> str:
        """The attention kept; all of it where no token was dropped."""
        if row.quality and row.quality.exact:
            return "100"
        return kept_note(row) or hundredths(kept(row))

    known = any(row.at_largest and row.at_largest.cost_per_solved for row in plan.candidates)
    priced = any(row.at_largest and row.at_largest.cost_per_1000 for row in plan.candidates)
    fleet = any(row.fleet for row in plan.candidates)
    load = "clients" if plan.unit == "clients" else "offered\n/s"
    yield [
        *([paid_for(f"{plan.currency}/1000\nsolved", paid_solved)] if known and priced else []),
        *([paid_for(f"{plan.currency}/1000\nsearches", paid)] if priced else []),
        *(
            [
                _number(
                    f"{plan.currency}\n/hour",
                    lambda row: middle(hourly(row)),
                    lambda row: _range(hourly(row)),
                )
            ]
            if priced
            else []
        ),
        *(
            [
                _number(
                    "GPUs",
                    lambda row: row.fleet.gpus if row.fleet else math.nan,
                    lambda row: f"{row.fleet.gpus}" if row.fleet else "n/a",
                )
            ]
            if fleet
            else []
        ),
    ]
    yield [
        _number(load, at_largest(lambda p: p.load), largest),
        _figure("p50\ns", lambda p: p.search_s.p50),
        _figure("p95\ns", lambda p: p.search_s.p95),
        _figure("p99\ns", lambda p: p.search_s.p99),
        point("runs\nout", lambda p: _RUNS_OUT.get(p.saturated, p.saturated)),
        _text("kept\n%", readable),
        _figure("served\n/s", lambda p: p.served_per_s.value),
        *([_text("by\nseed", by_seed)] if plan.runs > 1 else []),
        _figure("at\nonce", lambda p: p.concurrency),
    ]
    yield [
        _figure("p50\nms/tok", lambda p: 1e3 * p.token_s.p50),
        _figure("p95\nms/tok", lambda p: 1e3 * p.token_s.p95),
        _figure("HBM\n%", lambda p: p.used.hbm, _share),
        _figure("HBM\nB/s %", lambda p: p.used.memory, _share),
        _figure("comp.\n%", lambda p: p.used.compute, _share),
        _figure("PCIe\ndown %", lambda p: p.used.pcie_down, _share),
        _figure("PCIe\nup %", lambda p: p.used.pcie_up, _share),
        _figure("DDR\n%", lambda p: p.used.host, _share),
        _figure("pre-\nempt.", lambda p: p.preemptions_per_1000),
        _figure("re-\nfused", lambda p: p.refused_per_1000, hide=NOTHING),
    ]


def _failures(plan: PlanResult) -> list[str]:
    """One line per reason, with all that it holds for; those too slow alone, together."""
    lines, reasons = [], dict[tuple[str, str], list[str]]()
    slow = [(row.alone, row.name) for row in plan.candidates if row.status == MISSED if row.alone]
    if slow:
        slow.sort(key=lambda each: each[0].at_percentile_s)
        named = "; ".join(f"{name} {_times(alone, plan)}" for alone, name in slow[:_MOST_SLOW])
        more = f"; and {len(slow) - _MOST_SLOW} more" if len(slow) > _MOST_SLOW else ""
        lines.append(f"missed ({plan.percentile:g}% of the searches take up to, alone): "
                     f"{named}{more}")  # fmt: skip
    for row in plan.candidates:
        if row.reason and not (row.status == MISSED and row.alone):
            reasons.setdefault((row.status, row.reason), []).append(row.name)
    for (status, reason), names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{status}: {', '.join(names[:3])}{more}: {reason}")
    return lines


def _times(alone: Alone, plan: PlanResult) -> str:
    """What a search takes alone, at the target's percentile."""
    times = {
        f"{_digits(alone.at_percentile_s)} s": plan.search_limit_s,
        f"{_digits(1e3 * alone.token_at_percentile_s)} ms/tok": plan.token_limit_s,
    }
    return ", ".join(time for time, limit in times.items() if limit is not None)


def legend(plan: PlanResult) -> list[str]:
    """Lines for what is in the tables; the marks first, then the columns as they come."""
    clients = plan.unit == "clients"
    limits = {each.limited_by for each in plan.met()}
    lines = ["*  recommended"]
    priced = any(each.at_largest and each.at_largest.cost_per_1000 for each in plan.met())
    stated = plan.stated_load if any(each.fleet for each in plan.candidates) else None
    if priced:
        per = "served search" if clients else "offered search (in the long run all are served)"
        at = f"{load_of(stated, plan)}, idle time included" if stated is not None else (
            "each one's largest load, as none is stated")  # fmt: skip
        lines += [
            f"{plan.currency}/1000: at {at};",
            f"  per {per}",
            "  its range is that of prices and of the error of seconds, where that is known",
        ]
        if any(point.cost_per_solved for each in plan.met() if (point := compared_point(each))):
            lines.append("  solved: n/a where nothing tells how many answers stay right")
    if stated is not None:
        lines.append(f"GPUs, /hour: of the machines for {load_of(stated, plan)}")
    lines += [
        f"{'clients' if clients else 'offered'}: the most that one machine is offered while every "
        "run meets the target;",
        "  latencies, shares and what runs out are at that load",
        *(["  no mark: some run missed the target at the next larger load"] * ("target" in limits)),
        *(f"  {mark}  {meaning}" for why, (mark, meaning) in _BEYOND.items() if why in limits),
    ]
    if plan.runs > 1:
        lines.append(f"by seed: how much more the best of the {plan.runs} runs carries")
    lines += [
        "served: what ended per second; less in short runs, as machines begin empty",
        "runs out: HBM or DDR space if searches wait for a place (at peaks, long before",
        "  HBM %, a mean, is 100); else what is busy most: HBM speed, compute or PCIe",
    ]
    lines.append("kept: attention on tokens that are still readable; it is not accuracy")
    return [*lines, "HBM B/s, comp., PCIe %: shares of the time; pre-empt.: per 1,000 searches"]
