"""What candidates cost against what they keep and how fast they are; the efficient ones joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from arborsim.plan.results import CandidateResult, PlanResult
from arborsim.plan.sensitivity import compared_cost
from arborsim.show.figures import Figure, label
from arborsim.show.plan_measures import Measure, measures
from arborsim.show.plan_words import named
from arborsim.show.words import digits

_COLOURS = 8
#: About half a marker, in shares of the plot.
_MARKER_WIDE, _MARKER_HIGH = 0.012, 0.03
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")


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
        f"{', '.join(named(same) for same in _equal(row, rows, known))}: "
        f"{', '.join(m.show(row) for m in known)}"
        for row in best
    ]
    return {"plots": plots, "efficient": texts, "by": " and ".join(_listed(known)),
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
        "customdata": ["<br>".join(label(named(row)) for row in spot) for spot in spots],
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
