"""Plots of results: which there are of each kind of results, and writing them to files.

A plot is a figure of one of the pages by itself, with what is to be said of it.  It is drawn in a
terminal (`Plot.lines`), as a page, or as an image (`write`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arborsim.bank.results import SearchResult, rows_of
from arborsim.core.errors import UnknownName, UsageError
from arborsim.plan.results import PlanResult
from arborsim.run.results import BASELINE, ReplayResult, Row, at_budget
from arborsim.show import cliff, page, plan_figures, replay_figures
from arborsim.show import plan_pareto as pareto
from arborsim.show.characters import drawn
from arborsim.show.live import LiveReport, live_rows
from arborsim.show.live_page import accuracy
from arborsim.show.page import Figure
from arborsim.show.search import cells_of
from arborsim.show.search_page import against_size, against_width
from arborsim.show.words import plain

if TYPE_CHECKING:
    from rich.console import Console

#: The endings of files that a plot can be written to.
FORMATS = (".html", ".svg", ".png")
#: What replays can be plotted by: the names of ``--metric``.
METRICS = {
    "right": replay_figures.RIGHT,
    "kept": replay_figures.KEPT,
    "error": replay_figures.ERROR,
    "time": replay_figures.TIMES,
    "memory": replay_figures.PEAK,
}
_WIDTH, _SCALE = 900, 2  # pixels of an image, and how many dots a PNG has for each
_TITLE, _AXIS, _LINE = 34, 70, 17  # pixels above a plot, below it, and of a line of notes
_NOTE = 125  # characters of a line of notes
#: What the page's style sheet says of fonts; image files have no system fonts to fall back to.
_FONT = "Roboto, Helvetica Neue, Arial, DejaVu Sans, sans-serif"


@dataclass(frozen=True, eq=False)
class Plot:
    """A figure by itself."""

    title: str
    figure: Figure
    notes: tuple[str, ...] = ()  #: what its numbers stand for, and what to know about it

    def lines(self, width: int = 80, height: int = 22) -> list[str]:
        """Title, figure and notes in characters; notes are not wrapped."""
        return [plain(self.title), *drawn(self.figure, width, height), *map(plain, self.notes)]


# --- which plots there are ---


def replay_pareto(result: ReplayResult, metric: str = "") -> list[Plot]:
    """Memory against a metric, a plot per trace: right answers where they were counted."""
    return [
        Plot(
            f"{own[0].trace}: {chosen.title.lower()} against memory",
            made["figure"],
            tuple(f"{n}  {text}" for n, text in enumerate(made["efficient"], 1)),
        )
        for own, chosen in _measured(result, metric, ("right", "kept", "time"))
        for made in [replay_figures.pareto(own, chosen)]
    ]


def replay_heat(result: ReplayResult, metric: str = "") -> list[Plot]:
    """Policies by budgets, a map per trace: the darker, the better."""
    found = []
    for own, chosen in _measured(result, metric, ("right", "kept", "time")):
        rows = [row for row in own if not row.is_baseline]
        if not replay_figures.known(chosen, rows):
            continue
        made = next(m for m in replay_figures.heat(rows)["metrics"] if m["title"] == chosen.title)
        budgets = replay_figures.heat(rows)["budgets"]
        title = f"{own[0].trace}: {made['title'].lower()} ({made['unit']})"
        found.append(Plot(title, _heat(made, budgets)))
    return found


def replay_cliff(result: ReplayResult, metric: str = "") -> list[Plot]:
    """Right answers by budget, a plot per kind of problems that were counted live."""
    found: dict[str, Plot] = {}
    for trace in result.recordings:
        for made in cliff.of_replay(result, trace):
            title = f"Answers by budget, {made['title']}"
            found.setdefault(title, Plot(title, made["figure"], (made["note"],)))
    return list(found.values())


def _measured(
    result: ReplayResult, metric: str, choices: Sequence[str]
) -> Iterator[tuple[list[Row], replay_figures.Metric]]:
    """Rows of each trace with the metric that was named, or the first of `choices` it knows."""
    if metric and metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    rows = result.rows()
    for trace in dict.fromkeys(row.trace for row in rows):
        own = [row for row in rows if row.trace == trace]
        for name in (metric,) if metric else choices:
            if replay_figures.known(METRICS[name], own):
                yield own, METRICS[name]
                break
        else:
            if metric:
                raise UsageError(
                    f"--metric {metric}: {trace} has no known {METRICS[metric].title.lower()}; "
                    f"others: {', '.join(name for name in METRICS if name != metric)}"
                )


def _heat(made: Mapping[str, Any], budgets: Sequence[str]) -> Figure:
    policies = made["policies"]
    trace = {
        "type": "heatmap", "x": [page.label(f"budget {each}") for each in budgets],
        "y": [page.label(policy["name"]) for policy in policies],
        "z": [policy["shade"] for policy in policies],
        "text": [policy["text"] for policy in policies],
        "texttemplate": "%{text}", "hoverinfo": "skip", "showscale": False, "zmin": 0, "zmax": 1,
        "xgap": 2, "ygap": 2, "colorscale": [[0, "var(--cool)"], [1, "var(--heat)"]],
        "textfont": {"color": "var(--ink)"},
    }  # fmt: skip
    x = {"showgrid": False, "type": "category"}
    y = {"autorange": "reversed", "showgrid": False, "type": "category"}
    return page.figure([trace], x, y, 90 + 26 * len(policies))


def search_pareto(results: Sequence[SearchResult], metric: str = "") -> list[Plot]:
    """Accuracy against KV size, a plot per policy and budget."""
    cells = cells_of(rows_of(results))
    return [
        Plot(f"Accuracy against KV size{_under(*cell)}", made["figure"])
        for cell, rows in cells.items()
        for made in against_size(rows)[:1]
    ]


def search_width(results: Sequence[SearchResult], metric: str = "") -> list[Plot]:
    """Accuracy against width; policies and budgets do not change it."""
    rows = next(iter(cells_of(rows_of(results)).values()), [])
    made = against_width(rows)
    return [Plot("Accuracy against width", made["figure"])] if made else []


def _under(policy: str, budget: str) -> str:
    return "" if policy == BASELINE else f", {at_budget(policy, budget)}"


def plan_pareto(result: PlanResult, metric: str = "") -> list[Plot]:
    """Cost, quality and latency, a plot per pair; a colour per GPU."""
    made = pareto.figures(result)
    texts = tuple(f"{n}  {text}" for n, text in enumerate(made["efficient"], 1))
    plots = [Plot(each["title"], each["figure"]) for each in made["plots"]]
    return [*plots[:-1], replace(plots[-1], notes=texts)] if plots else []


def plan_load(result: PlanResult, metric: str = "") -> list[Plot]:
    """Times over loads, a plot per kind of time."""
    return [
        Plot(f"{each['title']} over loads", each["figure"])
        for each in plan_figures.against_load(result)
    ]


def live_cliff(report: LiveReport, metric: str = "") -> list[Plot]:
    """Accuracy by budget, with full retention's."""
    figure = accuracy(live_rows(report))
    facts = report.facts
    title = f"Answers of {facts.model} on {report.problems} of {facts.task}"
    return [Plot(title, figure)] if figure else []


