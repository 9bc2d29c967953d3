"""What changes if a number that a plan assumes is another: an overview, and curves for sliders.

Runs that are too short to tell give only a lower bound of a load, so a ratio of two loads is
known, bounded on one side, or not known at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.units import quantity
from arborsim.plan.results import CandidateResult, PlanResult, compared_cost
from arborsim.plan.sensitivity import (
    LENGTH,
    MOST_SEARCHES,
    Sensitivity,
    Variant,
    elsewhere,
)
from arborsim.show.figures import Figure, colour, label, stacked_bars
from arborsim.show.plan_figures import curve, marks, over_load
from arborsim.show.plan_words import at_load, is_least, load, middle, numbered, runs_out, told_apart
from arborsim.show.words import digits, money

KNOWN, LEAST, MOST, OPEN = "", "at least", "at most", "not told apart"
_WIDTH = 0.62  # of a row; said, because bars of several traces would get several widths
_COLOURS = ("c6", "c5")  # of the smallest and the largest factor


@dataclass(frozen=True)
class End:
    """A load under a changed number, against that under the number as it is."""

    factor: float
    ratio: float
    bound: str  #: `KNOWN`, `LEAST`, `MOST`, or `OPEN` where the ratio says nothing


def at(each: Sensitivity, factor: float) -> Variant:
    """The variant with that factor."""
    return next(variant for variant in each.variants if variant.factor == factor)


def run_of(result: PlanResult) -> str:
    """What the loads here come from."""
    return f"{min(MOST_SEARCHES, result.searches):,} searches"


def ends(each: Sensitivity) -> tuple[End, End]:
    """Largest load at the lowest and the highest factor, relative to that at factor 1."""
    return _end(each, each.variants[0]), _end(each, each.variants[-1])


def _end(each: Sensitivity, variant: Variant) -> End:
    base = at(each, 1.0).result
    if not base.largest:
        return End(variant.factor, 1.0, OPEN)
    if not variant.result.largest:  # nothing at all, whatever the base would be
        return End(variant.factor, 0.0, KNOWN)
    ratio = variant.result.largest / base.largest
    open_here, open_base = is_least(variant.result), is_least(base)
    if not open_here and not open_base:
        return End(variant.factor, ratio, KNOWN)
    # More of a resource carries more, longer searches less: a bound on the other side of 100 %
    # leaves open what everybody knows, and would look like the contrary.
    more = (variant.factor > 1) != (each.assumption == LENGTH)
    if (open_here and open_base) or (ratio <= 1 if more else ratio >= 1):
        return End(variant.factor, ratio, OPEN)
    return End(variant.factor, ratio, LEAST if open_here else MOST)


def overview(result: PlanResult, found: Sequence[Sensitivity]) -> Figure | None:
    """The recommended candidate's largest load with each number halved and doubled.

    What is known best and matters most stands on top; bounds are hatched, and what the runs leave
    open is said in place of a bar.
    """
    own = [each for each in found if each.candidate == result.recommendation.candidate]
    if not own:
        return None
    bars = sorted(((each.assumption.title, ends(each)) for each in own), key=_rank)
    places = list(range(len(bars)))
    data = [
        trace
        for place in (0, 1)
        for bound in (KNOWN, LEAST, MOST)
        if (trace := _bars([(title, pair[place]) for title, pair in bars], bound, _COLOURS[place]))
    ]
    notes = [_open(place, pair, run_of(result)) for place, (_, pair) in enumerate(bars)]
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "xaxis": {"title": {"text": "largest load (unchanged: 100 %)"}, **_room(bars)},
            "yaxis": {"tickvals": places, "ticktext": [title for title, _ in bars],
                      "range": [-0.5, len(bars) - 0.5], "zeroline": False, "showgrid": False},
            "shapes": [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 100, "x1": 100,
                        "line": {"color": "var(--soft)", "width": 1}}],
            "annotations": [note for note in notes if note],
            "hovermode": "closest",
            "height": 130 + 46 * len(bars),
        },
    }  # fmt: skip


def _rank(bar: tuple[str, tuple[End, End]]) -> tuple[int, float]:
    """Ascending, as the last bar is on top: open ones, bounds, known ones; then by how much."""
    bounds = {end.bound for end in bar[1]}
    known = 2 if bounds == {KNOWN} else 0 if bounds == {OPEN} else 1
    drawn = [end.ratio for end in bar[1] if end.bound != OPEN]
    return known, max((abs(math.log2(max(ratio, 0.01))) for ratio in drawn), default=0.0)


def _bars(named: Sequence[tuple[str, End]], bound: str, colour: str) -> Figure | None:
    """The bars of one factor that are known so well; None if there is none."""
    own = [(place, title, end) for place, (title, end) in enumerate(named) if end.bound == bound]
    if not own:
        return None
    paint = f"var(--{colour})"
    marker: Figure = {"color": paint}
    if bound:
        marker |= {"pattern": {"shape": "/", "fillmode": "replace", "size": 7, "solidity": 0.35},
                   "line": {"color": paint, "width": 1.5}}  # fmt: skip
    words = f"{bound} " if bound else ""
    return {
        "type": "bar", "orientation": "h",
        "name": f"number × {own[0][2].factor:g}" + (f", {bound} so much" if bound else ""),
        "y": [place for place, _, _ in own],
        "base": [100.0] * len(own),
        "width": _WIDTH,
        "x": [round(100 * (end.ratio - 1), 3) for _, _, end in own],
        "marker": marker,
        "customdata": [f"{title} × {end.factor:g}: {words}{100 * end.ratio:.0f} %"
                       for _, title, end in own],
        "hovertemplate": "%{customdata} of the load<extra></extra>",
    }  # fmt: skip


def _open(place: int, pair: tuple[End, End], runs: str) -> Figure | None:
    """What stands in the place of a bar; None if nothing is open."""
    left = [end for end in pair if end.bound == OPEN]
    if not left:
        return None
    which = "" if len(left) == 2 else f"× {left[0].factor:g}: "
    drawn = [end.ratio for end in pair if end.bound != OPEN]
    right = not drawn or drawn[0] <= 1
    return {
        "text": f"{which}not told<br>apart by runs of<br>{runs}", "x": 100, "y": place,
        "xanchor": "left" if right else "right", "align": "left" if right else "right",
        "xshift": 6 if right else -6, "showarrow": False,
        "font": {"color": "var(--soft)", "size": 10},
    }  # fmt: skip


def _room(bars: Sequence[tuple[str, tuple[End, End]]]) -> dict[str, Any]:
    """The axis' range: around the bars, and wide enough for what is said in place of one."""
    if all(end.bound != OPEN for _, pair in bars for end in pair):
        return {}
    drawn = [100 * end.ratio for _, pair in bars for end in pair if end.bound != OPEN]
    low, high = min([95.0, *drawn]), max([105.0, *drawn])
    return {"range": [low - 0.45 * (high - 100) if high - 100 > 100 - low else low - 2,
                      high + 0.6 * (100 - low)]}  # fmt: skip


