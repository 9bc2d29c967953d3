"""The columns of searches: ETS's tables 1 and 2, for any searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arborsim.products.search.results import SearchRow as Row
from arborsim.report.table import read_columns
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
#: What a terminal shows at once, and what of it goes first where there is no room.
DECIDING = (
    *("search", "width", "right", "interval", "kv", "kv_vs", "missed"),
    *("hbm", "hbm_vs", "time", "kept"),
)
IMPLIED = ("hbm_vs", "interval")

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