#: Of each kind of results its plots by name, the usual one first.
KINDS: dict[str, dict[str, Callable[..., list[Plot]]]] = {
    "replay": {"pareto": replay_pareto, "heat": replay_heat, "cliff": replay_cliff},
    "search": {"pareto": search_pareto, "width": search_width},
    "plan": {"pareto": plan_pareto, "load": plan_load},
    "live": {"cliff": live_cliff},
}


def kinds() -> list[str]:
    """The names of plots of any results."""
    return sorted({name for plots in KINDS.values() for name in plots})


def metrics() -> list[str]:
    """What replays can be drawn by."""
    return list(METRICS)


def plots_of(
    results: str, record: Any, kind: str | None = None, metric: str | None = None
) -> list[Plot]:
    """The plots of one kind.

    Parameters
    ----------
    results
        A key of `KINDS`.
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
    known = KINDS[results]
    chosen = kind or next(iter(known))
    if chosen not in known:
        raise UnknownName(f"plot of {results} results", chosen, known)
    if metric and results != "replay":
        raise UsageError(f"--metric {metric}: only replays have a choice, not {results} results")
    found = known[chosen](record, metric or "")
    if not found:
        why = "; a plan's curves over loads are on its page (--report)" if chosen == "load" else ""
        raise UsageError(f"these {results} results hold nothing that '{chosen}' could draw{why}")
    return found


def print_plots(plots: Sequence[Plot], console: Console | None = None, height: int = 22) -> None:
    """Print plots in characters at the width of the terminal."""
    from rich.console import Console

    console = console or Console(highlight=False)
    for number, each in enumerate(plots):
        for text in ([""] if number else []) + each.lines(console.width, height):
            console.print(text, markup=False, style="bold" if text == plain(each.title) else "")


# --- writing ---


def write(
    plots: Sequence[Plot], path: Path, *, dark: bool = False, command: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write plots to one file, as its name's ending says; the same plots give the same bytes.

    A page follows its reader's light or dark theme, and says what command and settings made the
    results; an image has one of the themes, and several plots below each other.

    Raises
    ------
    UsageError
        No format follows from the name, the file cannot be written, or it is an image and there is
        no kaleido, or no Chrome for it.
    """
    check_format(path)
    if path.suffix == ".html":
        text = page.render(
            "plot", ("plot.js",), [each.figure for each in plots], title=_title(plots),
            subtitle=command, plots=plots, settings=settings,
        )  # fmt: skip
        page.write(text, path)
        return
    image = _image(themed(stacked(plots), dark), path.suffix[1:])
    try:
        path.write_bytes(image)
    except OSError as error:
        raise UsageError(f"--out {path}: cannot write: {error.strerror}") from None


