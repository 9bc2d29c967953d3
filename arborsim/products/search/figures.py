"""The figures of searches on a bank: accuracy against KV size, time and width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arborsim.core.units import scale_for
from arborsim.products.search.results import SearchRow as Row
from arborsim.products.search.tables import reference
from arborsim.report import page
from arborsim.report.page import Figure
from arborsim.report.report import Choice
from arborsim.searches.arms import REFERENCE

_DASHES = ("solid", "dash", "dot")
#: With more lines than this, their intervals hide each other: only a chosen line shows its own.
_MOST_INTERVALS = 5
#: From this ratio of the largest to the smallest on, sizes are compared on a logarithmic axis.
_WIDE_RANGE = 6.0


@dataclass(frozen=True)
class _Size:
    """A kind of size that accuracy is shown against."""

    label: str  #: in the picker
    axis: str
    figure: str  #: of a row
    size: float  #: that is 1 on the axis
    unit: str = ""


#: Label, axis, figure of a row and kind of unit.
_SIZES = (
    ("KV in bytes", "KV size, summed over selections", "kv_bytes", "bytes"),
    ("Peak HBM", "peak KV in HBM", "peak_hbm_kv_bytes", "bytes"),
    ("Byte-seconds", "KV in HBM over time", "hbm_kv_byte_s", "bytes"),
    ("Time", "simulated time per search", "total_s", "seconds"),
)


def against_size(rows: Sequence[Row], cell: str = "") -> list[Choice]:
    """Accuracy against size for rows of one policy and budget; ETS's figure 3.

    One figure per kind of size; none where nothing was judged.
    """
    judged = [row for row in rows if row.judged]
    found = []
    for size in _sizes(judged, reference(rows)) if judged else ():
        x = [row.figures[size.figure] / size.size for row in judged]
        across = page.axis(size.axis, **page.size_axis(x, _WIDE_RANGE))
        made = _accuracies(judged, x, size.unit, across)
        found.append(replace(made, labels=(size.label, cell)))
    return found


def _sizes(judged: Sequence[Row], base: Row | None) -> list[_Size]:
    found = []
    if base is not None and (tokens := base.figures["kv_tokens"]):
        title = f"KV size (REBASE at width {base.width} is 1)"
        found.append(_Size("KV against REBASE", title, "kv_tokens", tokens))
    for label, title, name, kind in _SIZES:
        scale = scale_for(kind, [row.figures[name] for row in judged])
        unit = f"{scale.unit}·s" if name.endswith("byte_s") else scale.unit
        found.append(_Size(label, f"{title} ({unit})", name, scale.size, unit))
    return found


def against_width(rows: Sequence[Row]) -> list[Choice]:
    """Accuracy against width for rows of one policy and budget, searches side by side; if any."""
    judged = [row for row in rows if row.judged]
    if not judged:
        return []
    widths = sorted({row.width for row in judged})
    ends = (-0.5, len(widths) - 0.5)
    x = page.axis("width") | page.named_axis(range(len(widths)), list(map(str, widths)), ends)
    return [_accuracies(judged, [row.width for row in judged], "thoughts", x, widths)]


def _accuracies(
    rows: Sequence[Row], x: Sequence[float], unit: str, across: Figure, widths: Sequence[int] = ()
) -> Choice:
    """A line per search over its widths; points are at `x`, or at the places of `widths`.

    A highlighted line and REBASE's stand out with their intervals.
    """
    ordered = sorted(zip(rows, x, strict=True), key=lambda each: each[0].width)
    names = list(dict.fromkeys(row.label for row in rows))
    drawn = {}
    for number, name in enumerate(names):
        own, places = zip(*(each for each in ordered if each[0].label == name), strict=True)
        texts = [_point(row, place, unit) for row, place in zip(own, places, strict=True)]
        if widths:
            shift = page.side_by_side(number, len(names))
            places = tuple(round(widths.index(width) + shift, 3) for width in places)
        paint, dash = page.colour(number), _DASHES[number // page.COLOURS % len(_DASHES)]
        line = {"color": paint, "width": 2, "dash": dash}
        at, whiskers = [page.rounded(place, 5) for place in places], len(names) <= _MOST_INTERVALS
        look: Figure = {"mode": "lines+markers", "line": line}
        drawn[name] = page.accuracies(name, own, at, paint, number, texts, whiskers, **look)
    bold = {
        name: {**line, "error_y": {**line["error_y"], "visible": True}, "showlegend": False}
        for name, line in drawn.items()
    }
    base = [bold[REFERENCE]] if REFERENCE in bold else []
    lines = {name: [*base, line] if name != REFERENCE else [line] for name, line in bold.items()}
    note = "Bars are 95% Clopper-Pearson intervals."
    if len(names) > _MOST_INTERVALS:
        note = "95% intervals are shown for the highlighted search and for REBASE."
    figure = page.figure(list(drawn.values()), across, page.ACCURACY_AXIS, 460)
    return Choice(figure, note=note, lines=lines, fades=True)


def _point(row: Row, place: float, unit: str) -> str:
    size = f"{place:.3g} {unit}".strip()
    return page.label(f"{row.label}, width {row.width}: {size}") + (
        f"<br>{row.right}/{row.judged} right, {100 * row.accuracy:.1f}%, "
        f"95% interval {100 * row.low:.1f} to {100 * row.high:.1f}"
    )
