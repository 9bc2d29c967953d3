"""One kind of column and one table, for terminals and for pages.

A `Column` says what a figure of a row is called, how it is read and in which unit it is shown.  A
`Table` puts rows under columns.  `print_tables` prints it at the width of a terminal; the template
``parts.html`` writes it into a page from `Table.heads` and `Table.bodies`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from arborsim.core.units import Scale, scale_for
from arborsim.show.words import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

R = TypeVar("R")
S = TypeVar("S")

#: Kinds of columns that hold text: a name leads a row, a label follows it, a remark may wrap.
NAME, LABEL, REMARK = "name", "label", "remark"
_TEXTS = (NAME, LABEL, REMARK)
#: When a column is left out: where no row knows its figure, or where it is zero in all as well.
UNKNOWN, NOTHING = "unknown", "nothing"
#: Spaces between the columns of a terminal's table, and from how many characters on names fold.
_FORMS = ((2, 18), (1, 18), (0, 18), (0, 14))
_DASH, _MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Column(Generic[R]):
    """One figure, or one text, of a row."""

    key: str
    title: str  #: the head where there is room
    kind: str  #: a key of `arborsim.core.units.UNITS`, or `NAME`, `LABEL` or `REMARK`
    #: Row -> float, in bytes, tokens, seconds or as a ratio; NaN where it is not known.  Rows are
    #: sorted by it, those of texts by their text.
    value: Callable[[R], float] = lambda row: math.nan
    about: str = ""  #: what it means
    head: tuple[str, ...] = ()  #: lines of a narrow head; the unit is added below
    family: str = ""  #: columns of a family share a unit, so that they can be compared and added
    text: Callable[[R], str] | None = None  #: row -> str, shown in place of the scaled value
    #: Figures that share the cell, in place of `value`.
    parts: tuple[Callable[[R], float], ...] = ()
    #: Values -> Scale, where `kind` does not tell the unit.
    scale: Callable[[Sequence[float]], Scale] | None = None
    per: str = ""  #: follows the unit: ``"s"`` makes byte-seconds of bytes
    hide: str = ""  #: `UNKNOWN` or `NOTHING`: when the column says nothing and is left out
    bar: bool = False  #: whether a page draws the share behind the number
    warn: bool = False  #: whether a page stresses what is above zero

    @property
    def is_text(self) -> bool:
        return self.kind in _TEXTS

    def of(self, read: Callable[[S], R]) -> Column[S]:
        """The same figure of a record that holds such a row."""

        def on(inner: Callable[[R], Any]) -> Any:
            return lambda record: inner(read(record))

        changed: Any = {"value": on(self.value), "parts": tuple(map(on, self.parts)),
                        "text": self.text and on(self.text)}  # fmt: skip
        found: Any = replace(self, **changed)
        return cast("Column[S]", found)

    def figures(self, row: R) -> list[float]:
        """What stands in the row's cell."""
        return [read(row) for read in self.parts or (self.value,)]

    def show(self, row: R, scale: Scale) -> str:
        """The row's cell as text."""
        if self.text is not None:
            return self.text(row)
        return " / ".join(map(scale.show, self.figures(row)))

    def silent(self, rows: Sequence[R]) -> bool:
        """Whether it says nothing about these rows."""
        if not self.hide:
            return False
        values = [value for row in rows for value in self.figures(row)]
        return not any(not math.isnan(v) and (v or self.hide == UNKNOWN) for v in values)


def name_column(title: str, text: Callable[[R], str], kind: str = NAME) -> Column[R]:
    """A column of texts: a `NAME` that leads rows, a `LABEL` or a `REMARK`."""
    return Column(title.lower(), title, kind, text=text)


def shown(columns: Iterable[Column[R]], rows: Sequence[R]) -> tuple[Column[R], ...]:
    """Without columns that say nothing about these rows."""
    return tuple(column for column in columns if not column.silent(rows))


