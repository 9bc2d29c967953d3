"""The page about searches on a bank.

The answer in words, accuracy against KV size and width, the table, and the trees of a few problems
step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborsim.play.results import at_budget
from arborsim.products.replay.report import ASSUMED, MOST_SENTENCES, SORTS
from arborsim.products.search.figures import against_size, against_width
from arborsim.products.search.results import SearchResult, SkippedSearch, rows_of
from arborsim.products.search.results import SearchRow as Row
from arborsim.products.search.tables import (
    ANSWERS,
    DECIDING,
    IMPLIED,
    LEGEND,
    MEMORY,
    NAMES,
    VERSUS,
    WORK,
    cells_of,
    reference,
)
from arborsim.products.search.trees import MOST_TEXT, ProblemTrees, cell_name
from arborsim.products.search.words import cautions, missing, summarise
from arborsim.report.report import (
    Answer,
    Block,
    Facts,
    Figures,
    Listed,
    Raw,
    Report,
    Section,
    Shown,
    Warned,
)
from arborsim.report.table import Table, shown
from arborsim.searches.arms import REFERENCE

if TYPE_CHECKING:
    import pandas as pd

#: Columns of the terminal that the page can do without.
_LEFT_OUT = {
    "kv_prompt_vs",
    "held_s",
    *(f"{k}_vs" for k in ("held", "hbm_s", "held_s", "calls", "tokens")),
}
_SIZE = "One line per search, one marker per width; up and left is better."
_WIDTH = "Width is how many thoughts run together at first. Searches of a width stand side by side."
_TREE = (
    "One bar per recorded thought, the prompt at the left; its width grows with the square root of "
    "its tokens. Move the slider through the steps of the search; point at a thought, tap it, or "
    "walk through the tree with the arrow keys to read it."
)
_RAN_OUT = "The bank ran out of thoughts."
_SWITCHES = (("tree-colour", "Colours"), ("tree-which", "Thoughts"), ("tree-size", "Size"))


@dataclass(frozen=True, eq=False)
class SearchReport:
    """Results of searches, and what made them."""

    heading: str  #: what was run on what, in a line
    results: tuple[SearchResult, ...]
    trees: tuple[ProblemTrees, ...]
    settings: dict[str, str]  #: everything that determines the results
    assumed: tuple[str, ...] = ()  #: numbers of the hardware profile that are not measured
    left_out: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()  #: the paper's choice of lambda_b, where it was swept
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedSearch, ...] = ()  #: what budgets were too small for

    def frame(self) -> pd.DataFrame:
        """One row per search."""
        import pandas as pd

        return pd.DataFrame([result.flat() for result in self.results])


def report_of(report: SearchReport) -> Report:
    """Make the report of the searches."""
    rows = rows_of(report.results)
    cells = cells_of(rows)
    named = {at_budget(*cell).replace(" budget", ""): own for cell, own in cells.items()}

    table = _table(report, rows, len(cells) > 1)
    legend = (LEGEND, *[VERSUS] * any(row.reference for row in rows))
    compared = Shown(table, deciding=DECIDING, implied=IMPLIED, legend=legend)
    all_searches = Section("table", "All searches", (SORTS, *[compared] * bool(rows)))
    said = [*summarise(report.results, rows), *report.verdicts]
    trees = [note for each in report.trees for note in each.notes()]
    trees.append(f"Of a thought's text the first {MOST_TEXT} characters are on this page.")
    film = Raw("film", ("Problem", "Search", "Step of the search", _SWITCHES))
    films = [
        {**film, "layout": number}
        for number, each in enumerate(report.trees)
        for film in each.films
    ]
    layouts = [each.layout for each in report.trees]

    def pictures() -> Iterator[Section]:
        found = [made for cell, own in named.items() for made in against_size(own, cell)]
        sizes = Figures("size", found, ("Against", "Policy"))
        widths = Figures("width", against_width(next(iter(cells.values()))))
        yield Section("size", "Accuracy against KV size", (_SIZE, sizes))
        yield Section("width", "Accuracy against width", (_WIDTH, widths))
        yield Section("tree", "What a search does", (_TREE, *[film] * bool(films), *trees))

    return Report(
        "search",
        "Search algorithms compared",
        report.heading,
        (Section("answer", "The answer", _answer(report, rows, said)), all_searches),
        pictures,
        (
            Facts("Settings", report.settings),
            Listed(report.left_out, printed=True),
            Listed(report.assumed, ASSUMED),
            Facts("Columns", table.definitions()),
        ),
        {"arborsim-searches.csv": report.frame},
        ("tree.js", "search.js"),
        lambda: {"trees": {"layouts": layouts, "films": films}},
        _start(rows) if rows else "",
        leading=said[:MOST_SENTENCES],
        telling=_telling(report, rows),
        nothing="" if rows else "no search was completed",
    )


def _table(report: SearchReport, rows: Sequence[Row], titled: bool) -> Table[Row]:
    return Table(
        rows_of(report.results, report.skipped),
        shown((*NAMES, *ANSWERS, *MEMORY, *WORK), rows),
        lambda row: at_budget(row.policy, row.budget),
        titled,
        look=lambda row: "baseline" if row.label == REFERENCE else "",
        reason=lambda row: row.left_out,
    ).without(_LEFT_OUT)


def _answer(report: SearchReport, rows: Sequence[Row], said: Sequence[str]) -> list[Block]:
    found: list[Block] = [Answer(said)]
    if warning := missing(rows):
        found.append(Warned(_RAN_OUT, warning))
    return [*found, Listed([*cautions(report.results, rows), *report.notes])]


def _telling(report: SearchReport, rows: Sequence[Row]) -> list[str]:
    """Notes that can change what is chosen."""
    warning = [f"{_RAN_OUT} {text}" for text in [missing(rows)] if text]
    unfit = [text for text in report.notes if text.startswith("Does not fit")]
    others = [*report.left_out, *cautions(report.results, rows), *report.notes]
    return list(dict.fromkeys([*warning, *unfit, *others]))


def _start(rows: Sequence[Row]) -> str:
    """The search to show first: ETS at the widest REBASE's width, or whatever comes last there."""
    base = reference(rows)
    near = [row for row in rows if base is None or row.width == base.width]
    row = next((row for row in near if row.label.startswith("ets")), near[0])
    return cell_name(row.label, row.width, row.policy, row.budget, len(cells_of(rows)) > 1)
