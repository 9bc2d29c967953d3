"""The page about searches on a bank.

The answer in words, accuracy against KV size and width, the table, and the trees of a few problems
step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import write_text
from arborsim.core.tables import csv_text
from arborsim.core.units import scale_for
from arborsim.play.results import at_budget
from arborsim.products.search.results import SearchResult, SkippedSearch, rows_of
from arborsim.products.search.results import SearchRow as Row
from arborsim.products.search.tables import ANSWERS, MEMORY, NAMES, WORK, cells_of, reference
from arborsim.products.search.trees import MOST_TEXT, ProblemTrees, cell_name
from arborsim.products.search.words import cautions, missing, summarise
from arborsim.report import page
from arborsim.report.page import Figure
from arborsim.report.table import Table, shown
from arborsim.searches.arms import REFERENCE

#: Columns of the terminal that the page can do without.
_SPARE = (
    "kv_prompt_vs", "held_vs", "hbm_s_vs", "held_s", "held_s_vs", "calls_vs", "tokens_vs",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot")
#: With more lines than this, their intervals hide each other: only a chosen line shows its own.
_MOST_INTERVALS = 5
#: From this ratio of the largest to the smallest on, sizes are compared on a logarithmic axis.
_WIDE_RANGE = 6.0
#: Sizes that accuracy is shown against: title of the button, axis, figure of a row, kind of unit.
_SIZES = (
    ("KV in bytes", "KV size, summed over selections", "kv_bytes", "bytes"),
    ("Peak HBM", "peak KV in HBM", "peak_hbm_kv_bytes", "bytes"),
    ("Byte-seconds", "KV in HBM over time", "hbm_kv_byte_s", "bytes"),
    ("Time", "simulated time per search", "total_s", "seconds"),
)


@dataclass(frozen=True, eq=False)
class SearchReport:
    """What the page shows."""

    heading: str  #: what was run on what, in a line
    results: tuple[SearchResult, ...]
    trees: tuple[ProblemTrees, ...]
    settings: dict[str, str]  #: everything that determines the results
    assumed: tuple[str, ...] = ()  #: numbers of the hardware profile that are not measured
    left_out: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()  #: the paper's choice of lambda_b, where it was swept
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedSearch, ...] = ()  #: what budgets were too small for


def write_search_page(report: SearchReport, path: str | Path) -> None:
    """Write the page; `UsageError` where it cannot be written, or there is nothing to report."""
    if not report.results:
        raise UsageError("no search was completed: there is nothing to report")
    write_text(path, render(report))


def render(report: SearchReport) -> str:
    """The whole page as text; the same results give the same bytes."""
    rows = rows_of(report.results)
    table = Table(
        rows_of(report.results, report.skipped), shown((*NAMES, *ANSWERS, *MEMORY, *WORK), rows),
        lambda row: at_budget(row.policy, row.budget), len(cells_of(rows)) > 1,
        look=lambda row: "baseline" if row.label == REFERENCE else "",
        reason=lambda row: row.left_out,
    )  # fmt: skip
    import pandas as pd

    records = pd.DataFrame([result.flat() for result in report.results])
    films = [{**film, "layout": number}
             for number, each in enumerate(report.trees) for film in each.films]  # fmt: skip
    data = {
        **figures_of(rows),
        "trees": {"layouts": [each.layout for each in report.trees], "films": films},
        "reference": REFERENCE,
        "start": _start(rows),
        "csv": csv_text(records),
    }
    return page.render(
        "search",
        ("tree.js", "search.js"),
        data,
        title="Search algorithms compared",
        subtitle=report.heading,
        sentences=[*map(_unbroken, (*summarise(report.results, rows), *report.verdicts))],
        warning=_unbroken(missing(rows)),
        caution=" ".join([*cautions(report.results, rows), *report.notes]),
        table=table.without(_SPARE),
        tree_notes=[note for each in report.trees for note in each.notes()],
        most_text=MOST_TEXT,
        report=report,
    )


def _unbroken(text: str) -> str:
    """Per cent signs stay with their numbers."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _start(rows: Sequence[Row]) -> str:
    """The search to show first: ETS at the widest REBASE's width, or whatever comes last there."""
    base = reference(rows)
    near = [row for row in rows if base is None or row.width == base.width]
    row = next((row for row in near if row.label.startswith("ets")), near[0])
    return cell_name(row.label, row.width, row.policy, row.budget, len(cells_of(rows)) > 1)


