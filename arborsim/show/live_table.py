"""`arborsim live` in a terminal: answers, memory and moves, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arborsim.core.units import quantity
from arborsim.show.live_columns import ANSWERS, MEMORY, TIME, LiveColumn, scales, shown
from arborsim.show.live_rows import LiveReport, LiveRow, cautions, live_rows
from arborsim.show.terminal import plain
from arborsim.show.terminal_table import add_figures, add_names, new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LONGEST_NAME = 16
_GROUPS = (("Answers", ANSWERS), ("Memory and moves", MEMORY), ("Time", TIME))
#: Columns that others imply: the first to go where there is no room.
_IMPLIED = ("speed_vs_full", "rehydrations", "prefill")


def print_live(report: LiveReport, console: Console | None = None) -> None:
    """Print the comparison at the width of the terminal.

    Three tables, or fewer where two fit side by side.
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    rows = live_rows(report)
    _heading(console, report)
    if rows:
        for title, columns in _fitting(console, rows):
            _show(console, title, rows, columns)
    else:
        console.print("Nothing could be run.")
    for note in cautions(report, rows):
        console.print(plain(note), markup=False)
    if rows:
        console.print(_LEGEND, style="dim", markup=False)


_LEGEND = (
    "Peaks are the largest of any search, with the prefill: they can exceed the budget; tokens "
    "moved and times are sums over searches."
)


def _heading(console: Console, report: LiveReport) -> None:
    from rich.text import Text

    facts = report.facts
    problems = len({result.episode for result in report.results})
    text = Text(plain(f"{facts.model}, {report.request['search']}"), style="bold")
    what = f"{problems} problem{'' if problems == 1 else 's'} of {facts.task}"
    memory = f"weights {quantity('bytes', facts.weight_bytes)}"
    text.append(plain(f"  {what}, {facts.dtype} on {facts.device}, {memory}"), style="not bold")
    console.print(text)


def _fitting(console: Console, rows: Sequence[LiveRow]) -> list[tuple[str, tuple[LiveColumn, ...]]]:
    """Neighbouring groups share a table where it fits the width."""
    found: list[tuple[str, tuple[LiveColumn, ...]]] = []
    for title, group in _GROUPS:
        columns = shown(group, rows)
        if not columns:
            continue
        if found:
            before, others = found[-1]
            together = (*others, *columns)
            if _width(console, _table("", rows, together, 2)) <= console.width:
                found[-1] = (f"{before}, {title[0].lower()}{title[1:]}", together)
                continue
        found.append((title, columns))
    return found


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _show(
    console: Console, title: str, rows: Sequence[LiveRow], columns: Sequence[LiveColumn]
) -> None:
    """Print with as much air between the columns as fits; columns that others imply may go."""
    choices = [tuple(columns)]
    for key in _IMPLIED:
        choices.append(tuple(column for column in choices[-1] if column.key != key))
    tables = [_table(title, rows, some, padding) for some in choices for padding in (2, 1, 0)]
    fits = (table for table in tables if _width(console, table) <= console.width)
    console.print(next(fits, tables[-1]))


def _table(
    title: str, rows: Sequence[LiveRow], columns: Sequence[LiveColumn], padding: int
) -> Table:
    from rich.text import Text

    table = new_table(title, padding)
    add_names(table, "policy", (row.label for row in rows), _LONGEST_NAME)
    add_figures(table, ("bud-", "get"))
    units = scales(columns, rows)
    for column in columns:
        add_figures(table, column.head, units[column.key].unit)
    before = rows[0].budget_label
    for row in rows:
        if row.budget_label != before:
            table.add_section()
        before = row.budget_label
        cells = [column.show(row, units[column.key]) for column in columns]
        table.add_row(Text(plain(row.label)), row.budget_label, *cells)
    return table
