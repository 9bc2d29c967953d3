"""The page about a replay: the answer in words, the table, figures, and what they rest on.

What its scripts draw is plain data, within limits on its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import write_text
from arborsim.core.tables import csv_text
from arborsim.play.pictures import TokenMap, TreePicture, packed_runs
from arborsim.play.results import BASELINE, MACHINE, EpisodeResult, ReplayResult, Row
from arborsim.products.replay import answers_words, cliff, trees
from arborsim.products.replay import figures as replay_figures
from arborsim.products.replay.answers import Answers
from arborsim.products.replay.tables import COLUMNS, PAGE_MEMORY, TIME, leading, memory, to_frame
from arborsim.products.replay.words import cautions, headline, summarise, too_small
from arborsim.report import page
from arborsim.report.page import packed
from arborsim.report.table import Table, shown
from arborsim.report.words import counted

#: What decides comes first: it must be in sight on a narrow page.
_LEADING = (
    "right", "right_interval", "right_vs_full", "peak_hbm", "hbm_vs_full", "kept", "gap", "error",
    "total", "time_vs_full", "tokens_per_s",
)  # fmt: skip

#: Points over all memory series of a page, most and fewest points per series.
_ALL_POINTS, _MOST_POINTS, _FEWEST_POINTS = 100_000, 600, 100
#: Frames over all films of a page, and fewest per film.
_ALL_FRAMES, _FEWEST_FRAMES = 4_000, 10


def write_report(result: ReplayResult, path: str | Path, known: Answers | None = None) -> None:
    """Write the page; `UsageError` where it cannot be written, or nothing was replayed.

    `known` are answers counted live, by default those that come with the package.
    """
    if not result.episodes:
        raise UsageError("nothing was replayed: there is nothing to report")
    write_text(path, render(result, known))


def render(result: ReplayResult, known: Answers | None = None) -> str:
    """The whole page as text; the same result gives the same bytes."""
    rows = result.rows()
    by_trace: dict[str, list[Row]] = {}
    for row in rows:
        by_trace.setdefault(row.trace, []).append(row)
    data, note = _data(result, by_trace, known)
    answers = [
        (trace, summarise(own, answers_words.would_decide(own, result)))
        for trace, own in by_trace.items()
    ]
    notes = ["Bytes and seconds are simulated.", *result.does_not_fit]
    notes += answers_words.footnotes(rows)
    if any(not math.isnan(row.attention_kept) for row in rows):
        notes.append("Attention kept says how much of what the recorded model looked at was still "
                     "readable.")  # fmt: skip
    searches = "; ".join(
        f"{row.trace} ({counted(row.searches, 'search')}, {row.generated_tokens:,} generated "
        "tokens)"
        for row in (own[-1] for own in by_trace.values())
    )
    on = f" Simulated on {result.settings[MACHINE]}." if MACHINE in result.settings else ""
    names, first = leading(rows), [COLUMNS[key] for key in _LEADING]
    # Speed relative to full is the inverse of time relative to full.
    others = [
        c
        for c in (*memory(rows), *PAGE_MEMORY, *TIME)
        if c not in first and c.key != "speed_vs_full"
    ]
    return page.render(
        "replay",
        ("tree.js", "replay.js"),
        data,
        title="KV-cache policies compared",
        subtitle=f"Recorded searches: {searches}.{on}",
        answers=[(trace, sentences) for trace, sentences in answers if sentences],
        caution=" ".join([*notes, *cautions(result, rows, "see below")]),
        table=Table(
            result.rows(too_small(result.left_out)),
            shown((*names, *first, *others), rows), lambda row: row.trace,
            titled=len(by_trace) > 1, look=lambda row: "baseline" if row.is_baseline else "",
            leading={column.key for column in (*names, *first)},
            reason=lambda row: row.left_out,
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


def _data(
    result: ReplayResult, by_trace: dict[str, list[Row]], known: Answers | None
) -> tuple[dict[str, Any], str]:
    """The data, and a note on what was left out."""
    kept, note = _worth_drawing(result.episodes)
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(len(kept), 1)))
    best = headline(next(iter(by_trace.values())))
    data = {
        "traces": list(by_trace),
        "pareto": {
            trace: [
                {"title": metric.title, **replay_figures.pareto(own, metric)}
                for metric in (
                    replay_figures.RIGHT,
                    replay_figures.KEPT,
                    replay_figures.ERROR,
                    replay_figures.TIMES,
                )
                if replay_figures.known(metric, own)
            ]
            for trace, own in by_trace.items()
        },
        "cliff": {trace: cliff.of_replay(result, trace, known) for trace in by_trace},
        "heat": {trace: replay_figures.heat(own) for trace, own in by_trace.items()},
        "time": {trace: replay_figures.time_splits(own) for trace, own in by_trace.items()},
        "memory": [{**_labels(e), "figure": replay_figures.memory(e, points)} for e in kept],
        "trees": _trees(result.pictures),
        "maps": _maps(result.token_maps),
        "start": _cell(best.policy, best.budget) if best else "",
        "csv": csv_text(to_frame(result)),
    }
    return data, note


def _labels(drawn: EpisodeResult | TreePicture | TokenMap) -> dict[str, str]:
    """By which a search under a policy is picked."""
    cell = _cell(drawn.policy, drawn.budget)
    return {"search": f"{drawn.trace}, search {drawn.episode}", "cell": cell}


def _cell(policy: str, budget: str) -> str:
    return policy if policy == BASELINE else f"{policy}, budget {budget}"


def _worth_drawing(episodes: Sequence[EpisodeResult]) -> tuple[list[EpisodeResult], str]:
    """Memory series up to the page's number of points: whole searches, evenly over traces."""
    with_series = [each for each in episodes if each.measured.series.time_s]
    searches: dict[str, dict[int, int]] = {}  # trace -> episode -> its place
    for each in with_series:
        own = searches.setdefault(each.trace, {})
        own.setdefault(each.episode, len(own))
    places = [searches[each.trace][each.episode] for each in with_series]
    most = _ALL_POINTS // _FEWEST_POINTS
    depth = 1 + max(places, default=0)
    while depth > 1 and sum(place < depth for place in places) > most:
        depth -= 1
    kept = [each for each, place in zip(with_series, places, strict=True) if place < depth]
    if len(kept) == len(with_series):
        return kept, ""
    first = "search" if depth == 1 else f"{depth} searches"
    return kept, f"Of each trace, the first {first} can be shown here."


