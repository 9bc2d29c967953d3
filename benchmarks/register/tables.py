"""Claims of papers and our verdicts: the summary, a table for each paper, and the files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arborsim.core.errors import UsageError
from arborsim.report.lines import print_tables
from arborsim.report.table import Column, Table, name_column, terminal
from arborsim.report.words import counted, plain
from benchmarks.register.claims import Claim, Judged, Paper, to_frame
from benchmarks.register.numbers import EXACT, UNITS, Measured, Number
from benchmarks.register.verdicts import FAIR, Verdict

if TYPE_CHECKING:
    from rich.console import Console

#: Between these lines a document has the summary.
MARKS = ("<!-- claims -->", "<!-- /claims -->")
FILES = ("claims.parquet", "index.html", "README.md")


# --- texts ---


def figure(value: float, unit: str) -> str:
    """A number in its unit, without it: shares in per cent, bytes in GB, to three digits."""
    scaled = value * UNITS.get(unit, 1.0)
    if math.isnan(scaled):
        return ""
    if unit in ("%", "points") and (scaled == 0 or abs(scaled) >= 0.1):
        return f"{scaled:.1f}"
    if scaled == int(scaled) and abs(scaled) < 1e6:
        return f"{scaled:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:,.{min(decimals, 6)}f}"


def number_text(number: Number) -> str:
    """``"96.5% [92.9, 98.6], n 200"``; no interval where there is none."""
    unit = number.unit
    sign = "+" if unit == "points" and number.ours > 0 else ""
    glued = unit in ("%", "x")
    said = f"{sign}{figure(number.ours, unit)}{unit if glued else f' {unit}' if unit else ''}"
    if not math.isnan(number.low):
        said += f" [{figure(number.low, unit)}, {figure(number.high, unit)}]"
    return f"{said}, n {number.n:,}"


def interval_text(number: Number) -> str:
    """How a number and its interval were worked out."""
    if number.interval == EXACT:
        return f"{number.statistic} of {counted(number.n, 'row')}, without an interval"
    what = "pair" if number.statistic in ("ratio", "difference") else "row"
    return f"{number.statistic} of {counted(number.n, what)}, 95% interval: {number.interval}"


def bounds_text(asked: Measured) -> str:
    """``"; the claim holds from 80% to 120%"``; empty for a number that is not judged."""

    def end(value: float) -> str:
        glued = asked.unit in ("%", "x", "")
        return f"{figure(value, asked.unit)}{asked.unit if glued else f' {asked.unit}'}"

    ends = [
        f"{word} {end(value)}"
        for word, value in (("from", asked.above), ("up to", asked.below))
        if value is not None
    ]
    return f"; the claim holds {' '.join(ends)}" if ends else ""


def ours_text(row: Judged) -> str:
    """All of our numbers for a claim, with their labels."""
    return "; ".join(f"{each.label}: {number_text(each)}" for each in row.numbers)


def headline(papers: Sequence[Paper]) -> str:
    """How many claims there are and what came out."""
    total = sum(len(paper.rows) for paper in papers)
    counts = {each: sum(paper.count(each) for paper in papers) for each in Verdict}
    found = ", ".join(f"{each.words} {counts[each]:,}" for each in Verdict)
    return f"{counted(total, 'claim')} of {counted(len(papers), 'paper')}: {found}."


def verdict_text(row: Judged) -> str:
    """How the verdict follows: readings, ground, settings that differ, and why it was lowered."""
    claim, said = row.claim, list[str]()
    if len(row.readings) > 1:
        each = (f"{name}: {verdict.words}" for name, verdict in row.readings.items())
        said.append(f"read as {'; as '.join(each)}.")
    if claim.ground and claim.ground not in FAIR[claim.needs]:
        said.append(
            f"{_ground(claim.ground)} can neither reproduce nor contradict {_NEED[claim.needs]}."
        )
    if claim.differs:
        said.append(f"Not as the authors run it: {claim.differs}.")
    if claim.lowered:
        said.append(f"Lowered by hand: {claim.lowered.because}.")
    text = " ".join(each[0].upper() + each[1:] for each in said)
    return f"{text} {claim.why}" if text else claim.why


_NEED = {
    "definition": "a claim of definitions",
    "search": "a claim about search trees",
    "model": "a claim about any model",
    "language": "a claim about natural language",
    "large-model": "a claim about large models and their tasks",
    "machine": "a claim about a machine",
}


def _ground(ground: str) -> str:
    names = {
        "toy-model": "a small model trained here", "drawn-trees": "trees drawn at random",
        "recorded-trees": "recorded trees without a model", "priced": "a simulation",
        "authors-rule": "the authors' rule on a small model", "arithmetic": "arithmetic",
    }  # fmt: skip
    return names.get(ground, ground)


def contradicted(papers: Sequence[Paper]) -> list[tuple[Paper, Claim]]:
    """What our results contradict, in the order of the papers."""
    return [
        (paper, row.claim)
        for paper in papers
        for row in paper.rows
        if row.verdict is Verdict.CONTRADICTED
    ]


# --- tables ---


def _counted(verdict: Verdict) -> Column[Paper]:
    return Column(
        verdict.value, verdict.words, "count", lambda paper: paper.count(verdict),
        verdict.meaning, text=lambda paper: str(paper.count(verdict)),
    )  # fmt: skip


SUMMARY: tuple[Column[Paper], ...] = (
    name_column("paper", lambda paper: paper.head.name),
    *map(_counted, Verdict),
    Column("rows", "rows", "count", lambda paper: len(paper.rows),
           text=lambda paper: str(len(paper.rows))),
)  # fmt: skip


def summary_table(papers: Sequence[Paper]) -> Table[Paper]:
    """A row per paper: how many of its claims have which verdict."""
    return Table(papers, SUMMARY)


def print_claims(papers: Sequence[Paper], console: Console | None = None) -> None:
    """Print the summary and what is contradicted."""
    console = console or terminal()
    console.print(headline(papers), markup=False)
    print_tables(console, [("", summary_table(papers))])
    against = contradicted(papers)
    if against:
        console.print("Contradicted:")
    for paper, claim in against:
        console.print(plain(f"  {paper.head.name}, {claim.where}: {claim.claim}"), markup=False)


def summary_markdown(papers: Sequence[Paper]) -> str:
    """The summary as a Markdown table."""
    heads = [column.title for column in SUMMARY]
    rows = [[column.show(paper) for column in SUMMARY] for paper in papers]
    sums = [sum(int(row[k]) for row in rows) for k in range(1, len(heads))]
    rows.append(["all", *map(str, sums)])
    return _markdown(heads, rows, right=range(1, len(heads)))


def readme(papers: Sequence[Paper]) -> str:
    """The page ``README.md`` of the reports: a section per paper."""
    lines = [
        "# Claims of papers, and what we found", "",
        "Made by `python -m benchmarks.register --out reports/claims` from the files `*.toml` next "
        "to this page and the raw results that they name; do not edit. "
        "[docs/claims.md](../../docs/claims.md) says how verdicts are defined, how to make the "
        "numbers again and how to object. It also writes `index.html`, the same to filter, with "
        "settings, commands and objections; `claims.parquet` has a row per claim and number.", "",
        headline(papers), "", summary_markdown(papers), "",
        *(f"- **{each.words}**: {each.meaning}." for each in Verdict), "",
        "Our numbers stand with their 95% interval in brackets and the number of rows or pairs.",
    ]  # fmt: skip
    for paper in papers:
        rows = [
            [claim.where, claim.claim, claim.theirs, ours_text(row) or "-",
             f"**{row.verdict.words}**: {verdict_text(row)}"]
            for row in paper.rows
            for claim in [row.claim]
        ]  # fmt: skip
        heads = ("where", "claim", "paper", "ours", "verdict")
        lines += ["", f"## {paper.head.name}", "", paper.head.title, "", _markdown(heads, rows)]
    return "\n".join(lines) + "\n"


def _markdown(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()
) -> str:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = ["---:" if k in set(right) else "---" for k in range(len(heads))]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join([line(heads), f"|{'|'.join(rule)}|", *map(line, escaped)])


# --- files ---


def write_claims(papers: Sequence[Paper], out: Path | None, documents: Iterable[Path]) -> None:
    """Write the table, the page and its Markdown into a folder, and the summary into documents.

    Raises
    ------
    UsageError
        A file cannot be written, or a document lacks the marks.
    """
    from arborsim.core.outputs import write_text
    from arborsim.core.tables import made_by, write_table
    from benchmarks.register.page import write_page

    texts = {path: with_summary(path, papers) for path in documents}
    if out is not None:
        if not out.is_dir():
            raise UsageError(f"--out {out}: there is no such folder")
        table, page, markdown = (out / name for name in FILES)
        about = made_by("claims", "python -m benchmarks.register", "numpy", "pandas", "scipy")
        write_table(to_frame(papers), table, about)
        write_page(papers, page)
        write_text(markdown, readme(papers))
    for path, text in texts.items():
        write_text(path, text)


def with_summary(path: Path, papers: Sequence[Paper]) -> str:
    """A document's text with the summary between its marks."""
    from arborsim.core.records import read_text

    text = read_text(path)
    between = re.compile(f"({re.escape(MARKS[0])}\n).*?({re.escape(MARKS[1])})", re.DOTALL)
    if not between.search(text):
        raise UsageError(f"--summary {path}: it has no lines {MARKS[0]} and {MARKS[1]}")
    made = f"{summary_markdown(papers)}\n"
    return between.sub(lambda found: found[1] + made + found[2], text)