def figures_of(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures, by policy and budget; a policy changes neither accuracies nor widths."""
    cells = cells_of(rows)
    return {
        "sizes": [
            {"cell": at_budget(*cell).replace(" budget", ""), "figures": against_size(own)}
            for cell, own in cells.items()
        ],
        "width": against_width(next(iter(cells.values()))) if cells else None,
    }


def against_size(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Accuracy against size for rows of one policy and budget; ETS's figure 3.

    One figure per kind of size, with the title of its button and the names of its lines in order;
    none where nothing was judged.
    """
    judged = [row for row in rows if row.judged]
    if not judged:
        return []
    kinds = []
    base = reference(rows)
    if base is not None and base.figures["kv_tokens"]:
        title = f"KV size (REBASE at width {base.width} is 1)"
        kinds.append(("KV against REBASE", title, "kv_tokens", base.figures["kv_tokens"], ""))
    for button, title, name, kind in _SIZES:
        scale = scale_for(kind, [row.figures[name] for row in judged])
        unit = f"{scale.unit}·s" if name.endswith("byte_s") else scale.unit
        kinds.append((button, f"{title} ({unit})", name, scale.size, unit))
    found = []
    for button, title, name, size, unit in kinds:
        x = [row.figures[name] / size for row in judged]
        across = page.axis(title, **page.size_axis(x, _WIDE_RANGE))
        found.append(_accuracies(button, judged, x, unit, across))
    return found


def against_width(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Accuracy against width for rows of one policy and budget, searches side by side; if any."""
    judged = [row for row in rows if row.judged]
    if not judged:
        return None
    widths = sorted({row.width for row in judged})
    ends = (-0.5, len(widths) - 0.5)
    x = page.axis("width") | page.named_axis(range(len(widths)), list(map(str, widths)), ends)
    found = _accuracies("", judged, [row.width for row in judged], "thoughts", x)
    lines = found["figure"]["data"]
    for number, line in enumerate(lines):
        shift = page.side_by_side(number, len(lines))
        line["x"] = [round(widths.index(width) + shift, 3) for width in line["x"]]
    return found


def _accuracies(
    title: str, rows: Sequence[Row], x: Sequence[float], unit: str, across: Figure
) -> dict[str, Any]:
    """A line per search over its widths; points are at `x`."""
    ordered = sorted(zip(rows, x, strict=True), key=lambda each: each[0].width)
    names = list(dict.fromkeys(row.label for row in rows))
    data = []
    for number, name in enumerate(names):
        own, places = zip(*(each for each in ordered if each[0].label == name), strict=True)
        paint, dash = page.colour(number), _DASHES[number // page.COLOURS % len(_DASHES)]
        data.append(page.accuracies(
            name, own, [page.rounded(place, 5) for place in places], paint, number,
            [_point(row, place, unit) for row, place in zip(own, places, strict=True)],
            len(names) <= _MOST_INTERVALS, mode="lines+markers",
            line={"color": paint, "width": 2, "dash": dash},
        ))  # fmt: skip
    return {"title": title, "figure": page.figure(data, across, page.ACCURACY_AXIS, 460),
            "names": names}  # fmt: skip


def _point(row: Row, place: float, unit: str) -> str:
    size = f"{place:.3g} {unit}".strip()
    return page.label(f"{row.label}, width {row.width}: {size}") + (
        f"<br>{row.right}/{row.judged} right, {100 * row.accuracy:.1f} %, "
        f"95% interval {100 * row.low:.1f} to {100 * row.high:.1f}"
    )
