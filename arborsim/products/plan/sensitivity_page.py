"""What changes if a number that a plan assumes is another: an overview, and curves for sliders.

Runs that are too short to tell give only a lower bound of a load, so a ratio of two loads is
known, bounded on one side, or not known at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from arborsim.core.units import quantity
from arborsim.products.plan.answer import elsewhere
from arborsim.products.plan.figures import over_load, time_kinds
from arborsim.products.plan.results import CandidateResult, PlanResult, compared_cost
from arborsim.products.plan.sensitivity import LENGTH, MOST_SEARCHES, Sensitivity
from arborsim.products.plan.sentences import (
    at_load,
    cost,
    is_least,
    load,
    numbered,
    runs_out,
    saturates,
    short_names,
)
from arborsim.report.page import Figure, axis, colour, figure, named_axis, stacked_bars, upright
from arborsim.report.words import digits, money

KNOWN, LEAST, MOST, OPEN = "", "at least", "at most", "open"
_WIDTH = 0.62  # of a row; else bars of several traces would differ in width
_COLOURS = ("c6", "c5")  # of the smallest and the largest factor


class LoadRatio(NamedTuple):
    """A load under a changed number, against that under the number as it is."""

    factor: float
    ratio: float
    bound: str  #: `KNOWN`, `LEAST`, `MOST`, or `OPEN` where the runs show nothing


Bar = tuple[str, tuple[LoadRatio, LoadRatio]]  # an assumption


def at(each: Sensitivity, factor: float) -> CandidateResult:
    """What comes of that factor."""
    return next(variant.result for variant in each.variants if variant.factor == factor)


def run_of(result: PlanResult) -> str:
    """What the loads here come from."""
    return f"{min(MOST_SEARCHES, result.searches):,} searches"


def ends(each: Sensitivity) -> tuple[LoadRatio, LoadRatio]:
    """Largest load at the lowest and the highest factor, relative to that at factor 1."""
    return _end(each, each.variants[0].factor), _end(each, each.variants[-1].factor)


def _end(each: Sensitivity, factor: float) -> LoadRatio:
    base, here = at(each, 1.0), at(each, factor)
    if not base.largest:
        return LoadRatio(factor, 1.0, OPEN)
    if not here.largest:  # nothing at all, whatever the base would be
        return LoadRatio(factor, 0.0, KNOWN)
    ratio = here.largest / base.largest
    open_here, open_base = is_least(here), is_least(base)
    if not open_here and not open_base:
        return LoadRatio(factor, ratio, KNOWN)
    # More of a resource carries more, longer searches less: a bound on the other side of 100 %
    # does not contradict that, but would look as if it did.
    more = (factor > 1) != (each.assumption == LENGTH)
    if (open_here and open_base) or (ratio <= 1 if more else ratio >= 1):
        return LoadRatio(factor, ratio, OPEN)
    return LoadRatio(factor, ratio, LEAST if open_here else MOST)


def overview(result: PlanResult, found: Sequence[Sensitivity]) -> tuple[Figure | None, str]:
    """The recommended candidate's largest load with each number halved and doubled, and a note.

    What is known best and matters most is on top; bounds are hatched, and a text replaces the
    bar of what the runs leave open.
    """
    here = [each for each in found if each.candidate == result.recommendation.candidate]
    own = [each for each in here if not each.idle]
    if not own:
        return None, ""
    bars = sorted(((each.assumption.title, ends(each)) for each in own), key=_rank)
    data = [
        trace
        for place in (0, 1)
        for bound in (KNOWN, LEAST, MOST)
        if (trace := _bars([(title, pair[place]) for title, pair in bars], bound, _COLOURS[place]))
    ]
    runs = run_of(result)
    texts = [_open(place, pair, runs) for place, (_, pair) in enumerate(bars)]
    unchanged = upright(100) | {"line": {"color": "var(--soft)", "width": 1}}
    names, room = [title for title, _ in bars], (-0.5, len(bars) - 0.5)
    drawn = figure(
        data, axis("largest load (unchanged: 100 %)", **_room(bars)),
        named_axis(range(len(bars)), names, room), 130 + 46 * len(bars),
        barmode="overlay", shapes=[unchanged], annotations=[text for text in texts if text],
    )  # fmt: skip
    left_out = [f"{each.assumption.title} is left out: {each.idle}." for each in here if each.idle]
    return drawn, " ".join(filter(None, [_note(bars, runs), *left_out]))


def _drawn(pair: tuple[LoadRatio, LoadRatio]) -> list[float]:
    return [end.ratio for end in pair if end.bound != OPEN]


def _rank(bar: Bar) -> tuple[int, float]:
    """Ascending, as the last bar is on top: open ones, bounds, known ones; then by how much."""
    bounds = {end.bound for end in bar[1]}
    known = 2 if bounds == {KNOWN} else 0 if bounds == {OPEN} else 1
    return known, max((abs(math.log2(max(each, 0.01))) for each in _drawn(bar[1])), default=0.0)


def _bars(named: Sequence[tuple[str, LoadRatio]], bound: str, paint: str) -> Figure | None:
    """The bars of one factor that are known so well; None if there is none."""
    own = [(place, title, end) for place, (title, end) in enumerate(named) if end.bound == bound]
    if not own:
        return None
    marker: Figure = {"color": f"var(--{paint})"}
    if bound:
        marker |= {"pattern": {"shape": "/", "fillmode": "replace", "size": 7, "solidity": 0.35},
                   "line": {**marker, "width": 1.5}}  # fmt: skip
    words = f"{bound} " if bound else ""
    return {
        "type": "bar", "orientation": "h", "marker": marker, "width": _WIDTH,
        "name": f"number × {own[0][2].factor:g}" + (f" ({bound})" if bound else ""),
        "y": [place for place, _, _ in own],
        "base": [100.0] * len(own),
        "x": [round(100 * (end.ratio - 1), 3) for _, _, end in own],
        "customdata": [f"{title} × {end.factor:g}: {words}{100 * end.ratio:.0f} %"
                       for _, title, end in own],
        "hovertemplate": "%{customdata} of the load<extra></extra>",
    }  # fmt: skip


def _open(place: int, pair: tuple[LoadRatio, LoadRatio], runs: str) -> Figure | None:
    """The text in place of a bar; None if nothing is open."""
    left, drawn = [end for end in pair if end.bound == OPEN], _drawn(pair)
    if not left:
        return None
    which = "" if len(left) == 2 else f"× {left[0].factor:g}: "
    right = not drawn or drawn[0] <= 1
    return {
        "text": f"{which}no difference<br>for sure in runs<br>of {runs}", "x": 100, "y": place,
        "xanchor": "left" if right else "right", "align": "left" if right else "right",
        "xshift": 6 if right else -6, "showarrow": False,
        "font": {"color": "var(--soft)", "size": 10},
    }  # fmt: skip


def _room(bars: Sequence[Bar]) -> dict[str, Any]:
    """The axis' range: around the bars, and wide enough for a text in place of one."""
    if all(end.bound != OPEN for _, pair in bars for end in pair):
        return {}
    drawn = [100 * ratio for _, pair in bars for ratio in _drawn(pair)]
    low, high = min([95.0, *drawn]), max([105.0, *drawn])
    return {"range": [low - 0.45 * (high - 100) if high - 100 > 100 - low else low - 2,
                      high + 0.6 * (100 - low)]}  # fmt: skip


