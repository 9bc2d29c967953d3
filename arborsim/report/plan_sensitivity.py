"""What changes if a number that a plan assumes is another: curves for sliders, and all at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from arborsim.planning.results import CandidateResult, PlanResult
from arborsim.planning.sensitivity import Sensitivity, Variant, compared_cost, elsewhere
from arborsim.report.figures import Figure, label
from arborsim.report.plan_figures import curve, level, marks, said
from arborsim.report.plan_words import (
    at_load,
    digits,
    load,
    load_axis,
    middle,
    money,
    numbered,
    saturates,
    told_apart,
)
from arborsim.report.units import quantity

_PRICES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
_ABOVE_LIMIT = 2.0
_NOTHING = "no load meets the target"


def sliders(result: PlanResult, found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """One slider per assumption, with everything that it shows at each of its stops.

    Returns
    -------
    list of dict
        ``title``; ``start``: the stop at which nothing is changed; ``stops``: ``label``,
        ``figure``, ``rows`` (texts of a table's cells, one list per candidate) and ``verdict``.
    """
    chosen = {each.candidate: numbered(result, each.candidate) for each in found}
    names = told_apart(chosen.values())
    made = []
    for assumption in dict.fromkeys(each.assumption for each in found):
        own = [each for each in found if each.assumption == assumption]
        factors = sorted({variant.factor for each in own for variant in each.variants})
        made.append({
            "title": assumption.title,
            "start": factors.index(1.0),
            "stops": [_stop(result, own, names, factor) for factor in factors],
        })  # fmt: skip
    if price := _price_slider(result, list(chosen.values())):
        made.append(price)
    return made


def _at(each: Sensitivity, factor: float) -> Variant:
    return next(variant for variant in each.variants if variant.factor == factor)


def _stop(
    result: PlanResult, own: Sequence[Sensitivity], names: dict[int, str], factor: float
) -> dict[str, Any]:
    served = {each.candidate: _at(each, factor).result for each in own}
    rows = [[names[number], *_cells(row, result)] for number, row in served.items()]
    return {
        "label": _label(own, factor),
        "figure": _moved(result, own, names, factor),
        "rows": rows,
        "verdict": _verdict(served, names, result),
    }


def _cells(row: CandidateResult, result: PlanResult) -> list[str]:
    """Largest load, cost, what runs out first."""
    if row.largest is None:
        return [row.reason or _NOTHING, "", ""]
    cost = money(compared_cost(row), result.currency)
    more = " or more" if _is_least(row) else ""
    return [f"{load(row.largest, result.unit)}{more}", cost, saturates(row.at_largest)]


def _is_least(row: CandidateResult) -> bool:
    """Whether the runs are too short to tell how much more it carries."""
    return row.limited_by == "run length"


def _label(own: Sequence[Sensitivity], factor: float) -> str:
    """The factor, and the numbers that come of it."""
    kind, times = own[0].assumption.kind, f"× {factor:g}"
    if kind == "factor":
        return times
    values = dict.fromkeys(_quantity(kind, factor * each.base) for each in own)
    return f"{times} ({', '.join(values)})"


def _quantity(kind: str, value: float) -> str:
    if kind.startswith("bytes"):
        return quantity("bytes", value) + kind.removeprefix("bytes")
    return f"{digits(value / 1e12)} T{kind}"


def _verdict(served: dict[int, CandidateResult], names: dict[int, str], result: PlanResult) -> str:
    """Which of them is the cheapest now; without prices, which one serves most."""
    able = {number: row for number, row in served.items() if row.at_largest is not None}
    if not able:
        return "None of them meets the target."
    if len(served) == 1:
        return ""
    costs = {number: _cost(row) for number, row in able.items()}
    if all(math.isnan(cost) for cost in costs.values()):
        best = max(able, key=lambda number: able[number].largest or 0.0)
        what = "The most is served by"
    else:
        best = min(
            costs, key=lambda number: math.inf if math.isnan(costs[number]) else costs[number]
        )
        what = "The cheapest of them is"
    usual = "" if best == result.recommendation.candidate else ", which is not what is recommended"
    return f"{what} {names[best]}{usual}."


def _cost(row: CandidateResult) -> float:
    return middle(compared_cost(row))


def _moved(
    result: PlanResult, own: Sequence[Sensitivity], names: dict[int, str], factor: float
) -> Figure:
    """Time per search against load; dotted as it was before the number was changed."""
    data = []
    for number, each in enumerate(own):
        before, now = _at(each, 1.0).result, _at(each, factor).result
        name = names[each.candidate]
        if factor != 1:
            data.append(curve(before, lambda p: p.at_percentile.value, name, number,
                              result.unit, dashed=True))  # fmt: skip
        data.append(curve(now, lambda p: p.at_percentile.value, name, number, result.unit))
    shown = [variant.result for each in own for variant in each.variants]
    data += marks([_at(each, factor).result for each in own])
    points = [point for row in shown for point in row.curve]
    limit = result.search_limit_s
    longest = max((p.at_percentile.value for p in points), default=1.0)
    top = longest if limit is None else min(max(longest, 1.2 * limit), _ABOVE_LIMIT * limit)
    right = max((p.load for p in points), default=1.0)
    axis = f"arrival to answer, {result.percentile:g}th percentile (s)"
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": load_axis(result)},
                      "range": [0, 1.03 * right]},
            "yaxis": {"title": {"text": axis}, "range": [0, 1.03 * top]},
            "shapes": [] if limit is None else [level(limit)],
            "annotations": [] if limit is None else [said("target", limit)],
            "hovermode": "closest",
            "height": 380,
        },
    }  # fmt: skip


def _price_slider(result: PlanResult, rows: Sequence[CandidateResult]) -> dict[str, Any] | None:
    """The price of the recommended GPU, which needs nothing to be served again.

    Beside the others stands what is recommended on each other GPU.
    """
    first = next((row for row in rows if row.number == result.recommendation.candidate), None)
    if first is None or math.isnan(_cost(first)):
        return None
    compared = {row.number: row for row in (*rows, *elsewhere(result, first))}
    priced = [row for row in compared.values() if not math.isnan(_cost(row))]
    names = told_apart(priced)
    costs_now = {row.number: _cost(row) for row in priced}
    most = max(*costs_now.values(), _PRICES[-1] * _cost(first))
    stops = []
    for factor in _PRICES:
        costs = {
            row.number: costs_now[row.number] * (factor if row.hardware == first.hardware else 1.0)
            for row in priced
        }
        best = min(costs, key=lambda number: (costs[number], number != first.number))
        usual = "" if best == first.number else ", which is not what is recommended"
        stops.append({
            "label": f"× {factor:g} ({money(_times(first.price_per_hour, factor), result.currency)}"
            f" per hour of {first.hardware})",
            "figure": _bars(costs, names, result, most),
            "rows": [
                [names[row.number], load(row.largest, result.unit),
                 f"{digits(costs[row.number])} {result.currency}", saturates(row.at_largest)]
                for row in priced
            ],
            "verdict": f"The cheapest of them is {names[best]}{usual}." if len(priced) > 1 else "",
        })  # fmt: skip
    return {"title": f"Price of {first.hardware}", "start": _PRICES.index(1.0), "stops": stops}


def _times(bounds: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    return None if bounds is None else (factor * bounds[0], factor * bounds[1])


def _bars(
    costs: dict[int, float], names: dict[int, str], result: PlanResult, most: float
) -> Figure:
    axis = f"cost of 1,000 searches{at_load(result)} ({label(result.currency)})"
    places = list(range(len(costs)))
    texts = [label(names[number]) for number in costs]
    return {
        "data": [{
            "type": "bar", "orientation": "h", "y": places, "showlegend": False,
            "x": [float(f"{cost:.5g}") for cost in costs.values()], "customdata": texts,
            "marker": {"color": [f"var(--c{(place + 1) % 8})" for place in places]},
            "hovertemplate": "%{customdata}: %{x:.4g}<extra></extra>",
        }],
        "layout": {
            "xaxis": {"title": {"text": axis}, "range": [0, 1.03 * most]},
            "yaxis": {"tickvals": places, "ticktext": texts, "zeroline": False, "showgrid": False,
                      "range": [len(costs) - 0.5, -0.5]},
            "bargap": 0.35,
            "height": 140 + 44 * len(costs),
        },
    }  # fmt: skip


def overview(result: PlanResult, found: Sequence[Sensitivity]) -> Figure | None:
    """The recommended candidate's largest load with each number halved and doubled."""
    own = [each for each in found if each.candidate == result.recommendation.candidate]
    bars: list[tuple[str, float, float]] = [(each.assumption.title, *_ends(each)) for each in own]
    bars.sort(key=lambda bar: max(abs(math.log2(max(end, 0.01))) for end in (bar[1], bar[2])))
    if not bars:
        return None
    low, high = own[0].variants[0].factor, own[0].variants[-1].factor
    least = {
        each.assumption.title: [
            "at least " if _is_least(each.variants[end].result) else "" for end in (0, -1)
        ]
        for each in own
    }
    places = list(range(len(bars)))
    data = [
        {
            "type": "bar", "orientation": "h", "name": f"number × {factor:g}", "y": places,
            "base": [100.0] * len(bars),
            "x": [round(100 * (end - 1), 3) for end in ends],
            "marker": {"color": f"var(--{colour})"},
            "customdata": [f"{bar[0]} × {factor:g}: {least}{100 * end:.0f} %"
                           for bar, end, least in zip(bars, ends, leasts, strict=True)],
            "hovertemplate": "%{customdata} of the load<extra></extra>",
        }
        for ends, leasts, factor, colour in (
            ([bar[1] for bar in bars], [least[bar[0]][0] for bar in bars], low, "c6"),
            ([bar[2] for bar in bars], [least[bar[0]][1] for bar in bars], high, "c5"),
        )
    ]  # fmt: skip
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "bargap": 0.35,
            "xaxis": {"title": {"text": "largest load (unchanged: 100 %)"}},
            "yaxis": {"tickvals": places, "ticktext": [bar[0] for bar in bars],
                      "zeroline": False, "showgrid": False},
            "shapes": [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 100, "x1": 100,
                        "line": {"color": "var(--soft)", "width": 1}}],
            "hovermode": "closest",
            "height": 130 + 40 * len(bars),
        },
    }  # fmt: skip


def _ends(each: Sensitivity) -> tuple[float, float]:
    """Largest load at the lowest and the highest factor, relative to that at factor 1."""
    base = _at(each, 1.0).result.largest
    ends = [each.variants[place].result.largest or 0.0 for place in (0, -1)]
    return (ends[0] / base, ends[1] / base) if base else (1.0, 1.0)
