"""`arborsim search` in a terminal: ETS's tables 1 and 2, for any searches, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arborsim.core.units import Scale
from arborsim.play.results import BASELINE, at_budget
from arborsim.products.search.results import SearchRow as Row
from arborsim.report.table import (
    LABEL,
    NOTHING,
    UNKNOWN,
    Column,
    Table,
    name_column,
    print_tables,
    shown,
    terminal,
)
from arborsim.report.words import hundredths, interval, plain
from arborsim.searches.arms import REFERENCE

if TYPE_CHECKING:
    from rich.console import Console

NAMES: tuple[Column[Row], ...] = (
    name_column("Search", lambda r: r.label),
    Column("width", "Width", LABEL, about="Thoughts that run together at first.",
           head=("width",), text=lambda r: str(r.width)),
)  # fmt: skip


def _mean(key: str, title: str, kind: str, figure: str, about: str, head: tuple[str, ...],
          family: str = "", hide: str = UNKNOWN, **others: Any) -> Column[Row]:  # fmt: skip
    """A figure of `arborsim.products.search.results.FIGURES`; counts are means here."""
    if kind == "count":
        others["scale"] = lambda values: Scale("", 1.0, 1)
    return Column(key, title, kind, lambda row: row.figures[figure], about, head, family,
                  hide=hide, **others)  # fmt: skip


def _versus(key: str, title: str, head: str, figure: str) -> Column[Row]:
    """A figure as a multiple of REBASE's."""
    name = REFERENCE.upper()
    about = f"As a multiple of {name}'s at the same width, policy and budget."
    return Column(key, f"{title} vs {name}", "factor", lambda row: row.times(figure), about,
                  (head, "vs", name), hide=UNKNOWN)  # fmt: skip


ANSWERS: tuple[Column[Row], ...] = (
    Column("accuracy", "Accuracy", "percent", lambda r: r.accuracy,
           "Share of right answers among the problems that were judged.", ("accuracy",),
           text=lambda r: hundredths(r.accuracy), hide=UNKNOWN, bar=True),
    Column("interval", "95% interval", "percent", lambda r: r.low,
           "Clopper-Pearson interval of the accuracy.", ("95%", "interval"),
           text=lambda r: interval(r.low, r.high), hide=UNKNOWN),
    Column("right", "Right", "count", lambda r: r.right,
           "Problems solved, of those that were judged.", ("right",),
           text=lambda r: f"{r.right}/{r.judged}" if r.judged else "n/a"),
    _mean("kv", "KV size", "tokens", "kv_tokens",
          "Unique tokens of all unfinished candidates and their ancestors at each selection, "
          "summed over selections, without the prompt (ETS, figure 3); mean per search, as are all "
          "figures that follow.", ("KV", "size"), "kv", ""),
    _versus("kv_vs", "KV", "KV", "kv_tokens"),
    _mean("kv_prompt", "KV with prompt", "tokens", "kv_tokens_with_prompt",
          "The KV size with the prompt, counted once per selection.", ("with", "prompt"), "kv", ""),
    _versus("kv_prompt_vs", "KV with prompt", "same", "kv_tokens_with_prompt"),
    Column("missed", "Bank misses", "percent", lambda r: r.missed,
           "Share of the thoughts asked for that were not recorded. A search that is denied "
           "thoughts is a smaller one than its width says.", ("bank", "misses"), warn=True),
)  # fmt: skip
MEMORY: tuple[Column[Row], ...] = (
    _mean("hbm", "HBM peak", "bytes", "peak_hbm_kv_bytes",
          "Largest KV footprint in HBM under the policy.", ("HBM", "peak"), "memory"),
    _versus("hbm_vs", "HBM peak", "peak", "peak_hbm_kv_bytes"),
    _mean("ddr", "DDR peak", "bytes", "peak_ddr_bytes",
          "Largest KV footprint in host memory.", ("DDR", "peak"), "memory", NOTHING),
    _mean("held", "Held peak", "bytes", "peak_held_kv_bytes",
          "Largest KV size of what the search has not given up, whatever the policy keeps.",
          ("held", "peak"), "memory"),
    _versus("held_vs", "Held peak", "held", "peak_held_kv_bytes"),
    _mean("hbm_s", "HBM byte-seconds", "bytes", "hbm_kv_byte_s",
          "Integral over time of the KV bytes in HBM.", ("HBM", "byte-s"), "byte-s", per="s"),
    _versus("hbm_s_vs", "HBM byte-seconds", "b-s", "hbm_kv_byte_s"),
    _mean("held_s", "Held byte-seconds", "bytes", "held_kv_byte_s",
          "The same of what the search has not given up.", ("held", "byte-s"), "byte-s", per="s"),
    _versus("held_s_vs", "Held byte-seconds", "b-s", "held_kv_byte_s"),
)  # fmt: skip
WORK: tuple[Column[Row], ...] = (
    _mean("calls", "Model calls", "count", "model_calls",
          "Thoughts opened: each is one request to the model.", ("model", "calls")),
    _versus("calls_vs", "Model calls", "calls", "model_calls"),
    _mean("tokens", "Tokens", "tokens", "generated_tokens", "Generated tokens.", ("tokens",)),
    _versus("tokens_vs", "Tokens", "tok.", "generated_tokens"),
    _mean("time", "Time", "seconds", "total_s",
          "Simulated seconds per search, alone on the GPU.", ("per", "search")),
    _versus("time_vs", "Time", "time", "total_s"),
    _mean("speed", "Speed", "rate", "tokens_per_s",
          "Generated tokens per simulated second, over all searches.", ("speed",)),
    _mean("kept", "Attention kept", "percent", "attention_kept",
          "Share of the recorded attention that fell on readable tokens.", ("attn.", "kept"),
          words=lambda r: r.kept_note),
)  # fmt: skip
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
        groups = [(title, whole.under((*NAMES, *shown(columns, ran))))
                  for title, columns in _GROUPS.items()]  # fmt: skip
        print_tables(console, groups if ran else groups[:1])
    if any(row.policy != BASELINE for row in rows):
        console.print(ANSWERED, markup=False)
    if unjudged := [row for row in rows if row.judged < row.searches]:
        counts = (f"{row.label} {row.width} ({row.searches - row.judged})" for row in unjudged)
        console.print(plain(
            "Answers that the bank does not judge count neither way; of "
            f"{max(row.searches for row in rows)} problems: {', '.join(dict.fromkeys(counts))}."
        ), markup=False)  # fmt: skip
    console.print(LEGEND, style="dim", markup=False)
    if any(row.reference for row in rows):
        console.print(VERSUS, style="dim", markup=False)
