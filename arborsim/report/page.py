"""Self-contained pages, and what their Plotly figures share.

A page carries its scripts, its style and all data inline and forbids itself any network access
(content security policy).  Jinja escapes what stands in the markup; the JSON for the scripts cannot
end its element; and labels of figures are escaped where they are made (`label`), because Plotly
reads a subset of HTML in them.

Figures are plain dictionaries.  Colours are written as ``var(--name)`` and resolved in the page,
where they follow its light or dark theme: the style sheet is the only place that knows a colour.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.documents import strict

if TYPE_CHECKING:
    from jinja2 import Environment

Figure = dict[str, Any]

#: Colours of lines, ``--c0`` to ``--c7``; with more lines than this they repeat.
COLOURS = 8
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
#: Bars of time that stay distinct in one figure.
MOST_BARS = 24


def render(
    product: str,
    scripts: Sequence[str | Path] = (),
    data: Any = None,
    *,
    draws: bool = True,
    template: str = "",
    style: str = "",
    **facts: Any,
) -> str:
    """The page of a product; the same facts give the same bytes.

    `product` names what of the style sheet is its own, and the `template` if no other is named.
    `scripts` are assets that follow ``page.js`` and, if the page `draws`, plotly.js; `data` is JSON
    for them.  `style` follows the style sheet, and `facts` are all else that the template shows.
    """
    from markupsafe import Markup

    return (
        _templates()
        .get_template(f"{template or product}.html")
        .render(
            product=product,
            style=Markup(asset("page.css") + style),
            script=Markup("\n".join(map(asset, ("page.js", *scripts)))),
            plotly=Markup(_plotly()) if draws else "",
            data=Markup(in_script(data)),
            **facts,
        )
    )


def asset(name: str | Path) -> str:
    """The text of a file that ships with this package, or of one elsewhere."""
    found = name if isinstance(name, Path) else files("arborsim.report") / "assets" / name
    return found.read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(strict(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    rules: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    made = Environment(loader=FunctionLoader(asset), trim_blocks=True, lstrip_blocks=True, **rules)
    made.filters |= {"headings": _headings, "about": _about}
    return made


def _about(title: str) -> str:
    """The anchor of a column's meaning."""
    return f"about-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"


def _headings(body: str) -> list[tuple[str, str]]:
    """Name and title of each section (macro `card` of ``parts.html``), for the list of contents."""
    from markupsafe import Markup

    found = re.findall(r'<h2 id="h-([^"]*)">(.*?)</h2>', str(body))
    return [(name, Markup(title)) for name, title in found]


def label(text: str) -> str:
    """`text` so that Plotly shows it and does not read it as markup."""
    return html.escape(text, quote=False)


def axis(title: str, **settings: Any) -> Figure:
    """An axis with a title."""
    return {"title": {"text": label(title)}, **settings}


def figure(data: list[Figure], x: Figure, y: Figure, height: int, **layout: Any) -> Figure:
    """Lines or bars on two axes, `height` pixels high."""
    own = {"xaxis": x, "yaxis": y, "height": height, "hovermode": "closest"}
    return {"data": data, "layout": {**own, **layout}}


def colour(number: int) -> str:
    """The colour of a line, by its number."""
    return f"var(--c{number % COLOURS})"


def symbol(number: int) -> str:
    """The symbol of a line's markers, by its number."""
    return SYMBOLS[number % len(SYMBOLS)]


def packed(values: np.ndarray, dtype: str = "f4") -> dict[str, str]:
    """Numbers the way plotly.js reads them: half the size of decimal digits.

    `dtype` is ``"f4"`` (single precision) or ``"u2"`` (whole numbers below 65536).
    """
    raw = np.ascontiguousarray(values, dtype=f"<{dtype}").tobytes()
    return {"dtype": dtype, "bdata": base64.b64encode(raw).decode("ascii")}


def rounded(value: float, significant: int = 6) -> float | None:
    """A few digits; None where there is nothing to draw."""
    return float(f"{value:.{significant}g}") if math.isfinite(value) else None


