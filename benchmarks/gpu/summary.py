"""What a run found, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.journal import Facts

_GB = 1e9
_WIDE = 190  # columns of a log file


def print_summary(records: Sequence[Facts]) -> None:
    """Print the tables of all parts that left records."""
    console = Console(width=None if Console().is_terminal else _WIDE)
    by_part: dict[str, list[Facts]] = {}
    for record in records:
        by_part.setdefault(record["part"], []).append(record)
    tables = (
        ("correctness", ("check", "of", "outcome", "figures"), _check),
        ("calibration", ("predictions", "passes", "R2", "median error", "largest"), None),
        ("live", _LIVE, _live),
        ("context", ("attention", "outcome", "fits", "does not fit", "ended by"), _context),
    )
    for part, columns, row in tables:
        found = by_part.get(part, [])
        if not found:
            continue
        rows = _agreements(found) if row is None else [row(record) for record in found]
        _print(console, part, columns, rows)


def _print(console: Console, title: str, columns: Sequence[str], rows: Iterable[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def verdict(record: Facts) -> str:
    """The outcome, and whether what was checked holds."""
    if record["outcome"] != "done" or "ok" not in record:
        return str(record["outcome"])
    return "ok" if record["ok"] else "NOT OK"


def _check(record: Facts) -> list[str]:
    known = ("grouping", "recall", "ordered", "case", "dtype", "history", "search", "problem")
    of = ", ".join(f"{name} {record[name]}" for name in known if name in record)
    return [record["check"], of, verdict(record), _figures(record)]


def _figures(record: Facts) -> str:
    if record["outcome"] != "done":
        return str(record.get("why") or record.get("error") or "")
    if "equal_policies" in record:
        equal, count = record["equal_policies"], record["policies"]
        signals = record["signals"]
        differ = sum(s.get("differ", 0) for s in signals.values())
        return f"{equal} of {count} policies equal; {differ} signal values differ"
    if "form" in record:
        worst = max(record["largest_difference"].values())
        rate = record.get("read_bytes_per_s", 0.0) / _GB
        return f"{record['form']}, off by {worst:.1e}" + (f", {rate:.0f} GB/s" if rate else "")
    if "down_bytes_per_s" in record:
        rates = (record[f"{way}_bytes_per_s"] / _GB for way in ("down", "up"))
        return "{:.1f} GB/s down, {:.1f} up".format(*rates)
    if "share_of_tolerance" in record:
        return f"off by {record['largest_difference']:.1e}"
    return ""


def _agreements(records: Sequence[Facts]) -> list[list[str]]:
    rows = []
    for record in records:
        if record["outcome"] != "done":
            said = str(record.get("why") or record.get("error") or "")
            rows.append([record["outcome"], "", "", "", said])
            continue
        for name, each in record["agreement"].items():
            errors = f"{each['median']:.1%}", f"{each['largest']:.1%}"
            rows.append([name, str(each["passes"]), f"{each['r2']:.3f}", *errors])
    return rows


_LIVE = (
    "policy", "prompt", "outcome", "prefill s", "ms per iteration", "tokens/s", "policy time",
    "waits / hidden s", "pools GB", "allocator GB", "bytes as predicted", "predicted / real s",
)  # fmt: skip


def _live(record: Facts) -> list[str]:
    head = [record["policy"], f"{record['prompt_tokens']:,}", record["outcome"]]
    if record["outcome"] != "done":
        said = record.get("why") or record.get("asked") or record.get("error") or ""
        return [*head, *[""] * 8, str(said)[:60]]
    live = record["live_s"]
    figures = [
        f"{live['prefill_s']:.2f}",
        f"{record['iteration_s'] * 1e3:.1f}",
        f"{record['decode_tokens_per_s']:.1f}",
    ]
    memory = [f"{record[name] / _GB:.2f}" for name in ("pool_bytes", "allocator_peak_bytes")]
    if "calls" not in record:
        return [*head, *figures, "", "", *memory, "", ""]
    waits = f"{live['exposed_transfer_s']:.2f} / {live['hidden_transfer_s']:.2f}"
    equal = f"{record['calls_with_equal_bytes']} of {record['calls']}"
    seconds = f"{record['predicted_s']['total_s']:.2f} / {live['total_s']:.2f}"
    return [*head, *figures, f"{record['policy_share']:.1%}", waits, *memory, equal, seconds]


def _context(record: Facts) -> list[str]:
    head = [record["kind"], record["outcome"]]
    if record["outcome"] != "done":
        return [*head, "", "", str(record.get("why") or record.get("error") or "")]
    fits, fails = (_tokens(record[name]) for name in ("fits_tokens", "fails_tokens"))
    return [*head, fits, fails, record["ended"]]


def _tokens(count: Any) -> str:
    return "-" if count is None else f"{count:,}"
