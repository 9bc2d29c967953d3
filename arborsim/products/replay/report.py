"""The page about a replay: the answer in words, the table, figures, and what they rest on.

What is drawn is plain data, within limits on its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from arborsim.play.pictures import TokenMap, TreePicture, packed_runs
from arborsim.play.results import BASELINE, MACHINE, EpisodeResult, ReplayResult, Row
from arborsim.policies.registry import names
from arborsim.products.replay import cliff, figures, trees
from arborsim.products.replay.answers import Answers
from arborsim.products.replay.outside import counted_by_others
from arborsim.products.replay.tables import (
    GROUPS,
    IMPLIED,
    TIME,
    leading,
    memory,
    no_result,
    printed,
    to_frame,
)
from arborsim.products.replay.words import (
    headline,
    legend,
    notes,
    summarise,
    telling,
    too_small,
)
from arborsim.report.page import packed
from arborsim.report.report import (
    Answer,
    Block,
    Choice,
    Facts,
    Figures,
    Heading,
    Listed,
    Raw,
    Report,
    Section,
    Shown,
)
from arborsim.report.table import Table, shown
from arborsim.report.words import counted

#: Points over all memory series of a page, most and fewest points per series.
_ALL_POINTS, _MOST_POINTS, _FEWEST_POINTS = 100_000, 600, 100
#: Frames over all films of a page, and fewest per film.
_ALL_FRAMES, _FEWEST_FRAMES = 4_000, 10
#: Sentences of the answer in a terminal.
MOST_SENTENCES = 3
ASSUMED = "Assumed, without a measurement or source"
SORTS = (
    "Click a column to sort by it; what it means is explained at the end. Decimal units: 1 GB is "
    "10⁹ bytes."
)
_PARETO = (
    "One marker per policy and budget; left is less memory. Numbered and joined: settings that no "
    "other one beats in both; of right answers, visibly."
)
_MAP = (
    "From left to right the tokens in the order of their birth, the prompt first; from top to "
    "bottom the search. A column is the life of a token, or of the few that share a cell: the "
    "commonest tier is shown."
)
_TREE = (
    "One bar per thought block, the prompt at the left; its width grows with the square root of "
    "its tokens. Colours show where its keys and values are at the chosen moment; the active path "
    "is outlined."
)


def report_of(result: ReplayResult, known: Answers | None = None, view: str = "auto") -> Report:
    """Make the report of a replay.

    `known` are answers counted live, by default those that come with the package.  `view` says what
    a terminal shows (`arborsim.products.replay.tables.printed`).
    """
    rows = result.rows()
    by_trace: dict[str, list[Row]] = {}
    for row in rows:
        by_trace.setdefault(row.trace, []).append(row)

    def pictures() -> Iterator[Section]:
        yield from _compared(result, by_trace, known)
        yield from _pictures(result)

    compared = Shown(
        _table(result, rows),
        printed=partial(printed, result, view),
        implied=IMPLIED,
        legend=legend(rows),
    )
    best = headline(next(iter(by_trace.values()), ()))
    return Report(
        "replay",
        "KV-cache policies compared",
        _subtitle(result, by_trace),
        (
            Section("answer", "The answer", _answer(result, rows, by_trace)),
            Section("table", "All settings", (SORTS, compared)),
        ),
        pictures,
        _appendix(result, rows),
        {"arborsim-searches.csv": partial(to_frame, result)},
        ("tree.js", "replay.js"),
        lambda: {"trees": _trees(result.pictures), "maps": _maps(result.token_maps)},
        _cell(best.policy, best.budget) if best else "",
        nothing="" if rows else "nothing was replayed",
        leading=lead(by_trace),
        telling=telling(result, rows),
    )


def _subtitle(result: ReplayResult, by_trace: dict[str, list[Row]]) -> str:
    searches = "; ".join(
        f"{row.trace} ({counted(row.searches, 'search')}, {row.generated_tokens:,} generated "
        "tokens)"
        for row in (own[-1] for own in by_trace.values())
    )
    if not searches:
        return ""
    on = f" Simulated on {result.settings[MACHINE]}." if MACHINE in result.settings else ""
    return f"{searches}.{on}"


def lead(by_trace: Mapping[str, Sequence[Row]]) -> list[str]:
    """The answer of a trace, or the first sentence of each of several."""
    found = {trace: sentences for trace, own in by_trace.items() if (sentences := summarise(own))}
    if len(found) == 1:
        return next(iter(found.values()))[:MOST_SENTENCES]
    return [f"{trace}: {sentences[0]}" for trace, sentences in found.items()][:MOST_SENTENCES]


def _answer(
    result: ReplayResult, rows: Sequence[Row], by_trace: dict[str, list[Row]]
) -> list[Block]:
    found: list[Block] = []
    for trace, own in by_trace.items():
        if sentences := summarise(own):
            found += [Heading(trace)] if len(by_trace) > 1 else []
            found.append(Answer(sentences))
    by_others = counted_by_others({row.policy for row in rows})
    return [*found, Listed([*telling(result, rows), *notes(result, rows), *by_others])]


def _table(result: ReplayResult, rows: Sequence[Row]) -> Table[Row]:
    first = (*leading(rows), *GROUPS["leading"])
    keys = {column.key for column in first}
    # Speed relative to full is the inverse of time relative to full.
    others = (*memory(rows), *GROUPS["fidelity"], *GROUPS["page"], *TIME)
    rest = [column for column in others if column.key not in (*keys, "speed_vs_full")]
    every = result.rows(too_small(result.left_out))
    shipped, traces = names(), list(dict.fromkeys(row.trace for row in every))
    return Table(
        # Own policies first, trace by trace; the sort is stable.
        sorted(every, key=lambda row: (traces.index(row.trace), row.policy in shipped)),
        shown((*first, *rest), rows),
        lambda row: row.trace,
        titled=len({row.trace for row in rows}) > 1,
        look=lambda row: (
            "baseline" if row.is_baseline else "own" if row.policy not in shipped else ""
        ),
        leading=keys,
        reason=no_result,
    )


def _compared(
    result: ReplayResult, by_trace: dict[str, list[Row]], known: Answers | None
) -> list[Section]:
    """Figures over all searches of a trace: answers, memory, time."""
    counts = [each for trace in by_trace for each in cliff.of_replay(result, trace, known)]
    buys, maps, times = [], [], []
    for trace, own in by_trace.items():
        worth = (*figures.WORTH, figures.RATE, figures.TIMES)
        for metric in figures.known_of(own, worth):
            if figures.several(own, metric):
                buys.append(figures.pareto(own, metric, trace))
        settings = [row for row in own if not row.is_baseline]
        for metric in figures.known_of(settings, (*worth, figures.PEAK)):
            if figures.several(own, metric):
                maps.append(figures.heat(own, metric, trace))
        times += figures.time_splits(own, labels=(trace,))
    drawn = {
        "cliff": ("Answers by budget", "", counts, "Problems"),
        "pareto": ("What memory buys", _PARETO, buys, "Figure"),
        "heat": ("Policies by budgets", "", maps, "Figure"),
        "time": ("Where the time goes", "", times, "Budget"),
    }
    return [
        Section(name, title, (*filter(None, [note]), Figures(name, choices, ("Trace", picker))))
        for name, (title, note, choices, picker) in drawn.items()
    ]


def _pictures(result: ReplayResult) -> list[Section]:
    """Figures of single searches."""
    kept, note = _worth_drawing(result.episodes)
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(len(kept), 1)))
    choices = [
        Choice(figures.memory(each, points), tuple(_labels(each).values()), note) for each in kept
    ]
    drawn = Figures("memory", choices, ("Search", "Policy"))
    found = [Section("memory", "Memory during a search", (drawn,))]
    if any(each.cells.size for each in result.token_maps):
        found.append(Section("map", "Where each token lives", (_MAP, Raw("tokens"))))
    if any(each.nodes and each.frames for each in result.pictures):
        film = Raw("film", ("Search", "Policy", "Moment of the search"))
        found.append(Section("tree", "Where each thought lives", (_TREE, film)))
    return found


def _appendix(result: ReplayResult, rows: Sequence[Row]) -> list[Block]:
    return [
        Facts("Settings", result.settings),
        Listed(result.assumed, ASSUMED),
        Facts("Columns", _table(result, rows).definitions()),
    ]


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
