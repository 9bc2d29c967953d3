"""What could not be replayed, and why, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Iterable

from arborsim.report.results import LeftOut

_NONE = "more than any"


def paragraph(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per way to record what is missing, and one for budgets that are too small.

    The same on several traces is said once.
    """
    items = list(left_out)
    lines = [
        f"Left out: {', '.join(policies)}. {_listed(traces)} "
        f"{'do' if len(traces) > 1 else 'does'} not hold what they read; record with {remedy}."
        for (traces, remedy), policies in _lacking(items).items()
    ]
    small = _too_small(items)
    if small:
        lines.append(f"Left out where the budget is below what is needed: {'; '.join(small)}.")
    return lines


def _lacking(items: Iterable[LeftOut]) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Policies by the traces that do not serve them and by how to record what they read."""
    traces: dict[tuple[str, str], list[str]] = {}
    for each in items:
        if each.remedy:
            traces.setdefault((each.policy, each.remedy), []).append(each.trace)
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (policy, remedy), where in traces.items():
        found.setdefault((tuple(where), remedy), []).append(policy)
    return found


def _too_small(items: Iterable[LeftOut]) -> list[str]:
    """``"on x.parquet 0.15 by h2o, epikv and 0.26 by arborkv"``: what is known to be needed."""
    needs: dict[str, dict[str, str]] = {}  # trace -> policy -> least
    for each in items:
        if not each.remedy:
            policies = needs.setdefault(each.trace, {})
            known = policies.get(each.policy, "0")
            policies[each.policy] = max(known, each.least or _NONE, key=_size)
    return [
        f"on {trace} "
        + _listed(
            f"{least} by {', '.join(policy for policy, one in policies.items() if one == least)}"
            for least in sorted(set(policies.values()), key=_size)
        )
        for trace, policies in needs.items()
    ]


def _size(least: str) -> float:
    return math.inf if least == _NONE else float(least)


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
