"""The page about searches on a bank.

The answer in words, accuracy against KV size and width, the table, and the trees of a few problems
step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from arborsim.bank.arms import REFERENCE
from arborsim.bank.results import SearchResult, rows_of
from arborsim.bank.results import SearchRow as Row
from arborsim.core.errors import UsageError
from arborsim.run.aggregate import at_budget
from arborsim.show import page
from arborsim.show.search import ANSWERS, MEMORY, NAMES, WORK, cells_of
from arborsim.show.search_figures import figures_of, reference
from arborsim.show.search_thoughts import MOST_TEXT
from arborsim.show.search_trees import ProblemTrees, cell_name
from arborsim.show.search_words import cautions, missing, summarise
from arborsim.show.table import Table, shown

#: Columns of the terminal that the page can do without.
_SPARE = (
    "kv_prompt_vs", "held_vs", "hbm_s_vs", "held_s", "held_s_vs", "calls_vs", "tokens_vs",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SearchReport:
    """What the page tells.

    Attributes
    ----------
    heading : str
        What was run on what, in a line.
    results : tuple of SearchResult
    trees : tuple of ProblemTrees
    settings : dict
        Everything that determines the results.
    assumed : tuple of str
        Numbers of the hardware profile that nobody measured.
    left_out : tuple of str
    verdicts : tuple of str
        The paper's choice of lambda_b, where it was swept.
    notes : tuple of str
    """

    heading: str
    results: tuple[SearchResult, ...]
    trees: tuple[ProblemTrees, ...]
    settings: dict[str, str]
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def write_search_page(report: SearchReport, path: str | Path) -> None:
    """Write the page; the same results give the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not report.results:
        raise UsageError("no search was completed: there is nothing to report")
    page.write(render(report), path)


def render(report: SearchReport) -> str:
    """The whole page as text."""
    rows = rows_of(report.results)
    sentences = summarise(report.results, rows)
    return page.render(
        "search",
        ("tree.js", "search.js"),
        _data(report, rows),
        title="Search algorithms compared",
        subtitle=report.heading,
        sentences=[*map(_unbroken, (*sentences, *report.verdicts))],
        warning=_unbroken(missing(rows)),
        caution=" ".join([*cautions(report.results, rows), *report.notes]),
        table=_table(rows),
        tree_notes=[note for each in report.trees for note in each.notes()],
        most_text=MOST_TEXT,
        settings=report.settings,
        assumed=report.assumed,
        left_out=report.left_out,
    )


def _unbroken(text: str) -> str:
    """Per cent signs stay with their numbers."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _data(report: SearchReport, rows: Sequence[Row]) -> dict[str, Any]:
    films = [
        {**film, "layout": number}
        for number, each in enumerate(report.trees)
        for film in each.films
    ]
    table = pd.DataFrame([result.flat() for result in report.results])
    return {
        **figures_of(rows),
        "trees": {"layouts": [each.layout for each in report.trees], "films": films},
        "reference": REFERENCE,
        "start": _start(rows),
        "csv": table.to_csv(index=False, lineterminator="\n"),
    }


def _start(rows: Sequence[Row]) -> str:
    """The search to show first: ETS beside the widest REBASE, or whatever comes last there."""
    cells = {(row.policy, row.budget) for row in rows}
    base = reference(rows)
    near = [row for row in rows if base is None or row.width == base.width]
    named = [row for row in near if row.label.startswith("ets")]
    row = (named or near)[0]
    return cell_name(row.label, row.width, row.policy, row.budget, len(cells) > 1)


def _table(rows: Sequence[Row]) -> Table[Row]:
    """A body per policy and budget."""
    columns = shown((*NAMES, *(c for c in (*ANSWERS, *MEMORY, *WORK) if c.key not in _SPARE)), rows)
    return Table(
        rows, columns, lambda row: at_budget(row.policy, row.budget), len(cells_of(rows)) > 1,
        look=lambda row: "baseline" if row.label == REFERENCE else "",
    )  # fmt: skip
