"""Figures of live runs: see `arborsim.show.figures` for how they name colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arborsim.core.units import scale_for
from arborsim.live.request import LiveResult
from arborsim.run.aggregate import ANY, BASELINE
from arborsim.show import figures
from arborsim.show.figures import Figure, label
from arborsim.show.live_rows import LiveReport, LiveRow, episode_result

_POINTS = 600
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_COLOURS = 7  # beside that of full retention
_SPREAD = 0.5  # of the distance between budgets, over which policies stand side by side


def accuracy(rows: Sequence[LiveRow]) -> Figure | None:
    """Accuracy with its interval, policies side by side per budget; None if nothing was judged."""
    judged = [row for row in rows if row.judged and row.row.policy != BASELINE]
    full = next((row for row in rows if row.judged and row.row.policy == BASELINE), None)
    if not judged:
        return None
    budgets = sorted({row.row.budget for row in judged}, key=_size)
    policies = list(dict.fromkeys(row.row.policy for row in judged))
    data = [] if full is None else _baseline(full, len(budgets))
    for i, policy in enumerate(policies):
        own = [row for row in judged if row.row.policy == policy]
        shift = _SPREAD * ((i + 0.5) / len(policies) - 0.5)
        places = [budgets.index(row.row.budget) + shift for row in own]
        data.append(_points(policy, own, places, i))
    layout = {
        "xaxis": {"title": {"text": "budget"}, "tickvals": list(range(len(budgets))),
                  "ticktext": [label(budget) for budget in budgets],
                  "range": [-0.5, len(budgets) - 0.5], "zeroline": False, "showgrid": False},
        "yaxis": {"title": {"text": "accuracy (%)"}, "range": [-3, 103], "zeroline": False},
        "height": 420,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _size(budget: str) -> tuple[bool, float, str]:
    """Shares before tokens, by size; no budget last."""
    number = float("inf") if budget == ANY else float(budget)
    return number > 1, number, budget


def _points(policy: str, rows: Sequence[LiveRow], places: list[float], i: int) -> dict[str, Any]:
    colour = f"var(--c{1 + i % _COLOURS})"
    values = [100 * row.accuracy for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(rows[0].label),
        "x": places,
        "y": values,
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1.5, "width": 4, "color": colour,
            "array": [100 * row.high - y for row, y in zip(rows, values, strict=True)],
            "arrayminus": [y - 100 * row.low for row, y in zip(rows, values, strict=True)],
        },
        "marker": {"color": colour, "size": 9, "symbol": _SYMBOLS[i % len(_SYMBOLS)]},
        "customdata": [
            label(f"{policy}, budget {row.row.budget}: {row.correct}/{row.judged} right, 95% "
                  f"{100 * row.low:.1f} to {100 * row.high:.1f}") for row in rows
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _baseline(full: LiveRow, budgets: int) -> list[dict[str, Any]]:
    ends = [-0.5, budgets - 0.5]
    line = {"type": "scatter", "mode": "lines", "x": ends, "hoverinfo": "skip"}
    edge = {**line, "line": {"width": 0}, "showlegend": False}
    y = [100 * full.accuracy] * 2
    return [
        {**edge, "y": [100 * full.low] * 2},
        {**edge, "y": [100 * full.high] * 2, "fill": "tonexty", "fillcolor": "var(--bar)",
         "name": "95% interval of full", "showlegend": True},
        {**line, "y": y, "name": "full", "line": {"width": 2, "dash": "dash",
                                                  "color": "var(--c0)"}},
    ]  # fmt: skip


def time_split(rows: Sequence[LiveRow]) -> Figure:
    """Where the seconds went, and what no part is about."""
    figure = figures.time_split([row.row for row in rows])
    if any(row.other_s for row in rows):
        scale = scale_for("seconds", [row.row.time.total_s for row in rows])
        figure["data"].append({
            **figure["data"][0],
            "name": "Other",
            "x": [row.other_s / scale.size for row in rows],
            "marker": {"color": "var(--evicted)"},
            "hovertemplate": f"%{{customdata}}<br>Other %{{x:.4g}} {scale.unit}<extra></extra>",
        })  # fmt: skip
    return figure


def memories(report: LiveReport) -> list[dict[str, Any]]:
    """Bytes by tier of one search per policy and budget: the first that most of them have."""
    ran = [r for r in report.results if not r.infeasible and r.measured.series.time_s]
    counts: dict[int, int] = {}
    for result in ran:
        counts[result.episode] = counts.get(result.episode, 0) + 1
    order = sorted(counts, key=lambda episode: (-counts[episode], episode))
    found: dict[tuple[str, str], LiveResult] = {}
    for episode in order:
        for result in ran:
            if result.episode == episode:
                found.setdefault((result.policy, result.budget), result)
    items = []
    for (policy, budget), result in found.items():
        shown = episode_result(report, result)
        if budget == ANY:  # no budget, no line
            shown = replace(shown, kv_bytes_per_token=0)
        figure = figures.memory(shown, _POINTS)
        if not report.shadow:
            title = figure["layout"]["xaxis"]["title"]
            title["text"] = title["text"].removeprefix("simulated ")
        cell = policy if budget == ANY else f"{policy}, budget {budget}"
        items.append({"search": f"problem {result.episode}", "cell": cell, "figure": figure})
    return items
