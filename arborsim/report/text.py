"""A report in a terminal: sentences that lead, its tables, then the answer and notes on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from arborsim.report.lines import print_tables
from arborsim.report.report import Answer, Block, Facts, Heading, Listed, Report, Shown, Warned
from arborsim.report.table import print_heading, terminal
from arborsim.report.words import counted, plain

if TYPE_CHECKING:
    from rich.console import Console


#: Notes that a terminal shows unless it is asked for all.
MOST_NOTES = 3


def print_report(report: Report, console: Console | None = None, notes: bool = False) -> None:
    """Print a report at the width of the terminal; figures are on its page.

    Without `notes` a report that says which of its notes are telling shows `MOST_NOTES` of these.
    """
    console = console or terminal()
    for place, line in enumerate(report.leading):
        console.print(plain(line), style="" if place else "bold", markup=False)
    if report.leading and report.subtitle:
        console.print()
    if report.subtitle:
        style = "dim" if report.leading else "bold"
        console.print(plain(report.subtitle), style=style, markup=False)
    if report.nothing:
        console.print(f"{report.nothing[0].upper()}{report.nothing[1:]}.")
    sections = () if report.nothing else report.sections
    blocks = [(each.name, block) for each in sections for block in each.blocks]
    every = notes or report.telling is None
    for _, block in blocks:
        if isinstance(block, Shown) and (every or not block.noted):
            _print_table(block, console, every)
    answer = [block for name, block in blocks if name == "answer"]
    others = (*(block for _, block in blocks), *report.appendix)
    listed = [each for each in others if isinstance(each, Listed) and each.printed]
    rest = [line for block in (*answer, *listed) for line in _lines(block)]
    rest = [line for line in rest if line[0] not in report.leading]
    telling = list(report.telling or ())[:MOST_NOTES]
    for text, style in rest if every else [(text, "") for text in telling]:
        console.print(plain(text), style=style, markup=False)
    if not every and (more := sum(text.strip() not in telling for text, _ in rest)):
        console.print(f"{counted(more, 'more note')}: --notes", style="dim", markup=False)


def _print_table(shown: Shown, console: Console, explained: bool) -> None:
    if shown.printed is None:
        table, keys = shown.table, shown.deciding
        if keys and not explained:
            table = table.under([column for column in table.columns if column.key in keys])
        print_tables(console, [("", table)], implied=() if explained else shown.implied)
    else:
        for heading, about, content in shown.printed(console.width):
            if heading or about:
                print_heading(console, heading, about)
            tables = [each for each in content if not isinstance(each, str)]
            print_tables(console, tables, implied=shown.implied)
            for line in (each for each in content if isinstance(each, str)):
                console.print(line, markup=False, no_wrap=True, crop=False)
    for line in shown.legend if explained else ():
        console.print(plain(line), style="dim", markup=False)


def _lines(block: Block) -> Iterator[tuple[str, str]]:
    """The lines of a block, with their style."""
    match block:
        case str():
            yield block, "dim"
        case Heading(text):
            yield text, "bold"
        case Answer(sentences):
            yield from ((each, "" if place else "bold") for place, each in enumerate(sentences))
        case Warned(title, text):
            yield f"{title} {text}", ""
        case Facts(_, texts):
            yield from ((f"{name}: {text}", "") for name, text in texts.items())
        case Listed(texts, title):
            if texts and title:
                yield f"{title}:", ""
            yield from ((f"  {each}" if title else each, "") for each in texts)
