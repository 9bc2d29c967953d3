"""What candidates of a plan are weighed by (cost, quality, latency), and the efficient ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.units import quantity
from arborsim.plan.results import CandidateResult, PlanResult, compared_cost
from arborsim.show.figures import Figure, colour, label, log_axis, rounded, symbol
from arborsim.show.plan_words import at_load, load, load_axis, middle, stated
from arborsim.show.words import listed, money

#: About half a marker, in shares of the plot.
_MARKER_WIDE, _MARKER_HIGH = 0.012, 0.03


@dataclass(frozen=True)
class Measure:
    """Something to weigh candidates by."""

    title: str
    axis: str
    #: CandidateResult -> float; NaN where it is not known.
    value: Callable[[CandidateResult], float]
    higher: bool  #: whether more is better
    show: Callable[[CandidateResult], str]  #: candidateResult -> str


def measures(result: PlanResult) -> tuple[Measure | None, Measure | None, Measure]:
    """Cost, quality and latency; None for what is not known, or the same for all candidates.

    Without prices the largest load stands for the cost.  Quality is the accuracy of live runs where
    every candidate has one, else attention kept, else the share of tokens that is never evicted.
    """
    rows = result.met()
    return _cost(result), _quality(rows), _latency(result)


def _cost(result: PlanResult) -> Measure | None:
    def cost(row: CandidateResult) -> float:
        return middle(compared_cost(row))

    def largest(row: CandidateResult) -> float:
        return math.nan if row.largest is None else row.largest

    if any(not math.isnan(cost(row)) for row in result.met()):
        axis = f"cost of 1,000 searches{at_load(result)} ({result.currency})"
        return Measure("cost", axis, cost, False, lambda row: (
            f"{money(compared_cost(row), result.currency)} per 1,000 searches"
        ))  # fmt: skip
    axis = f"largest {load_axis(result)}"
    return Measure("load", axis, largest, True, lambda row: load(row.largest, result.unit))


def _quality(rows: Sequence[CandidateResult]) -> Measure | None:
    def accuracy(row: CandidateResult) -> float:
        known = row.quality and row.quality.accuracy
        return 100 * known.value if known else math.nan

    def kept(row: CandidateResult) -> float:
        known = row.quality.attention_kept if row.quality else None
        return math.nan if known is None else 100 * known

    def whole(row: CandidateResult) -> float:
        return 100 * max(0.0, 1 - row.quality.evicted) if row.quality else math.nan

    for title, axis, value in (
        ("accuracy", "accuracy of live runs (%)", accuracy),
        ("attention kept", "attention kept (%)", kept),
        ("tokens never evicted", "tokens never evicted (%)", whole),
    ):
        if rows and not any(math.isnan(value(row)) for row in rows):
            if len({value(row) for row in rows}) == 1:
                return None  # nothing to weigh
            return _share(title, axis, value)
    return None


def _share(title: str, axis: str, value: Callable[[CandidateResult], float]) -> Measure:
    return Measure(title, axis, value, True, lambda row: f"{title} {value(row):.1f} %")


def _latency(result: PlanResult) -> Measure:
    """In a fleet for the stated load where it is known of every candidate, else alone."""
    rows = result.met()
    rank = f"{result.percentile:g}"
    served = bool(rows) and all(row.at_stated is not None for row in rows)

    def at_stated(row: CandidateResult) -> float:
        return math.nan if row.at_stated is None else row.at_stated.at_percentile.value

    def alone(row: CandidateResult) -> float:
        return math.nan if row.alone is None else row.alone.at_percentile_s

    value = at_stated if served else alone
    where = "alone"
    if served and result.stated_load is not None:
        where = f"in a fleet for {stated(result)}"
    return Measure(
        "latency", f"time per search {where}, {rank}th percentile (s)", value, False,
        lambda row: f"{quantity('seconds', value(row))} {where}",
    )  # fmt: skip


def efficient(rows: Sequence[CandidateResult], by: Sequence[Measure]) -> list[CandidateResult]:
    """Rows that no other one matches in every measure and beats in one, by the first measure.

    Of rows that are equal in all of them the first one stands for the others.
    """
    signed = {row.number: tuple((-1 if m.higher else 1) * m.value(row) for m in by) for row in rows}
    able = [row for row in rows if not any(math.isnan(v) for v in signed[row.number])]
    found: list[CandidateResult] = []
    for row in sorted(able, key=lambda each: (signed[each.number], each.number)):
        mine = signed[row.number]
        if not any(
            all(a <= b for a, b in zip(signed[other.number], mine, strict=True)) for other in found
        ):
            found.append(row)
    return found


def figures(result: PlanResult) -> dict[str, Any]:
    """One plot per pair of measures, and in words the candidates that are efficient in all.

    Returns
    -------
    dict
        ``plots``: list of ``title`` and ``figure``; ``efficient``: one text per numbered marker;
        ``by``: what efficiency is judged by; ``priced``: whether cost is part of it.
    """
    known = [measure for measure in measures(result) if measure is not None]
    rows = result.met()
    best = efficient(rows, known)
    pairs = [(x, y) for i, x in enumerate(known) for y in known[i + 1 :]] if rows else []
    plots = [
        {"title": f"{y.title.capitalize()} against {x.title}", "figure": _plot(rows, best, x, y)}
        for x, y in pairs
    ]
    texts = [
        f"{', '.join(same.name for same in _equal(row, rows, known))}: "
        f"{', '.join(m.show(row) for m in known)}"
        for row in best
    ]
    return {"plots": plots, "efficient": texts, "by": listed(measure.title for measure in known),
            "priced": known[0].title == "cost"}  # fmt: skip


def _equal(
    row: CandidateResult, rows: Sequence[CandidateResult], by: Sequence[Measure]
) -> list[CandidateResult]:
    """The candidate, and those that nothing tells from it."""
    same = [
        other
        for other in rows
        if other is not row and all(m.value(other) == m.value(row) for m in by)
    ]
    return [row, *same]


def _plot(
    rows: Sequence[CandidateResult], best: Sequence[CandidateResult], x: Measure, y: Measure
) -> Figure:
    machines = list(dict.fromkeys(row.hardware for row in rows))
    data = [
        _markers([row for row in rows if row.hardware == name], x, y, number, name)
        for number, name in enumerate(machines)
    ]
    numbered = [
        row for row in best if not math.isnan(x.value(row)) and not math.isnan(y.value(row))
    ]
    data.append(_efficient(numbered, best, rows, x, y))
    layout = {
        "xaxis": {"title": {"text": label(x.axis)}, **_range([x.value(row) for row in rows])},
        "yaxis": {"title": {"text": label(y.axis)}},
        "hovermode": "closest",
        "height": 440,
    }
    return {"data": data, "layout": layout}


def _efficient(
    numbered: Sequence[CandidateResult], best: Sequence[CandidateResult],
    rows: Sequence[CandidateResult], x: Measure, y: Measure,
) -> Figure:  # fmt: skip
    """Numbered markers; one for those that would lie on each other, with all their numbers."""
    spots = _spots(numbered, rows, x, y)
    first = [spot[0] for spot in spots]
    alone = [len(spot) == 1 for spot in spots]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "efficient (numbers: see below)",
        "x": [round(x.value(row), 6) for row in first],
        "y": [round(y.value(row), 6) for row in first],
        "text": [", ".join(str(best.index(row) + 1) for row in spot) for spot in spots],
        # Several numbers do not fit into a marker: they stand above it.
        "textposition": ["middle center" if one else "top center" for one in alone],
        "textfont": {"color": ["var(--card)" if one else "var(--accent)" for one in alone],
                     "size": 11},
        "marker": {"color": "var(--accent)", "size": 18,
                   "line": {"width": 1.5, "color": "var(--card)"}},
        "error_x": _prices(first, x),
        "customdata": ["<br>".join(label(row.name) for row in spot) for spot in spots],
        "hovertemplate": _hover(x, y),
    }  # fmt: skip


def _spots(
    numbered: Sequence[CandidateResult], rows: Sequence[CandidateResult], x: Measure, y: Measure
) -> list[list[CandidateResult]]:
    """Candidates by where they are drawn: those whose markers would cover each other, together."""
    wide, high = _places(x, rows, _range), _places(y, rows, lambda values: {})
    spots: list[list[CandidateResult]] = []
    for row in numbered:
        for spot in spots:
            at = spot[0].number
            if (abs(wide[row.number] - wide[at]) < _MARKER_WIDE
                    and abs(high[row.number] - high[at]) < _MARKER_HIGH):  # fmt: skip
                spot.append(row)
                break
        else:
            spots.append([row])
    return spots


def _places(
    measure: Measure,
    rows: Sequence[CandidateResult],
    axis: Callable[[Sequence[float]], Figure],
) -> dict[int, float]:
    """Where candidates lie along an axis, in shares of its length."""
    values = {row.number: measure.value(row) for row in rows}
    kind = axis(list(values.values()))
    if kind.get("type") == "log":
        values = {key: math.log(v) if v > 0 else math.nan for key, v in values.items()}
    known = [value for value in values.values() if math.isfinite(value)]
    start = 0.0 if "rangemode" in kind else min(known, default=0.0)
    length = (max(known, default=0.0) - start) or 1.0
    return {key: (value - start) / length for key, value in values.items()}


def _range(values: Sequence[float]) -> Figure:
    """Logarithmic where prices or loads lie far apart, else from zero on."""
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if known and max(known) > 8 * min(known):
        return log_axis(min(known), max(known))
    return {"rangemode": "tozero"}


def _hover(x: Measure, y: Measure) -> str:
    lines = ("<b>%{customdata}</b>", f"{label(x.axis)} %{{x:.4g}}", f"{label(y.axis)} %{{y:.4g}}")
    return f"{'<br>'.join(lines)}<extra></extra>"


def _markers(
    rows: Sequence[CandidateResult], x: Measure, y: Measure, number: int, name: str
) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(name),
        "x": [round(x.value(row), 6) for row in rows],
        "y": [round(y.value(row), 6) for row in rows],
        "customdata": [label(row.name) for row in rows],
        "marker": {"color": colour(number + 1), "size": 10, "symbol": symbol(number)},
        "hovertemplate": _hover(x, y),
    }


def _prices(rows: Sequence[CandidateResult], x: Measure) -> Figure:
    """The range of prices around their middle."""
    ends = [compared_cost(row) for row in rows]
    half = [0.0 if pair is None else (pair[1] - pair[0]) / 2 for pair in ends]
    return {
        "type": "data", "array": [rounded(each, 5) for each in half],
        "thickness": 1.5, "width": 4, "color": "var(--accent)",
        "visible": x.title == "cost" and any(half),
    }  # fmt: skip