def _note(bars: Sequence[Bar], runs: str) -> str:
    """How to read bars that are not known for sure; "" if all are."""
    bounds = {end.bound for _, pair in bars for end in pair}
    notes = []
    if bounds & {LEAST, MOST}:
        notes.append("Hatched bars are bounds: on one side of the comparison the runs are too "
                     "short to show the largest load.")  # fmt: skip
    if OPEN in bounds:
        notes.append(f"“No difference for sure”: runs of {runs} show no difference that is "
                     "certain, which does not mean that there is none.")  # fmt: skip
    return " ".join(notes)


_PRICES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)


def sliders(result: PlanResult, found: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    """One slider per assumption, with everything that it shows at each of its stops.

    At the stop ``start`` nothing is changed; a stop has the ``rows`` of a table (one list of texts
    per candidate) and a ``note`` on why it is not the plan's answer.
    """
    rows = [numbered(result, number) for number in dict.fromkeys(each.candidate for each in found)]
    names = short_names(rows)
    made = []
    for assumption in dict.fromkeys(each.assumption for each in found):
        own = [each for each in found if each.assumption == assumption]
        factors = sorted({variant.factor for each in own for variant in each.variants})
        stops = [_stop(result, own, names, factor) for factor in factors]
        if why := _no_effect(result, own, names):
            for stop in stops:
                stop["note"] = f"{why} {stop['note']}".rstrip()
        made.append({"title": assumption.title, "start": factors.index(1.0), "stops": stops})
    return made + _price_slider(result, rows)


def _no_effect(result: PlanResult, own: Sequence[Sensitivity], names: Mapping[int, str]) -> str:
    """Why moving the slider changes nothing, for each candidate where it does not; else ""."""
    said: dict[str, list[str]] = {}
    for each in own:
        shown = {_shown(variant.result, result) for variant in each.variants}
        if len(shown) == 1:
            said.setdefault(each.idle or _bound_by(each), []).append(names[each.candidate])
    title = own[0].assumption.title
    return " ".join(f"{title} changes nothing for {' and '.join(of)}: {why}."
                    for why, of in said.items())  # fmt: skip


def _shown(row: CandidateResult, result: PlanResult) -> tuple[str, ...]:
    """What the table under a slider shows of a candidate."""
    if row.largest is None:
        return (row.reason,)
    carried = load(row.largest, result.unit)
    return carried, money(compared_cost(row), result.currency), runs_out(row)


def _bound_by(each: Sensitivity) -> str:
    """What the load hangs on, where a number that may matter does not."""
    base = at(each, 1.0)
    if base.largest is None or base.at_largest is None:
        return "it meets the target under none of these numbers"
    if is_least(base):
        return f"runs of so few searches show no limit (busiest: {saturates(base.at_largest)})"
    if base.limited_by == "target":
        return f"the latency target limits the load ({saturates(base.at_largest)} is busiest)"
    return f"{saturates(base.at_largest)} runs out first"


def _stop(
    result: PlanResult, own: Sequence[Sensitivity], names: dict[int, str], factor: float
) -> dict[str, Any]:
    served = {each.candidate: at(each, factor) for each in own}
    able = {number: row for number, row in served.items() if row.at_largest is not None}
    costs = {number: cost(row) for number, row in able.items()}
    most = max(able, key=lambda number: able[number].largest or 0.0, default=None)
    if most is None:
        verdict = "None of them meets the target."
    elif len(served) == 1:
        verdict = ""
    elif all(map(math.isnan, costs.values())):
        verdict = f"The most is served by {names[most]}{_usual(most, result)}."
    else:
        verdict = _cheapest(costs, names, result)
    rows = []
    for number, row in served.items():
        cells = [row.reason or "no load meets the target", "", ""]
        if row.largest is not None:
            carried = load(row.largest, result.unit) + (" or more" if is_least(row) else "")
            cells = [carried, money(compared_cost(row), result.currency), runs_out(row)]
        rows.append([names[number], *cells])
    lines = [(names[each.candidate], at(each, factor), at(each, 1.0)) for each in own]
    points = [p for each in own for variant in each.variants for p in variant.result.curve]
    right = max((p.load for p in points), default=1.0)
    return {
        "label": _label(own, factor),
        # Time per search against load; dotted as it was before the number was changed.
        "figure": over_load(result, time_kinds(result)[0], lines, points, range=[0, 1.03 * right]),
        "rows": rows,
        "verdict": verdict,
        "note": _unchanged(result) if factor == 1 else "",
    }


def _cheapest(costs: Mapping[int, float], names: Mapping[int, str], result: PlanResult) -> str:
    best = min(costs, key=lambda number: (
        math.inf if math.isnan(costs[number]) else costs[number],
        number != result.recommendation.candidate,
    ))  # fmt: skip
    return f"The cheapest of them is {names[best]}{_usual(best, result)}."


def _usual(number: int, result: PlanResult) -> str:
    same = number == result.recommendation.candidate
    return "" if same else ", which is not what is recommended"


def _unchanged(result: PlanResult) -> str:
    """Why the figures at factor 1 are not the plan's answer; "" if it comes from the same run."""
    if result.runs == 1 and result.searches <= MOST_SEARCHES:
        return ""
    runs = "one run" if result.runs == 1 else f"{result.runs} runs"
    why = "takes the smallest load of them" if result.runs > 1 else "has more searches to go by"
    return (
        f"Nothing is changed here, but this is one run of {run_of(result)}. The answer above rests "
        f"on {runs} of {result.searches:,} and {why}; one short run has its own draw of searches, "
        "so its loads can be larger or smaller. Compare loads here with each other only."
    )


def _label(own: Sequence[Sensitivity], factor: float) -> str:
    """The factor, and the numbers that come of it."""
    kind, values = own[0].assumption.kind, [factor * each.base for each in own]
    if kind == "factor":
        return f"× {factor:g}"
    if kind.startswith("bytes"):
        texts = [quantity("bytes", value) + kind.removeprefix("bytes") for value in values]
    else:
        texts = [f"{digits(value / 1e12)} T{kind}" for value in values]
    return f"× {factor:g} ({', '.join(dict.fromkeys(texts))})"


def _price_slider(result: PlanResult, rows: Sequence[CandidateResult]) -> list[dict[str, Any]]:
    """The price of the recommended GPU, which needs nothing to be served again; if it has one.

    What is recommended on each other GPU is compared with it.
    """
    first = next((row for row in rows if row.number == result.recommendation.candidate), None)
    if first is None or first.price_per_hour is None or math.isnan(cost(first)):
        return []
    compared = {row.number: row for row in (*rows, *elsewhere(result, first))}
    priced = [row for row in compared.values() if not math.isnan(cost(row))]
    names = short_names(priced)
    most = max(*map(cost, priced), _PRICES[-1] * cost(first))
    low, high = first.price_per_hour
    title = f"cost of 1,000 searches{at_load(result)} ({result.currency})"
    x = axis(title, range=[0, 1.03 * most])
    paint = [colour(place + 1) for place in range(len(priced))]
    stops = []
    for factor in _PRICES:
        costs = {row.number: cost(row) * (factor if row.hardware == first.hardware else 1.0)
                 for row in priced}  # fmt: skip
        hourly = money((factor * low, factor * high), result.currency)
        bars = stacked_bars(list(names.values()), [("", list(costs.values()), "c1")], x, "")
        bars["data"][0] |= {"showlegend": False, "marker": {"color": paint}}
        stops.append({
            "label": f"× {factor:g} ({hourly} per hour of {first.hardware})",
            "figure": bars,
            "rows": [
                [names[row.number], load(row.largest, result.unit),
                 f"{digits(costs[row.number])} {result.currency}", runs_out(row)]
                for row in priced
            ],
            "verdict": _cheapest(costs, names, result) if len(priced) > 1 else "",
            "note": "",
        })  # fmt: skip
    return [{"title": f"Price of {first.hardware}", "start": _PRICES.index(1.0), "stops": stops}]
