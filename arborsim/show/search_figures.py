"""Figures of searches on a bank: see `arborsim.show.figures` for how they name colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from arborsim.bank.arms import REFERENCE
from arborsim.bank.results import SearchRow as Row
from arborsim.core.units import scale_for
from arborsim.show.figures import Figure, label

_COLOURS = 8
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_DASHES = ("solid", "dash", "dot")
#: With more lines than this, their intervals hide each other: only a chosen line shows its own.
_MOST_INTERVALS = 5
#: From this ratio of the largest to the smallest on, sizes are compared on a logarithmic axis.
_WIDE_RANGE = 6.0
_SPREAD = 0.5  # of the distance between widths, over which searches stand side by side

#: Sizes that accuracy is shown against: title of the button, axis, figure of a row, kind of unit.
_SIZES = (
    ("KV in bytes", "KV size, summed over selections", "kv_bytes", "bytes"),
    ("Peak HBM", "peak KV in HBM", "peak_hbm_kv_bytes", "bytes"),
    ("Byte-seconds", "KV in HBM over time", "hbm_kv_byte_s", "bytes"),
    ("Time", "simulated time per search", "total_s", "seconds"),
)


def reference(rows: Sequence[Row]) -> Row | None:
    """REBASE at its largest width, of rows of one policy and budget."""
    own = [row for row in rows if row.label == REFERENCE]
    return max(own, key=lambda row: row.width, default=None)


def against_size(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Accuracy against size, one figure per kind of size; ETS's figure 3.

    Parameters
    ----------
    rows : sequence of Row
        Of one policy and budget.

    Returns
    -------
    list of dict
        ``title`` of a button, ``figure``, and ``names`` of its lines in order; empty where nothing
        was judged.
    """
    judged = [row for row in rows if row.judged]
    if not judged:
        return []
    found = []
    base = reference(rows)
    if base is not None and base.figures["kv_tokens"]:
        whole = base.figures["kv_tokens"]
        found.append(_figure(
            judged, "KV against REBASE", f"KV size (REBASE at width {base.width} is 1)", "",
            lambda row: row.figures["kv_tokens"] / whole,
        ))  # fmt: skip
    for title, axis, name, kind in _SIZES:
        scale = scale_for(kind, [row.figures[name] for row in judged])
        unit = f"{scale.unit}·s" if name.endswith("byte_s") else scale.unit
        found.append(_figure(judged, title, f"{axis} ({unit})", unit, _scaled(name, scale.size)))
    return found


def _scaled(name: str, size: float) -> Callable[[Row], float]:
    return lambda row: row.figures[name] / size


def _figure(
    rows: Sequence[Row], title: str, axis: str, unit: str, across: Callable[[Row], float]
) -> dict[str, Any]:
    names = list(dict.fromkeys(row.label for row in rows))
    sizes = [across(row) for row in rows]
    wide = min(sizes) > 0 and max(sizes) > _WIDE_RANGE * min(sizes)
    data = [
        _line(name, own, [across(row) for row in own], number, len(names), unit)
        for number, name in enumerate(names)
        for own in [[row for row in rows if row.label == name]]
    ]
    xaxis: dict[str, Any] = {"title": {"text": axis}}
    if wide:
        ticks = _ticks(min(sizes), max(sizes))
        xaxis |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}
    else:
        xaxis |= {"rangemode": "tozero"}
    return {"title": title, "figure": {"data": data, "layout": _layout(xaxis)}, "names": names}


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, around sizes."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low / 2.5 <= tick <= 2.5 * high]


def _layout(xaxis: dict[str, Any]) -> dict[str, Any]:
    return {
        "xaxis": xaxis,
        "yaxis": {"title": {"text": "accuracy (%)"}, "range": [-3, 103], "zeroline": False},
        "hovermode": "closest",
        "height": 460,
    }


def _line(
    name: str, rows: Sequence[Row], x: Sequence[float], number: int, lines: int, unit: str
) -> dict[str, Any]:
    """One search over its widths, in order of size."""
    colour = f"var(--c{number % _COLOURS})"
    y = [100 * row.accuracy for row in rows]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name),
        "x": [float(f"{each:.5g}") for each in x],
        "y": [round(each, 4) for each in y],
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1.5, "width": 4, "color": colour,
            "array": [round(100 * row.high - at, 4) for row, at in zip(rows, y, strict=True)],
            "arrayminus": [round(at - 100 * row.low, 4) for row, at in zip(rows, y, strict=True)],
            "visible": lines <= _MOST_INTERVALS,
        },
        "line": {"color": colour, "width": 2,
                 "dash": _DASHES[number // _COLOURS % len(_DASHES)]},
        "marker": {"color": colour, "size": 9, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
        "customdata": [_point(row, at, unit) for row, at in zip(rows, x, strict=True)],
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _point(row: Row, at: float, unit: str) -> str:
    size = f"{at:.3g} {unit}".strip()
    interval = f"{100 * row.low:.1f} to {100 * row.high:.1f}"
    return label(f"{row.label}, width {row.width}: {size}") + (
        f"<br>{row.right}/{row.judged} right, {100 * row.accuracy:.1f} %, 95% interval {interval}"
    )


def against_width(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Accuracy against width, searches side by side; None where nothing was judged.

    A policy changes neither: `rows` are those of one policy and budget.
    """
    judged = [row for row in rows if row.judged]
    if not judged:
        return None
    widths = sorted({row.width for row in judged})
    names = list(dict.fromkeys(row.label for row in judged))
    data = []
    for number, name in enumerate(names):
        own = sorted((row for row in judged if row.label == name), key=lambda row: row.width)
        shift = _SPREAD * ((number + 0.5) / len(names) - 0.5)
        line = _line(name, own, [row.width for row in own], number, len(names), "thoughts")
        line["x"] = [round(widths.index(row.width) + shift, 3) for row in own]
        data.append(line)
    xaxis = {"title": {"text": "width"}, "tickvals": list(range(len(widths))),
             "ticktext": [str(width) for width in widths], "range": [-0.5, len(widths) - 0.5],
             "zeroline": False, "showgrid": False}  # fmt: skip
    return {"title": "", "figure": {"data": data, "layout": _layout(xaxis)}, "names": names}


def figures_of(rows: Sequence[Row]) -> Figure:
    """All figures, by policy and budget."""
    cells = list(dict.fromkeys((row.policy, row.budget) for row in rows))
    by_cell = {
        (policy, budget): [row for row in rows if (row.policy, row.budget) == (policy, budget)]
        for policy, budget in cells
    }
    return {
        "sizes": [
            {"cell": policy if budget == "any" else f"{policy} at {budget}",
             "figures": against_size(own)}
            for (policy, budget), own in by_cell.items()
        ],
        "width": against_width(by_cell[cells[0]]) if cells else None,
    }  # fmt: skip
