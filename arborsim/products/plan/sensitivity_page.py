"""Figures of changed assumptions: an overview of what matters, and curves for each.

Runs that are too short to tell give only a lower bound of a load, so a ratio of two loads is
known, bounded on one side, or not known at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from arborsim.core.units import quantity
from arborsim.products.plan.answer import elsewhere
from arborsim.products.plan.costs import compared_cost
from arborsim.products.plan.figures import over_load, time_kinds
from arborsim.products.plan.results import CandidateResult, PlanResult
from arborsim.products.plan.sensitivity import LENGTH, MOST_SEARCHES, Sensitivity
from arborsim.products.plan.words import (
    at_load,
    cost,
    load_of,
    money,
    numbered,
    runs_out,
    saturates,
    short_names,
)
from arborsim.report.page import Figure, axis, colour, figure, named_axis, stacked_bars, upright
from arborsim.report.report import Choice
from arborsim.report.words import digits, listed

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
    """The candidate under that factor."""
    return next(variant.result for variant in each.variants if variant.factor == factor)


def run_of(result: PlanResult) -> str:
    """The length of the runs that loads here come from."""
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
    open_here, open_base = here.is_open, base.is_open
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

    What is known best and matters most is on top.  Bounds are hatched, and what the runs leave open
    has no bar: the note names it.
    """
    here = [each for each in found if each.candidate == result.recommendation.candidate]
    bars = sorted(
        ((each.assumption.title, ends(each)) for each in here if not each.idle), key=_rank
    )
    if not bars:
        return None, ""
    places = {title: place for place, (title, _) in enumerate(bars)}
    made = (
        _bars([(places[title], title, pair[side]) for title, pair in bars], bound, _COLOURS[side])
        for side in (0, 1)
        for bound in (KNOWN, LEAST, MOST)
    )
    unchanged = upright(100) | {"line": {"color": "var(--soft)", "width": 1}}
    names = named_axis(list(places.values()), list(places), (-0.5, len(bars) - 0.5))
    x, height = axis("largest load (unchanged: 100%)"), 130 + 46 * len(bars)
    data = [drawn for drawn in made if drawn]
    drawn = figure(data, x, names, height, barmode="overlay", shapes=[unchanged])
    notes = [f"{each.assumption.title} is left out: {each.idle}." for each in here if each.idle]
    if unknown := [
        f"{t} × {end.factor:g}" for t, pair in bars for end in pair if end.bound == OPEN
    ]:
        notes.insert(
            0,
            f"Runs of {run_of(result)} show no difference for sure for "
            f"{listed(unknown)}, which does not mean that there is none.",
        )
    if any(end.bound in (LEAST, MOST) for _, pair in bars for end in pair):
        notes.insert(
            0,
            "Hatched bars are bounds: on one side of the comparison the runs are too "
            "short to show the largest load.",
        )
    return drawn, " ".join(notes)


def _rank(bar: Bar) -> tuple[int, float]:
    """Ascending, as the last bar is on top: open ones, bounds, known ones; then by how much."""
    bounds = {end.bound for end in bar[1]}
    known = 2 if bounds == {KNOWN} else 0 if bounds == {OPEN} else 1
    drawn = (end.ratio for end in bar[1] if end.bound != OPEN)
    return known, max((abs(math.log2(max(each, 0.01))) for each in drawn), default=0.0)


def _bars(named: Sequence[tuple[int, str, LoadRatio]], bound: str, paint: str) -> Figure | None:
    """The bars of one factor that are known so well; None if there is none."""
    own = [each for each in named if each[2].bound == bound]
    if not own:
        return None
    marker: Figure = {"color": f"var(--{paint})"}
    if bound:
        hatch = {"shape": "/", "fillmode": "replace", "size": 7, "solidity": 0.35}
        marker |= {"pattern": hatch, "line": {**marker, "width": 1.5}}
    said = f"{bound} " if bound else ""
    texts = [f"{title} × {end.factor:g}: {said}{100 * end.ratio:.0f}%" for _, title, end in own]
    return {
        "type": "bar",
        "orientation": "h",
        "marker": marker,
        "width": _WIDTH,
        "name": f"number × {own[0][2].factor:g}" + (f" ({bound})" if bound else ""),
        "y": [place for place, _, _ in own],
        "base": [100.0] * len(own),
        "x": [round(100 * (end.ratio - 1), 3) for _, _, end in own],
        "customdata": texts,
        "hovertemplate": "%{customdata} of the load<extra></extra>",
    }


_PRICES = (1.0, 0.5, 0.75, 1.25, 1.5, 2.0, 3.0)


