"""What the comparisons in a terminal have in common: a table, its first column, and heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from arborsim.show.terminal import plain

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, padding: int) -> Table:
    """An empty table with so much air between its columns."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, padding, 0, 0),
        pad_edge=False,
    )


def add_names(table: Table, head: str, names: Iterable[str], longest: int) -> None:
    """A first column for `names`, which fold from `longest` characters on."""
    needed = max(len(plain(name)) for name in names)
    table.add_column(
        head, vertical="bottom", overflow="fold", max_width=longest, min_width=min(longest, needed)
    )


def add_figures(table: Table, head: Iterable[str], unit: str = "") -> None:
    """A column of numbers; a long unit takes a line per word."""
    lines = (*head, *(unit.split(" ") if len(unit) > 5 else [unit]))
    title = "\n".join(line for line in lines if line)
    table.add_column(title, justify="right", vertical="bottom", no_wrap=True)
