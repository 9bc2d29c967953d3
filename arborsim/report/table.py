"""One kind of column and one table, for terminals and for pages.

A `Column` says what a figure of a row is called, how it is read and in which unit it is shown.  A
`Table` puts rows under columns.  `arborsim.report.lines` prints it at the width of a terminal; the
template ``parts.html`` writes it into a page from `Table.heads` and `Table.bodies`.  `print_list`
and `grid` are for rows of text that only terminals show.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from arborsim.core.units import Scale, scale_for
from arborsim.report.words import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

R = TypeVar("R", contravariant=True)

#: Kinds of columns that hold text: a name leads a row, a label follows it, a remark may wrap.
NAME, LABEL, REMARK = "name", "label", "remark"
#: When a column is left out: where no row knows its figure, or where it is zero in all as well.
UNKNOWN, NOTHING = "unknown", "nothing"
_TEXT = Scale("", 1.0, 0)  # of columns that hold text
#: Characters of a line, at least: below, tables would be cut.
LEAST_WIDTH = 60
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
    #: Row -> str: why a figure is not known, in place of the usual sign for that; "" for the sign.
    words: Callable[[R], str] = lambda row: ""
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
        return self.kind in (NAME, LABEL, REMARK)

    def figures(self, row: R) -> list[float]:
        """The numbers in the row's cell."""
        return [read(row) for read in self.parts or (self.value,)]

    def show(self, row: R, scale: Scale = _TEXT) -> str:
        """The row's cell as text."""
        if self.text is not None:
            return self.text(row)
        if math.isnan(self.value(row)) and (words := self.words(row)):
            return words
        return " / ".join(map(scale.show, self.figures(row)))

    def empty(self, rows: Sequence[R]) -> bool:
        """Whether it is a figure that is zero or unknown in all these rows."""
        return not self.is_text and replace(self, hide=NOTHING).silent(rows)

    def silent(self, rows: Sequence[R]) -> bool:
        """Whether it says nothing about these rows."""
        known = [v for row in rows for v in self.figures(row) if not math.isnan(v)]
        said = any(v or self.hide == UNKNOWN for v in known) or any(map(self.words, rows))
        return bool(self.hide) and not said


