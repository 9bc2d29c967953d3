"""Figures of a report by themselves: which there are of each kind of results.

How they are drawn and written is in `arborsim.report.images`.
"""

from __future__ import annotations

from collections.abc import Sequence

from arborsim.core.errors import UnknownName, UsageError
from arborsim.products.replay import figures
from arborsim.report.images import Plot
from arborsim.report.report import Choice, Figures, Report

#: What replays can be plotted by: the names of ``--metric``.
METRICS = {
    "right": figures.RIGHT,
    "fidelity": figures.KL,
    "kept": figures.KEPT,
    "error": figures.ERROR,
    "time": figures.TIMES,
    "memory": figures.PEAK,
}
#: Those of them that say what a policy is worth, the best first.
_DECIDING = ("right", "fidelity", "kept", "time")
#: Of each kind of results the sections with figures, by the names of ``--kind``; the usual first.
KINDS: dict[str, dict[str, str]] = {
    "replay": {"pareto": "pareto", "heat": "heat", "cliff": "cliff"},
    "search": {"pareto": "size", "width": "width"},
    "plan": {"pareto": "pareto", "load": "load"},
    "live": {"cliff": "accuracy"},
    "fidelity": {"budget": "budget", "pareto": "pareto", "position": "position"},
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


def plots_of(report: Report, kind: str | None = None, metric: str | None = None) -> list[Plot]:
    """The plots of one kind.

    Parameters
    ----------
    report
        A report whose `product` is a key of `KINDS`.
    kind
        A name in ``KINDS[report.product]``, or none for the usual one.
    metric
        What a replay is plotted by, a name in `METRICS`, or none for the first that is known.

    Raises `UsageError`: there is no such plot, or nothing to draw.
    """
    results = report.product
    known = KINDS.get(results)
    if known is None:
        raise UsageError(f"there are no plots of {results} results: their page shows them")
    chosen = kind or next(iter(known))
    if chosen not in known:
        raise UnknownName(f"plot of {results} results", chosen, known)
    if metric and results != "replay":
        raise UsageError(f"--metric {metric}: only replays have a choice, not {results} results")
    if metric and metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    section = next((each for each in report.pictures() if each.name == known[chosen]), None)
    blocks = section.blocks if section else ()
    drawn = [one for each in blocks if isinstance(each, Figures) for one in each.choices]
    if results == "search":  # one measure of size
        drawn = [one for one in drawn if one.labels[:1] == drawn[0].labels[:1]]
    if results == "replay" and chosen != "cliff":
        drawn = _measured(drawn, metric or "")
    if section is None or not drawn:
        why = f": {_NOTHING[chosen]}" if chosen in _NOTHING else ""
        raise UsageError(f"these {results} results hold nothing that '{chosen}' could draw{why}")
    return [_plot(section.title, one) for one in drawn]


def _plot(title: str, one: Choice) -> Plot:
    named = ": ".join(filter(None, (title, ", ".join(filter(None, one.labels)))))
    return Plot(named, one.figure, (*one.numbered(), *filter(None, [one.note])))


def _measured(choices: Sequence[Choice], metric: str) -> list[Choice]:
    """The figure of each trace by the metric that was named, or the first that decides."""
    found = []
    for trace in dict.fromkeys(one.labels[0] for one in choices):
        own = {one.labels[1]: one for one in choices if one.labels[0] == trace}
        titles = [METRICS[name].title for name in ((metric,) if metric else _DECIDING)]
        known = [own[title] for title in titles if title in own]
        if metric and not known:
            others = [name for name, each in METRICS.items() if each.title in own]
            raise UsageError(
                f"--metric {metric}: {METRICS[metric].title.lower()} is not known of {trace}; "
                f"known: {', '.join(others)}"
            )
        found += known[:1]
    return found
