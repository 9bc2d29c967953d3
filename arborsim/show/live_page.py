"""One self-contained HTML page about a live run; see `arborsim.show.html` for its rules."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.units import Scale, quantity
from arborsim.show import live_figures as figures
from arborsim.show.live_columns import ANSWERS, MEMORY, TIME, LiveColumn, scales, shown
from arborsim.show.live_export import to_frame
from arborsim.show.live_rows import LiveReport, LiveRow, cautions, left_out, live_rows
from arborsim.show.live_summary import summarise
from arborsim.show.markup import asset, bullets, filled, in_script, pairs, sorter

#: Bars of time that can be told apart in one figure.
_MOST_BARS = 24


def write_live_page(report: LiveReport, path: str | Path) -> None:
    """Write the page; the same results give the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    try:
        Path(path).write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {path}: {error.strerror}") from error


def render(report: LiveReport) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    rows = live_rows(report)
    columns = shown((*ANSWERS, *MEMORY, *TIME), rows) if rows else ()
    sentences = summarise(rows)
    parts = {
        "style": asset("report.css"),
        "title": "Policies looking on" if report.shadow else "Policies on a live model",
        "subtitle": html.escape(_subtitle(report)),
        "summary": f'<p class="lead">{html.escape(sentences[0])}</p>{bullets(sentences[1:])}',
        "caveat": bullets(cautions(report, rows)),
        "table": _table(rows, columns),
        "definitions": pairs({_title(c): c.about for c in columns}),
        "settings": pairs(_settings(report)),
        "left_out": bullets(_reasons(report)),
        "data": in_script(_data(report, rows)),
        "plotly": get_plotlyjs(),
        "script": "\n".join(map(asset, ("page.js", "live.js"))),
    }  # fmt: skip
    return filled("live.html", parts)


def _reasons(report: LiveReport) -> list[str]:
    """Every reason once; the policy stands before it already."""
    return [
        f"{policy}, budget {budget}: {each.removeprefix(f'budget infeasible for {policy}: ')}"
        for (policy, budget), reasons in left_out(report).items()
        for each in dict.fromkeys(reasons)
    ]


def _data(report: LiveReport, rows: Sequence[LiveRow]) -> dict[str, Any]:
    budgets = dict.fromkeys(row.budget_label for row in rows if not row.row.is_baseline)
    times = [("all", rows)]
    if len(rows) > _MOST_BARS:
        times = [
            (budget, [r for r in rows if r.row.is_baseline or r.budget_label == budget])
            for budget in budgets
        ]
    memories = figures.memories(report)
    return {
        "accuracy": figures.accuracy(rows),
        "time": [{"budget": budget, "figure": figures.time_split(some)} for budget, some in times]
        if rows
        else [],
        "memory": memories,
        "start": memories[1]["cell"] if len(memories) > 1 else "",
        "csv": to_frame(report).to_csv(index=False, lineterminator="\n"),
    }


def _subtitle(report: LiveReport) -> str:
    facts = report.facts
    problems = len({result.episode for result in report.results})
    how = f"{report.request['search']} search"
    return (
        f"{facts.model}: {problems} problem{'' if problems == 1 else 's'} of {facts.task}, {how}, "
        f"{facts.dtype} on {facts.device}. {quantity('bytes', facts.weight_bytes)} of weights, "
        f"{quantity('bytes', facts.kv_bytes_per_token)} of KV per token."
    )


def _settings(report: LiveReport) -> dict[str, str]:
    facts, request = report.facts, report.request
    found = {
        "command": report.command,
        "model": facts.model + (" (random weights)" if facts.random_weights else ""),
        "task": facts.task,
        "device": f"{facts.device}, {facts.dtype}",
        "versions": ", ".join(f"{name} {version}" for name, version in facts.software.items()),
    }
    spoken = {"cells", "command", "model", "task", "device", "dtype", "gpu"}
    for key, value in request.items():
        if key not in spoken:
            found[key.replace("_", " ")] = value if isinstance(value, str) else json.dumps(value)
    if "gpu" in request:
        found["simulated GPU"] = request["gpu"]["name"]
    for cell in request["cells"]:
        values = ", ".join(f"{key} {value}" for key, value in cell["settings"].items())
        found[f"policy {cell['policy']}"] = values or "no parameters"
    return {name: text for name, text in found.items() if text}


def _title(column: LiveColumn) -> str:
    return {"of full": "HBM peak, of full"}.get(column.title, column.title)


def _table(rows: Sequence[LiveRow], columns: Sequence[LiveColumn]) -> str:
    """The comparison, sortable: each cell carries its plain value."""
    units = scales(columns, rows)
    head = "".join(
        f'<th class="text" scope="col">{sorter(text, "")}</th>' for text in ("Policy", "Budget")
    )
    head += "".join(
        f'<th scope="col" title="{html.escape(c.about)}">{sorter(c.title, units[c.key].unit)}</th>'
        for c in columns
    )
    lines = [_line(row, columns, units) for row in rows]
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"


def _line(row: LiveRow, columns: Sequence[LiveColumn], units: dict[str, Scale]) -> str:
    policy, budget = html.escape(row.label), html.escape(row.budget_label)
    cells = [
        f'<th scope="row" class="text" data-value="{policy}">{policy}</th>',
        f'<td class="text" data-value="{budget}">{budget}</td>',
    ]
    for column in columns:
        value = column.value(row)
        known = not math.isnan(value)
        bar = ""
        if known and column.key in ("accuracy", "hbm_vs_full"):
            bar = f' class="bar" style="--share:{min(max(value, 0.0), 1.0):.3f}"'
        text = column.show(row, units[column.key])
        minus = column.key == "difference"
        text = html.escape(text.replace("-", "\u2212" if minus else "\u2013"))
        cells.append(f'<td{bar} data-value="{f"{value:.9g}" if known else ""}">{text}</td>')
    kind = ' class="baseline"' if row.row.is_baseline else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"
