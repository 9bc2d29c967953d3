"""The page about a replay: the answer in words, the table, figures, and what they rest on.

What its scripts draw is plain data, within limits on its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.run.pictures import TokenMap, TreePicture, packed_runs
from arborsim.run.results import (
    BASELINE,
    MACHINE,
    EpisodeResult,
    ReplayResult,
    Row,
    aggregate,
)
from arborsim.show import page, trees
from arborsim.show.page import packed
from arborsim.show.replay import COLUMNS, MEMORY, NAMES, TIME, to_frame
from arborsim.show.replay_figures import (
    ERROR,
    KEPT,
    TIMES,
    heat,
    known,
    memory,
    pareto,
    time_splits,
)
from arborsim.show.replay_words import cautions, headline, summarise
from arborsim.show.table import Table, shown
from arborsim.show.words import counted

#: What decides comes first: it must be in sight on a narrow page.
_LEADING = (
    "peak_hbm", "hbm_vs_full", "kept", "gap", "error", "total", "time_vs_full", "tokens_per_s",
)  # fmt: skip

#: Points over all memory series of a page, most and fewest points per series.
_ALL_POINTS, _MOST_POINTS, _FEWEST_POINTS = 100_000, 600, 100
#: Frames over all films of a page, and fewest per film.
_ALL_FRAMES, _FEWEST_FRAMES = 4_000, 10


def write_report(result: ReplayResult, path: str | Path) -> None:
    """Write the page; the same result gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not result.episodes:
        raise UsageError("nothing was replayed: there is nothing to report")
    page.write(render(result), path)


def render(result: ReplayResult) -> str:
    """The whole page as text."""
    rows = aggregate(result.episodes)
    traces = list(dict.fromkeys(row.trace for row in rows))
    data, note = page_data(result, rows)
    answers = {t: summarise([row for row in rows if row.trace == t]) for t in traces}
    notes = ["Bytes and seconds are simulated.", *result.does_not_fit]
    if any(not math.isnan(row.attention_kept) for row in rows):
        notes.append("Attention kept is not accuracy: it says how much of what the recorded model "
                     "looked at was still readable.")  # fmt: skip
    searches = "; ".join(
        f"{row.trace} ({counted(row.searches, 'search')}, {row.generated_tokens:,} generated "
        "tokens)"
        for row in {row.trace: row for row in rows}.values()
    )
    on = f" Simulated on {result.settings[MACHINE]}." if MACHINE in result.settings else ""
    leading = [COLUMNS[key] for key in _LEADING]
    # Speed relative to full is the inverse of time relative to full.
    others = [c for c in (*MEMORY, *TIME) if c not in leading and c.key != "speed_vs_full"]
    return page.render(
        "replay",
        ("tree.js", "replay.js"),
        data,
        title="KV-cache policies compared",
        subtitle=f"Recorded searches: {searches}.{on}",
        answers=[(trace, sentences) for trace, sentences in answers.items() if sentences],
        caution=" ".join([*notes, *cautions(result, rows, "see below")]),
        table=Table(
            rows, shown((*NAMES, *leading, *others), rows), lambda row: row.trace, len(traces) > 1,
            look=lambda row: "baseline" if row.is_baseline else "",
        ),
        memory_note=note,
        settings=result.settings,
        assumed=result.assumed,
        left_out=[
            f"{each.policy}{f' at budget {each.budget}' if each.budget else ''} on {each.trace}: "
            f"{each.detail}"
            for each in result.left_out
        ],
    )  # fmt: skip


def page_data(result: ReplayResult, rows: Sequence[Row]) -> tuple[dict[str, Any], str]:
    """The data, and a note on what was left out."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    by_trace = {trace: [row for row in rows if row.trace == trace] for trace in traces}
    kept, note = _worth_drawing(result.episodes)
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(len(kept), 1)))
    best = headline(by_trace[traces[0]])
    metrics = (KEPT, ERROR, TIMES)
    data = {
        "traces": traces,
        "pareto": {
            trace: [
                {"title": metric.title, **pareto(own, metric)}
                for metric in metrics
                if known(metric, own)
            ]
            for trace, own in by_trace.items()
        },
        "heat": {trace: heat(own) for trace, own in by_trace.items()},
        "time": {trace: time_splits(own) for trace, own in by_trace.items()},
        "memory": [{**_who(e), "figure": memory(e, points)} for e in kept],
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
            layouts.append({**trees.layout(picture.nodes), **trees.facts(picture.nodes)})
        shown = trees.frames(picture, most)
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
            runs = packed(packed_runs(each.cells), "u2")
            items.append({**_who(each), "axes": place, "runs": runs})
    return {"axes": list(axes.values()), "items": items}
