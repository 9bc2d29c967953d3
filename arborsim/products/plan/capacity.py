"""Figures of what machines give for their price: throughput against speed, memory, costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from arborsim.core.units import quantity, scale_for
from arborsim.products.plan.costs import compared_point, paid, ranked
from arborsim.products.plan.figures import legend_entry, scatter
from arborsim.products.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.products.plan.words import (
    at_load,
    load_of,
    middle,
    money,
    rate_of,
    short_names,
    tokens_per_gpu,
)
from arborsim.report import page
from arborsim.report.page import Figure

#: Fewer points than this are sentences, not a chart.
FEWEST = 3


class Spot(NamedTuple):
    """A candidate at one load."""

    per_user: float  #: output tokens per second that one user sees
    per_gpu: float  #: output tokens per second of each GPU
    row: CandidateResult
    point: LoadPoint


def spots(result: PlanResult) -> list[Spot]:
    """Every load at which a candidate met the target."""
    found = {}
    for row in result.met():
        for point in (row.at_stated, row.at_largest, *row.curve):
            if point is not None and point.meets:
                spot = Spot(point.per_user_s, tokens_per_gpu(row, point), row, point)
                if math.isfinite(spot.per_user) and math.isfinite(spot.per_gpu):
                    found[row.number, point.load] = spot
    return list(found.values())


def frontier(found: Sequence[Spot]) -> list[Spot]:
    """Those that no other one beats in both, the fastest per user last."""
    best: list[Spot] = []
    for spot in sorted(found, key=lambda each: (-each.per_user, -each.per_gpu)):
        if not best or spot.per_gpu > best[-1].per_gpu:
            best.append(spot)
    return best[::-1]


def throughput(result: PlanResult) -> Figure | None:
    """Tokens per second of a GPU against those that a user sees, with what nothing beats."""
    found = spots(result)
    if len(found) < FEWEST:
        return None
    machines = list(dict.fromkeys(spot.row.machine for spot in found))
    policies = list(dict.fromkeys(spot.row.policy for spot in found))
    hover = "<b>%{customdata}</b><br>%{x:.4g} tokens/s per user<br>%{y:.4g} per GPU<extra></extra>"
    data = []
    for place, machine in enumerate(machines):
        own = [spot for spot in found if spot.row.machine == machine]
        shapes = [page.symbol(policies.index(spot.row.policy)) for spot in own]
        marker = {"size": 9, "color": page.colour(place + 1), "symbol": shapes}
        texts = [f"{page.label(s.row.name)}, {load_of(s.point.load, result)}" for s in own]
        x, y = [s.per_user for s in own], [s.per_gpu for s in own]
        look = {"customdata": texts, "hovertemplate": hover}
        data.append(scatter(page.label(machine), x, y, "markers", marker, **look))
    if len(policies) > 1:
        shown = ((name, page.symbol(place)) for place, name in enumerate(policies))
        data += [legend_entry(page.label(name), "var(--soft)", shape) for name, shape in shown]
    best = frontier(found)
    line: Figure = {"width": 3, "color": "var(--soft)", "dash": "dot"}
    x, y = [s.per_user for s in best], [s.per_gpu for s in best]
    edge = scatter("frontier", x, y, "lines", {}, line=line, hoverinfo="skip")
    across = page.axis("output tokens/s per user (1 / TPOT)", rangemode="tozero")
    up = page.axis("output tokens/s per GPU", rangemode="tozero")
    return page.figure([*data, edge], across, up, 420)


def throughput_note(result: PlanResult) -> str:
    """How to read the frontier, with its fastest and its fullest point in words."""
    best = frontier(spots(result))
    if not best:
        return ""
    ends = [best[0], best[-1]] if len(best) > 1 else best
    said = " to ".join(
        f"{quantity('seconds', 1 / each.per_user)} per token at {each.per_gpu:,.0f} tokens/s per "
        f"GPU ({each.row.name}, {rate_of(each.point.load, result)})"
        for each in ends
    )
    return (
        "Each point is a load that meets the target; no point is to the right of and above the "
        f"dotted line. Along it: {said}."
    )


def memory_parts(result: PlanResult) -> Figure | None:
    """The content of each machine's HBM at the largest load, by candidate."""
    rows = [row for row in ranked(result) if row.pool is not None and row.at_largest is not None]
    rows = rows[: page.MOST_BARS]
    if not rows:
        return None
    scale = scale_for("bytes", [row.pool.hbm_bytes / row.gpus for row in rows if row.pool])
    parts: dict[str, tuple[str, list[float]]] = {
        "Weights": ("prefill", []),
        "Keys and values, mean": ("hbm", []),
        "Their room at peaks": ("evicted", []),
        "Workspace": ("decode", []),
        "Reserve": ("line", []),
    }
    for row in rows:
        assert row.pool is not None
        assert row.at_largest is not None
        pool = row.pool
        room = pool.hbm_bytes - pool.weight_bytes - pool.workspace_bytes - pool.reserve_bytes
        held = row.at_largest.used.hbm * room
        values = (pool.weight_bytes, held, room - held, pool.workspace_bytes, pool.reserve_bytes)
        for (_, drawn), value in zip(parts.values(), values, strict=True):
            drawn.append(value / scale.size / row.gpus)
    shown = [(title, values, paint) for title, (paint, values) in parts.items()]
    axis = page.axis(f"HBM of one GPU ({scale.unit})", rangemode="tozero")
    short = list(short_names(rows).values())
    return page.stacked_bars([row.name for row in rows], shown, axis, scale.unit, short)


def costs(result: PlanResult) -> Figure | None:
    """The cost of 1,000 under each candidate, with ranges of prices and of seconds' errors."""
    known = []
    for row in ranked(result)[: page.MOST_BARS]:
        point = compared_point(row)
        bounds = None if point is None else paid(row, point, result.unit)
        if bounds is not None:
            known.append((row, bounds))
    if len(known) < FEWEST - 1:
        return None
    short = short_names(ranked(result))  # as on the other charts
    names = [short[row.number] for row, _ in known]
    axis = page.axis(
        f"cost of 1,000 {result.noun}{at_load(result)} ({result.currency})", rangemode="tozero"
    )
    values = [middle(bounds) for _, bounds in known]
    one = [("middle of the range", values, "c1")]
    made = page.stacked_bars([row.name for row, _ in known], one, axis, result.currency, names)
    half = [(high - low) / 2 for _, (low, high) in known]
    made["data"][0]["error_x"] = {
        "type": "data",
        "array": [page.rounded(each) for each in half],
        "color": "var(--ink)",
        "thickness": 1.5,
        "width": 4,
    }
    made["data"][0]["customdata"] = [
        page.label(money(bounds, result.currency)) for _, bounds in known
    ]
    made["data"][0]["hovertemplate"] = "%{customdata}<extra></extra>"
    return made