def choices(result: PlanResult, found: Sequence[Sensitivity]) -> list[Choice]:
    """A figure per assumption and number, with what each candidate carries and costs under it.

    Nothing is changed in the first of an assumption.  The note says what is cheapest, and why that
    is not the plan's answer.
    """
    rows = [numbered(result, number) for number in dict.fromkeys(each.candidate for each in found)]
    names = short_names(rows)
    made = []
    for assumption in dict.fromkeys(each.assumption for each in found):
        own = [each for each in found if each.assumption == assumption]
        factors = sorted({variant.factor for each in own for variant in each.variants})
        why = _no_effect(result, own, names)
        for factor in sorted(factors, key=lambda factor: factor != 1):
            made.append(_changed(result, own, names, factor, why))
    return made + _prices(result, rows)


def _no_effect(result: PlanResult, own: Sequence[Sensitivity], names: Mapping[int, str]) -> str:
    """Why the number changes nothing, for each candidate where it does not; else ""."""
    said: dict[str, list[str]] = {}
    for each in own:
        shown = {tuple(_shown(variant.result, result)) for variant in each.variants}
        if len(shown) == 1:
            said.setdefault(each.idle or _bound_by(each), []).append(names[each.candidate])
    title = own[0].assumption.title
    return " ".join(
        f"{title} changes nothing for {' and '.join(names)}: {why}." for why, names in said.items()
    )


def _shown(row: CandidateResult, result: PlanResult) -> list[str]:
    """The load that a candidate carries, its cost, and the resource that runs out first."""
    if row.largest is None:
        return [row.reason or "no load meets the target", "", ""]
    carried = load_of(row.largest, result) + " or more" * row.is_open
    return [carried, money(compared_cost(row), result.currency), runs_out(row)]


def _bound_by(each: Sensitivity) -> str:
    """The cause that limits the load, where a number that may matter does not."""
    base = at(each, 1.0)
    if base.largest is None or base.at_largest is None:
        return "it meets the target under none of these numbers"
    if base.is_open:
        return f"runs of so few searches show no limit (busiest: {saturates(base.at_largest)})"
    if base.limited_by == "target":
        return f"the latency target limits the load ({saturates(base.at_largest)} is busiest)"
    return f"{saturates(base.at_largest)} runs out first"


def _changed(
    result: PlanResult, own: Sequence[Sensitivity], names: dict[int, str], factor: float, why: str
) -> Choice:
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
    lines = [(names[each.candidate], at(each, factor), at(each, 1.0)) for each in own]
    points = [p for each in own for variant in each.variants for p in variant.result.curve]
    right = max((p.load for p in points), default=1.0)
    # Time per search against load; dotted as it was before the number was changed.
    figure = over_load(result, time_kinds(result)[0], lines, points, range=[0, 1.03 * right])
    notes = (verdict, why, _unchanged(result) if factor == 1 else "")
    texts = [_said(names[number], *_shown(row, result)) for number, row in served.items()]
    labels = own[0].assumption.title, _label(own, factor)
    return Choice(figure, labels, " ".join(filter(None, notes)), texts)


def _said(name: str, *cells: str) -> str:
    return f"{name}: {', '.join(filter(None, cells))}"


def _cheapest(costs: Mapping[int, float], names: Mapping[int, str], result: PlanResult) -> str:
    def rank(number: int) -> tuple[float, bool]:
        price = costs[number]
        return math.inf if math.isnan(price) else price, number != result.recommendation.candidate

    best = min(costs, key=rank)
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


def _prices(result: PlanResult, rows: Sequence[CandidateResult]) -> list[Choice]:
    """The price of the recommended GPU, which needs nothing to be served again; if it has one.

    What is recommended on each other GPU is compared with it.
    """
    first = next((row for row in rows if row.number == result.recommendation.candidate), None)
    if first is None or first.price_per_hour is None or math.isnan(cost(first)):
        return []
    compared = {row.number: row for row in (*rows, *elsewhere(result, first))}
    priced = [row for row in compared.values() if not math.isnan(cost(row))]
    names = short_names(priced)
    most = max(*map(cost, priced), max(_PRICES) * cost(first))
    low, high = first.price_per_hour
    title = f"cost of 1,000 searches{at_load(result)} ({result.currency})"
    x = axis(title, range=[0, 1.03 * most])
    paint = [colour(place + 1) for place in range(len(priced))]
    made = []
    for factor in _PRICES:
        times = {row.number: factor if row.gpu == first.gpu else 1.0 for row in priced}
        costs = {row.number: times[row.number] * cost(row) for row in priced}
        hourly = money((factor * low, factor * high), result.currency)
        bars = stacked_bars(list(names.values()), [("", list(costs.values()), "c1")], x, "")
        bars["data"][0] |= {"showlegend": False, "marker": {"color": paint}}
        texts = [
            _said(
                names[row.number],
                load_of(row.largest, result),
                f"{digits(costs[row.number])} {result.currency}",
                runs_out(row),
            )
            for row in priced
        ]
        verdict = _cheapest(costs, names, result) if len(priced) > 1 else ""
        label = f"× {factor:g} ({hourly} per hour of {first.gpu})"
        made.append(Choice(bars, (f"Price of {first.gpu}", label), verdict, texts))
    return made
