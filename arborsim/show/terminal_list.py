"""Plain lists in a terminal: a line per thing, or a few where the terminal is too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arborsim.show.terminal import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_list(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text, whole: nothing is cut or left out, whatever the width.

    Parameters
    ----------
    console : rich.console.Console
    heads : sequence of str
        Of each column; lines that a narrow head can take are separated by ``"\\n"``.
    rows : sequence of sequence of str
        Names come first.  Where no table fits, each row is printed as a block: its name, then a
        line per column.
    """
    wide = [head.replace("/\n", "/").replace("\n", " ") for head in heads]
    tables = (_table(form, rows, padding) for form in (wide, list(heads)) for padding in (2, 1))
    room = console.options.update(max_width=10_000)
    fitting = (t for t in tables if console.measure(t, options=room).maximum <= console.width)
    table = next(fitting, None)
    if table is not None:
        console.print(table)
        return
    for name, *cells in rows:
        console.print(plain(name), markup=False)
        for head, cell in zip(wide[1:], cells, strict=True):
            console.print(f"  {head}: {plain(cell)}", markup=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], padding: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0), header_style="dim")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table
