"""What could not be replayed, and why, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Iterable

from arborsim.run.results import LeftOut

_NONE = "more than any"


def paragraph(left_out: Iterable[LeftOut]) -> list[str]:
    """A line per way to come by what is missing, and one for budgets that are too small.

    The same on several traces is said once.
    """
    items = list(left_out)
    lines = [
        f"Left out: {', '.join(policies)}. {_listed(traces)} "
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
    return "".join(f" Without that, --set {way} runs {_listed(own)}." for way, own in ways.items())


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
            policies[each.policy] = max(known, each.least or _NONE, key=_size)
    return [
        f"on {trace}: "
        + _listed(
            f"{least if least == _NONE else f'at least {least}'} for "
            f"{', '.join(policy for policy, one in policies.items() if one == least)}"
            for least in sorted(set(policies.values()), key=_size)
        )
        for trace, policies in needs.items()
    ]


def _size(least: str) -> float:
    return math.inf if least == _NONE else float(least)


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