def read_columns(
    package: str,
    functions: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    base: Mapping[str, Column[Any]] = MappingProxyType({}),
) -> dict[str, tuple[Column[Any], ...]]:
    """The columns that ``columns.toml`` of a package declares, by group.

    `value`, `text`, `words` and `scale` name one of `functions`, else attributes of a row: a figure
    is NaN where one on its way is None.  `parts` take the place of the last attribute of `value`.
    A column without a title is one of that key in `base` or further up, with what is said in place
    of what is said there.
    """
    known = dict(base)

    def made(key: str, said: dict[str, Any]) -> Column[Any]:
        if "parts" in said:
            whole = said["value"].split(".")[:-1]
            said["parts"] = tuple(partial(_read, [*whole, name]) for name in said["parts"])
        for part in {"value", "text", "words", "scale"} & said.keys():
            said[part] = functions.get(said[part]) or partial(_read, said[part].split("."))
        if "decimals" in said:
            fixed = Scale("", 1.0, said.pop("decimals"))
            said["scale"] = lambda values: fixed
        if "head" in said:
            said["head"] = tuple(said["head"])
        if "title" in said:
            known[key] = Column(key, **said)
            return known[key]
        return replace(known[key], **said)

    text = (files(package) / "columns.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text).items()
    return {name: tuple(made(*each) for each in group.items()) for name, group in groups}


def _read(path: Sequence[str], row: Any) -> Any:
    """The attribute, or the value of a mapping, that a path leads to."""
    for name in path:
        row = row[name] if isinstance(row, dict) else getattr(row, name)
        if row is None:
            return math.nan
    return row


def name_column(title: str, text: Callable[[R], str], kind: str = NAME) -> Column[R]:
    """A column of texts: a `NAME` that leads rows, a `LABEL` or a `REMARK`."""
    return Column(title.lower(), title, kind, text=text)


def shown(columns: Iterable[Column[R]], rows: Sequence[R]) -> tuple[Column[R], ...]:
    """Without columns that say nothing about these rows."""
    return tuple(column for column in columns if not column.silent(rows))


def scales(columns: Iterable[Column[R]], rows: Sequence[R]) -> dict[str, Scale]:
    """Unit of each column, by key; one per family."""
    families: dict[str, list[Column[R]]] = {}
    found = {}
    for column in columns:
        if column.is_text:
            found[column.key] = _TEXT
        else:
            families.setdefault(column.family or f"={column.key}", []).append(column)
    for members in families.values():
        values = [value for column in members for row in rows for value in column.figures(row)]
        first = members[0]
        scale = first.scale(values) if first.scale else scale_for(first.kind, values)
        found.update({column.key: scale for column in members})
    return found


@dataclass(frozen=True)
class TableCell:
    """A cell on a page: its text, the plain value that rows are sorted by, and how it looks."""

    text: str
    value: str
    look: str = ""
    share: str = ""
    label: str = ""  #: what it is, with its unit, where it does not stand under its head
    span: int = 1  #: how many columns it takes


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
    #: Row -> str: why it has no figures, in their place; "" if it has.
    reason: Callable[[R], str] = lambda row: ""
    #: On a page, columns with other keys are behind a box to tick; None shows all.
    leading: Container[str] | None = None

    def under(self, columns: Sequence[Column[R]]) -> Table[R]:
        """The same rows under other columns."""
        return replace(self, columns=columns)

    def without(self, keys: Iterable[str]) -> Table[R]:
        """The same rows without some columns."""
        gone = set(keys)
        return self.under([c for c in self.columns if c.key not in gone])

    def heads(self) -> Iterator[tuple[Column[R], str]]:
        """For a page: columns and their units."""
        units = scales(self.columns, self.rows)
        for column in self.columns:
            unit = unit_of(column, units)
            yield column, {"us": "µs", "x": "×"}.get(unit, unit)

    def bodies(self) -> Iterator[tuple[str, list[tuple[R, list[TableCell]]]]]:
        """For a page: the title of each section, and its rows with their cells."""
        units = scales(self.columns, self.rows)
        made = [(c, ", ".join(filter(None, (c.title, unit)))) for c, unit in self.heads()]
        for section in dict.fromkeys(map(self.section, self.rows)):
            own = [row for row in self.rows if self.section(row) == section]
            cells = ([self._cell(c, row, units[c.key], name) for c, name in made] for row in own)
            reasoned = [
                (row, self._reasoned(row, each)) for row, each in zip(own, cells, strict=True)
            ]
            yield section if self.titled else "", reasoned

    def _reasoned(self, row: R, cells: list[TableCell]) -> list[TableCell]:
        """With the row's reason, if it has one, in place of figures that a page shows at once."""
        if not (reason := self.reason(row)):
            return cells
        names = sum(column.kind in (NAME, LABEL) for column in self.columns)
        pairs = zip(cells, self.columns, strict=True)
        behind = [replace(cell, text="", value="") for cell, c in pairs if self.behind(c)]
        span = len(cells) - names - len(behind)
        why = TableCell(reason, "", "text wrap", label="left out", span=span)
        return [*cells[:names], why, *behind]

    def behind(self, column: Column[R]) -> bool:
        """Whether a page shows the column only on demand."""
        return self.leading is not None and column.key not in self.leading

    def _cell(self, column: Column[R], row: R, scale: Scale, label: str) -> TableCell:
        text, value = column.show(row, scale), column.value(row)
        more = "more" if self.behind(column) else ""
        if column.is_text:
            look = " ".join(filter(None, ("text", "wrap" * (column.kind == REMARK), more)))
            return TableCell(_DASH if text in ("", "-") else text, text, look, label=label)
        # A minus before a number, a dash in all other places.
        text = re.sub(r"(?<![\d%])-(?=\d)", _MINUS, text).replace("-", _DASH)
        known = not math.isnan(value)
        share = f"{min(max(value, 0.0), 1.0):.3f}" if column.bar and known else ""
        look = "bar" if share else "short" if column.warn and known and value else ""
        look = " ".join(filter(None, (look, more)))
        return TableCell(text, f"{value:.9g}" if known else "", look, share, label)

    def definitions(self) -> dict[str, str]:
        """Meanings of its columns."""
        return {column.title: column.about for column in self.columns if column.about}


def unit_of(column: Column[R], units: dict[str, Scale]) -> str:
    """The unit of a column, with what it is taken per."""
    unit = units[column.key].unit
    return f"{unit}·{column.per}" if column.per else unit


def terminal(stderr: bool = False) -> Console:
    """The console of every command, as wide as the terminal and at least `LEAST_WIDTH`.

    Bars, on standard error, give way instead.  A width of 0 is not known (``COLUMNS=0``, a serial
    line): 80 stands in.
    """
    from rich.console import Console

    console = Console(highlight=False, stderr=stderr)
    if not console.width:
        console.width = 80
    elif not stderr:
        console.width = max(console.width, LEAST_WIDTH)
    return console


def print_heading(console: Console, name: str, about: str) -> None:
    """Print a name in bold, and what follows it on its line."""
    from rich.text import Text

    after = plain(f"  {about}") if about else ""
    console.print(Text(plain(name), style="bold").append(after, style="not bold"))


def print_list(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text, whole: nothing is cut or left out, whatever the width.

    ``"\\n"`` separates the lines that a narrow head can take.  Where no table fits, each row is
    printed as a block: its first cell, then a line per column.
    """
    wide = [head.replace("/\n", "/").replace("\n", " ") for head in heads]
    cells = [[plain(cell) for cell in row] for row in rows]
    tables = (
        grid(cells, some, right=range(1, len(heads)), padding=padding)
        for some in (wide, heads)
        for padding in (2, 1)
    )
    unbounded = console.options.update(max_width=10_000)
    for table in tables:
        if console.measure(table, options=unbounded).maximum <= console.width:
            console.print(table)
            return
    for name, *others in cells:
        console.print(name, markup=False)
        for head, cell in zip(wide[1:], others, strict=True):
            console.print(f"  {head}: {cell}", markup=False)


def grid(
    rows: Iterable[Sequence[str | Text]],
    heads: Sequence[str] = (),
    *,
    right: Container[int] = (),
    dim: Container[int] = (),
    least: int = 0,
    padding: int = 2,
) -> RichTable:
    """A table without lines; its last column folds, the others are never cut.

    Text is printed as it is, never read as markup.  `right` and `dim` number the columns that are
    set right, or dim; the first column is at least `least` wide.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    cells = [[Text(each) if isinstance(each, str) else each for each in row] for row in rows]
    look: dict[str, Any] = {"header_style": "dim", "pad_edge": False}
    table = RichTable(box=None, show_header=bool(heads), padding=(0, padding, 0, 0), **look)
    columns = len(heads) or len(cells[0])
    for i in range(columns):
        table.add_column(
            heads[i] if heads else "",
            justify="right" if i in right else "left",
            style="dim" if i in dim else "",
            vertical="bottom" if any("\n" in head for head in heads) else "top",
            no_wrap=i < columns - 1,
            overflow="fold",
            min_width=least if i == 0 else None,
        )
    for row in cells:
        table.add_row(*row)
    return table
