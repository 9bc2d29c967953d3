"""`arborsim search` in a terminal: ETS's tables 1 and 2, for any searches, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from arborsim.play.results import BASELINE, at_budget
from arborsim.products.search.results import SearchRow as Row
from arborsim.report.lines import print_tables
from arborsim.report.table import Table, read_columns, shown, terminal
from arborsim.report.words import hundredths, interval, plain
from arborsim.searches.arms import REFERENCE

if TYPE_CHECKING:
    from rich.console import Console

_FUNCTIONS: dict[str, Callable[[Row], str]] = {
    "width_text": lambda row: str(row.width),
    "hundredths": lambda row: hundredths(row.accuracy),
    "interval": lambda row: interval(row.low, row.high),
    "right_text": lambda row: f"{row.right}/{row.judged}" if row.judged else "n/a",
}
#: Columns by group: ``columns.toml`` declares them.
NAMES, ANSWERS, MEMORY, WORK = read_columns("arborsim.products.search", _FUNCTIONS).values()
_GROUPS = {"Answers and KV size": ANSWERS, "Memory": MEMORY, "Work and time": WORK}

LEGEND = (
    "Figures are means per search. KV size: unique tokens of all unfinished candidates and their "
    "ancestors at each selection, summed over selections, without and with the prompt. HBM: what "
    "the policy keeps; held: what the search has not given up. Bank misses: the share of the "
    "thoughts asked for that were not recorded."
)
ANSWERED = (
    "Right answers are those recorded, under full retention: what a policy's evictions do to them "
    "is not in here (arborsim live)."
)
_UNJUDGED = "Answers that the bank does not judge count neither way;"
VERSUS = (
    "vs REBASE: a multiple of REBASE's figure at the same width, policy and budget; below 1 is "
    "less KV, memory, work or time."
)


def cells_of(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by policy and budget."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.policy, row.budget), []).append(row)
    return found


def reference(rows: Sequence[Row]) -> Row | None:
    """REBASE at its largest width, of rows of one policy and budget."""
    own = [row for row in rows if row.label == REFERENCE]
    return max(own, key=lambda row: row.width, default=None)


def print_searches(rows: Sequence[Row], heading: str, console: Console | None = None) -> None:
    """Print a block per policy and budget, at the width of the terminal.

    Groups of columns share a table where they fit side by side.
    """
    console = console or terminal()
    console.print(plain(heading), style="bold", markup=False)
    if not rows:
        console.print("No search was completed.")
        return
    cells = cells_of(rows)
    for (policy, budget), own in cells.items():
        ran = [row for row in own if not row.left_out]
        if len(cells) > 1 or policy != BASELINE:
            console.print(plain(f"policy {at_budget(policy, budget)}"), markup=False)
        whole = Table(own, (), lambda row: str(row.width), reason=lambda row: row.left_out)
        parts = {title: (*NAMES, *shown(columns, ran)) for title, columns in _GROUPS.items()}
        groups = [(title, whole.under(columns)) for title, columns in parts.items()]
        print_tables(console, groups if ran else groups[:1])
    if any(row.policy != BASELINE for row in rows):
        console.print(ANSWERED, markup=False)
    if unjudged := [row for row in rows if row.judged < row.searches]:
        counts = (f"{row.label} {row.width} ({row.searches - row.judged})" for row in unjudged)
        most, each = max(row.searches for row in rows), ", ".join(dict.fromkeys(counts))
        said = f"{_UNJUDGED} of {most} problems: {each}."
        console.print(plain(said), markup=False)
    console.print(LEGEND, style="dim", markup=False)
    if any(row.reference for row in rows):
        console.print(VERSUS, style="dim", markup=False)
