"""One self-contained HTML page: the answer in words, the table, figures, and what they rest on.

The page carries plotly.js and all data inline and forbids itself any network access (content
security policy).  Everything that comes from a file is escaped: in the markup, in the JSON, and,
because Plotly reads a subset of HTML, in labels (`arborsim.show.figures.label`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.core.units import Scale
from arborsim.run.aggregate import Row, aggregate
from arborsim.run.notes import MACHINE, assumed, cautions
from arborsim.run.results import LeftOut, ReplayResult
from arborsim.show.columns import MEMORY, TIME, Column, scales, shown
from arborsim.show.markup import asset, bullets, filled, in_script, pairs, sorter
from arborsim.show.page_data import page_data
from arborsim.show.summary import summarise

#: What decides comes first: it must be in sight on a narrow page.
_LEADING = (
    "peak_hbm", "hbm_vs_full", "kept", "gap", "error", "total", "time_vs_full", "tokens_per_s",
)  # fmt: skip
_SCRIPTS = ("page.js", "buttons.js", "report.js", "compare.js", "map.js", "tree.js")


def write_report(result: ReplayResult, path: str | Path) -> None:
    """Write the page; the same result gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not result.episodes:
        raise UsageError("nothing was replayed: there is nothing to report")
    try:
        Path(path).write_text(render(result), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {path}: {error.strerror}") from error


def render(result: ReplayResult) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    rows = aggregate(result.episodes)
    columns = _ordered(shown((*MEMORY, *TIME), rows))
    data, note = page_data(result, rows)
    parts = {
        "style": asset("report.css"),
        "subtitle": _subtitle(result, rows),
        "summary": _summary(rows),
        "caveat": html.escape(_caveat(result, rows)),
        "table": _table(rows, columns),
        "memory_note": html.escape(note),
        "definitions": pairs({_title(c): c.about for c in columns}),
        "settings": pairs(result.settings),
        "assumed": bullets(result.assumed),
        "left_out": bullets([_left_out(each) for each in result.left_out]),
        "data": in_script(data),
        "plotly": get_plotlyjs(),
        "script": "\n".join(map(asset, _SCRIPTS)),
    }
    return filled("report.html", parts)


def _traces(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.trace for row in rows))


def _subtitle(result: ReplayResult, rows: Sequence[Row]) -> str:
    firsts = {row.trace: row for row in rows}
    parts = [
        f"{trace} ({row.searches:,} search{'es' if row.searches > 1 else ''}, "
        f"{row.generated_tokens:,} generated tokens)"
        for trace, row in firsts.items()
    ]
    on = f" Simulated on {result.settings[MACHINE]}." if MACHINE in result.settings else ""
    return html.escape(f"Recorded searches: {'; '.join(parts)}.{on}")


def _summary(rows: Sequence[Row]) -> str:
    blocks = []
    traces = _traces(rows)
    for trace in traces:
        sentences = summarise([row for row in rows if row.trace == trace])
        if not sentences:
            continue
        name = f"<h3>{html.escape(trace)}</h3>" if len(traces) > 1 else ""
        lead = f'<p class="lead">{html.escape(sentences[0])}</p>'
        blocks.append(name + lead + bullets(sentences[1:]))
    return "".join(blocks)


def _caveat(result: ReplayResult, rows: Sequence[Row]) -> str:
    notes = ["Bytes and seconds are simulated.", *result.does_not_fit]
    if any(not math.isnan(row.attention_kept) for row in rows):
        notes.append("Attention kept is not accuracy: it says how much of what the recorded model "
                     "looked at was still readable.")  # fmt: skip
    return " ".join([*notes, *cautions(result, rows), *assumed(result, "see below")])


def _left_out(each: LeftOut) -> str:
    at = f" at budget {each.budget}" if each.budget else ""
    return f"{each.policy}{at} on {each.trace}: {each.detail}"


def _title(column: Column) -> str:
    return {"of full": "HBM peak, of full", "vs full": "Time vs full"}.get(
        column.title, column.title
    )


def _ordered(columns: Sequence[Column]) -> list[Column]:
    """What decides first.  Speed relative to full is the inverse of time relative to full."""
    order = {key: place for place, key in enumerate(_LEADING)}
    kept = [column for column in columns if column.key != "speed_vs_full"]
    return sorted(kept, key=lambda column: order.get(column.key, len(order)))


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The comparison, one body per trace, sortable: each cell carries its plain value."""
    units = scales(columns, rows)
    head = "".join(
        f'<th class="text" scope="col">{sorter(text, "")}</th>' for text in ("Policy", "Budget")
    )
    head += "".join(
        f'<th scope="col" title="{html.escape(c.about)}">{sorter(c.title, units[c.key].unit)}</th>'
        for c in columns
    )
    traces = _traces(rows)
    bodies = []
    for trace in traces:
        lines = [_line(row, columns, units) for row in rows if row.trace == trace]
        if len(traces) > 1:
            name = f'<th scope="rowgroup" colspan="{len(columns) + 2}">{html.escape(trace)}</th>'
            lines.insert(0, f'<tr class="group">{name}</tr>')
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return f"<thead><tr>{head}</tr></thead>{''.join(bodies)}"


def _line(row: Row, columns: Sequence[Column], units: dict[str, Scale]) -> str:
    policy, budget = html.escape(row.label), html.escape(row.budget_label)
    cells = [
        f'<th scope="row" class="text" data-value="{policy}">{policy}</th>',
        f'<td class="text" data-value="{budget}">{budget}</td>',
    ]
    for column in columns:
        value = column.value(row)
        known = not math.isnan(value)
        bar = ""
        if known and column.key in ("hbm_vs_full", "kept"):
            bar = f' class="bar" style="--share:{min(max(value, 0.0), 1.0):.3f}"'
        key = f"{value:.9g}" if known else ""
        text = html.escape(units[column.key].show(value).replace("-", "–"))
        cells.append(f'<td{bar} data-value="{key}">{text}</td>')
    kind = ' class="baseline"' if row.is_baseline else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"
