"""`arborsim replay` in a terminal: detailed tables for a few settings, a matrix for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arborsim.run.aggregate import Row, aggregate
from arborsim.run.notes import MACHINE, notes
from arborsim.run.results import ReplayResult
from arborsim.show.columns import MEMORY, TIME, Column, scales, shown
from arborsim.show.left_out import paragraph
from arborsim.show.matrix import matrix
from arborsim.show.terminal import plain
from arborsim.show.terminal_table import add_figures, add_names, new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

VIEWS = ("auto", "table", "matrix")
#: From this width on, memory and time stand in one table.
WIDE = 140
#: With more rows per trace than this, `auto` shows the matrix.
_MOST_ROWS = 16
_LONGEST_NAME = 16
#: Columns that others imply: the first to go where there is no room.
_IMPLIED = ("speed_vs_full", "tokens_per_s", "model")


def print_tables(result: ReplayResult, console: Console | None = None, view: str = "auto") -> None:
    """Print the comparison, one block per trace, at the width of the terminal.

    Parameters
    ----------
    result : ReplayResult
    console : rich.console.Console, optional
    view : {"auto", "table", "matrix"}
        ``table`` has all figures: below `WIDE` columns two tables per trace (memory and moves; time
        and quality), which fit 80 columns, above it one.  ``matrix`` has a line per policy and the
        figures that decide.  ``auto`` takes the matrix where there is much to compare.
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    rows = aggregate(result.episodes)
    traces = [[r for r in rows if r.trace == t] for t in dict.fromkeys(row.trace for row in rows)]
    if view == "auto":
        view = "matrix" if max(map(len, traces), default=0) > _MOST_ROWS else "table"
    if MACHINE in result.settings:
        console.print(plain(result.settings[MACHINE]), markup=False)
    for of_trace in traces:
        _heading(console, of_trace[0])
        if view == "matrix":
            for line in matrix(of_trace, console.width):
                console.print(line, markup=False, no_wrap=True, crop=False)
        else:
            _detailed(console, of_trace)
    if rows:
        for note in notes(result, rows):
            console.print(plain(note), style="dim", markup=False)
    else:
        console.print("Nothing was replayed.")
    for line in (*result.does_not_fit, *paragraph(result.left_out)):
        console.print(plain(line), markup=False)


def _detailed(console: Console, rows: Sequence[Row]) -> None:
    memory, time = shown(MEMORY, rows), shown(TIME, rows)
    if console.width >= WIDE:
        _show(console, "", rows, (*memory, *time))
        return
    # Speed relative to full is the inverse of time relative to full: no room to say it twice.
    time = tuple(column for column in time if column.key != "speed_vs_full")
    _show(console, "Memory and moves", rows, memory)
    _show(console, "Time and quality", rows, time)


def _heading(console: Console, row: Row) -> None:
    from rich.text import Text

    searches = "1 search" if row.searches == 1 else f"{row.searches:,} searches"
    text = Text(plain(row.trace), style="bold")
    text.append(
        f"  {searches}, {row.prompt_tokens:,} prompt + {row.generated_tokens:,} generated tokens",
        style="not bold",
    )
    console.print(text)


def _show(console: Console, title: str, rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print with as much air between the columns as fits; columns that others imply may go."""
    unbounded = console.options.update(max_width=10_000)
    choices = [columns]
    for key in _IMPLIED:
        choices.append(tuple(column for column in choices[-1] if column.key != key))
    tables = [_table(title, rows, some, padding) for some in choices for padding in (2, 1, 0)]
    fitting = (t for t in tables if console.measure(t, options=unbounded).maximum <= console.width)
    console.print(next(fitting, tables[-1]))


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], padding: int) -> Table:
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
        cells = [units[column.key].show(column.value(row)) for column in columns]
        table.add_row(Text(plain(row.label)), row.budget_label, *cells)
    return table
