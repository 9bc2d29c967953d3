"""Figures drawn with characters, for terminals.

`drawn` takes the same dictionaries that pages and image files draw (`arborsim.report.page`): points
and lines on two axes, or a heat map.  What a point is stands in the legend below: a series is drawn
with a letter of its name, numbered points with their numbers.
"""

from __future__ import annotations

import html
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from arborsim.report.page import Figure
from arborsim.report.words import plain

#: Drawn where points of several series fall on one place.
SEVERAL = "*"
#: Series without a letter that is free take one of these.
_SPARE = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ#%&@$"
_DOT, _DASH = "·", "╌"
#: Cells of a heat map, from the worst to the best.
_SHADES = " ░▒▓█"
#: Characters between the ticks of an axis across and up, at least.
_APART, _ABOVE = 9, 3
_LEAST_WIDTH, _LEAST_HEIGHT = 24, 6


def drawn(figure: Figure, width: int = 80, height: int = 20) -> list[str]:
    """Lines of at most `width` characters; a plane of points is `height` lines high, less its axes.

    Narrower or lower than what axes need, it is drawn at that size.
    """
    if any(trace.get("type") == "heatmap" for trace in figure["data"]):
        return _heat(figure["data"][0], width)
    return _Plane(figure, max(width, _LEAST_WIDTH), max(height, _LEAST_HEIGHT)).lines()


def _said(text: Any) -> str:
    """A label without the markup that Plotly reads."""
    return plain(html.unescape(re.sub(r"<[^>]*>", " ", str(text)))).strip()


# --- points and lines ---


@dataclass(frozen=True)
class _Axis:
    """Numbers to places 0 .. `length` - 1, with the ticks that fit."""

    low: float
    high: float
    length: int
    log: bool = False
    given: tuple[tuple[float, str], ...] = ()  #: ticks that the figure names

    @classmethod
    def of(cls, settings: Figure, values: Sequence[float], length: int) -> _Axis:
        log = settings.get("type") == "log"
        given = tuple(
            (float(at), _said(text))
            for at, text in zip(
                settings.get("tickvals", ()),
                settings.get("ticktext") or settings.get("tickvals", ()),
                strict=True,
            )
        )
        known = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        if "range" in settings:
            low, high = settings["range"]
            low, high = (10**low, 10**high) if log else (low, high)
        elif settings.get("rangemode") == "tozero":
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        return cls(low, high, length, log, given)

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1; NaN where it has no place."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)

    def place(self, value: float) -> int | None:
        """The character that a value falls on; None outside of the axis."""
        share = self.share(value)
        if math.isnan(share) or not -1e-9 <= share <= 1 + 1e-9:
            return None
        return min(max(round(share * (self.length - 1)), 0), self.length - 1)

    def ticks(self, apart: int) -> list[tuple[int, str]]:
        """Places and labels, at least `apart` characters from each other."""
        found: list[tuple[int, str]] = []
        for value, text in self.given or self._round(apart):
            at = self.place(value)
            room = max(apart, len(text) + 1) if self.given else apart
            if at is not None and (not found or abs(at - found[-1][0]) >= min(room, apart + 8)):
                found.append((at, text))
        return found

    def _round(self, apart: int) -> list[tuple[float, str]]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [(d * 10.0**p, f"{d * 10.0**p:,g}") for p in powers for d in (1, 2, 5)]
        least = (self.high - self.low) * apart / max(self.length - 1, 1)
        power = 10.0 ** math.floor(math.log10(least))
        step = next(d * power for d in (1, 2, 5, 10) if d * power >= least * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(n * step, f"{n * step:,.{decimals}f}") for n in range(first, last + 1)]


@dataclass
class _Series:
    """The points or line of one trace of a figure."""

    name: str  #: in the legend; "" for none
    points: list[tuple[float, float]]
    marks: list[str]  #: of each point; "" for none
    letter: str
    line: bool
    numbered: bool = False

    @property
    def legend(self) -> str:
        sign = "1, 2, ..." if self.numbered else self.letter or _DOT
        return f"{sign} {self.name}"


