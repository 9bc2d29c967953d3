"""What a reader of a replay needs in order not to misread it, and what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborsim.run.aggregate import ANY, MARK, Row
from arborsim.run.results import LeftOut, ReplayResult
from arborsim.show.words import listed

_MORE_THAN_ANY = "more than any"


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


def left_out(found: Iterable[LeftOut]) -> list[str]:
    """A line per way to come by what is missing, and one for budgets that are too small.

    The same on several traces is said once.
    """
    items = list(found)
    lines = [
        f"Left out: {', '.join(policies)}. {listed(traces)} "
        f"{'do' if len(traces) > 1 else 'does'} not hold what they read; {remedy}."
        f"{_instead(policies, items)}"
        for (traces, remedy), policies in _lacking(items).items()
    ]
    small = _too_small(items)
    if small:
        lines.append(f"Left out where the budget is below what is needed: {'; '.join(small)}.")
    lines += dict.fromkeys(f"Left out: {each.detail}." for each in items if each.unsuited)
    return lines


def _instead(policies: Iterable[str], items: Iterable[LeftOut]) -> str:
    """Which of the policies run without a new recording under another setting."""
    ways: dict[str, dict[str, None]] = {}
    for each in items:
        if each.instead and each.policy in policies:
            ways.setdefault(each.instead, {})[each.policy] = None
    return "".join(f" Without that, --set {way} runs {listed(own)}." for way, own in ways.items())


def _lacking(items: Iterable[LeftOut]) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Policies by the traces that do not serve them and by how to come by what they read."""
    traces: dict[tuple[str, str], list[str]] = {}
    for each in items:
        if each.remedy:
            remedy = each.unrecorded or f"record with {each.remedy}"
            traces.setdefault((each.policy, remedy), []).append(each.trace)
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (policy, remedy), where in traces.items():
        found.setdefault((tuple(where), remedy), []).append(policy)
    return found


def _too_small(items: Iterable[LeftOut]) -> list[str]:
    """``"on x.parquet: at least 0.15 for h2o, epikv and at least 0.26 for arborkv"``."""
    needs: dict[str, dict[str, str]] = {}  # trace -> policy -> least
    for each in items:
        if not each.remedy and not each.unsuited:
            policies = needs.setdefault(each.trace, {})
            known = policies.get(each.policy, "0")
            policies[each.policy] = max(known, each.least or _MORE_THAN_ANY, key=_size)
    return [
        f"on {trace}: "
        + listed(
            f"{least if least == _MORE_THAN_ANY else f'at least {least}'} for "
            f"{', '.join(policy for policy, one in policies.items() if one == least)}"
            for least in sorted(set(policies.values()), key=_size)
        )
        for trace, policies in needs.items()
    ]


def _size(least: str) -> float:
    return math.inf if least == _MORE_THAN_ANY else float(least)
