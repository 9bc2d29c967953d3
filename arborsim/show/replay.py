"""`arborsim replay` in a terminal: detailed tables for a few settings, a matrix for many.

The matrix has one line per policy and the figures that decide.  Budgets stand side by side where
the terminal is wide enough for all of them; otherwise each has a block of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arborsim.core.units import Scale
from arborsim.run.results import ANY, MACHINE, ReplayResult, Row, aggregate
from arborsim.show.replay_columns import COLUMNS, MEMORY, NAMES, TIME
from arborsim.show.replay_words import left_out, notes
from arborsim.show.table import Column, Table, print_tables, scales, shown
from arborsim.show.words import counted, plain

if TYPE_CHECKING:
    from rich.console import Console

VIEWS = ("auto", "table", "matrix")
#: From this width on, memory and time stand in one table.
WIDE = 140
#: With more rows per trace than this, `auto` shows the matrix.
_MOST_ROWS = 16
#: Columns that others imply: the first to go where there is no room.
_IMPLIED = ("speed_vs_full", "tokens_per_s", "model")
#: Narrow headers, in the order of what decides.
_HEADS = {
    "kept": "kept",
    "gap": "gap",
    "error": "err",
    "peak_hbm": "HBM",
    "hbm_vs_full": "full",
    "peak_ddr": "DDR",
    "peak_quantised": "8bit",
    "total": "time",
    "time_vs_full": "full",
    "rehydrations": "rehy",
}
_ABOVE = {"hbm_vs_full": "of", "time_vs_full": "vs"}
#: What can be told from its neighbours and full retention: the first to go.
_RELATIVE = ("time_vs_full", "hbm_vs_full")
_LONGEST_NAME = 20
_BETWEEN_BUDGETS = " │ "


def print_replay(result: ReplayResult, console: Console | None = None, view: str = "auto") -> None:
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
            print_tables(console, _groups(of_trace, console.width), implied=_IMPLIED)
    if rows:
        for note in notes(result, rows):
            console.print(plain(note), style="dim", markup=False)
    else:
        console.print("Nothing was replayed.")
    for line in (*result.does_not_fit, *left_out(result.left_out)):
        console.print(plain(line), markup=False)


def _groups(rows: Sequence[Row], width: int) -> list[tuple[str, Table[Row]]]:
    # Speed relative to full is the inverse of time relative to full: seldom room to say it twice.
    spare = "" if width >= WIDE else "speed_vs_full"
    return [
        (title, Table(rows, (*NAMES, *(c for c in shown(columns, rows) if c.key != spare)),
                      section=lambda row: row.budget_label))
        for title, columns in (("Memory and moves", MEMORY), ("Time and quality", TIME))
    ]  # fmt: skip


def _heading(console: Console, row: Row) -> None:
    from rich.text import Text

    text = Text(plain(row.trace), style="bold")
    text.append(
        f"  {counted(row.searches, 'search')}, {row.prompt_tokens:,} prompt + "
        f"{row.generated_tokens:,} generated tokens",
        style="not bold",
    )
    console.print(text)


@dataclass(frozen=True)
class _Block:
    """Figures of some policies under one budget, as text."""

    title: str
    heads: tuple[tuple[str, ...], ...]  # lines of each column's header
    cells: tuple[tuple[str, ...], ...]  # [policies][columns]; empty text where there is none

    def lines(self, air: int) -> list[str]:
        """Title, header and cells, all of the same width."""
        columns = [[*head, *(row[i] for row in self.cells)] for i, head in enumerate(self.heads)]
        widths = [max(map(len, column)) for column in columns]
        text = [
            (" " * air).join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in zip(*columns, strict=True)
        ]
        width = max(len(text[0]), len(self.title))
        title = f" {self.title} ".center(width, "─") if self.title else "─" * width
        return [title[:width], *(line.rjust(width) for line in text)]


def matrix(rows: Sequence[Row], width: int) -> list[str]:
    """Lines for a terminal of `width` columns, from the rows of one trace.

    The oracle comes first, then policies by the attention they keep, most first; those that do not
    keep to the budget come last.
    """
    columns = _columns(rows)
    units = _units(columns, rows)
    always = [_always(row, columns, units) for row in rows if row.budget == ANY]
    above = [*always, ""] if always else []
    others = [row for row in rows if row.budget != ANY]
    if not others:
        return above
    budgets = list(dict.fromkeys(row.budget for row in others))
    names = _ranked(others, budgets)
    labels = _labels(others, names)
    choices = [columns]
    for key in _RELATIVE:
        choices.append([column for column in choices[-1] if column.key != key])
    for some, air in itertools.product(choices[1:], (2, 1)):
        blocks = [_block(others, names, b, some, units) for b in budgets]
        lines = _side_by_side([_names(labels), *(block.lines(air) for block in blocks)])
        if max(map(len, lines)) <= width:
            return [*above, *lines, ""]
    lines = above
    for budget in budgets:
        own = _ranked([row for row in others if row.budget == budget], [budget])
        for some, air in itertools.product(choices, (2, 1)):
            block = _block(others, own, budget, some, units)
            shown_names = _names(_labels(others, own), _name_width(labels))
            part = _side_by_side([shown_names, block.lines(air)], " " * air)
            if max(map(len, part)) <= width:
                break
        lines += [*part, ""]
    return lines


def _always(row: Row, columns: Sequence[Column[Row]], units: dict[str, Scale]) -> str:
    """A policy that does not know budgets, full retention above all: said once."""
    told = {
        "kept": "kept",
        "error": "error",
        "peak_hbm": "in HBM",
        "peak_ddr": "in DDR",
        "total": "",
    }
    parts = [
        f"{units[c.key].show(c.value(row))} {units[c.key].unit} {told[c.key]}".strip()
        for c in columns
        if c.key in told and c.value(row)
    ]
    return f"{_fitted(row.label)}, whatever the budget: {', '.join(parts)}"


def _columns(rows: Sequence[Row]) -> list[Column[Row]]:
    columns = shown([COLUMNS[key] for key in _HEADS], rows)
    nothing = {"peak_ddr", "rehydrations"}
    return [c for c in columns if c.key not in nothing or any(map(c.value, rows))]


def _units(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> dict[str, Scale]:
    """Three digits are enough to compare."""
    return {
        key: replace(scale, decimals=max(0, scale.decimals - 1))
        if scale.unit not in ("%", "pp", "x")
        else scale
        for key, scale in scales(columns, rows).items()
    }


def _ranked(rows: Sequence[Row], budgets: Sequence[str]) -> list[str]:
    """Policies by attention kept under the first budget, then the next; the oracle first.

    Policies that hold more than the budget compare with each other only, and come last.
    Where that is equal or unknown, less HBM comes first; what was left out under a budget follows
    what was not.
    """
    by_cell = {(row.policy, row.budget): row for row in rows}

    def key(policy: str) -> tuple[object, ...]:
        found = [by_cell.get((policy, budget)) for budget in budgets]
        ranks = [
            (1, 0.0, 0)
            if row is None
            else (0, 0.0 if math.isnan(row.attention_kept) else -row.attention_kept,
                  row.peak_hbm_kv_bytes)
            for row in found
        ]  # fmt: skip
        oracle = any(row is not None and row.is_oracle for row in found)
        unbounded = any(row is not None and not row.bounded for row in found)
        return (not oracle, unbounded, *itertools.chain(*ranks), policy)

    return sorted(dict.fromkeys(row.policy for row in rows), key=key)


def _labels(rows: Iterable[Row], names: Iterable[str]) -> list[str]:
    found = {row.policy: row.label for row in rows}
    return [found[name] for name in names]


def _block(
    rows: Iterable[Row],
    names: Iterable[str],
    budget: str,
    columns: Sequence[Column[Row]],
    units: dict[str, Scale],
) -> _Block:
    by_name = {row.policy: row for row in rows if row.budget == budget}
    heads: tuple[tuple[str, ...], ...] = tuple(
        (_ABOVE.get(column.key, ""), _HEADS[column.key], units[column.key].unit)
        for column in columns
    )
    cells = tuple(
        tuple(units[c.key].show(c.value(by_name[name])) if name in by_name else "" for c in columns)
        for name in names
    )
    if not any(above for above, _, _ in heads):
        heads = tuple(head[1:] for head in heads)
    return _Block(f"budget {budget}", heads, cells)


def _names(names: Sequence[str], width: int = 0) -> list[str]:
    """The first column, without a header yet: `_side_by_side` fills up."""
    width = width or _name_width(names)
    return [_fitted(name).ljust(width) for name in names]


def _name_width(names: Iterable[str]) -> int:
    return max(len("policy"), *(len(_fitted(name)) for name in names))


def _fitted(name: str) -> str:
    """A name that is too long loses its front: `package.module:` matters least."""
    name = plain(name)
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


def _side_by_side(parts: Sequence[list[str]], between: str = _BETWEEN_BUDGETS) -> list[str]:
    """Names and blocks side by side; a rule below the header."""
    names, *blocks = parts
    blank = " " * len(names[0])
    above = len(blocks[0]) - len(names)
    first = [blank] * (above - 1) + ["policy".ljust(len(blank))] + names
    lines = [between.join(line) for line in zip(first, *blocks, strict=True)]
    rule = "".join("┼" if c == "│" else "─" for c in lines[above - 1])
    return [*(line.rstrip() for line in lines[:above]), rule, *lines[above:]]