def scales(columns: Iterable[Column[R]], rows: Sequence[R]) -> dict[str, Scale]:
    """Unit of each column, by key; one per family."""
    families: dict[str, list[Column[R]]] = {}
    for column in columns:
        if not column.is_text:
            families.setdefault(column.family or f"={column.key}", []).append(column)
    found = {}
    for members in families.values():
        values = [value for column in members for row in rows for value in column.figures(row)]
        first = members[0]
        scale = first.scale(values) if first.scale else scale_for(first.kind, values)
        found.update({column.key: scale for column in members})
    return found


@dataclass(frozen=True)
class Head:
    """The head of a column on a page."""

    title: str
    unit: str
    about: str
    is_text: bool


@dataclass(frozen=True)
class Cell:
    """A cell on a page: its text, the plain value that rows are sorted by, and how it looks."""

    text: str
    value: str
    look: str = ""
    share: str = ""


@dataclass(frozen=True)
class Table(Generic[R]):
    """Rows under columns; names come first."""

    rows: Sequence[R]
    columns: Sequence[Column[R]]
    section: Callable[[R], str] = lambda row: ""  #: row -> str: rows that share it stand together
    titled: bool = False  #: whether a page says what a section is
    #: Row -> str: "" or a class of the style sheet; ``"chosen"`` is bold in terminals.
    look: Callable[[R], str] = lambda row: ""
    #: Row -> (sign, meaning), next to the name on a page; None for no sign.
    badge: Callable[[R], tuple[str, str] | None] = lambda row: None

    def scales(self) -> dict[str, Scale]:
        return scales(self.columns, self.rows)

    def under(self, columns: Sequence[Column[R]]) -> Table[R]:
        """The same rows under other columns."""
        return replace(self, columns=columns)

    def without(self, keys: Iterable[str]) -> Table[R]:
        """The same rows without some columns."""
        gone = set(keys)
        return self.under([c for c in self.columns if c.key not in gone])

    def heads(self) -> Iterator[Head]:
        """For a page."""
        units = self.scales()
        for column in self.columns:
            unit = "" if column.is_text else _unit(column, units[column.key])
            unit = {"us": "µs", "x": "×"}.get(unit, unit)
            yield Head(column.title, unit, column.about, column.is_text)

    def bodies(self) -> Iterator[tuple[str, list[tuple[R, list[Cell]]]]]:
        """For a page: the title of each section, and its rows with their cells."""
        units = self.scales()
        for section in dict.fromkeys(map(self.section, self.rows)):
            own = [row for row in self.rows if self.section(row) == section]
            cells = [(row, [_cell(c, row, units) for c in self.columns]) for row in own]
            yield section if self.titled else "", cells

    def definitions(self) -> dict[str, str]:
        """What its columns mean."""
        return {column.title: column.about for column in self.columns if column.about}


def _unit(column: Column[R], scale: Scale) -> str:
    return f"{scale.unit}·{column.per}" if column.per else scale.unit


def _cell(column: Column[R], row: R, units: dict[str, Scale]) -> Cell:
    if column.is_text:
        text = column.show(row, Scale("", 1.0, 0))
        look = "text wrap" if column.kind == REMARK else "text"
        return Cell(_DASH if text in ("", "-") else text, text, look)
    value = column.value(row)
    if math.isnan(value):
        return Cell(_typeset(column.show(row, units[column.key])), "")
    share = f"{min(max(value, 0.0), 1.0):.3f}" if column.bar else ""
    look = "bar" if column.bar else "short" if column.warn and value else ""
    return Cell(_typeset(column.show(row, units[column.key])), f"{value:.9g}", look, share)


def _typeset(text: str) -> str:
    """A minus before a number, a dash in all other places."""
    return re.sub(r"(?<![\d%])-(?=\d)", _MINUS, text).replace("-", _DASH)


