"""`arborsim live` in a terminal, and the figures by which live runs are compared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arborsim.core.units import quantity
from arborsim.show.live_rows import LiveReport, LiveRow, live_rows
from arborsim.show.live_words import cautions
from arborsim.show.replay_columns import COLUMNS
from arborsim.show.replay_columns import NAMES as ROW_NAMES
from arborsim.show.table import NOTHING, UNKNOWN, Column, Table, print_tables, shown
from arborsim.show.words import counted, hundredths, interval, plain

if TYPE_CHECKING:
    from rich.console import Console

#: Columns that others imply: the first to go where there is no room.
_IMPLIED = ("speed_vs_full", "rehydrations", "prefill")
_LEGEND = (
    "Peaks are the largest of any search, with the prefill: they can exceed the budget; tokens "
    "moved and times are sums over searches."
)


def _as_replayed(key: str, **changes: Any) -> Column[LiveRow]:
    """A column of replays, of the row inside."""
    return replace(COLUMNS[key].of(lambda r: r.row), **changes)


def _judged(row: LiveRow, value: float) -> float:
    return value if row.judged else math.nan


def _p(row: LiveRow) -> str:
    if math.isnan(row.p):
        return ""
    return "<0.001" if row.p < 0.001 else f"{row.p:.3f}"


NAMES: tuple[Column[LiveRow], ...] = tuple(column.of(lambda r: r.row) for column in ROW_NAMES)
ANSWERS: tuple[Column[LiveRow], ...] = (
    Column("correct", "Right", "count", lambda r: _judged(r, r.correct),
           "Problems solved, of those searched: less than all if the budget could not hold some.",
           text=lambda r: f"{r.correct}/{r.judged}" if r.judged else "n/a", head=("right",),
           hide=UNKNOWN),
    Column("accuracy", "Accuracy", "percent", lambda r: r.accuracy,
           "Share of the searched problems that were solved.", ("accu-", "racy"),
           text=lambda r: hundredths(r.accuracy), hide=UNKNOWN, bar=True),
    Column("interval", "95% interval", "percent", lambda r: r.low,
           "Clopper-Pearson interval of the accuracy.", ("95%", "interval"),
           text=lambda r: interval(r.low, r.high), hide=UNKNOWN),
    Column("difference", "Accuracy vs full", "points", lambda r: r.difference,
           "Accuracy less that of full retention on the same problems.", ("vs", "full"),
           text=lambda r: "" if math.isnan(r.difference) else f"{100 * r.difference:+.1f}",
           hide=UNKNOWN),
    Column("p", "Fisher's p", "count", lambda r: r.p,
           "Two-sided p of Fisher's exact test of that difference.", ("Fisher", "p"), text=_p,
           hide=UNKNOWN),
)  # fmt: skip
MEMORY: tuple[Column[LiveRow], ...] = (
    _as_replayed("peak_hbm", about="Largest KV footprint in device memory of any search, staged "
                 "tokens included; weights are not in it. It includes the prefill, so it can "
                 "exceed the budget."),
    Column("hbm_vs_full", "HBM peak, of full", "percent", lambda r: r.hbm_vs_full,
           "That peak relative to the one of full retention on the same problems.",
           ("of", "full"), hide=UNKNOWN, bar=True),
    _as_replayed("peak_ddr", hide=NOTHING),
    _as_replayed("peak_quantised"),
    Column("allocated", "Allocated", "bytes", lambda r: r.allocated_bytes,
           "Largest size of the tensors that hold KV on the device, gaps included.",
           ("allo-", "cated"), "memory", hide=NOTHING),
    Column("device", "Device peak", "bytes", lambda r: r.device_peak_bytes,
           "Largest memory of the framework's allocator on the device, weights included.",
           ("all on", "device"), hide=NOTHING),
    _as_replayed("evicted"),
    _as_replayed("quantised"),
    _as_replayed("offloaded", hide=NOTHING),
    _as_replayed("rehydrated", hide=NOTHING),
    _as_replayed("rehydrations", hide=NOTHING, head=("pas-", "ses")),
    Column("decisions", "Decisions", "count", lambda r: r.row.decisions,
           "How often the policy was asked.", ("deci-", "sions")),
)  # fmt: skip
TIME: tuple[Column[LiveRow], ...] = (
    Column("total", "Total time", "seconds", lambda r: r.total_s,
           "All searches of the row, one after the other.", ("total", "time"), "time"),
    Column("prefill", "Prefill", "seconds", lambda r: r.row.time.prefill_s,
           "Forward passes over prompts.", ("pre-", "fill"), "time"),
    Column("model", "Model", "seconds", lambda r: r.row.time.decode_s,
           "Forward passes of the generated tokens.", ("model",), "time"),
    _as_replayed("policy_time", about="Taking signals, deciding, and moving tokens."),
    _as_replayed("transfer", about="Waiting for copies from or to DDR.", hide=NOTHING),
    _as_replayed("rehydration", about="Prefill passes over evicted tokens.", hide=NOTHING),
    Column("other", "Other", "seconds", lambda r: r.other_s,
           "Sampling, keeping the tree, judging thoughts and answers.", ("other",), "time",
           hide=NOTHING),
    Column("hidden", "Hidden transfer", "seconds", lambda r: r.row.time.hidden_transfer_s,
           "Copies that ran behind computation; not part of the total.", ("hid-", "den"), "time",
           hide=NOTHING),
    Column("tokens_per_s", "Speed", "rate", lambda r: r.tokens_per_s,
           "Generated tokens, on all branches together, per second of total time.",
           ("", "speed")),
    Column("speed_vs_full", "Speed vs full", "factor", lambda r: r.speed_vs_full,
           "Speed relative to full retention, same problems.", ("vs", "full"), hide=UNKNOWN),
)  # fmt: skip
_GROUPS = (("Answers", ANSWERS), ("Memory and moves", MEMORY), ("Time", TIME))


def print_live(report: LiveReport, console: Console | None = None) -> None:
    """Print the comparison at the width of the terminal.

    Three tables, or fewer where two fit side by side.
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    rows = live_rows(report)
    _heading(console, report)
    if rows:
        groups = [
            (title, Table(rows, (*NAMES, *shown(columns, rows)), lambda row: row.row.budget_label))
            for title, columns in _GROUPS
        ]
        print_tables(console, groups, implied=_IMPLIED)
    else:
        console.print("Nothing could be run.")
    for note in cautions(report, rows):
        console.print(plain(note), markup=False)
    if rows:
        console.print(_LEGEND, style="dim", markup=False)


def _heading(console: Console, report: LiveReport) -> None:
    from rich.text import Text

    facts = report.facts
    problems = len({result.episode for result in report.results})
    text = Text(plain(f"{facts.model}, {report.request['search']}"), style="bold")
    what = f"{counted(problems, 'problem')} of {facts.task}"
    memory = f"weights {quantity('bytes', facts.weight_bytes)}"
    text.append(plain(f"  {what}, {facts.dtype} on {facts.device}, {memory}"), style="not bold")
    console.print(text)
