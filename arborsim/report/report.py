"""The result of a product as sections of notes, tables and figures.

`html` makes a page of them, and `arborsim.report.text` shows the tables and the answer in a
terminal.  A block that is a string is a note.  The other blocks name the macro of ``parts.html``
that writes them in `macro`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from arborsim.core.errors import UsageError
from arborsim.core.outputs import write_text
from arborsim.core.tables import csv_text
from arborsim.report import page
from arborsim.report.page import Figure
from arborsim.report.table import Table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Answer:
    """Sentences, of which the first leads."""

    sentences: Sequence[str]
    macro: ClassVar[str] = "answer"


@dataclass(frozen=True)
class Heading:
    """A line between blocks."""

    text: str
    macro: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Warned:
    """A note that must not be missed."""

    title: str
    text: str
    macro: ClassVar[str] = "warning"


@dataclass(frozen=True)
class Listed:
    """Texts under a title, or without one below other blocks."""

    texts: Sequence[str]
    title: str = ""
    printed: bool = False  #: whether terminals show it although it is in the appendix
    macro: ClassVar[str] = "items"


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for."""

    title: str
    texts: Mapping[str, str]
    macro: ClassVar[str] = "pairs"


#: Heading, what stands next to it, and titled tables or lines.
Printed = tuple[str, str, Sequence[tuple[str, Table[Any]]] | Sequence[str]]


@dataclass(frozen=True)
class Shown:
    """A table; with `sorts` its heads sort it."""

    table: Table[Any]
    name: str = "comparison"
    label: str = "Comparison table"
    sorts: bool = True
    #: What takes its place in a terminal of some width; None for the table as it is.
    printed: Callable[[int], Iterable[Printed]] | None = None
    noted: bool = False  #: whether a terminal shows it only among all notes
    deciding: Sequence[str] = ()  #: columns that a terminal shows without all notes; () for all
    implied: Sequence[str] = ()  #: columns that go first where a terminal has no room
    legend: Sequence[str] = ()  #: follows in a terminal, where columns have no meanings
    macro: ClassVar[str] = "comparison"


@dataclass(frozen=True)
class Choice:
    """One figure of several."""

    figure: Figure
    labels: Sequence[str] = ()  #: what picks it, a label per picker
    note: str = ""
    texts: Sequence[str] = ()  #: a numbered list below
    #: Lines that are drawn above the others when a name is picked.
    lines: Mapping[str, Sequence[Figure]] = field(default_factory=dict)
    fades: bool = False  #: whether the others fade then

    def numbered(self) -> list[str]:
        """Its texts with their numbers, for terminals and images."""
        return [f"{n}  {text}" for n, text in enumerate(self.texts, 1)]


@dataclass(frozen=True)
class Figures:
    """A figure, or several of which the pickers show one."""

    name: str
    choices: Sequence[Choice]
    pickers: Sequence[str] = ()
    macro: ClassVar[str] = "figures"

    @property
    def highlights(self) -> bool:
        """Whether a line can be picked."""
        return any(each.lines for each in self.choices)


@dataclass(frozen=True)
class Raw:
    """A macro of ``parts.html`` that a script fills, or markup that is safe."""

    macro: str
    content: Any = None


Block = str | Answer | Heading | Warned | Listed | Facts | Shown | Figures | Raw


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own; its scripts find it by its name."""

    name: str
    title: str
    blocks: Sequence[Block]

    @property
    def there(self) -> bool:
        """Whether it has more than notes, or a figure to draw."""
        return any(
            not isinstance(each, str) and not (isinstance(each, Figures) and not each.choices)
            for each in self.blocks
        )


@dataclass(frozen=True)
class Report:
    """Everything that pages and terminals show."""

    product: str  #: for the style sheet
    title: str
    subtitle: str
    sections: Sequence[Section]  #: the first is the answer; those without content are left out
    #: Sections of figures, which follow, drawn when a page asks for them.
    pictures: Callable[[], Iterable[Section]] = tuple
    appendix: Sequence[Block] = ()
    #: The data by the name of the CSV file that can be downloaded.
    files: Mapping[str, Callable[[], pd.DataFrame]] = field(default_factory=dict)
    scripts: Sequence[str | Path] = ()  #: assets or files that fill the page's `Raw` blocks
    data: Callable[[], Mapping[str, Any]] = dict  #: what they read
    start: str = ""  #: the label that pickers begin with
    style: str = ""  #: follows the style sheet
    draws: bool = True  #: whether its scripts draw
    nothing: str = ""  #: why there is nothing to report, if that is so
    leading: Sequence[str] = ()  #: sentences of the answer that come first in a terminal
    #: Notes that can change the decision, those that can most first: what a terminal shows of all
    #: notes unless it is asked for them.  None shows all.
    telling: Sequence[str] | None = None

    def tables(self) -> Iterator[Shown]:
        """The tables of all sections but those of figures."""
        for section in self.sections:
            yield from (each for each in section.blocks if isinstance(each, Shown))

    def answers(self) -> Iterator[Answer]:
        """The sentences that lead each part of the answer."""
        for section in self.sections:
            yield from (each for each in section.blocks if isinstance(each, Answer))


def html(report: Report) -> str:
    """The whole page as text; the same report gives the same bytes."""
    sections = [each for each in (*report.sections, *report.pictures()) if each.there]
    figures = {
        each.name: each.choices
        for section in sections
        for each in section.blocks
        if isinstance(each, Figures) and each.choices
    }
    csv = {name: csv_text(frame()) for name, frame in report.files.items()}
    data = {**report.data(), "figures": figures, "start": report.start, "csv": csv}
    facts: dict[str, Any] = {
        "title": report.title,
        "subtitle": report.subtitle,
        "files": list(csv),
    }
    draws = bool(figures) or any(isinstance(b, Raw) for s in sections for b in s.blocks)
    facts |= {"template": "report", "style": report.style, "draws": draws and report.draws}
    facts |= {"sections": sections, "appendix": report.appendix}
    return page.render(report.product, report.scripts, data, **facts)


def write(report: Report, path: str | Path) -> None:
    """Write the page; `UsageError` where it cannot be written, or there is nothing to report."""
    if report.nothing:
        raise UsageError(f"{report.nothing}: there is nothing to report")
    write_text(path, html(report))