def _title(plots: Sequence[Plot]) -> str:
    """What all plots show: the title of one, or what the titles of several end with."""
    if len(plots) == 1:
        return plots[0].title
    ends = dict.fromkeys(plot.title.rpartition(": ")[2] for plot in plots)
    return next(iter(ends)).capitalize() if len(ends) == 1 else f"{len(plots)} plots"


def check_format(path: Path) -> None:
    """Refuse a name from which no format follows."""
    if path.suffix not in FORMATS:
        raise UnknownName("format of --out", path.suffix or path.name, FORMATS)


def _image(figure: Figure, form: str) -> bytes:
    try:
        import kaleido  # noqa: F401  plotly would answer with a page of advice
        from plotly import io
    except ImportError:
        raise UsageError(
            f"a .{form} file needs the package kaleido, and Chrome or Chromium for it: "
            "pip install 'arborsim[images]', or write .html"
        ) from None
    layout = figure["layout"]
    size = {"width": _WIDTH, "height": layout["height"], "scale": _SCALE if form == "png" else 1}
    try:
        made = bytes(io.to_image(figure, format=form, validate=False, **size))
    except Exception as error:  # what a browser may fail with has no common type
        why = " ".join(str(error).split())[:160]
        raise UsageError(
            f"kaleido could not make the .{form} ({why}): it needs Chrome or Chromium on the "
            "path, or its folder in BROWSER_PATH; .html needs neither"
        ) from None
    return _same_names(made) if form == "svg" else made


def _same_names(svg: bytes) -> bytes:
    """Without the random part of the names that Plotly gives to clips and gradients."""
    for name in set(re.findall(rb'id="topdefs-([0-9a-f]{6})"', svg)):
        svg = re.sub(rb"(clip|defs-|legend|g)" + name, rb"\g<1>000000", svg)
    return svg