def print_tables(
    console: Console,
    groups: Iterable[tuple[str, Table[R]]],
    *,
    implied: Sequence[str] = (),
    names: Sequence[str] = (),
) -> None:
    """Print tables over the same rows with as much air between the columns as fits.

    Parameters
    ----------
    console : rich.console.Console
    groups : iterable of (str, Table)
        Title and table; neighbours share a table where they fit side by side.
    implied : sequence of str
        Keys of columns that others imply: the first to go where there is no room.
    names : sequence of str
        Keys of names that only the first table needs, as a number tells rows apart: they go from
        the others where there is no room.
    """
    joined = _joined(console, groups)
    for place, (title, table) in enumerate(joined):
        title = title if len(joined) > 1 else ""
        airy = []
        if place and names:
            airy = [_rich(title, table, *form) for form in _FORMS[:2]]
            table = table.without(names)
        choices = [table]
        for key in implied:
            choices.append(choices[-1].without([key]))
        made = [_rich(title, some, *form) for some in choices for form in _FORMS]
        console.print(first_fitting(console, [*airy, *made]) or made[-1])


def _joined(console: Console, groups: Iterable[tuple[str, Table[R]]]) -> list[tuple[str, Table[R]]]:
    """Neighbouring groups share a table where that fits the width."""
    found: list[tuple[str, Table[R]]] = []
    for title, table in groups:
        figures = [column for column in table.columns if column.kind != NAME]
        if not figures:
            continue
        if found:
            before, first = found[-1]
            known = {column.key for column in first.columns}
            more = [column for column in table.columns if column.key not in known]
            both = replace(first, columns=[*first.columns, *more])
            if first_fitting(console, [_rich("", both, *_FORMS[1])]):
                joined = f"{before}, {title[0].lower()}{title[1:]}" if before and title else before
                found[-1] = (joined, both)
                continue
        found.append((title, table))
    return found


def first_fitting(console: Console, tables: Iterable[RichTable]) -> RichTable | None:
    """The first table that the terminal is wide enough for; None if there is none."""
    unbounded = console.options.update(max_width=10_000)
    fitting = (t for t in tables if console.measure(t, options=unbounded).maximum <= console.width)
    return next(fitting, None)


def _rich(title: str, table: Table[R], padding: int, longest: int) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, padding, 0, 0), pad_edge=False,
    )  # fmt: skip
    units = table.scales()
    for column in table.columns:
        _add_column(made, column, units, table.rows, longest)
    before = None
    for row in table.rows:
        if before is not None and table.section(row) != before:
            made.add_section()
        before = table.section(row)
        cells = [Text(plain(c.show(row, units.get(c.key, _PLAIN)))) for c in table.columns]
        made.add_row(*cells, style="bold" if table.look(row) == "chosen" else "")
    return made


_PLAIN = Scale("", 1.0, 0)


def _add_column(
    made: RichTable, column: Column[R], units: dict[str, Scale], rows: Sequence[R], longest: int
) -> None:
    if column.kind == NAME:
        needed = max((len(plain(column.show(row, _PLAIN))) for row in rows), default=0)
        made.add_column(
            "\n".join(column.head) or column.title.lower(), vertical="bottom", overflow="fold",
            max_width=longest, min_width=min(longest, needed),
        )  # fmt: skip
        return
    unit = "" if column.is_text else _unit(column, units[column.key])
    # A long unit takes a line per word.
    lines = (*(column.head or (column.title,)), *(unit.split(" ") if len(unit) > 5 else [unit]))
    head = "\n".join(line for line in lines if line)
    made.add_column(head, justify="right", vertical="bottom", no_wrap=True)


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
    forms = ((form, padding) for form in (wide, list(heads)) for padding in (2, 1))
    table = first_fitting(console, (_list(form, rows, padding) for form, padding in forms))
    if table is not None:
        console.print(table)
        return
    for name, *cells in rows:
        console.print(plain(name), markup=False)
        for head, cell in zip(wide[1:], cells, strict=True):
            console.print(f"  {head}: {plain(cell)}", markup=False)


def _list(heads: Sequence[str], rows: Sequence[Sequence[str]], padding: int = 2) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, pad_edge=False, padding=(0, padding, 0, 0), header_style="dim")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made
