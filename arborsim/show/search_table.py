"""`arborsim search` in a terminal: ETS's tables 1 and 2, for any searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborsim.bank.arms import REFERENCE
from arborsim.bank.results import SearchRow as Row
from arborsim.core.units import Scale, scale_for
from arborsim.show.terminal import plain
from arborsim.show.terminal_table import add_figures, add_names, new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LONGEST_NAME = 18


@dataclass(frozen=True)
class Column:
    """One figure of a `Row`; columns of a `family` share a unit."""

    head: tuple[str, ...]
    kind: str
    value: Callable[[Row], float]
    family: str = ""
    show: Callable[[Row], str] | None = None


def _figure(name: str) -> Callable[[Row], float]:
    return lambda row: row.figures[name]


def _versus(head: str, figure: str) -> Column:
    """As a multiple of REBASE's."""
    return Column((head, "vs", REFERENCE.upper()), "factor", lambda row: row.times(figure))


def _interval(row: Row) -> str:
    if math.isnan(row.low):
        return "n/a"
    return f"{100 * row.low:.0f}-{100 * row.high:.0f} %"


def _accuracy(row: Row) -> str:
    return "n/a" if math.isnan(row.accuracy) else f"{100 * row.accuracy:.1f}"


def _n(row: Row) -> str:
    return f"{row.right}/{row.judged}"


def _misses(row: Row) -> str:
    return _MISSES.show(row.missed)


_MISSES = Scale("%", 1e-2, 1)


ANSWERS = (
    Column(("accu-", "racy", "%"), "", lambda row: row.accuracy, show=_accuracy),
    Column(("95%", "interval"), "", lambda row: row.low, show=_interval),
    Column(("", "right"), "", lambda row: row.judged, show=_n),
    Column(("KV", "size"), "tokens", _figure("kv_tokens"), "kv"),
    _versus("KV", "kv_tokens"),
    Column(("with", "prompt"), "tokens", _figure("kv_tokens_with_prompt"), "kv"),
    _versus("same", "kv_tokens_with_prompt"),
    Column(("bank", "misses", "%"), "", lambda row: row.missed, show=_misses),
)
MEMORY = (
    Column(("HBM", "peak"), "bytes", _figure("peak_hbm_kv_bytes"), "memory"),
    _versus("peak", "peak_hbm_kv_bytes"),
    Column(("held", "peak"), "bytes", _figure("peak_held_kv_bytes"), "memory"),
    _versus("held", "peak_held_kv_bytes"),
    Column(("HBM", "byte-s"), "bytes", _figure("hbm_kv_byte_s"), "byte-s"),
    _versus("b-s", "hbm_kv_byte_s"),
    Column(("held", "byte-s"), "bytes", _figure("held_kv_byte_s"), "byte-s"),
    _versus("b-s", "held_kv_byte_s"),
)
WORK = (
    Column(("model", "calls"), "calls", _figure("model_calls")),
    _versus("calls", "model_calls"),
    Column(("", "tokens"), "tokens", _figure("generated_tokens")),
    _versus("tok.", "generated_tokens"),
    Column(("per", "search"), "seconds", _figure("total_s")),
    _versus("time", "total_s"),
    Column(("", "speed"), "rate", _figure("tokens_per_s")),
    Column(("attn.", "kept"), "percent", _figure("attention_kept")),
)
_GROUPS = (("Answers and KV size", ANSWERS), ("Memory", MEMORY), ("Work and time", WORK))

LEGEND = (
    "Figures are means per search. KV size: unique tokens of all unfinished candidates and their "
    "ancestors at each selection, summed over selections, without and with the prompt. HBM: what "
    "the policy keeps; held: what the search has not given up. Bank misses: the share of the "
    "thoughts asked for that were not recorded."
)
ANSWERED = (
    "Right answers are those recorded, under full retention: what a policy's evictions do to them "
    "is not in here (arborsim live)."
)
VERSUS = (
    "vs REBASE: a multiple of REBASE's figure at the same width, policy and budget; below 1 is "
    "less KV, memory, work or time."
)


