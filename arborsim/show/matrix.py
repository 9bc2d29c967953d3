"""The compact comparison of many policies: one line each, and the figures that decide.

Budgets stand side by side where the terminal is wide enough for all of them; otherwise each has a
block of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from arborsim.core.units import Scale
from arborsim.run.aggregate import ANY, Row
from arborsim.show.columns import MEMORY, REHYDRATIONS, TIME, Column, scales, shown
from arborsim.show.terminal import plain

_BY_KEY = {column.key: column for column in (*MEMORY, *TIME, REHYDRATIONS)}
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
        lines = _beside([_names(labels), *(block.lines(air) for block in blocks)])
        if max(map(len, lines)) <= width:
            return [*above, *lines, ""]
    lines = above
    for budget in budgets:
        own = _ranked([row for row in others if row.budget == budget], [budget])
        for some, air in itertools.product(choices, (2, 1)):
            block = _block(others, own, budget, some, units)
            shown_names = _names(_labels(others, own), _name_width(labels))
            part = _beside([shown_names, block.lines(air)], " " * air)
            if max(map(len, part)) <= width:
                break
        lines += [*part, ""]
    return lines


def _always(row: Row, columns: Sequence[Column], units: dict[str, Scale]) -> str:
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


def _columns(rows: Sequence[Row]) -> list[Column]:
    columns = shown([_BY_KEY[key] for key in _HEADS], rows)
    nothing = {"peak_ddr", "rehydrations"}
    return [c for c in columns if c.key not in nothing or any(map(c.value, rows))]


def _units(columns: Iterable[Column], rows: Sequence[Row]) -> dict[str, Scale]:
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
    columns: Sequence[Column],
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
    """The first column, without a header yet: `_beside` fills up."""
    width = width or _name_width(names)
    return [_fitted(name).ljust(width) for name in names]


def _name_width(names: Iterable[str]) -> int:
    return max(len("policy"), *(len(_fitted(name)) for name in names))


def _fitted(name: str) -> str:
    """A name that is too long loses its front: `package.module:` matters least."""
    name = plain(name)
    return name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]


def _beside(parts: Sequence[list[str]], between: str = _BETWEEN_BUDGETS) -> list[str]:
    """Names and blocks side by side; a rule below the header."""
    names, *blocks = parts
    blank = " " * len(names[0])
    above = len(blocks[0]) - len(names)
    first = [blank] * (above - 1) + ["policy".ljust(len(blank))] + names
    lines = [between.join(line) for line in zip(first, *blocks, strict=True)]
    rule = "".join("┼" if c == "│" else "─" for c in lines[above - 1])
    return [*(line.rstrip() for line in lines[:above]), rule, *lines[above:]]
