"""What the page's scripts draw, as plain data, within limits on its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arborsim.run.aggregate import BASELINE, Row
from arborsim.run.results import EpisodeResult, ReplayResult, TreePicture
from arborsim.run.token_map import TokenMap, packed_runs
from arborsim.show import figures, forest, pareto
from arborsim.show.export import to_frame
from arborsim.show.heat import heat
from arborsim.show.summary import headline

#: Points over all memory series of a page, most and fewest points per series.
_ALL_POINTS, _MOST_POINTS, _FEWEST_POINTS = 100_000, 600, 100
#: Frames over all films of a page, and fewest per film.
_ALL_FRAMES, _FEWEST_FRAMES = 4_000, 10
#: Bars of time that can be told apart in one figure.
_MOST_BARS = 24


def page_data(result: ReplayResult, rows: Sequence[Row]) -> tuple[dict[str, Any], str]:
    """The data, and a note on what was left out."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    by_trace = {trace: [row for row in rows if row.trace == trace] for trace in traces}
    kept, note = _worth_drawing(result.episodes)
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(len(kept), 1)))
    best = headline(by_trace[traces[0]])
    metrics = (pareto.KEPT, pareto.ERROR, pareto.TIMES)
    data = {
        "traces": traces,
        "pareto": {
            trace: [
                {"title": metric.title, **pareto.figure(own, metric)}
                for metric in metrics
                if pareto.known(metric, own)
            ]
            for trace, own in by_trace.items()
        },
        "heat": {trace: heat(own) for trace, own in by_trace.items()},
        "time": {trace: _times(own) for trace, own in by_trace.items()},
        "memory": [{**_who(e), "figure": figures.memory(e, points)} for e in kept],
        "trees": _trees(result),
        "maps": _maps(result),
        "start": _cell(best.policy, best.budget) if best else "",
        "csv": to_frame(result).to_csv(index=False, lineterminator="\n"),
    }
    return data, note


def _who(shown: EpisodeResult | TreePicture | TokenMap) -> dict[str, str]:
    """Labels by which a search under a policy is picked."""
    return {
        "search": f"{shown.trace}, search {shown.episode}",
        "cell": _cell(shown.policy, shown.budget),
    }


def _cell(policy: str, budget: str) -> str:
    return policy if policy == BASELINE else f"{policy}, budget {budget}"


def _times(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One figure, or one per budget if there are too many bars."""
    if len(rows) <= _MOST_BARS:
        return [{"budget": "all", "figure": figures.time_split(rows)}]
    budgets = dict.fromkeys(row.budget for row in rows if not row.is_baseline)
    return [
        {
            "budget": budget,
            "figure": figures.time_split([r for r in rows if r.is_baseline or r.budget == budget]),
        }
        for budget in budgets
    ]


def _worth_drawing(episodes: Sequence[EpisodeResult]) -> tuple[list[EpisodeResult], str]:
    """Memory series up to the page's number of points: whole searches, evenly over traces."""
    with_series = [e for e in episodes if e.measured.series.time_s]
    order = {
        (trace, episode): i
        for trace in dict.fromkeys(e.trace for e in with_series)
        for i, episode in enumerate(
            dict.fromkeys(e.episode for e in with_series if e.trace == trace)
        )
    }
    most = _ALL_POINTS // _FEWEST_POINTS
    depth = 1 + max(order.values(), default=0)
    while depth > 1 and sum(order[e.trace, e.episode] < depth for e in with_series) > most:
        depth -= 1
    kept = [e for e in with_series if order[e.trace, e.episode] < depth]
    if len(kept) == len(with_series):
        return kept, ""
    first = "search" if depth == 1 else f"{depth} searches"
    return kept, f"Of each trace, the first {first} can be shown here."


def _trees(result: ReplayResult) -> dict[str, Any]:
    """Trees once per search, films once per policy and budget."""
    places: dict[tuple[str, int], int] = {}
    layouts: list[dict[str, Any]] = []
    films = []
    most = max(_FEWEST_FRAMES, _ALL_FRAMES // max(len(result.pictures), 1))
    for picture in result.pictures:
        if not picture.nodes or not picture.frames:
            continue
        key = (picture.trace, picture.episode)
        if key not in places:
            places[key] = len(layouts)
            layouts.append({**forest.layout(picture.nodes), **forest.facts(picture.nodes)})
        shown = forest.frames(picture, most)
        films.append({**_who(picture), "layout": places[key], "frames": shown})
    return {"layouts": layouts, "films": films}


def _maps(result: ReplayResult) -> dict[str, Any]:
    """Axes once per search, cells once per policy and budget."""
    axes: dict[tuple[str, int], dict[str, list[int]]] = {}
    items = []
    for each in result.token_maps:
        if each.cells.size:
            axis = {"tokens": each.first_tokens.tolist(), "iterations": each.iterations.tolist()}
            axes.setdefault((each.trace, each.episode), axis)
            place = list(axes).index((each.trace, each.episode))
            runs = figures.packed(packed_runs(each.cells), "u2")
            items.append({**_who(each), "axes": place, "runs": runs})
    return {"axes": list(axes.values()), "items": items}