def overview_note(result: PlanResult, found: Sequence[Sensitivity]) -> str:
    """How to read bars that are not known for sure; "" if all are."""
    own = [each for each in found if each.candidate == result.recommendation.candidate]
    bounds = {end.bound for each in own for end in ends(each)}
    told = []
    if bounds & {LEAST, MOST}:
        told.append(
            "Hatched bars are bounds: on one side of the comparison the runs are too short to show "
            "the largest load."
        )
    if OPEN in bounds:
        told.append(
            f"“Not told apart”: runs of {run_of(result)} show no difference for sure, which does "
            "not mean that there is none."
        )
    return " ".join(told)


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

    What is recommended on each other GPU is compared with it.
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
            "figure": _cost_bars(costs, names, result, most),
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


def _cost_bars(
    costs: dict[int, float], names: dict[int, str], result: PlanResult, most: float
) -> Figure:
    axis = f"cost of 1,000 searches{at_load(result)} ({label(result.currency)})"
    texts = [names[number] for number in costs]
    ends = {"title": {"text": axis}, "range": [0, 1.03 * most]}
    figure = stacked_bars(texts, [("", list(costs.values()), "c1")], ends, "")
    paint = [colour(place + 1) for place in range(len(costs))]
    figure["data"][0] |= {"showlegend": False, "marker": {"color": paint}}
    return figure