@dataclass
class _Plane:
    """A plane of characters, its axes, and its legend."""

    figure: Figure
    width: int
    height: int
    series: list[_Series] = field(default_factory=list)

    def __post_init__(self) -> None:
        letters: dict[str, str] = {}
        for trace in self.figure["data"]:
            if made := _series(trace, letters):
                self.series.append(made)

    def lines(self) -> list[str]:
        layout = self.figure["layout"]
        across, up = layout["xaxis"], layout["yaxis"]
        points = [point for each in self.series for point in each.points]
        limits = [shape["y0"] for shape in layout.get("shapes", ()) if shape.get("xref") == "paper"]
        rows = self.height - 4
        y = _Axis.of(up, [*(point[1] for point in points), *limits], rows)
        labels = dict(y.ticks(_ABOVE))
        margin = max((len(text) for text in labels.values()), default=1) + 1
        x = _Axis.of(across, [point[0] for point in points], self.width - margin - 2)
        grid = self._grid(x, y, limits)
        found = [_said(up.get("title", {}).get("text", ""))]
        for row in range(rows - 1, -1, -1):
            tick = row in labels
            found.append(f"{labels.get(row, ''):>{margin}}{'┤' if tick else '│'}{grid[row]}")
        found += self._bottom(x, margin)
        title = _said(across.get("title", {}).get("text", ""))
        found.append(title.rjust(min(self.width, margin + 1 + x.length)))
        found += self._legend(grid)
        return [line.rstrip() for line in found]

    def _grid(self, x: _Axis, y: _Axis, limits: Iterable[float]) -> list[str]:
        """Rows of characters, the lowest first."""
        cells = [[" "] * x.length for _ in range(y.length)]
        for limit in limits:
            if (row := y.place(limit)) is not None:
                cells[row] = [_DASH] * x.length
        owners: dict[tuple[int, int], str] = {}
        placed = [[(x.place(px), y.place(py)) for px, py in each.points] for each in self.series]
        for each, spots in zip(self.series, placed, strict=True):
            if each.line:
                for a, b in itertools.pairwise(spots):
                    _line(cells, a, b)
        for each, spots in zip(self.series, placed, strict=True):
            for (column, row), mark in zip(spots, each.marks, strict=True):
                if column is None or row is None or not mark:
                    continue
                owner = owners.setdefault((row, column), each.letter)
                if owner != each.letter and not each.numbered:
                    mark = SEVERAL
                start = min(column, x.length - len(mark))
                cells[row][start : start + len(mark)] = list(mark)
        return ["".join(row) for row in cells]

    def _bottom(self, x: _Axis, margin: int) -> list[str]:
        """The axis across, and its labels."""
        ticks = x.ticks(_APART)
        rule, text = ["─"] * x.length, [" "] * (margin + 1 + x.length)
        for at, label in ticks:
            rule[at] = "┬"
            start = min(max(margin + 1 + at - len(label) // 2, 0), len(text) - len(label))
            if not "".join(text[max(start - 1, 0) : start + len(label) + 1]).strip():
                text[start : start + len(label)] = list(label)
        return [" " * margin + "└" + "".join(rule), "".join(text)]

    def _legend(self, grid: Sequence[str]) -> list[str]:
        entries = [each.legend for each in self.series if each.name]
        entries += [
            f"{_DASH} {_said(each['text'])}"
            for each in self.figure["layout"].get("annotations", ())
            if each.get("xref") == "paper" and each.get("text")
        ]
        if any(SEVERAL in row for row in grid):
            entries.append(f"{SEVERAL} several")
        # An entry stays on one line: its spaces are no places to break.
        text = "   ".join(entry.replace(" ", "\N{NO-BREAK SPACE}") for entry in entries)
        return [
            line.replace("\N{NO-BREAK SPACE}", " ")
            for line in textwrap.wrap(text, self.width, break_long_words=False)
        ]


def _series(trace: Figure, letters: dict[str, str]) -> _Series | None:
    """A trace as points with marks; None for bars, bands and what a page only uses as a frame.

    `letters` are those of names so far: traces of one name share theirs.
    """
    bare = trace.get("line", {}).get("width") == 0 and trace.get("mode") == "lines"
    if trace.get("type") != "scatter" or bare or isinstance(trace.get("x"), dict):
        return None
    pairs = [
        (float(x), float(y))
        for x, y in zip(trace["x"], trace["y"], strict=True)
        if x is not None and y is not None
    ]
    name = _said(trace.get("name", ""))
    said = name if trace.get("showlegend", True) else ""
    mode = trace.get("mode", "lines+markers")
    if not pairs:
        return None
    if "text" in mode:
        return _Series(said, pairs, list(map(_said, trace["text"])), "", "lines" in mode, True)
    if "markers" not in mode:
        return _Series(said, pairs, [""] * len(pairs), "", True)
    if name not in letters:
        free = (c for c in (*name.lower(), *name.upper(), *_SPARE) if c.isalpha() or c in _SPARE)
        taken = letters.values()
        letters[name] = next((c for c in free if c not in taken), "o")
    letter = letters[name]
    return _Series(said, pairs, [letter] * len(pairs), letter, "lines" in mode)


def _line(cells: list[list[str]], a: Any, b: Any) -> None:
    """Dots between two places, where nothing is."""
    if None in (*a, *b):
        return
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]))
    for step in range(1, steps):
        column = round(a[0] + (b[0] - a[0]) * step / steps)
        row = round(a[1] + (b[1] - a[1]) * step / steps)
        if cells[row][column] in (" ", _DASH):
            cells[row][column] = _DOT


# --- heat maps ---


def _heat(trace: Figure, width: int) -> list[str]:
    """A line per row, with a shade behind each number; as many columns side by side as fit."""
    names, heads = list(map(_said, trace["y"])), list(map(_said, trace["x"]))
    texts = [[_said(text) for text in row] for row in trace["text"]]
    shades = [[_shade(value) for value in row] for row in trace["z"]]
    longest = max(map(len, names), default=0)
    cell = 3 + max([len(t) for row in texts for t in row] + [len(head) for head in heads])
    each = max(1, (width - longest) // (cell + 1))
    found: list[str] = []
    for start in range(0, len(heads), each):
        part = slice(start, start + each)
        found += [""] if found else []
        found.append(" " * longest + "".join(f" {head:>{cell}}" for head in heads[part]))
        for name, row, shade in zip(names, texts, shades, strict=True):
            cells = zip(row[part], shade[part], strict=True)
            found.append(
                name.ljust(longest) + "".join(f" {t:>{cell - 2}}{s * 2}" for t, s in cells)
            )
    return [line.rstrip() for line in found]


def _shade(value: float | None) -> str:
    return " " if value is None else _SHADES[round(value * (len(_SHADES) - 1))]
