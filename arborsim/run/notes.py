"""What a reader needs in order not to misread the numbers, a sentence or two each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from arborsim.core.units import quantity
from arborsim.run.aggregate import ANY, MARK, Row
from arborsim.run.results import ReplayResult

if TYPE_CHECKING:
    from arborsim.machine.profile import HardwareProfile

#: The setting that tells GPU, host, model and type of its cache in a line.
MACHINE = "simulated on"
_MOST_NAMED = 6


def notes(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """The notes below the tables of a terminal."""
    found = []
    if any(not math.isnan(row.attention_kept) for row in rows):
        found.append("attn. kept: recorded attention that fell on readable tokens; not accuracy.")
    else:
        found.append("attn. kept is n/a: not measured, or the trace holds no attention.")
    if any(not math.isnan(row.oracle_gap) for row in rows):
        found.append(
            "gap: what the oracle keeps at the same budget, less the policy's, in percentage "
            "points. It knows the future, and bounds what evicting the same tokens in all heads "
            "can keep; DDR, 8 bits, recomputing, a choice per head, or holding more than the "
            "budget can beat it (below zero)."
        )
    found.append(
        "Peaks are the largest of any search, taken before decisions and with the prefill: they "
        "can exceed the budget; tokens moved and times are sums."
    )
    return [*found, *cautions(result, rows), *assumed(result, "see --report")]


def cautions(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """What does not hold for every row: broken budgets, ties, and notes on single policies."""
    found = []
    if any(row.label != row.policy for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    return [*found, *_ties(rows), *result.notes]


def assumed(result: ReplayResult, where: str) -> list[str]:
    """How many numbers of the hardware nobody measured; `where` tells where they are listed."""
    count = len(result.assumed)
    if not count:
        return []
    return [
        f"{count} number{'s' if count > 1 else ''} of the hardware profile "
        f"{'are' if count > 1 else 'is'} assumed, not measured ({where})."
    ]


def assumed_policy_time(policies: Iterable[str], profile: HardwareProfile) -> list[str]:
    """A note on policies that take time on a machine on which nobody measured theirs.

    A slow decision can make a policy look slower than full retention, and is then no finding.
    """
    named = [name for name in dict.fromkeys(policies) if name not in profile.policies]
    if not named or not profile.is_assumed("decision_base_s"):
        return []
    whose = ", ".join(named) if len(named) <= _MOST_NAMED else f"{len(named)} policies"
    return [
        f"Policy time of {whose} is assumed ({quantity('seconds', profile.decision_base_s)} a "
        "decision), not measured: `arborsim calibrate hardware` measures it on your machine."
    ]


def _ties(rows: Sequence[Row]) -> list[str]:
    """A note for every trace on which policies lose exactly as much, so that none is better.

    What is protected can fill a budget alone, and policies that take whole blocks can take the
    same ones; the order of such rows says nothing about their scores.
    """
    found = []
    traces = list(dict.fromkeys(row.trace for row in rows))
    for trace in traces:
        on = f" on {trace}" if len(traces) > 1 else ""
        groups = [
            f"{len(policies)} policies{on} ({', '.join(policies)}; budget {', '.join(budgets)})"
            for policies, budgets in _alike([row for row in rows if row.trace == trace]).items()
        ]
        if groups:
            found.append(f"Same attention kept, so in no order: {'; '.join(groups)}.")
    return found


def _alike(rows: Sequence[Row]) -> dict[tuple[str, ...], list[str]]:
    """Policies that keep the same, less than everything, with the budgets at which they do."""
    cells: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        if row.attention_kept < 1 and row.budget != ANY and not row.is_oracle:
            cells.setdefault((row.budget, round(row.attention_kept, 12)), []).append(row.label)
    found: dict[tuple[str, ...], list[str]] = {}
    for (budget, _), policies in cells.items():
        if len(policies) > 1:
            found.setdefault(tuple(policies), []).append(budget)
    return found
