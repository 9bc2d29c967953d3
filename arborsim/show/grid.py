"""Rows of text under each other in a terminal: for lists of facts, which no page repeats."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def grid(
    rows: Iterable[Sequence[str | Text]],
    heads: Sequence[str] = (),
    *,
    right: Container[int] = (),
    dim: Container[int] = (),
    least: int = 0,
) -> Table:
    """A table without lines; its last column folds, the others are never cut.

    Parameters
    ----------
    rows : iterable of sequences of str or Text
        Text is printed as it is, never read as markup.
    heads : sequence of str
    right, dim : containers of int
        Columns that are set right, or dim.
    least : int
        Width of the first column, at least.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(each) if isinstance(each, str) else each for each in row] for row in rows]
    table = Table(
        box=None, show_header=bool(heads), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0)
    )
    columns = len(heads) or len(cells[0])
    for i in range(columns):
        table.add_column(
            heads[i] if heads else "",
            justify="right" if i in right else "left",
            style="dim" if i in dim else "",
            no_wrap=i < columns - 1,
            overflow="fold",
            min_width=least if i == 0 else None,
        )
    for row in cells:
        table.add_row(*row)
    return table
