"""All assumptions of a plan at a glance: its load with each number halved and doubled.

Runs that are too short to tell give only a lower bound of a load, so a ratio of two loads is
known, bounded on one side, or not known at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.plan.results import PlanResult
from arborsim.plan.sensitivity import LENGTH, MOST_SEARCHES, Sensitivity, Variant
from arborsim.show.figures import Figure
from arborsim.show.plan_words import is_least

KNOWN, LEAST, MOST, OPEN = "", "at least", "at most", "not told apart"
_WIDTH = 0.62  # of a row; said, because bars of several traces would get several widths
_COLOURS = ("c6", "c5")  # of the smallest and the largest factor


@dataclass(frozen=True)
class End:
    """A load under a changed number, against that under the number as it is.

    Attributes
    ----------
    factor, ratio : float
    bound : str
        `KNOWN`, `LEAST`, `MOST`, or `OPEN` where the ratio says nothing.
    """

    factor: float
    ratio: float
    bound: str


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
