"""What could not be replayed, and why, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable

from arborsim.report.results import LeftOut


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
        lines.append(
            "Left out for budgets too small, with the budget needed as far as is known: "
            + "; ".join(small)
            + "."
        )
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
    """``"at 0.1 of x.parquet: h2o, epikv (0.15), arborkv (0.26)"``, and so on."""
    needs: dict[tuple[str, str], dict[str, list[str]]] = {}  # (budget, trace) -> least -> policies
    for each in items:
        if not each.remedy:
            by_least = needs.setdefault((each.budget, each.trace), {})
            by_least.setdefault(each.least or "more than all", []).append(each.policy)
    return [
        f"at {budget} of {trace}: "
        + ", ".join(
            f"{', '.join(policies)} ({least})" for least, policies in sorted(by_least.items())
        )
        for (budget, trace), by_least in needs.items()
    ]


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
