"""The page about claims of papers: the summary, and every claim with our numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from arborsim.report import report
from arborsim.report.report import Answer, Facts, Raw, Report, Section, Shown
from benchmarks.register.claims import Paper, to_frame
from benchmarks.register.tables import (
    bounds_text,
    contradicted,
    headline,
    interval_text,
    number_text,
    summary_table,
    verdict_text,
)
from benchmarks.register.verdicts import Verdict

HERE = Path(__file__).parent
_HOW = (
    "Every number is worked out of committed raw results by python -m benchmarks.register; the "
    "file of a paper says of which rows. Intervals: Clopper and Pearson's for shares; for "
    "differences of right answers those of the pairs in which only one side is right, at 97.5% "
    "each; else a bootstrap over problems or seeds, paired where two sides are compared. What is "
    "simulated from one input without chance has no interval."
)
_CLAIMS = (
    "Click a claim for its setting, how our numbers were made, and what its authors could object. "
    "Our numbers stand with their 95% interval in brackets."
)


def write_page(papers: Sequence[Paper], path: str | Path) -> None:
    """Write the page; `UsageError` where the file cannot be written."""
    report.write(report_of(papers), path)


def report_of(papers: Sequence[Paper]) -> Report:
    """The register as a report: verdicts by paper, their meanings, and every claim."""
    total = sum(len(paper.rows) for paper in papers)
    summary = Shown(summary_table(papers), "summary-table", "Verdicts by paper")
    meanings = Facts("What the verdicts mean", {each.words: each.meaning for each in Verdict})
    found = contradicted(papers)
    against = [Raw("markup", _markup("against.html", contradicted=found))] if found else []
    every = Raw("markup", _markup("claims.html", papers=papers))
    sections = (
        Section("answer", "Verdicts by paper", (Answer([headline(papers)]), summary, meanings)),
        Section("against", "What is contradicted", against),
        Section("claims", "Every claim", (_CLAIMS, every)),
    )
    titles = {paper.head.name: paper.head.title for paper in papers}
    return Report(
        "claims",
        "Claims of papers",
        f"{total:,} claims of {len(papers)} papers: what they say, what we found",
        sections,
        appendix=(_HOW, Facts("Papers", titles)),
        files={"arborsim-claims.csv": partial(to_frame, papers)},
        scripts=(HERE / "claims.js",),
        style=(HERE / "claims.css").read_text(encoding="utf-8"),
        draws=False,
    )


def _markup(name: str, **facts: object) -> Markup:
    """A template of this folder, filled."""
    made = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts = {
        each.__name__: each
        for each in (code, zip, bounds_text, number_text, interval_text, verdict_text)
    }
    return Markup(made.get_template(name).render(verdicts=list(Verdict), **texts, **facts))


def code(text: str) -> Markup:
    """A text whose parts between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
