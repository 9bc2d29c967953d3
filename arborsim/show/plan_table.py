"""The tables of a plan's page: one candidate a row, a body per GPU."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from arborsim.core.units import Scale
from arborsim.plan.results import MET, MISSED, CandidateResult, PlanResult
from arborsim.show.markup import sorter
from arborsim.show.plan_columns import RUNS_OUT, RUNS_OUT_ABOUT, STOPPED_BY, PlanColumn
from arborsim.show.plan_words import named, runs_out, stopped_by

_STATUS = {MISSED: "misses the target"}
_DASH = "\u2013"


@dataclass(frozen=True)
class _Layout:
    """What all rows of a table share."""

    result: PlanResult
    columns: Sequence[PlanColumn]
    units: dict[str, Scale]
    names: dict[str, str]
    reasons: bool

    @property
    def span(self) -> int:
        return 1 + len(self.names) + len(self.columns) + 2 * self.reasons


def table(result: PlanResult, columns: Sequence[PlanColumn], part: str) -> str:
    """A comparison, sortable; each cell carries its plain value.

    Candidates that meet the target under no load are not in it.

    Parameters
    ----------
    result : PlanResult
    columns : sequence of PlanColumn
        As `arborsim.show.plan_columns.shown` finds them.
    part : str
        "main", with why there is no more load, or "use" of the machine: so many columns side by
        side fit neither a screen nor a sheet of paper.
    """
    rows = result.met()
    own = [column for column in columns if column.part == part]
    names = {}
    if any(row.budget != "-" for row in rows):
        names["Budget"] = "budget"
    if len({row.recall for row in rows}) > 1:
        names["Recall"] = "recall"
    units = {column.key: column.scale(rows, result) for column in own}
    layout = _Layout(result, own, units, names, part == "main")
    bodies = []
    for hardware in dict.fromkeys(row.hardware for row in rows):
        name = f'<th scope="rowgroup" colspan="{layout.span}">{html.escape(hardware)}</th>'
        lines = [_line(row, layout) for row in rows if row.hardware == hardware]
        bodies.append(f'<tbody><tr class="group">{name}</tr>{"".join(lines)}</tbody>')
    return f"<thead><tr>{_head(layout)}</tr></thead>{''.join(bodies)}"


def _head(layout: _Layout) -> str:
    head = "".join(
        f'<th class="text" scope="col">{sorter(text, "")}</th>'
        for text in ("Policy", *layout.names)
    )
    head += "".join(
        f'<th scope="col" title="{html.escape(c.about)}">'
        f"{sorter(c.title, html.escape(layout.units[c.key].unit))}</th>"
        for c in layout.columns
    )
    if layout.reasons:
        for text, about in ((RUNS_OUT, RUNS_OUT_ABOUT), (STOPPED_BY, "")):
            head += f'<th class="text" scope="col" title="{html.escape(about)}">'
            head += f"{sorter(text, '')}</th>"
    return head


def _line(row: CandidateResult, layout: _Layout) -> str:
    policy, result = html.escape(row.policy), layout.result
    cells = [
        f'<th scope="row" class="text" data-value="{policy}">{policy}{_mark(row, result)}</th>'
    ]
    cells += [_text(getattr(row, name)) for name in layout.names.values()]
    cells += [_cell(row, column, layout.units[column.key]) for column in layout.columns]
    if layout.reasons:
        cells += [_text(runs_out(row)), _text(stopped_by(row))]
    chosen = ' class="chosen"' if row.number == result.recommendation.candidate else ""
    return f"<tr{chosen}>{''.join(cells)}</tr>"


def _cell(row: CandidateResult, column: PlanColumn, unit: Scale) -> str:
    value = column.value(row)
    known = not math.isnan(value)
    bar = ""
    if known and column.kind == "percent":
        bar = f' class="bar" style="--share:{min(max(value, 0.0), 1.0):.3f}"'
    figures = column.figures(row) if known else [value]
    text = " / ".join(html.escape(unit.show(each).replace("-", _DASH)) for each in figures)
    return f'<td{bar} data-value="{f"{value:.9g}" if known else ""}">{text}</td>'


def _text(text: str) -> str:
    shown = html.escape(text).replace("-", _DASH) or _DASH
    return f'<td class="text wrap" data-value="{html.escape(text)}">{shown}</td>'


def _mark(row: CandidateResult, result: PlanResult) -> str:
    """A star on what is recommended, a ring on its alternative."""
    if row.number == result.recommendation.candidate:
        return ' <abbr title="recommended">★</abbr>'
    if row.number == result.recommendation.alternative:
        return ' <abbr title="nearest alternative">☆</abbr>'
    return ""


def failures(result: PlanResult) -> list[str]:
    """Why the others are not in the tables, one line each."""
    return [
        f"{named(row)}: {_STATUS.get(row.status, row.status)}"
        + (f" ({row.reason})" if row.reason else "")
        for row in result.candidates
        if row.status != MET
    ]
