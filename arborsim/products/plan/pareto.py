"""What candidates of a plan are weighed by (cost, quality, latency), and the efficient ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from arborsim.core import statistics
from arborsim.core.units import quantity
from arborsim.products.plan.results import CandidateResult, PlanResult, compared_cost
from arborsim.products.plan.sentences import accuracy, at_load, cost, kept, load, load_axis, stated
from arborsim.report.page import Figure, axis, colour, figure, label, rounded, size_axis, symbol
from arborsim.report.words import listed, money

#: About half a marker, in shares of the plot.
_MARKER_WIDE, _MARKER_HIGH = 0.012, 0.03
#: From this ratio of prices or loads on, their axis is logarithmic.
_FAR = 8.0


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
        title = f"cost of 1,000 searches{at_load(result)} ({result.currency})"
        return Measure("cost", title, cost, lambda row: (
            f"{money(compared_cost(row), result.currency)} per 1,000 searches"
        ))  # fmt: skip
    return Measure(
        "load", f"largest {load_axis(result)}",
        lambda row: math.nan if row.largest is None else row.largest,
        lambda row: load(row.largest, result.unit), higher=True,
    )  # fmt: skip


def _quality(rows: Sequence[CandidateResult]) -> list[Measure]:
    """At most one."""

    def percent(title: str, source: str, share: Callable[[CandidateResult], float]) -> Measure:
        return Measure(title, f"{title}{source} (%)", lambda row: 100 * share(row),
                       lambda row: f"{title} {100 * share(row):.1f} %", higher=True)  # fmt: skip

    for measure in (
        percent("accuracy", " of live runs", accuracy),
        percent("attention kept", "", kept),
        percent("tokens never evicted", "",
                lambda row: max(0.0, 1 - row.quality.evicted) if row.quality else math.nan),
    ):  # fmt: skip
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
    where = f"in a fleet for {stated(result)}" if fleet else "alone"
    return Measure(
        "latency", f"time per search {where}, {result.percentile:g}th percentile (s)", value,
        lambda row: f"{quantity('seconds', value(row))} {where}",
    )  # fmt: skip


def efficient(rows: Sequence[CandidateResult], by: Sequence[Measure]) -> list[CandidateResult]:
    """Rows that no other one matches in every measure and beats in one, by the first measure.

    Of rows that are equal in all of them the first one stands for the others.
    """
    signed = {row.number: tuple((-1 if m.higher else 1) * m.value(row) for m in by) for row in rows}
    able = [row for row in rows if not any(map(math.isnan, signed[row.number]))]
    able.sort(key=lambda row: row.number)
    return [able[at] for at in statistics.efficient([signed[row.number] for row in able])]


def figures(result: PlanResult) -> dict[str, Any]:
    """One plot per pair of measures, and a text per numbered marker: candidates efficient in all.

    ``by`` is what efficiency is judged by, ``priced`` whether cost is part of it.
    """
    known, rows = measures(result), result.met()
    best = efficient(rows, known)
    plots = [
        {"title": f"{y.title.capitalize()} against {x.title}", "figure": _plot(rows, best, x, y)}
        for x, y in combinations(known, 2)
        if rows
    ]
    texts = []
    for row in best:
        others = [each for each in rows if each is not row]
        equal = [each for each in others if all(m.value(each) == m.value(row) for m in known)]
        names = ", ".join(each.name for each in (row, *equal))
        texts.append(f"{names}: {', '.join(m.show(row) for m in known)}")
    return {"plots": plots, "efficient": texts, "by": listed(measure.title for measure in known),
            "priced": known[0].title == "cost"}  # fmt: skip


def _plot(
    rows: Sequence[CandidateResult], best: Sequence[CandidateResult], x: Measure, y: Measure
) -> Figure:
    """A colour per GPU and a shape per policy; the efficient ones are numbered."""
    hover = (f"<b>%{{customdata}}</b><br>{label(x.axis)} %{{x:.4g}}<br>{label(y.axis)} %{{y:.4g}}"
             "<extra></extra>")  # fmt: skip
    gpus = {name: colour(n + 1) for n, name in enumerate(dict.fromkeys(r.hardware for r in rows))}
    shapes = {name: symbol(n) for n, name in enumerate(dict.fromkeys(row.policy for row in rows))}

    def markers(name: str, own: Sequence[CandidateResult], **others: Any) -> Figure:
        return {
            "type": "scatter", "mode": "markers", "name": name, "hovertemplate": hover,
            "x": [round(x.value(row), 6) for row in own],
            "y": [round(y.value(row), 6) for row in own],
            "customdata": [label(row.name) for row in own], **others,
        }  # fmt: skip

    def looks(own: Sequence[CandidateResult]) -> dict[str, list[str]]:
        return {"color": [gpus[row.hardware] for row in own],
                "symbol": [shapes[row.policy] for row in own]}  # fmt: skip

    data = []
    for name, paint in gpus.items():
        own = [row for row in rows if row.hardware == name]
        marker = {"size": 10, "color": paint, "symbol": looks(own)["symbol"]}
        data.append(markers(label(name), own, marker=marker))
    if len(shapes) > 1:  # entries of the legend without points
        data += [
            {"type": "scatter", "mode": "markers", "name": label(name), "x": [None], "y": [None],
             "hoverinfo": "skip", "marker": {"size": 10, "color": "var(--soft)", "symbol": shape}}
            for name, shape in shapes.items()
        ]  # fmt: skip
    across = size_axis([v for row in rows if math.isfinite(v := x.value(row))], _FAR)
    spots = _spots(best, _along(x, rows, across), _along(y, rows, {}))
    ends = [compared_cost(spot[0]) or (0.0, 0.0) for spot in spots]
    half = [(high - low) / 2 for low, high in ends]  # of the range of prices, around its middle
    first = [spot[0] for spot in spots]
    # Numbers stand above their markers, whose colours and shapes tell GPU and policy.
    data.append(markers(
        "efficient (numbers: see below)", first, mode="markers+text",
        text=[", ".join(str(best.index(row) + 1) for row in spot) for spot in spots],
        textposition=["top center"] * len(spots),
        textfont={"color": "var(--ink)", "size": 12},
        marker=looks(first) | {"size": 15, "line": {"width": 2, "color": "var(--ink)"}},
        customdata=["<br>".join(label(row.name) for row in spot) for spot in spots],
        error_x={"type": "data", "array": [rounded(each, 5) for each in half], "thickness": 1.5,
                 "width": 4, "color": "var(--soft)",
                 "visible": x.title == "cost" and any(half)},
    ))  # fmt: skip
    return figure(data, axis(x.axis, **across), axis(y.axis), 440)


def _spots(
    best: Sequence[CandidateResult], wide: dict[int, float], high: dict[int, float]
) -> list[list[CandidateResult]]:
    """Candidates by where they are drawn: those whose markers would cover each other, together."""
    spots: dict[int, list[CandidateResult]] = {}  # by the number of the first
    for row in best:
        n = row.number
        near = (at for at in spots if abs(wide[n] - wide[at]) < _MARKER_WIDE
                and abs(high[n] - high[at]) < _MARKER_HIGH)  # fmt: skip
        spots.setdefault(next(near, n), []).append(row)
    return list(spots.values())


def _along(measure: Measure, rows: Sequence[CandidateResult], drawn: Figure) -> dict[int, float]:
    """Where candidates lie along an axis, in shares of its length."""
    values = {row.number: measure.value(row) for row in rows}
    if drawn.get("type") == "log":
        values = {key: math.log(v) if v > 0 else math.nan for key, v in values.items()}
    known = [value for value in values.values() if math.isfinite(value)]
    start = 0.0 if "rangemode" in drawn else min(known, default=0.0)
    length = (max(known, default=0.0) - start) or 1.0
    return {key: (value - start) / length for key, value in values.items()}
