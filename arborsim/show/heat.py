"""Policies by budgets, one figure at a time: the data of the page's heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from arborsim.core.units import scale_for
from arborsim.run.aggregate import Row
from arborsim.show.pareto import ERROR, KEPT, PEAK, TIMES, Metric, known

METRICS = (KEPT, ERROR, TIMES, PEAK)


def heat(rows: Sequence[Row]) -> dict[str, Any]:
    """The heat maps of one trace.

    Returns
    -------
    dict
        ``budgets``; ``metrics``: for each that is known ``title``, ``unit`` and ``policies``, best
        first, but those that do not keep to the budget last.  Each has its ``name``, the ``text``
        of its cells and their ``shade``: 1 for the best cell of the map, 0 for the worst, none
        where a cell was left out.
    """
    rows = [row for row in rows if not row.is_baseline]
    budgets = list(dict.fromkeys(row.budget for row in rows))
    metrics = [_map(rows, budgets, metric) for metric in METRICS if known(metric, rows)]
    return {"budgets": budgets, "metrics": metrics}


def _map(rows: Sequence[Row], budgets: Sequence[str], metric: Metric) -> dict[str, Any]:
    column = metric.column
    cells = {(row.policy, row.budget): column.value(row) for row in rows}
    values = [value for value in cells.values() if not math.isnan(value)]
    scale = scale_for(column.kind, values)
    low, high = min(values), max(values)

    def shade(value: float) -> float | None:
        if math.isnan(value):
            return None
        share = (value - low) / (high - low) if high > low else 1.0
        return round(share if metric.higher else 1 - share, 3)

    def worst_last(policy: str) -> tuple[float, ...]:
        shades = [shade(cells.get((policy, budget), math.nan)) for budget in budgets]
        return tuple(1.0 if one is None else -one for one in shades)

    labels = {row.policy: row.label for row in rows}
    oracles = {row.policy for row in rows if row.is_oracle}
    unbounded = {row.policy for row in rows if not row.bounded}
    policies = sorted(
        dict.fromkeys(row.policy for row in rows),
        key=lambda p: (p not in oracles, p in unbounded, worst_last(p), p),
    )
    found = []
    for policy in policies:
        own = [cells.get((policy, budget), math.nan) for budget in budgets]
        text = ["" if math.isnan(value) else scale.show(value) for value in own]
        found.append(
            {"name": labels[policy], "text": text, "shade": [shade(value) for value in own]}
        )
    unit = {"x": "times full retention", "%": "%"}.get(scale.unit, scale.unit)
    return {"title": metric.title, "unit": unit, "higher": metric.higher, "policies": found}