def _trees(pictures: Sequence[TreePicture]) -> dict[str, Any]:
    """Trees once per search, films once per policy and budget."""
    places: dict[tuple[str, int], int] = {}
    layouts: list[dict[str, Any]] = []
    films = []
    most = max(_FEWEST_FRAMES, _ALL_FRAMES // max(len(pictures), 1))
    for picture in pictures:
        if not picture.nodes or not picture.frames:
            continue
        place = places.setdefault((picture.trace, picture.episode), len(places))
        if place == len(layouts):
            layouts.append(trees.layout(picture.nodes))
        shown = trees.frames(picture.frames, most)
        films.append({**_labels(picture), "layout": place, "frames": shown})
    return {"layouts": layouts, "films": films}


def _maps(maps: Sequence[TokenMap]) -> dict[str, Any]:
    """Axes once per search, cells once per policy and budget."""
    places: dict[tuple[str, int], int] = {}
    axes: list[dict[str, list[int]]] = []
    items = []
    for each in maps:
        if not each.cells.size:
            continue
        place = places.setdefault((each.trace, each.episode), len(places))
        if place == len(axes):
            axes.append(
                {"tokens": each.first_tokens.tolist(), "iterations": each.iterations.tolist()}
            )
        runs = packed(packed_runs(each.cells), "u2")
        items.append({**_labels(each), "axes": place, "runs": runs})
    return {"axes": axes, "items": items}
