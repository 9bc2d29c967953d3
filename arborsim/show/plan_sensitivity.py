"""What changes if a number that a plan assumes is another: curves and tables for sliders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from arborsim.core.units import quantity
from arborsim.plan.results import CandidateResult, PlanResult, compared_cost
from arborsim.plan.sensitivity import (
    MOST_SEARCHES,
    Sensitivity,
    elsewhere,
)
from arborsim.show.figures import Figure, colour, label, stacked_bars
from arborsim.show.plan_figures import curve, marks, over_load
from arborsim.show.plan_overview import at, run_of
from arborsim.show.plan_words import at_load, is_least, load, middle, numbered, runs_out, told_apart
from arborsim.show.words import digits, money

_PRICES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
_ABOVE_LIMIT = 2.0
_NOTHING = "no load meets the target"


def sliders(result: PlanResult, found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """One slider per assumption, with everything that it shows at each of its stops.

    Returns
    -------
    list of dict
        ``title``; ``start``: the stop at which nothing is changed; ``stops``: ``label``,
        ``figure``, ``rows`` (texts of a table's cells, one list per candidate), ``verdict`` and
        ``note``: why it is not the plan's answer.
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


def _stop(
    result: PlanResult, own: Sequence[Sensitivity], names: dict[int, str], factor: float
) -> dict[str, Any]:
    served = {each.candidate: at(each, factor).result for each in own}
    rows = [[names[number], *_cells(row, result)] for number, row in served.items()]
    return {
        "label": _label(own, factor),
        "figure": _moved(result, own, names, factor),
        "rows": rows,
        "verdict": _verdict(served, names, result),
        "note": _unchanged(result) if factor == 1 else "",
    }


def _unchanged(result: PlanResult) -> str:
    """Why what stands at factor 1 is not the plan's answer; "" if it comes from the same run."""
    if result.runs == 1 and result.searches <= MOST_SEARCHES:
        return ""
    runs = "one run" if result.runs == 1 else f"{result.runs} runs"
    why = "takes the smallest load of them" if result.runs > 1 else "has more searches to go by"
    return (
        f"Nothing is changed here, but this is one run of {run_of(result)}. The answer above rests "
        f"on {runs} of {result.searches:,} and {why}; one short run has its own draw of searches, "
        "so its loads can be larger or smaller. Compare loads here with each other only."
    )


def _cells(row: CandidateResult, result: PlanResult) -> list[str]:
    """Largest load, cost, what runs out first."""
    if row.largest is None:
        return [row.reason or _NOTHING, "", ""]
    cost = money(compared_cost(row), result.currency)
    more = " or more" if is_least(row) else ""
    return [f"{load(row.largest, result.unit)}{more}", cost, runs_out(row)]


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
        before, now = at(each, 1.0).result, at(each, factor).result
        name = names[each.candidate]
        if factor != 1:
            data.append(curve(before, lambda p: p.at_percentile.value, name, number,
                              result.unit, dashed=True))  # fmt: skip
        data.append(curve(now, lambda p: p.at_percentile.value, name, number, result.unit))
    shown = [variant.result for each in own for variant in each.variants]
    data += marks([at(each, factor).result for each in own])
    points = [point for row in shown for point in row.curve]
    limit = result.search_limit_s
    longest = max((p.at_percentile.value for p in points), default=1.0)
    top = longest if limit is None else min(max(longest, 1.2 * limit), _ABOVE_LIMIT * limit)
    right = max((p.load for p in points), default=1.0)
    axis = f"arrival to answer, {result.percentile:g}th percentile (s)"
    layout = over_load(result, axis, 1.03 * top, limit)
    layout["xaxis"]["range"] = [0, 1.03 * right]
    return {"data": data, "layout": layout}


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
                 f"{digits(costs[row.number])} {result.currency}", runs_out(row)]
                for row in priced
            ],
            "verdict": f"The cheapest of them is {names[best]}{usual}." if len(priced) > 1 else "",
            "note": "",
        })  # fmt: skip
    return {"title": f"Price of {first.hardware}", "start": _PRICES.index(1.0), "stops": stops}


def _times(bounds: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    return None if bounds is None else (factor * bounds[0], factor * bounds[1])


def _bars(
    costs: dict[int, float], names: dict[int, str], result: PlanResult, most: float
) -> Figure:
    axis = f"cost of 1,000 searches{at_load(result)} ({label(result.currency)})"
    texts = [names[number] for number in costs]
    ends = {"title": {"text": axis}, "range": [0, 1.03 * most]}
    figure = stacked_bars(texts, [("", list(costs.values()), "c1")], ends, "")
    paint = [colour(place + 1) for place in range(len(costs))]
    figure["data"][0] |= {"showlegend": False, "marker": {"color": paint}}
    return figure