def print_searches(rows: Sequence[Row], heading: str, console: Console | None = None) -> None:
    """Print a block per policy and budget, at the width of the terminal.

    Groups of columns share a table where they fit side by side.
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    console.print(plain(heading), style="bold", markup=False)
    if not rows:
        console.print("No search was completed.")
        return
    cells = list(dict.fromkeys((row.policy, row.budget) for row in rows))
    for policy, budget in cells:
        of_cell = [row for row in rows if (row.policy, row.budget) == (policy, budget)]
        if len(cells) > 1 or policy != "full":
            at = "" if budget == "any" else f" at budget {budget}"
            console.print(plain(f"policy {policy}{at}"), markup=False)
        for title, columns in _fitting(console, of_cell):
            _show(console, title, of_cell, columns)
    if any(row.policy != "full" for row in rows):
        console.print(ANSWERED, markup=False)
    for line in _cautions(rows):
        console.print(plain(line), markup=False)
    console.print(LEGEND, style="dim", markup=False)
    if any(row.reference for row in rows):
        console.print(VERSUS, style="dim", markup=False)


def _cautions(rows: Sequence[Row]) -> list[str]:
    """What keeps accuracies from being of all problems."""
    problems = max(row.searches for row in rows)
    lines = []
    unjudged = [row for row in rows if row.judged < row.searches]
    if unjudged:
        counts = (f"{row.label} {row.width} ({row.searches - row.judged})" for row in unjudged)
        named = ", ".join(dict.fromkeys(counts))
        lines.append(
            f"Answers that the bank does not judge count neither way; of {problems} problems: "
            f"{named}."
        )
    return lines


def _shown(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[Column, ...]:
    """Without columns that nothing is known for."""
    return tuple(c for c in columns if c.show or any(not math.isnan(c.value(r)) for r in rows))


def _fitting(console: Console, rows: Sequence[Row]) -> list[tuple[str, tuple[Column, ...]]]:
    found: list[tuple[str, tuple[Column, ...]]] = []
    for title, group in _GROUPS:
        columns = _shown(group, rows)
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


def _show(console: Console, title: str, rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """With as much air between the columns as fits; the last ones go where there is no room."""
    choices = [_table(title, rows, columns, padding) for padding in (2, 1, 0)]
    fits = (table for table in choices if _width(console, table) <= console.width)
    console.print(next(fits, choices[-1]))


def _scales(columns: Sequence[Column], rows: Sequence[Row]) -> list[Scale | None]:
    families: dict[str, list[float]] = {}
    for i, column in enumerate(columns):
        values = families.setdefault(column.family or str(i), [])
        values += [column.value(row) for row in rows]
    scales: list[Scale | None] = []
    for i, column in enumerate(columns):
        if column.show:
            scales.append(None)
        elif column.kind == "calls":
            scales.append(Scale("", 1.0, 1))
        else:
            scales.append(scale_for(column.kind, families[column.family or str(i)]))
    return scales


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], padding: int) -> Table:
    from rich.text import Text

    table = new_table(title, padding)
    add_names(table, "search", (row.label for row in rows), _LONGEST_NAME)
    add_figures(table, ("width",))
    scales = _scales(columns, rows)
    for column, scale in zip(columns, scales, strict=True):
        unit = "" if scale is None else scale.unit
        unit = f"{unit} s" if column.family == "byte-s" else unit
        add_figures(table, column.head, unit)
    for i, row in enumerate(rows):
        if i and row.width != rows[i - 1].width:
            table.add_section()
        cells = [
            scale.show(column.value(row)) if scale else (column.show or str)(row)
            for column, scale in zip(columns, scales, strict=True)
        ]
        table.add_row(Text(plain(row.label)), str(row.width), *cells)
    return table