def stacked(plots: Sequence[Plot]) -> Figure:
    """One figure with the plots below each other, each under its title."""
    notes = [[line for note in each.notes for line in textwrap.wrap(note, _NOTE)] for each in plots]
    heights = [
        each.figure["layout"]["height"] + _TITLE + (_LINE * len(said) + 10 if said else 0)
        for each, said in zip(plots, notes, strict=True)
    ]
    whole = sum(heights)
    layout: Figure = {"height": whole, "hovermode": "closest", "shapes": [], "annotations": []}
    data: list[Figure] = []
    named: set[str] = set()
    above = 0
    for number, (plot, said, height) in enumerate(zip(plots, notes, heights, strict=True), 1):
        end = "" if number == 1 else str(number)
        x, y = f"x{end}", f"y{end}"
        own = plot.figure["layout"]
        top = 1 - (above + _TITLE) / whole
        below = above + _TITLE + plot.figure["layout"]["height"]
        bottom = 1 - (below - _AXIS) / whole
        layout[f"xaxis{end}"] = {**own["xaxis"], "anchor": y}
        layout[f"yaxis{end}"] = {**own["yaxis"], "anchor": x, "domain": [bottom, top]}
        for key in ("barmode", "bargap"):
            layout.update({key: own[key]} if key in own else {})
        for kind in ("shapes", "annotations"):
            layout[kind] += [_moved(each, x, y) for each in own.get(kind, ())]
        title, texts = page.label(plot.title), "<br>".join(map(page.label, said))
        layout["annotations"].append(_text(f"<b>{title}</b>", 1 - above / whole, 15))
        layout["annotations"] += [_text(texts, 1 - below / whole, 12)] if said else []
        for trace in plot.figure["data"]:
            name = trace.get("name", "")
            again = name in named
            named.add(name)
            shown = {"legendgroup": name, "showlegend": not again and trace.get("showlegend", True)}
            made = {**trace, "uid": f"{len(data):06x}", "xaxis": x, "yaxis": y}
            data.append({**made, **(shown if name else {})})
        above += height
    return {"data": data, "layout": layout}


def _text(text: str, y: float, size: int) -> Figure:
    """Lines across an image from a height on down."""
    return {"text": text, "xref": "paper", "yref": "paper", "x": 0, "y": y, "xanchor": "left",
            "yanchor": "top", "align": "left", "showarrow": False,
            "font": {"size": size}}  # fmt: skip


def _moved(shape: Figure, x: str, y: str) -> Figure:
    """A line or a text of a layout, on the axes of its own plot."""
    ends = {
        ref: f"{axis} domain" if shape.get(ref) == "paper" else axis
        for ref, axis in (("xref", x), ("yref", y))
    }
    return {**shape, **ends}


def themed(figure: Figure, dark: bool = False) -> Figure:
    """With colours for names of colours, and the look that pages give their figures."""
    colours = palette(dark)
    line = {"gridcolor": "var(--line)", "zerolinecolor": "var(--line)",
            "linecolor": "var(--soft)", "automargin": True}  # fmt: skip
    layout = {
        key: {**line, **value} if re.fullmatch(r"[xy]axis\d*", key) else value
        for key, value in figure["layout"].items()
    }
    look = {
        "template": "none", "paper_bgcolor": "var(--card)", "plot_bgcolor": "var(--card)",
        "font": {"color": "var(--ink)", "family": _FONT, "size": 13},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "top",
                   "yref": "container", "traceorder": "normal"},
        "hoverlabel": {"bgcolor": "var(--card)", "font": {"color": "var(--ink)"}},
        "margin": {"l": 64, "r": 16, "t": 12, "b": 24},
    }  # fmt: skip
    return dict(_coloured({"data": figure["data"], "layout": {**look, **layout}}, colours))


@cache
def palette(dark: bool) -> dict[str, str]:
    """The colours of the style sheet, by name: ``{"--ink": "#1b2430", ...}``."""
    light, at_night = re.findall(r":root\s*\{([^}]*)\}", page.asset("page.css"))[:2]
    texts = light + at_night if dark else light
    return {name: text.strip() for name, text in re.findall(r"(--[\w-]+):\s*([^;]+);", texts)}


def _coloured(value: Any, colours: Mapping[str, str]) -> Any:
    if isinstance(value, str) and value.startswith("var(--"):
        return colours[value[4:-1]]
    if isinstance(value, Mapping):
        return {key: _coloured(item, colours) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_coloured(item, colours) for item in value]
    return value
