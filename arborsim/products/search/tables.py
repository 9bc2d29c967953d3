"""The columns of searches: ETS's tables 1 and 2, for any searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from arborsim.play.results import BASELINE, at_budget
from arborsim.products.search.results import SearchRow as Row
from arborsim.report.report import Printed
from arborsim.report.table import Table, read_columns, shown
from arborsim.report.words import hundredths, interval
from arborsim.searches.arms import REFERENCE

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


def printed(rows: Sequence[Row], width: int) -> Iterator[Printed]:
    """A block per policy and budget; groups of columns share a table where they fit."""
    cells = cells_of(rows)
    for (policy, budget), own in cells.items():
        ran = [row for row in own if not row.left_out]
        whole = Table(own, (), lambda row: str(row.width), reason=lambda row: row.left_out)
        parts = {title: (*NAMES, *shown(columns, ran)) for title, columns in _GROUPS.items()}
        groups = [(title, whole.under(columns)) for title, columns in parts.items()]
        named = len(cells) > 1 or policy != BASELINE
        heading = f"policy {at_budget(policy, budget)}" if named else ""
        yield heading, "", groups if ran else groups[:1]
