"""One self-contained HTML page about searches on a bank; see `arborsim.show.html` for its rules.

The answer in words, accuracy against KV size and width, the table, and the trees of a few problems
step by step.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from arborsim.bank.arms import REFERENCE
from arborsim.bank.results import SearchResult, rows_of
from arborsim.bank.results import SearchRow as Row
from arborsim.core.errors import UsageError
from arborsim.core.units import Scale
from arborsim.show.markup import asset, bullets, filled, in_script, pairs, sorter
from arborsim.show.search_columns import SearchColumn, scales, shown
from arborsim.show.search_figures import figures_of, reference
from arborsim.show.search_summary import cautions, missing, summarise
from arborsim.show.search_thoughts import MOST_TEXT
from arborsim.show.search_trees import ProblemTrees, cell_name

_WARNING = '<p class="warning"><strong>The bank ran out of thoughts.</strong> {}</p>'
_SCRIPTS = ("page.js", "buttons.js", "tree.js", "search.js")


@dataclass(frozen=True, eq=False)
class SearchReport:
    """What the page tells.

    Attributes
    ----------
    heading : str
        What was run on what, in a line.
    results : tuple of SearchResult
    trees : tuple of ProblemTrees
    settings : dict
        Everything that determines the results.
    assumed : tuple of str
        Numbers of the hardware profile that nobody measured.
    left_out : tuple of str
    verdicts : tuple of str
        The paper's choice of lambda_b, where it was swept.
    notes : tuple of str
    """

    heading: str
    results: tuple[SearchResult, ...]
    trees: tuple[ProblemTrees, ...]
    settings: dict[str, str]
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def write_search_page(report: SearchReport, path: str | Path) -> None:
    """Write the page; the same results give the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not report.results:
        raise UsageError("no search was completed: there is nothing to report")
    try:
        Path(path).write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {path}: {error.strerror}") from error


def render(report: SearchReport) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    rows = rows_of(report.results)
    columns = shown(rows)
    sentences = summarise(report.results, rows)
    warning = missing(rows)
    parts = {
        "style": f"{asset('report.css')}\n{asset('search.css')}",
        "subtitle": html.escape(report.heading),
        "summary": _unbroken(
            f'<p class="lead">{html.escape(sentences[0])}</p>'
            + bullets([*sentences[1:], *report.verdicts])
        ),
        "warning": _unbroken(_WARNING.format(html.escape(warning))) if warning else "",
        "caveat": html.escape(" ".join([*cautions(report.results, rows), *report.notes])),
        "table": _table(rows, columns),
        "tree_notes": bullets([note for each in report.trees for note in each.notes()]),
        "most_text": str(MOST_TEXT),
        "settings": pairs(report.settings),
        "assumed": bullets(report.assumed),
        "left_out": bullets(report.left_out),
        "definitions": pairs({c.title: c.about for c in columns}),
        "data": in_script(_data(report, rows)),
        "plotly": get_plotlyjs(),
        "script": "\n".join(map(asset, _SCRIPTS)),
    }
    return filled("search.html", parts)


def _unbroken(markup: str) -> str:
    """Per cent signs stay with their numbers."""
    return markup.replace(" %", "&nbsp;%")


def _data(report: SearchReport, rows: Sequence[Row]) -> dict[str, Any]:
    films = [
        {**film, "layout": number}
        for number, each in enumerate(report.trees)
        for film in each.films
    ]
    table = pd.DataFrame([result.flat() for result in report.results])
    return {
        **figures_of(rows),
        "trees": {"layouts": [each.layout for each in report.trees], "films": films},
        "reference": REFERENCE,
        "start": _start(rows),
        "csv": table.to_csv(index=False, lineterminator="\n"),
    }


def _start(rows: Sequence[Row]) -> str:
    """The search to show first: ETS beside the widest REBASE, or whatever comes last there."""
    cells = {(row.policy, row.budget) for row in rows}
    base = reference(rows)
    near = [row for row in rows if base is None or row.width == base.width]
    named = [row for row in near if row.label.startswith("ets")]
    row = (named or near)[0]
    return cell_name(row.label, row.width, row.policy, row.budget, len(cells) > 1)


def _table(rows: Sequence[Row], columns: Sequence[SearchColumn]) -> str:
    """The comparison, a body per policy and budget, sortable: each cell carries its plain value."""
    units = scales(columns, rows)
    head = f'<th class="text" scope="col">{sorter("Search", "")}</th>'
    head += f'<th scope="col">{sorter("Width", "")}</th>'
    head += "".join(
        f'<th scope="col" title="{html.escape(c.about)}">'
        f"{sorter(c.title, c.unit(units[c.key]))}</th>"
        for c in columns
    )
    cells = list(dict.fromkeys((row.policy, row.budget) for row in rows))
    bodies = []
    for policy, budget in cells:
        lines = [_line(r, columns, units) for r in rows if (r.policy, r.budget) == (policy, budget)]
        if len(cells) > 1:
            name = html.escape(policy if budget == "any" else f"{policy} at budget {budget}")
            span = f'<th scope="rowgroup" colspan="{len(columns) + 2}">{name}</th>'
            lines.insert(0, f'<tr class="group">{span}</tr>')
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return f"<thead><tr>{head}</tr></thead>{''.join(bodies)}"


def _line(row: Row, columns: Sequence[SearchColumn], units: dict[str, Scale]) -> str:
    name = html.escape(row.label)
    cells = [
        f'<th scope="row" class="text" data-value="{name}">{name}</th>',
        f'<td data-value="{row.width}">{row.width:,}</td>',
    ]
    for column in columns:
        value = column.value(row)
        known = not math.isnan(value)
        marks = ""
        if known and column.key == "accuracy":
            marks = f' class="bar" style="--share:{min(max(value, 0.0), 1.0):.3f}"'
        if column.key == "missed" and value:
            marks = ' class="short"'
        text = html.escape(column.show(row, units[column.key]).replace("-", "\u2013"))
        cells.append(f'<td{marks} data-value="{f"{value:.9g}" if known else ""}">{text}</td>')
    kind = ' class="baseline"' if row.label == REFERENCE else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"
