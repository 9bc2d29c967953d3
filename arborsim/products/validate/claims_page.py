"""The page about claims of papers: the summary, and every claim with our numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from arborsim.core.outputs import write_text
from arborsim.core.tables import csv_text
from arborsim.products.validate.claims import Paper, Verdict, to_frame
from arborsim.products.validate.claims_tables import (
    contradicted,
    headline,
    interval_text,
    number_text,
    summary_table,
)
from arborsim.report import page


def write_page(papers: Sequence[Paper], path: str | Path) -> None:
    """Write the page; `UsageError` where the file cannot be written."""
    write_text(path, render(papers))


def render(papers: Sequence[Paper]) -> str:
    """The whole page as text; the same claims give the same bytes."""
    total = sum(len(paper.rows) for paper in papers)
    return page.render(
        "claims",
        ("claims.js",),
        {"csv": csv_text(to_frame(papers))},
        draws=False,
        title="Claims of papers",
        subtitle=f"{total:,} claims of {len(papers)} papers: what they say, what we found",
        headline=headline(papers),
        contradicted=contradicted(papers),
        code=code,
        papers=papers,
        summary=summary_table(papers),
        verdicts=list(Verdict),
        meanings={each.words: each.meaning for each in Verdict},
        titles={paper.head.name: paper.head.title for paper in papers},
        number_text=number_text,
        interval_text=interval_text,
    )


def code(text: str) -> Markup:
    """A text whose parts between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
