"""Plots by themselves: as characters, as a page, or as an image.

An image holds one figure, so several plots stand below each other in it (`stacked`), in the colours
that pages have (`themed`).  It is drawn by kaleido, which runs Chrome or Chromium.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import strict
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import write_bytes
from arborsim.report import page, report
from arborsim.report.characters import drawn
from arborsim.report.page import Figure
from arborsim.report.report import Choice, Facts, Figures, Report, Section
from arborsim.report.table import terminal
from arborsim.report.words import plain

if TYPE_CHECKING:
    from rich.console import Console

#: The endings of files that a plot can be written to.
FORMATS = (".html", ".svg", ".png")
_WIDTH, _SCALE = 900, 2  # pixels of an image, and how many dots a PNG has for each
_MARGIN = {"l": 64, "r": 16, "t": 12, "b": 16}
#: Pixels: above a plot for its title, below it for its axis, a line of notes, a line of the legend,
#: a letter of its names, and the sign before each.
_TITLE, _AXIS, _LINE, _ENTRY, _LETTER, _SIGN = 34, 70, 17, 21, 8, 48
#: What makes an image, and how long it may take: a few seconds, but for a busy machine.
_RENDER = """
import json, sys
from plotly import io
figure, options = json.load(sys.stdin.buffer)
image = io.to_image(figure, validate=False, **options)
sys.stdout.buffer.write(image)
"""
_PATIENCE_S, _ATTEMPTS = 60, 3
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


def print_plots(plots: Sequence[Plot], console: Console | None = None, height: int = 22) -> None:
    """Print plots in characters at the width of the terminal."""
    console = console or terminal()
    for number, each in enumerate(plots):
        for text in ([""] if number else []) + each.lines(console.width, height):
            console.print(text, markup=False, style="bold" if text == plain(each.title) else "")


# --- writing ---


def write(
    plots: Sequence[Plot],
    path: Path,
    *,
    dark: bool = False,
    command: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
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
        about = (Facts("Settings", settings),)
        made = Report("plot", _title(plots), command, sections(plots), appendix=about)
        report.write(made, path)
    else:
        write_bytes(path, _image(themed(stacked(plots), dark), path.suffix[1:]))


def sections(plots: Sequence[Plot]) -> list[Section]:
    """A part of a page for each plot."""
    return [
        Section(f"plot-{n}", plot.title, (Figures(f"plot-{n}", [Choice(plot.figure)]), *plot.notes))
        for n, plot in enumerate(plots)
    ]


def _title(plots: Sequence[Plot]) -> str:
    """The title of one plot, or the common end of the titles of several."""
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
    except ImportError:
        raise UsageError(
            f"a .{form} file needs the package kaleido, and Chrome or Chromium for it: "
            "pip install 'arborsim[images]', or write .html"
        ) from None
    layout = figure["layout"]
    size = {"width": _WIDTH, "height": layout["height"], "scale": _SCALE if form == "png" else 1}
    asked = json.dumps([strict(figure), {"format": form, **size}]).encode()
    # Chrome sometimes stops answering kaleido: in a process of its own it can be tried again.
    for _ in range(_ATTEMPTS):
        made, why = _rendered(asked)
        if made:
            break
    else:
        raise UsageError(
            f"kaleido could not make the .{form} ({why}): it needs Chrome or Chromium on the "
            "path, or its folder in BROWSER_PATH; .html needs neither"
        )
    return _same_names(made) if form == "svg" else made


def _rendered(asked: bytes) -> tuple[bytes, str]:
    """The image that kaleido makes of a figure and options, else why there is none."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    made = [sys.executable, "-c", _RENDER]
    with subprocess.Popen(made, **pipes, start_new_session=True) as process:
        try:
            image, said = process.communicate(asked, timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return b"", f"no answer within {_PATIENCE_S} s"
    if process.returncode == 0:
        return image, ""
    lines = said.decode(errors="replace").split("\n")
    return b"", next((line.strip()[:160] for line in reversed(lines) if line.strip()), "no reason")


def _same_names(svg: bytes) -> bytes:
    """Without the random part of the names that Plotly gives to clips and gradients."""
    for name in set(re.findall(rb'id="topdefs-([0-9a-f]{6})"', svg)):
        svg = re.sub(rb"(clip|defs-|legend\d*|g)" + name, rb"\g<1>000000", svg)
    return svg


def stacked(plots: Sequence[Plot]) -> Figure:
    """One figure with the plots below each other: title, legend, axes and notes of each."""
    layout: Figure = {"hovermode": "closest", "shapes": [], "annotations": []}
    data: list[Figure] = []
    blocks = [_Block(plot) for plot in plots]
    whole, above = sum(block.height for block in blocks), 0
    for number, block in enumerate(blocks, 1):
        end = "" if number == 1 else str(number)
        x, y = f"x{end}", f"y{end}"
        own = block.plot.figure["layout"]
        top = above + _TITLE + block.legend
        below = top + own["height"]
        height = [1 - (below - _AXIS) / whole, 1 - top / whole]
        layout[f"xaxis{end}"] = {**own["xaxis"], "anchor": y}
        layout[f"yaxis{end}"] = {**own["yaxis"], "anchor": x, "domain": height}
        layout[f"legend{end}"] = {"y": 1 - (above + _TITLE) / whole, "entrywidth": block.entry}
        for key in ("barmode", "bargap"):
            layout.update({key: own[key]} if key in own else {})
        for kind in ("shapes", "annotations"):
            layout[kind] += [_moved(each, x, y) for each in own.get(kind, ())]
        title = f"<b>{page.label(block.plot.title)}</b>"
        layout["annotations"].append(_text(title, 1 - above / whole, 15))
        if block.notes:
            texts = "<br>".join(map(page.label, block.notes))
            layout["annotations"].append(_text(texts, 1 - below / whole, 12))
        for trace in block.plot.figure["data"]:
            place = {"uid": f"{len(data):06x}", "xaxis": x, "yaxis": y}
            data.append({**trace, **place, **({"legend": f"legend{end}"} if block.legend else {})})
        above += block.height
    return {"data": data, "layout": {**layout, "height": whole + _MARGIN["t"] + _MARGIN["b"]}}


class _Block:
    """The room that a plot takes, in pixels: title, legend, axes, notes."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.notes = [line for note in plot.notes for line in textwrap.wrap(note, _NOTE)]
        names = [
            str(trace["name"])
            for trace in plot.figure["data"]
            if trace.get("name") and trace.get("showlegend", True)
        ]
        self.entry = _LETTER * max(map(len, names), default=0)
        room = _WIDTH - _MARGIN["l"] - _MARGIN["r"]
        across = max(1, room // (self.entry + _SIGN))
        self.legend = -(-len(names) // across) * _ENTRY + 6 if names else 0
        self.height = _TITLE + self.legend + int(plot.figure["layout"]["height"])
        self.height += _LINE * len(self.notes) + 10 if self.notes else 0


def _text(text: str, y: float, size: int) -> Figure:
    """Lines across an image from a height on down."""
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": y, "xanchor": "left"}
    look = {"yanchor": "top", "align": "left", "showarrow": False, "font": {"size": size}}
    return {"text": text, **place, **look}


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
    line = {"linecolor": "var(--soft)", "automargin": True}
    line |= dict.fromkeys(("gridcolor", "zerolinecolor"), "var(--line)")
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "yanchor": "top"}
    legend |= {"entrywidthmode": "pixels", "traceorder": "normal"}
    kinds = {"axis": line, "legend": legend}
    layout = {
        key: {**kinds[kind[1]], **value}
        if (kind := re.fullmatch(r"[xy]?(axis|legend)\d*", key))
        else value
        for key, value in figure["layout"].items()
    }
    card, ink = "var(--card)", "var(--ink)"
    look = {
        "template": "none",
        "paper_bgcolor": card,
        "plot_bgcolor": card,
        "width": _WIDTH,
        "font": {"color": ink, "family": _FONT, "size": 13},
        "margin": _MARGIN,
        "hoverlabel": {"bgcolor": card, "font": {"color": ink}},
    }
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
