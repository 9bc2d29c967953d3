"""Memory against what it buys: one marker per policy and budget, the efficient ones joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.units import quantity
from arborsim.run.aggregate import Row
from arborsim.show.columns import MEMORY, TIME, Column, scales
from arborsim.show.figures import Figure, label

_COLUMNS = {column.key: column for column in (*MEMORY, *TIME)}
#: With more policies than this, colours no longer tell them apart.
_MOST_COLOURS = 8
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")
#: Settings that differ by less than this share of full retention's memory need the same.
_SAME_MEMORY = 0.005


@dataclass(frozen=True)
class Metric:
    """A figure that policies are compared by.

    Attributes
    ----------
    key : str
        Of a column of the table.
    title : str
        On a button.
    axis : str
    higher : bool
        Whether more is better.
    """

    key: str
    title: str
    axis: str
    higher: bool

    @property
    def column(self) -> Column:
        return _COLUMNS[self.key]

    def value(self, row: Row) -> float:
        """For a figure: per cent, or times full retention."""
        value = self.column.value(row)
        return 100 * value if self.column.kind == "percent" else value

    def show(self, row: Row, rows: Sequence[Row]) -> str:
        """For people; `rows` are those it stands beside."""
        scale = scales([self.column], rows)[self.key]
        unit = {"x": "×", "%": "%"}.get(scale.unit, f" {scale.unit}")
        return f"{scale.show(self.column.value(row))}{unit}"


KEPT = Metric("kept", "Attention kept", "attention kept (%)", higher=True)
ERROR = Metric("error", "Output error", "relative output error (%)", higher=False)
TIMES = Metric("time_vs_full", "Time", "time relative to full retention", higher=False)
PEAK = Metric("hbm_vs_full", "Peak HBM", "peak KV in HBM (% of full)", higher=False)


def known(metric: Metric, rows: Sequence[Row]) -> bool:
    """Whether any row has the figure."""
    return any(not math.isnan(metric.value(row)) for row in rows)


def efficient(rows: Sequence[Row], metric: Metric) -> list[Row]:
    """Rows that no other one beats in memory and `metric` at once, least memory first.

    The oracle, which cannot be built, does not compete.  Of rows that need the same memory, to half
    a per cent of full retention's, the best one stands for all.
    """
    able = [r for r in rows if not r.is_oracle and not math.isnan(metric.value(r))]
    sign = -1.0 if metric.higher else 1.0
    least = _SAME_MEMORY * max((r.peak_hbm_kv_bytes for r in able), default=0)

    def rank(row: Row) -> tuple[float, float, str]:
        step = round(row.peak_hbm_kv_bytes / least) if least else 0
        return step, sign * metric.value(row), row.policy

    found: list[Row] = []
    for row in sorted(able, key=rank):
        if not found or sign * metric.value(row) < sign * metric.value(found[-1]) - 1e-9:
            found.append(row)
    return found


def figure(rows: Sequence[Row], metric: Metric) -> dict[str, Any]:
    """The plot of one trace, and the efficient settings in words.

    Returns
    -------
    dict
        ``figure``; ``efficient``: one text per numbered marker; ``policies``: name to ``x``, ``y``
        and ``budget`` of its markers, for highlighting one.
    """
    best = efficient(rows, metric)
    relative = known(PEAK, rows)
    size = scales([_COLUMNS["peak_hbm"]], rows)["peak_hbm"]

    def across(row: Row) -> float:
        return PEAK.value(row) if relative else row.peak_hbm_kv_bytes / size.size

    shown = [row for row in rows if not math.isnan(metric.value(row))]
    plain = [row for row in shown if not row.is_oracle and row not in best]
    policies = list(dict.fromkeys(row.policy for row in shown if not row.is_oracle))
    data = [
        *_others(plain, policies, across, metric),
        *_bound([row for row in shown if row.is_oracle], across, metric),
        _frontier(best, across, metric),
    ]
    layout = {
        "xaxis": {"title": {"text": PEAK.axis if relative else f"peak KV in HBM ({size.unit})"},
                  "rangemode": "tozero"},
        "yaxis": {"title": {"text": metric.axis}},
        "hovermode": "closest",
        "height": 460,
    }  # fmt: skip
    return {
        "figure": {"data": data, "layout": layout},
        "efficient": [_words(row, metric, rows) for row in best],
        "policies": {
            policy: _markers([r for r in shown if r.policy == policy], across, metric)
            for policy in policies
        },
    }


def _words(row: Row, metric: Metric, rows: Sequence[Row]) -> str:
    memory = quantity("bytes", row.peak_hbm_kv_bytes)
    if known(PEAK, rows):
        memory = f"{PEAK.show(row, rows)} of full retention's memory ({memory})"
    name = row.policy if row.is_baseline else f"{row.label} at budget {row.budget}"
    return f"{name}: {memory}, {metric.title.lower()} {metric.show(row, rows)}"


def _markers(rows: Sequence[Row], across: Callable[[Row], float], metric: Metric) -> Figure:
    return {
        "x": [round(across(row), 4) for row in rows],
        "y": [round(metric.value(row), 5) for row in rows],
        "customdata": [
            label(row.label if row.is_baseline else f"{row.label}, budget {row.budget}")
            for row in rows
        ],
        "hovertemplate": f"<b>%{{customdata}}</b><br>memory %{{x:.4g}}<br>{metric.axis} "
        "%{y:.4g}<extra></extra>",
    }


def _others(
    rows: Sequence[Row], policies: Sequence[str], across: Callable[[Row], float], metric: Metric
) -> list[Figure]:
    """Settings that others beat: by policy if there are few policies, else all alike."""
    if len(policies) > _MOST_COLOURS:
        marker = {"color": "var(--dot)", "size": 7, "line": {"width": 0}}
        return [{"type": "scatter", "mode": "markers", "name": "others", "marker": marker,
                 **_markers(rows, across, metric)}]  # fmt: skip
    found = []
    for number, policy in enumerate(policies):
        own = [row for row in rows if row.policy == policy]
        colour = f"var(--c{number % _MOST_COLOURS})"
        marker = {"color": colour, "size": 10, "symbol": _SYMBOLS[number % len(_SYMBOLS)]}
        if own:
            found.append({"type": "scatter", "mode": "markers", "name": label(policy),
                          "marker": marker, **_markers(own, across, metric)})  # fmt: skip
    return found


def _bound(rows: Sequence[Row], across: Callable[[Row], float], metric: Metric) -> list[Figure]:
    """What evicting could keep if it knew the future; of equal memory the best."""
    best: dict[float, Row] = {}
    for row in sorted(rows, key=metric.value, reverse=not metric.higher):
        best[round(across(row), 1)] = row
    rows = sorted(best.values(), key=across)
    if not rows:
        return []
    return [{
        "type": "scatter",
        "mode": "lines+markers",
        "name": "oracle: knows the future, only evicts",
        "line": {"color": "var(--bound)", "width": 1.5, "dash": "dash"},
        "marker": {"color": "var(--bound)", "size": 10, "symbol": "diamond-open"},
        **_markers(rows, across, metric),
    }]  # fmt: skip


def _frontier(rows: Sequence[Row], across: Callable[[Row], float], metric: Metric) -> Figure:
    """Numbered markers: names beside them would overlap."""
    return {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": "efficient (numbers: see below)",
        "line": {"color": "var(--accent)", "width": 2},
        "marker": {"color": "var(--accent)", "size": 18, "line": {"width": 1.5,
                                                                  "color": "var(--card)"}},
        "text": [str(number) for number in range(1, len(rows) + 1)],
        "textfont": {"color": "var(--card)", "size": 11},
        **_markers(rows, across, metric),
    }  # fmt: skip
