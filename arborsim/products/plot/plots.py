"""Which plots there are of each kind of results.

A plot is a figure of one of the pages by itself, with what is to be said of it; how it is drawn and
written is in `arborsim.report.images`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.play.results import BASELINE, ReplayResult, Row, at_budget
from arborsim.products.live.report import accuracy
from arborsim.products.live.tables import LiveReport, live_rows
from arborsim.products.plan import figures as plan_figures
from arborsim.products.plan import pareto
from arborsim.products.plan.results import PlanResult
from arborsim.products.replay import answers_words, cliff
from arborsim.products.replay import figures as replay_figures
from arborsim.products.search.figures import against_size, against_width
from arborsim.products.search.results import SearchResult, rows_of
from arborsim.products.search.tables import cells_of
from arborsim.report.images import Plot

#: What replays can be plotted by: the names of ``--metric``.
METRICS = {
    "right": replay_figures.RIGHT,
    "kept": replay_figures.KEPT,
    "error": replay_figures.ERROR,
    "time": replay_figures.TIMES,
    "memory": replay_figures.PEAK,
}
#: Those of them that say what a policy is worth, the best first.
_DECIDING = ("right", "kept", "time")
_READABLE = "Attention kept: how much of what the recorded model looked at was still readable."


def replay_pareto(result: ReplayResult, metric: str = "") -> list[Plot]:
    """Memory against a metric, a plot per trace: right answers if live runs counted any."""
    found = []
    for own, chosen in _measured(result, metric):
        made = replay_figures.pareto(own, chosen)
        title = f"{own[0].trace}: {chosen.title.lower()} against memory"
        cautions = filter(None, _cautions(result, own, chosen))
        found.append(Plot(title, made.figure, (*made.numbered(), *cautions)))
    return found


def _cautions(
    result: ReplayResult, rows: Sequence[Row], metric: replay_figures.Metric
) -> Iterator[str]:
    """Notes on what a metric leaves open: attention kept does not say which answers are right."""
    if metric is replay_figures.RIGHT:
        yield from answers_words.footnotes(rows)
    elif metric is replay_figures.KEPT:
        yield f"{_READABLE} {answers_words.not_ranking()}"
    if metric in (replay_figures.RIGHT, replay_figures.KEPT):
        yield answers_words.would_decide(rows, result)


def replay_heat(result: ReplayResult, metric: str = "") -> list[Plot]:
    """Policies by budgets, a map per trace: the darker, the better."""
    found = []
    for own, chosen in _measured(result, metric):
        rows = [row for row in own if not row.is_baseline]
        if replay_figures.known(chosen, rows):
            made = replay_figures.heat(rows, chosen)
            said = made.note.partition(" by budget")[0]
            title = f"{own[0].trace}: {said[0].lower()}{said[1:]}"
            found.append(Plot(title, made.figure))
    return found


def _measured(
    result: ReplayResult, metric: str
) -> Iterator[tuple[list[Row], replay_figures.Metric]]:
    """Rows of each trace with the metric that was named, or the first that decides and is known."""
    if metric and metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    rows = result.rows()
    for trace in dict.fromkeys(row.trace for row in rows):
        own = [row for row in rows if row.trace == trace]
        for name in (metric,) if metric else _DECIDING:
            if replay_figures.known(METRICS[name], own):
                yield own, METRICS[name]
                break
        else:
            if metric:
                others = [name for name, each in METRICS.items() if replay_figures.known(each, own)]
                raise UsageError(
                    f"--metric {metric}: {METRICS[metric].title.lower()} is not known of {trace}; "
                    f"known: {', '.join(others)}"
                )


def replay_cliff(result: ReplayResult, metric: str = "") -> list[Plot]:
    """Right answers by budget, a plot per kind of problems that were counted live."""
    found: dict[str, Plot] = {}
    for trace in result.recordings:
        for made in cliff.of_replay(result, trace):
            title = f"Answers by budget, {made.labels[-1]}"
            found.setdefault(title, Plot(title, made.figure, (made.note,)))
    return list(found.values())


def search_pareto(results: Sequence[SearchResult], metric: str = "") -> list[Plot]:
    """Accuracy against KV size, a plot per policy and budget."""
    cells = cells_of(rows_of(results))
    return [
        Plot(f"Accuracy against KV size{_under(*cell)}", made.figure)
        for cell, rows in cells.items()
        for made in against_size(rows)[:1]
    ]


def search_width(results: Sequence[SearchResult], metric: str = "") -> list[Plot]:
    """Accuracy against width; policies and budgets do not change it."""
    rows = next(iter(cells_of(rows_of(results)).values()), [])
    return [Plot("Accuracy against width", made.figure) for made in against_width(rows)]


def _under(policy: str, budget: str) -> str:
    return "" if policy == BASELINE else f", {at_budget(policy, budget)}"


def plan_pareto(result: PlanResult, metric: str = "") -> list[Plot]:
    """Cost, quality and latency, a plot per pair; a colour per GPU."""
    choices, _, _ = pareto.figures(result)
    plots = [Plot(each.labels[0], each.figure) for each in choices]
    notes = tuple(choices[-1].numbered()) if choices else ()
    return [*plots[:-1], replace(plots[-1], notes=notes)] if plots else []


def plan_load(result: PlanResult, metric: str = "") -> list[Plot]:
    """Times over loads, a plot per kind of time."""
    return [
        Plot(f"{each.labels[0]} over loads", each.figure)
        for each in plan_figures.against_load(result)
    ]


def live_cliff(report: LiveReport, metric: str = "") -> list[Plot]:
    """Accuracy by budget, with full retention's."""
    title = f"Answers of {report.facts.model} on {report.problems} of {report.facts.task}"
    return [Plot(title, made.figure) for made in accuracy(live_rows(report))]


