"""Figures of a plan against its load: times, what is used up, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from arborsim.plan.results import CandidateResult, LoadPoint, PlanResult, compared_cost
from arborsim.show.figures import (
    MOST_BARS,
    Figure,
    colour,
    label,
    level,
    rounded,
    said,
    stacked_bars,
    upright,
)
from arborsim.show.plan_words import VERDICTS, load_axis, middle, saturates, told_apart, verdict

#: Of the limit: times beyond it say only that the machine is overloaded.
_ABOVE_LIMIT = 2.0
_MOST_LINES = 6

#: Title, attribute of `Utilisation`, colour.
SHARES = (
    ("HBM space", "hbm", "hbm"),
    ("HBM bandwidth", "memory", "c3"),
    ("Compute", "compute", "c0"),
    ("Host memory", "host", "ddr"),
    ("PCIe to host", "pcie_down", "flight"),
    ("PCIe from host", "pcie_up", "c2"),
)
#: Shapes of points, by `VERDICTS`.
SYMBOLS = {
    "met": "circle",
    "target": "x",
    "throughput": "triangle-up",
    "run length": "diamond-open",
    "above a miss": "square-open",
}
_PARTS = (
    ("Prefill", "prefill_s", "prefill"),
    ("Decode", "decode_s", "decode"),
    ("Recomputing", "recompute_s", "rehydration"),
    ("Waiting for transfers", "exposed_s", "transfer"),
    ("Policy", "policy_s", "policy"),
)


def with_curves(result: PlanResult) -> list[CandidateResult]:
    """Candidates that were served under several loads: the recommended one, then the cheapest."""
    leading = (result.recommendation.candidate, result.recommendation.alternative)
    rows = [row for row in result.met() if len(row.curve) > 1]
    return sorted(
        rows,
        key=lambda row: (leading.index(row.number) if row.number in leading else 2, *_rank(row)),
    )


def against_load(result: PlanResult) -> list[dict[str, Any]]:
    """Times against load, one line per candidate; a plot per kind of time, with its limit."""
    rank = f"{result.percentile:g}th percentile"
    kinds: tuple[tuple[str, str, Callable[[LoadPoint], float], float | None], ...] = (
        ("Per search", f"arrival to answer, {rank} (s)", lambda p: p.at_percentile.value,
         result.search_limit_s),
        ("Per token", "time per output token, 95th percentile (s)", lambda p: p.token_s.p95,
         result.token_limit_s),
        ("First token", "arrival to first token, 95th percentile (s)",
         lambda p: p.first_token_s.p95, None),
        ("Waiting", "arrival to admission, 95th percentile (s)", lambda p: p.waiting_s.p95, None),
    )  # fmt: skip
    rows = with_curves(result)[:_MOST_LINES]
    if not rows:
        return []
    return [
        {"title": title, "figure": _curves(rows, result, axis, read, limit)}
        for title, axis, read, limit in kinds
    ]


def _curves(
    rows: Sequence[CandidateResult],
    result: PlanResult,
    axis: str,
    read: Callable[[LoadPoint], float],
    limit: float | None,
) -> Figure:
    names = told_apart(rows)
    values = [read(point) for row in rows for point in row.curve]
    data = [
        curve(row, read, names[row.number], number, result.unit) for number, row in enumerate(rows)
    ]
    layout = over_load(result, axis, _top(values, limit), limit)
    return {"data": data + marks(rows), "layout": layout}


def over_load(result: PlanResult, axis: str, top: float, limit: float | None) -> Figure:
    """The layout of times over loads, with the limit as a line."""
    return {
        "xaxis": {"title": {"text": load_axis(result)}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": label(axis)}, "range": [0, top]},
        "shapes": [] if limit is None else [level(limit)],
        "annotations": [] if limit is None else [said("target", limit)],
        "hovermode": "closest",
        "height": 420,
    }


def _top(values: Sequence[float], limit: float | None) -> float:
    """End of an axis of times: the limit with some room, or everything."""
    known = [value for value in values if math.isfinite(value)]
    largest = 1.08 * max(known, default=1.0) or 1.0
    if limit is None or largest <= limit:
        return largest if limit is None else 1.25 * limit
    return min(largest, _ABOVE_LIMIT * limit)


def curve(
    row: CandidateResult, read: Callable[[LoadPoint], float], name: str, number: int, unit: str,
    dashed: bool = False,
) -> Figure:  # fmt: skip
    """A line over loads; points say what is served, whether that is in time, and what runs out."""
    points, told = row.curve, [verdict(row, point) for point in row.curve]
    paint = colour(number + 1)
    return {
        "type": "scatter",
        "mode": "lines" if dashed else "lines+markers",
        "name": label(name),
        "showlegend": not dashed,
        "x": [rounded(point.load) for point in points],
        "y": [rounded(read(point)) for point in points],
        "customdata": [
            [VERDICTS[each], saturates(point), f"{point.served_per_s.value:.3g}"]
            for point, each in zip(points, told, strict=True)
        ],
        "line": {"color": paint, "width": 1.5 if dashed else 2.2,
                 "dash": "dot" if dashed else "solid"},
        "marker": {"color": paint, "size": [7 if each == "met" else 10 for each in told],
                   "symbol": [SYMBOLS[each] for each in told]},
        "hovertemplate": f"<b>{label(name)}</b><br>offered %{{x:.4g}} {unit}<br>"
        "served %{customdata[2]} searches/s<br>%{y:.4g} s<br>%{customdata[0]}<br>"
        "runs out first: %{customdata[1]}<extra></extra>",
    }  # fmt: skip


def marks(rows: Sequence[CandidateResult]) -> list[Figure]:
    """Entries of the legend for the shapes of points beyond the largest load."""
    told = {verdict(row, point) for row in rows for point in row.curve}
    return [
        {
            "type": "scatter", "mode": "markers", "name": VERDICTS[each], "x": [None], "y": [None],
            "marker": {"color": "var(--soft)", "size": 10, "symbol": symbol}, "hoverinfo": "skip",
        }
        for each, symbol in SYMBOLS.items() if each in told - {"met"}
    ]  # fmt: skip


def saturation(result: PlanResult) -> list[dict[str, Any]]:
    """What a candidate uses of its machine as the load grows: a plot each."""
    rows = with_curves(result)
    names = {row.number: row.name for row in rows}
    return [{"cell": names[row.number], "figure": _used(row, result), "text": _first(row, result)}
            for row in rows]  # fmt: skip


def _used(row: CandidateResult, result: PlanResult) -> Figure:
    data = []
    for title, attribute, paint in SHARES:
        values = [100 * getattr(point.used, attribute) for point in row.curve]
        if attribute in ("host", "pcie_down", "pcie_up") and not any(values):
            continue
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": title,
            "x": [rounded(point.load) for point in row.curve],
            "y": [rounded(value) for value in values],
            "line": {"color": f"var(--{paint})", "width": 2},
            "marker": {"color": f"var(--{paint})", "size": 6},
            "hovertemplate": f"{title} %{{y:.1f}} %<extra></extra>",
        })  # fmt: skip
    shapes = [] if row.largest is None else [upright(row.largest)]
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": load_axis(result)}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "used (%)"}, "range": [0, 103]},
            "shapes": shapes,
            "hovermode": "x unified",
            "height": 380,
        },
    }  # fmt: skip


def _first(row: CandidateResult, result: PlanResult) -> str:
    """What runs out along the curve, in a sentence."""
    stretches: list[tuple[str, float]] = []
    for point in row.curve:
        if not stretches or stretches[-1][0] != saturates(point):
            stretches.append((saturates(point), point.load))
    (what, _), *later = stretches
    words = [f"At small loads the busiest part is {what}" if later else f"At every load: {what}"]
    words += [f"from {at:.3g} {result.unit} on, {what}" for what, at in later]
    return f"{'; '.join(words)}. The dashed line is the largest load that meets the target."


def time_split(result: PlanResult) -> Figure | None:
    """Horizontal bars at the largest load: shares of the time, what is left is idle."""
    rows = sorted(
        (row for row in result.met() if row.at_largest is not None and row.at_largest.total_s > 0),
        key=_rank,
    )[:MOST_BARS]
    if not rows:
        return None
    points = [row.at_largest for row in rows if row.at_largest is not None]
    busy = [100 * point.busy.total_s / point.total_s for point in points]
    parts = [
        (title, [100 * getattr(point.busy, name) / point.total_s for point in points], paint)
        for title, name, paint in _PARTS
    ]
    parts.append(("Idle", [max(0.0, 100 - share) for share in busy], "line"))
    axis = {"title": {"text": "share of the time (%)"}, "range": [0, 100]}
    short = told_apart(rows)
    return stacked_bars(
        [row.name for row in rows], [part for part in parts if any(part[1])], axis, "%",
        [short[row.number] for row in rows],
    )  # fmt: skip


def _rank(row: CandidateResult) -> tuple[float, int]:
    """Cheapest first; without prices, fastest first."""
    if row.at_largest is None:
        return math.inf, row.number
    cost = middle(compared_cost(row))
    return (-row.at_largest.served_per_s.value if math.isnan(cost) else cost), row.number


def time_note(result: PlanResult) -> str:
    """What of the bars is shown."""
    left = len(result.met()) - MOST_BARS
    return f"{left} more candidates are in the table." if left > 0 else ""


def load_note(result: PlanResult) -> str:
    """Which of the lines are shown."""
    left = len(with_curves(result)) - _MOST_LINES
    return (
        f"Shown are the recommended candidate, its alternative, and the cheapest others; {left} "
        "more are in the table."
        if left > 0
        else ""
    )