def size_axis(values: Sequence[float], far: float) -> Figure:
    """From zero; logarithmic where values lie `far` apart: 1, 2 and 5 times powers of ten."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if not 0 < far * low < high:
        return {"rangemode": "tozero"}
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    near = [tick for tick in ticks if low / 2.5 <= tick <= 2.5 * high]
    return {"type": "log", "tickvals": near, "ticktext": [f"{tick:,g}" for tick in near]}


def named_axis(places: Sequence[float], names: Sequence[str], ends: tuple[float, float]) -> Figure:
    """An axis whose ticks are names."""
    plain = {"zeroline": False, "showgrid": False}
    return {"tickvals": list(places), "ticktext": list(names), "range": list(ends), **plain}


def scatter(name: str, x: Any, y: Any, mode: str = "lines", **look: Any) -> Figure:
    """Points, or a line."""
    return {"type": "scatter", "mode": mode, "name": label(name), "x": x, "y": y, **look}


#: The axis of shares of right answers.
ACCURACY_AXIS = {"title": {"text": "accuracy (%)"}, "range": [-3, 103], "zeroline": False}


def accuracies(
    name: str,
    rows: Sequence[Any],
    x: Sequence[float | None],
    paint: str,
    number: int,
    texts: Sequence[str],
    intervals: bool = True,
    **look: Any,
) -> Figure:
    """Accuracies of rows in per cent, with their intervals, and texts where they are pointed at."""
    y, marker = [round(100 * row.accuracy, 4) for row in rows], {"size": 9, "color": paint}
    tips = {"customdata": list(texts), "hovertemplate": "%{customdata}<extra></extra>"}
    own = {"marker": {**marker, "symbol": symbol(number)}, **tips, "mode": "markers", **look}
    return scatter(name, list(x), y, error_y=whiskers(rows, paint, intervals), **own)


def whiskers(rows: Sequence[Any], paint: str, visible: bool = True) -> Figure:
    """Intervals of accuracies in per cent."""
    return {
        "type": "data",
        "symmetric": False,
        "thickness": 1.5,
        "width": 4,
        "color": paint,
        "array": [round(100 * row.high - 100 * row.accuracy, 4) for row in rows],
        "arrayminus": [round(100 * row.accuracy - 100 * row.low, 4) for row in rows],
        "visible": visible,
    }


def side_by_side(number: int, lines: int) -> float:
    """How far points of a line are from a named place that all lines share."""
    return 0.5 * ((number + 0.5) / lines - 0.5)


def stacked_bars(
    names: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float], str]],
    axis: Figure,
    unit: str,
    ticks: Sequence[str] | None = None,
) -> Figure:
    """Horizontal bars, a row per name: `parts` are (title, values, colour variable).

    Bars are placed by number: two names that look alike must not fall on one bar.
    """
    places = list(range(len(names)))
    labels = [label(name) for name in names]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": places,
            "x": [rounded(value) for value in values],
            "customdata": labels,
            "marker": {"color": f"var(--{paint})"},
            "hovertemplate": f"%{{customdata}}<br>{title} %{{x:.4g}} {unit}<extra></extra>",
        }
        for title, values, paint in parts
    ]
    shown = labels if ticks is None else [label(tick) for tick in ticks]
    rows = named_axis(places, shown, (len(names) - 0.5, -0.5))
    return figure(data, axis, rows, 150 + 25 * len(names), barmode="stack", bargap=0.3)


def area(name: str, x: Any, values: np.ndarray, paint: str, unit: str) -> Figure:
    """A layer of stacked areas."""
    look: Figure = {
        "line": {"width": 0, "color": f"var(--{paint})"},
        "fillcolor": f"var(--{paint})",
    }
    tip = f"%{{y:.4g}} {unit}"
    return scatter(name, x, packed(values), stackgroup="stack", hovertemplate=tip, **look)


_BOUND = {"color": "var(--bound)"}


def limit_line(text: str, value: float | None) -> Figure:
    """A dashed line across the plot, and what it means above its right end, for a layout."""
    if value is None:
        return {"shapes": [], "annotations": []}
    where = {"text": text, "xref": "paper", "x": 1, "y": value, "showarrow": False}
    meaning = {**where, "xanchor": "right", "yanchor": "bottom", "font": _BOUND}
    line = _dashed(xref="paper", x0=0, x1=1, y0=value, y1=value)
    return {"shapes": [line], "annotations": [meaning]}


def upright(value: float) -> Figure:
    """A dashed line from bottom to top."""
    return _dashed(yref="paper", y0=0, y1=1, x0=value, x1=value)


def _dashed(**ends: Any) -> Figure:
    return {"type": "line", **ends, "line": {**_BOUND, "width": 1.5, "dash": "dash"}}
