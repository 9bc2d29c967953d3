"""The figures of a plan as tables that spreadsheets read; nothing in them is rounded."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from arborsim.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.plan.sensitivity import Sensitivity
from arborsim.plan.statistics import Estimate

#: What the names of columns do not say by themselves; seconds, bytes and shares have it in theirs.
ABOUT = {
    "load, largest_load": "Offered to one machine: searches that arrive per second, or clients.",
    "refuted_load": "The next load, which limited_by rules out; it was served only "
    "if limited_by is target.",
    "limited_by": "target: some run missed it; throughput: searches arrive faster than they end; "
    "run length: runs are too short to tell.",
    "served_per_s": "Searches that ended per second of the measured part of the runs; below the "
    "load while the machine fills.",
    "cost_per_1000": "Of 1,000 searches offered at that load, at the lowest and highest price.",
    "saturated": "What runs out first: hbm, host or searches (space), compute, memory (HBM "
    "bandwidth), pcie_down or pcie_up (time).",
    "used_...": "hbm and host: mean share of the bytes; others: share of the time.",
    "prefix_tokens_...": "Of shared prefixes, over all runs: found in hbm, copied back from ddr, "
    "or computed.",
    "..._low, ..._high": "Ends of the 95 % interval, or of the range of prices.",
}
_NAMES = ("number", "hardware", "policy", "budget", "recall", "gpus", "status", "reason")
#: Spreadsheets take a text that begins so for a formula.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def to_csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as CSV, with the columns of all of them; what is not known is empty."""
    found = list(rows)
    names = list(dict.fromkeys(name for row in found for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in found)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str) and value.startswith(_FORMULAS) and value != "-":
        return f"'{value}"
    return value


def candidates(result: PlanResult) -> str:
    """One row per candidate, at its largest load."""
    return to_csv(
        {**_who(row), **_known(row), **_point(row.at_largest)} for row in result.candidates
    )


def curves(result: PlanResult) -> str:
    """One row per candidate and load that was served."""
    return to_csv(
        {**_who(row), "meets": point.meets, **_point(point)}
        for row in result.candidates
        for point in row.curve
    )


def sensitivity(found: Sequence[Sensitivity]) -> str:
    """One row per candidate, assumption and factor."""
    return to_csv(
        {
            "assumption": each.assumption.title,
            "factor": variant.factor,
            "value": each.base * variant.factor,
            "unit": "" if each.assumption.kind == "factor" else each.assumption.kind,
            **_who(variant.result),
            "number": each.candidate,
            "largest_load": variant.result.largest,
            **_point(variant.result.at_largest),
        }
        for each in found
        for variant in each.variants
    )


def _who(row: CandidateResult) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _NAMES}


def _known(row: CandidateResult) -> dict[str, Any]:
    quality, alone, fleet = row.quality, row.alone, row.fleet
    return {
        **_range("price_per_hour", row.price_per_hour),
        "largest_load": row.largest,
        "refuted_load": row.refuted,
        "limited_by": row.limited_by,
        **_estimate("largest_mean", row.spread),
        "attention_kept": quality.attention_kept if quality else None,
        **_estimate("accuracy", quality.accuracy if quality else None),
        **{name: getattr(quality, name, None) for name in ("evicted", "quantised", "offloaded")},
        "alone_s": alone.seconds if alone else None,
        "alone_at_percentile_s": alone.at_percentile_s if alone else None,
        "alone_peak_hbm_bytes": alone.peak_hbm_bytes if alone else None,
        "fleet_machines": fleet.machines if fleet else None,
        "fleet_gpus": fleet.gpus if fleet else None,
    }


def _point(point: LoadPoint | None) -> dict[str, Any]:
    if point is None:
        return {}
    found: dict[str, Any] = {
        "load": point.load,
        **_estimate("at_percentile_s", point.at_percentile),
        **_estimate("served_per_s", point.served_per_s),
    }
    for name in ("search_s", "first_token_s", "token_s", "waiting_s"):
        found |= _prefixed(name, getattr(point, name))
    for name in ("concurrency", "queue", "peak_concurrency", "total_s", "saturated",
                 "preemptions_per_1000", "refused_per_1000"):  # fmt: skip
        found[name] = getattr(point, name)
    solved = point.cost_per_solved
    return {
        **found,
        **_prefixed("used", point.used),
        **_prefixed("busy", point.busy),
        **_prefixed("prefix_tokens", point.prefixes),
        **_range("cost_per_1000", point.cost_per_1000),
        **_estimate("cost_per_solved_at_lowest_price", solved[0] if solved else None),
        **_estimate("cost_per_solved_at_highest_price", solved[1] if solved else None),
    }


def _prefixed(name: str, record: Any) -> dict[str, Any]:
    """The fields of a record."""
    return {f"{name}_{each.name}": getattr(record, each.name) for each in fields(record)}


def _range(name: str, bounds: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = bounds or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _estimate(name: str, value: Estimate | None) -> dict[str, float | None]:
    if value is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
