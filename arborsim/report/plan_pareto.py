"""What candidates cost against what they keep and how fast they are; the efficient ones joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.planning.results import CandidateResult, PlanResult
from arborsim.planning.sensitivity import compared_cost
from arborsim.report.figures import Figure, label
from arborsim.report.plan_words import at_load, digits, load, load_axis, middle, money, named
from arborsim.report.units import quantity

_COLOURS = 8
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")


@dataclass(frozen=True)
class Measure:
    """Something to weigh candidates by.

    Attributes
    ----------
    title, axis : str
    value : callable
        CandidateResult -> float; NaN where it is not known.
    higher : bool
        Whether more is better.
    show : callable
        CandidateResult -> str
    """

    title: str
    axis: str
    value: Callable[[CandidateResult], float]
    higher: bool
    show: Callable[[CandidateResult], str]


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
    stated = bool(rows) and all(row.at_stated is not None for row in rows)

    def at_stated(row: CandidateResult) -> float:
        return math.nan if row.at_stated is None else row.at_stated.at_percentile.value

    def alone(row: CandidateResult) -> float:
        return math.nan if row.alone is None else row.alone.at_percentile_s

    value = at_stated if stated else alone
    where = "alone"
    if stated and result.stated_load is not None:
        where = f"in a fleet for {result.stated_load:g} {result.unit}"
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
    texts = [f"{named(row)}: {', '.join(m.show(row) for m in known)}" for row in best]
    return {"plots": plots, "efficient": texts, "by": " and ".join(_listed(known)),
            "priced": known[0].title == "cost"}  # fmt: skip


def _listed(known: Sequence[Measure]) -> list[str]:
    titles = [measure.title for measure in known]
    return [", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles


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
    data.append({
        "type": "scatter",
        "mode": "markers+text",
        "name": "efficient (numbers: see below)",
        "x": [round(x.value(row), 6) for row in numbered],
        "y": [round(y.value(row), 6) for row in numbered],
        "text": [str(best.index(row) + 1) for row in numbered],
        "textfont": {"color": "var(--card)", "size": 11},
        "marker": {"color": "var(--accent)", "size": 18,
                   "line": {"width": 1.5, "color": "var(--card)"}},
        "error_x": _prices(numbered, x),
        "customdata": [label(named(row)) for row in numbered],
        "hovertemplate": _hover(x, y),
    })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": label(x.axis)}, **_range([x.value(row) for row in rows])},
        "yaxis": {"title": {"text": label(y.axis)}},
        "hovermode": "closest",
        "height": 440,
    }
    return {"data": data, "layout": layout}


def _range(values: Sequence[float]) -> Figure:
    """Logarithmic where prices or loads lie far apart, else from zero on."""
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if known and max(known) > 8 * min(known):
        return {"type": "log", **ticks(min(known), max(known))}
    return {"rangemode": "tozero"}


def ticks(low: float, high: float) -> Figure:
    """1, 2 and 5 times powers of ten: a logarithmic axis that can be read."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    values = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    near = [value for value in values if low / 2.5 <= value <= 2.5 * high]
    return {"tickvals": near, "ticktext": [f"{value:,g}" for value in near]}


def _hover(x: Measure, y: Measure) -> str:
    lines = ("<b>%{customdata}</b>", f"{label(x.axis)} %{{x:.4g}}", f"{label(y.axis)} %{{y:.4g}}")
    return f"{'<br>'.join(lines)}<extra></extra>"


def _markers(
    rows: Sequence[CandidateResult], x: Measure, y: Measure, number: int, name: str
) -> Figure:
    colour = f"var(--c{(number + 1) % _COLOURS})"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(name),
        "x": [round(x.value(row), 6) for row in rows],
        "y": [round(y.value(row), 6) for row in rows],
        "customdata": [label(named(row)) for row in rows],
        "marker": {"color": colour, "size": 10, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
        "hovertemplate": _hover(x, y),
    }


def _prices(rows: Sequence[CandidateResult], x: Measure) -> Figure:
    """The range of prices around their middle."""
    ends = [compared_cost(row) for row in rows]
    half = [0.0 if pair is None else (pair[1] - pair[0]) / 2 for pair in ends]
    return {
        "type": "data", "array": [float(digits(each, 5).replace(",", "")) for each in half],
        "thickness": 1.5, "width": 4, "color": "var(--accent)",
        "visible": x.title == "cost" and any(half),
    }  # fmt: skip
