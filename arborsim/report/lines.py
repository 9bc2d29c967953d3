"""Tables as lines of text, at the width of a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from arborsim.core.units import Scale
from arborsim.report.table import LABEL, NAME, Column, Table, scales, unit_of
from arborsim.report.words import plain

if TYPE_CHECKING:
    from rich.console import Console

R = TypeVar("R", contravariant=True)

#: Spaces between columns, and from how many characters on names fold.
_FORMS = ((3, 20), (2, 20), (1, 20), (1, 14))
_WORDS = 9  # characters of a line of words among numbers


def print_tables(
    console: Console,
    groups: Iterable[tuple[str, Table[R]]],
    *,
    implied: Sequence[str] = (),
) -> None:
    """Print titled tables over the same rows with as much air between the columns as fits.

    Neighbours share a table where they fit side by side.  Figures that are zero or unknown in all
    rows are left out.  Where there is no room, columns with keys in `implied` go, the first of them
    first.
    """
    joined = _joined(console, groups)
    for title, table in joined:
        title = title if len(joined) > 1 else ""
        known = [row for row in table.rows if not table.reason(row)]
        choices = [table.without(c.key for c in table.columns if c.empty(known))]
        for key in implied:
            choices.append(choices[-1].without([key]))
        made = (_drawn(title, some, *form) for some in choices for form in _FORMS)
        fitting = next((each for each in made if each.width <= console.width), None)
        for drawn in [fitting] if fitting else _parts(title, choices[0], console.width):
            drawn.print(console)


def _joined(console: Console, groups: Iterable[tuple[str, Table[R]]]) -> list[tuple[str, Table[R]]]:
    """Neighbouring groups share a table where that fits the width."""
    found: list[tuple[str, Table[R]]] = []
    for title, table in groups:
        if all(column.kind == NAME for column in table.columns):
            continue
        if found:
            before, first = found[-1]
            both = first.under(list(dict.fromkeys([*first.columns, *table.columns])))
            if _drawn("", both, *_FORMS[1]).width <= console.width:
                joined = f"{before}, {title[0].lower()}{title[1:]}" if before and title else before
                found[-1] = (joined, both)
                continue
        found.append((title, table))
    return found


def _parts(title: str, table: Table[R], width: int) -> Iterator[_Drawn]:
    """A table that is too wide for any form, as several with the same names."""
    leading = [column for column in table.columns if column.kind in (NAME, LABEL)]
    part: list[Column[R]] = []
    for column in (column for column in table.columns if column not in leading):
        grown = table.under([*leading, *part, column])
        if part and _drawn(title, grown, *_FORMS[-1]).width > width:
            yield _drawn(title, table.under([*leading, *part]), *_FORMS[-1])
            title, part = "", []
        part.append(column)
    yield _drawn(title, table.under([*leading, *part]), *_FORMS[-1])


@dataclass(frozen=True)
class _Drawn:
    """A table as lines of text, of which those of reasons are still to be folded."""

    title: str
    heads: list[str]
    #: Lines of each row, with its style; None for the space between sections.
    rows: list[tuple[list[str], str] | None]
    reasons: dict[int, str]  #: in place of figures, by number of the row
    width: int
    start: int  #: where figures begin

    def print(self, console: Console) -> None:
        """Print it; a reason may use all of the terminal's width."""
        from rich.text import Text

        def put(line: str, style: str = "") -> None:
            console.print(Text(line.rstrip(), style=style), no_wrap=True, crop=False)

        if self.title:
            put(self.title, "italic")
        put("")
        for head in self.heads:
            put(head, "bold")
        put(" " + "─" * (self.width - 1))
        for number, row in enumerate(self.rows):
            lines, style = row or ([""], "")
            if number in self.reasons:
                room = max(console.width - self.start, _WORDS)
                said = textwrap.wrap(self.reasons[number], room, break_on_hyphens=False)
                lines = [
                    (one[: self.start].ljust(self.start) + two).rstrip()
                    for one, two in itertools.zip_longest(lines, said, fillvalue="")
                ]
            for line in lines:
                put(line, style)
        put("")


def _drawn(title: str, table: Table[R], gap: int, longest: int) -> _Drawn:
    """Draw a table with `gap` spaces between its columns and names of up to `longest` a line."""
    units = scales(table.columns, table.rows)
    columns = []  # of each: how it is set, its width, lines of its head, lines of its cells
    start = 1
    for column in table.columns:
        leads = column.kind in (NAME, LABEL)
        head = list(column.head) or [column.title.lower() if column.kind == NAME else column.title]
        if column.kind != NAME:
            unit = unit_of(column, units)
            # A long unit takes a line per word.
            head += unit.split(" ") if len(unit) > 5 else [unit]
        head = [plain(line) for line in head if line]  # units, too, come from files
        cells = [
            _folded(column, row, units[column.key], longest)
            if leads or not table.reason(row)
            else []
            for row in table.rows
        ]
        width = max((len(line) for lines in (head, *cells) for line in lines), default=0)
        columns.append((str.ljust if column.kind == NAME else str.rjust, width, head, cells))
        start += (width + gap) * leads

    def joined(parts: Sequence[list[str]], below: bool = False) -> list[str]:
        """Lines of all columns side by side; the shorter end at the top, or at the bottom."""
        height = max(1, *map(len, parts))
        padded = []
        for (align, width, _, _), part in zip(columns, parts, strict=True):
            blank = [""] * (height - len(part))
            whole = [*blank, *part] if below else [*part, *blank]
            padded.append([align(text, width) for text in whole])
        return [" " + (" " * gap).join(line) for line in zip(*padded, strict=True)]

    rows: list[tuple[list[str], str] | None] = []
    reasons = {}
    before = None
    for number, row in enumerate(table.rows):
        if (section := table.section(row)) != before:
            rows += [None] * (before is not None)
            rows += [([f" {plain(section)}"], "italic")] if table.titled and section else []
        before = section
        if reason := table.reason(row):
            reasons[len(rows)] = plain(reason)
        lines = joined([cells[number] for _, _, _, cells in columns])
        rows.append((lines, "bold" if table.look(row) == "chosen" else ""))
    heads = joined([head for _, _, head, _ in columns], below=True)
    return _Drawn(title, heads, rows, reasons, max(map(len, heads)), start)


def _folded(column: Column[R], row: R, scale: Scale, longest: int) -> list[str]:
    """The lines of a cell; names and words that stand for a number take several."""
    text = plain(column.show(row, scale))
    if column.kind == NAME:
        return textwrap.wrap(text, longest) or [""]
    return [text] if text != column.words(row) else textwrap.wrap(text, _WORDS)