#: Of each kind of results its plots by name, the usual one first.
KINDS: dict[str, dict[str, Callable[..., list[Plot]]]] = {
    "replay": {"pareto": replay_pareto, "heat": replay_heat, "cliff": replay_cliff},
    "search": {"pareto": search_pareto, "width": search_width},
    "plan": {"pareto": plan_pareto, "load": plan_load},
    "live": {"cliff": live_cliff},
}


#: Why a plot can be empty, and what to do.
_NOTHING = {
    "cliff": "no answers were counted live on such problems; arborsim live counts them",
    "load": "a plan's curves over loads are on its page (--report)",
}


def kinds() -> list[str]:
    """The names of plots of any results."""
    return sorted({name for plots in KINDS.values() for name in plots})


def metrics() -> list[str]:
    """The metrics that replays can be drawn by."""
    return list(METRICS)


def plots_of(
    results: str, record: Any, kind: str | None = None, metric: str | None = None
) -> list[Plot]:
    """The plots of one kind.

    Parameters
    ----------
    results
        The kind of results, a key of `KINDS`.
    record
        `ReplayResult`, a sequence of `SearchResult`, `PlanResult` or `LiveReport`.
    kind
        A name in ``KINDS[results]``; none for the usual one.
    metric
        What a replay is plotted by, a name in `METRICS`; none for the first that is known.

    Raises
    ------
    UsageError
        There is no such plot, or nothing to draw.
    """
    known = KINDS.get(results)
    if known is None:
        raise UsageError(f"there are no plots of {results} results: their page shows them")
    chosen = kind or next(iter(known))
    if chosen not in known:
        raise UnknownName(f"plot of {results} results", chosen, known)
    if metric and results != "replay":
        raise UsageError(f"--metric {metric}: only replays have a choice, not {results} results")
    found = known[chosen](record, metric or "")
    if not found:
        why = f": {_NOTHING[chosen]}" if chosen in _NOTHING else ""
        raise UsageError(f"these {results} results hold nothing that '{chosen}' could draw{why}")
    return found
