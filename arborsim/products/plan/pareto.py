"""Candidates of a plan by cost, quality and latency, and the efficient ones among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from arborsim.core import statistics
from arborsim.core.units import quantity
from arborsim.products.plan.costs import compared_cost
from arborsim.products.plan.figures import legend_entry, scatter
from arborsim.products.plan.results import CandidateResult, PlanResult
from arborsim.products.plan.words import accuracy, at_load, cost, kept, load_axis, load_of, money
from arborsim.report.page import Figure, axis, colour, figure, label, rounded, size_axis, symbol
from arborsim.report.report import Choice
from arborsim.report.words import listed

#: About half a marker, in shares of the plot.
_MARKER_WIDE, _MARKER_HIGH = 0.012, 0.03
#: From this ratio of prices or loads on, their axis is logarithmic.
_FAR = 8.0
_SHARES = (-3.0, 106.0)  # the axis of shares in per cent, with room for a marker and its number


@dataclass(frozen=True)
class Measure:
    """Something to weigh candidates by."""

    title: str
    axis: str
    value: Callable[[CandidateResult], float]  #: NaN where it is not known
    show: Callable[[CandidateResult], str]
    higher: bool = False  #: whether more is better


def measures(result: PlanResult) -> list[Measure]:
    """Cost, quality and latency, without what is not known, or the same for all candidates.

    Without prices the largest load stands for the cost.  Quality is the accuracy of live runs where
    every candidate has one, else attention kept, else the share of tokens that is never evicted.
    """
    rows = result.met()
    return [_cost(result, rows), *_quality(rows), _latency(result, rows)]


def _cost(result: PlanResult, rows: Sequence[CandidateResult]) -> Measure:
    if any(not math.isnan(cost(row)) for row in rows):

        def paid(row: CandidateResult) -> str:
            return f"{money(compared_cost(row), result.currency)} per 1,000 {result.noun}"

        title = f"cost of 1,000 {result.noun}{at_load(result)} ({result.currency})"
        return Measure("cost", title, cost, paid)

    def largest(row: CandidateResult) -> float:
        return math.nan if row.largest is None else row.largest

    def text(row: CandidateResult) -> str:
        return load_of(row.largest, result)

    return Measure("load", f"largest {load_axis(result)}", largest, text, higher=True)


def _never_evicted(row: CandidateResult) -> float:
    return max(0.0, 1 - row.quality.evicted) if row.quality else math.nan


def _quality(rows: Sequence[CandidateResult]) -> list[Measure]:
    """At most one."""

    def percent(title: str, source: str, share: Callable[[CandidateResult], float]) -> Measure:
        def text(row: CandidateResult) -> str:
            return f"{title} {100 * share(row):.1f}%"

        axis_title = f"{title}{source} (%)"
        return Measure(title, axis_title, lambda row: 100 * share(row), text, higher=True)

    for measure in (
        percent("accuracy", " of live runs", accuracy),
        percent("attention kept", "", kept),
        percent("tokens never evicted", "", _never_evicted),
    ):
        found = {measure.value(row) for row in rows}
        if not any(map(math.isnan, found)):
            return [measure] if len(found) > 1 else []
    return []


def _latency(result: PlanResult, rows: Sequence[CandidateResult]) -> Measure:
    """In a fleet for the stated load where it is known of every candidate, else alone."""
    served = bool(rows) and all(row.at_stated is not None for row in rows)

    def value(row: CandidateResult) -> float:
        if served:
            return row.at_stated.at_percentile.value if row.at_stated else math.nan
        return row.alone.at_percentile_s if row.alone else math.nan

    fleet = served and result.stated_load is not None
    where = f"in a fleet for {load_of(result.stated_load, result)}" if fleet else "alone"
    title = f"arrival to answer {where}, {result.percentile:g}th percentile (s)"
    return Measure("latency", title, value, lambda r: f"{quantity('seconds', value(r))} {where}")


def efficient(rows: Sequence[CandidateResult], by: Sequence[Measure]) -> list[CandidateResult]:
    """Rows that no other one matches in every measure and beats in one, by the first measure.

    Of rows that are equal in all of them the first one stands for the others.
    """
    signed = {row.number: tuple((-1 if m.higher else 1) * m.value(row) for m in by) for row in rows}
    able = [row for row in rows if not any(map(math.isnan, signed[row.number]))]
    able.sort(key=lambda row: row.number)
    return [able[at] for at in statistics.efficient([signed[row.number] for row in able])]


def figures(result: PlanResult) -> tuple[list[Choice], str, bool]:
    """One plot per pair of measures, with a text per numbered marker: candidates efficient in all.

    Also what efficiency is judged by, and whether cost is part of it.
    """
    known, rows = measures(result), result.met()
    best = efficient(rows, known)
    texts = []
    for row in best:
        others = [each for each in rows if each is not row]
        equal = [each for each in others if all(m.value(each) == m.value(row) for m in known)]
        names = ", ".join(each.name for each in (row, *equal))
        texts.append(f"{names}: {', '.join(m.show(row) for m in known)}")
    plots = [
        Choice(_plot(rows, best, x, y), (f"{y.title.capitalize()} against {x.title}",), texts=texts)
        for x, y in combinations(known, 2)
        if rows
    ]
    return plots, listed(measure.title for measure in known), known[0].title == "cost"


def _plot(
    rows: Sequence[CandidateResult], best: Sequence[CandidateResult], x: Measure, y: Measure
) -> Figure:
    """A colour per GPU and a shape per policy; the efficient ones are numbered."""
    gpus = {name: colour(n + 1) for n, name in enumerate(dict.fromkeys(r.machine for r in rows))}
    shapes = {name: symbol(n) for n, name in enumerate(dict.fromkeys(row.policy for row in rows))}
    places = f"{label(x.axis)} %{{x:.4g}}<br>{label(y.axis)} %{{y:.4g}}"
    hover = f"<b>%{{customdata}}</b><br>{places}<extra></extra>"

    def markers(
        name: str, own: Sequence[CandidateResult], texts: list[str], marker: Figure, **others: Any
    ) -> Figure:
        look = {
            "color": [gpus[row.machine] for row in own],
            "symbol": [shapes[row.policy] for row in own],
        }
        points = map(x.value, own), map(y.value, own)
        others = {"mode": "markers", "customdata": texts, "hovertemplate": hover} | others
        return scatter(name, *points, marker=look | marker, **others)

    data = []
    for name, paint in gpus.items():
        own = [row for row in rows if row.machine == name]
        texts = [label(row.name) for row in own]
        data.append(markers(label(name), own, texts, {"size": 10, "color": paint}))
    if len(shapes) > 1:
        data += [legend_entry(label(name), "var(--soft)", shape) for name, shape in shapes.items()]
    across = size_axis([v for row in rows if math.isfinite(v := x.value(row))], _FAR)
    up: Figure = {"range": _SHARES} if y.axis.endswith("(%)") else {}
    spots = _spots(best, _along(x, rows, across), _along(y, rows, up))
    ends = [compared_cost(spot[0]) or (0.0, 0.0) for spot in spots]
    half = [(high - low) / 2 for low, high in ends]  # of the range of prices, around its middle
    bars: Figure = {"type": "data", "array": [rounded(each, 5) for each in half]}
    bars |= {"thickness": 1.5, "width": 4, "color": "var(--soft)"}
    # Numbers stand above their markers, whose colours and shapes tell GPU and policy.
    numbers = markers(
        "efficient (numbers: see below)",
        [spot[0] for spot in spots],
        ["<br>".join(label(row.name) for row in spot) for spot in spots],
        {"size": 15, "line": {"width": 2, "color": "var(--ink)"}},
        mode="markers+text",
        text=[", ".join(str(best.index(row) + 1) for row in spot) for spot in spots],
        textposition=["top center"] * len(spots),
        textfont={"color": "var(--ink)", "size": 12},
        error_x=bars | {"visible": x.title == "cost" and any(half)},
    )
    return figure([*data, numbers], axis(x.axis, **across), axis(y.axis, **up), 440)


def _spots(
    best: Sequence[CandidateResult], wide: dict[int, float], high: dict[int, float]
) -> list[list[CandidateResult]]:
    """Candidates by where they are drawn: those whose markers would cover each other, jointly."""
    spots: dict[int, list[CandidateResult]] = {}  # by the number of the first

    def covers(a: int, b: int) -> bool:
        return abs(wide[a] - wide[b]) < _MARKER_WIDE and abs(high[a] - high[b]) < _MARKER_HIGH

    for row in best:
        near = (at for at in spots if covers(row.number, at))
        spots.setdefault(next(near, row.number), []).append(row)
    return list(spots.values())


def _along(measure: Measure, rows: Sequence[CandidateResult], drawn: Figure) -> dict[int, float]:
    """Where candidates lie along an axis, in shares of its length."""
    values = {row.number: measure.value(row) for row in rows}
    if drawn.get("type") == "log":
        values = {key: math.log(v) if v > 0 else math.nan for key, v in values.items()}
    known = [value for value in values.values() if math.isfinite(value)]
    start = 0.0 if "rangemode" in drawn else min(known, default=0.0)
    start, end = drawn.get("range") or (start, max(known, default=0.0))
    length = (end - start) or 1.0
    return {key: (value - start) / length for key, value in values.items()}
