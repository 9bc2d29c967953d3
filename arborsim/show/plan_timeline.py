"""One machine over time: its memory by tier, and who does what when."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from arborsim.core.units import Scale, quantity, scale_for
from arborsim.machine.options import KvPool
from arborsim.plan.results import PlanResult, Slice, Timeline
from arborsim.show.figures import Figure, area, level, packed, said
from arborsim.show.plan_words import numbered

#: Kinds of `Slice`: title, colour.
KINDS = {
    "waiting": ("waiting", "evicted"),
    "prefill": ("prefill", "prefill"),
    "recompute": ("recomputing", "rehydration"),
    "decode": ("decode", "hbm"),
    "policy": ("policy", "policy"),
    "swap": ("swapping", "flight"),
    "down": ("to host memory", "ddr"),
    "up": ("from host memory", "quantised"),
}
_UNITS = {"prefill": "tokens", "recompute": "tokens", "policy": "tokens", "decode": "sequences",
          "swap": "bytes", "down": "bytes", "up": "bytes"}  # fmt: skip
#: Bars that stay distinct, and rows of them.
_MOST_SLICES, _MOST_ROWS = 2500, 48
_MOST_POINTS = 1000
#: Rows of what no single search does.
_ABOVE = {"up": -2, "down": -3}
_SHARED = {-1: "batch", -2: "from host", -3: "to host"}


def memory(result: PlanResult) -> Figure | None:
    """Stacked areas: what the HBM holds; host memory as a line over them."""
    line = result.timeline
    if line is None or len(line.series.time_s) < 2:
        return None
    keep = _thinned(line)
    kv = np.asarray(line.series.hbm_kv_bytes, dtype=float)[keep]
    host = np.asarray(line.series.host_bytes, dtype=float)[keep]
    pool = numbered(result, line.candidate).pool
    fixed = _fixed(pool)
    whole = pool.hbm_bytes if pool else 0
    scale = scale_for("bytes", [whole, kv.max() + sum(v for _, v, _ in fixed), host.max()])
    seconds = np.asarray(line.series.time_s, dtype=float)[keep]
    time = scale_for("seconds", seconds.tolist())
    x = packed(seconds / time.size)
    layers = [(name, np.full(len(keep), size), paint) for name, size, paint in fixed]
    data = [
        area(name, x, values / scale.size, paint, scale.unit)
        for name, values, paint in (*layers, ("KV in HBM", kv, "hbm"))
    ]
    if host.any():
        data.append({
            "type": "scatter", "mode": "lines", "name": "KV in host memory", "x": x,
            "y": packed(host / scale.size), "line": {"color": "var(--ddr)", "width": 2},
            "hovertemplate": f"%{{y:.4g}} {scale.unit}",
        })  # fmt: skip
    top = whole / scale.size
    axis: Figure = {"range": [0, 1.15 * top]} if whole else {"rangemode": "tozero"}
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": f"simulated time ({time.unit})"}},
            "yaxis": {"title": {"text": f"memory ({scale.unit})"}, **axis},
            "shapes": [level(top)] if whole else [],
            "annotations": [said("HBM", top)] if whole else [],
            "hovermode": "x unified",
            "height": 400,
        },
    }


def _fixed(pool: KvPool | None) -> list[tuple[str, float, str]]:
    """What of the HBM is not for keys and values, from the bottom."""
    if pool is None:
        return []
    return [
        ("Weights", float(pool.weight_bytes), "prefill"),
        ("Workspace and reserve", float(pool.workspace_bytes + pool.reserve_bytes), "decode"),
    ]


def _thinned(line: Timeline) -> np.ndarray:
    """Indices of at most `_MOST_POINTS` samples, evenly, with the fullest moment among them."""
    n = len(line.series.time_s)
    if n <= _MOST_POINTS:
        return np.arange(n)
    even = np.linspace(0, n - 1, _MOST_POINTS - 1).astype(int)
    return np.unique(np.append(even, int(np.argmax(line.series.hbm_kv_bytes))))


def timeline(result: PlanResult) -> tuple[Figure | None, str]:
    """Bars over time, a row per place that a search takes, and a note on what is left out."""
    line = result.timeline
    if line is None or not line.slices:
        return None, ""
    slices, from_s, until_s = _window(line.slices, line.until_s)
    places = _places(slices)
    kept = [each for each in slices if _row(each, places) < _MOST_ROWS]
    time = scale_for("seconds", [until_s])
    rows = 1 + max((_row(each, places) for each in kept), default=0)
    data = [
        _bars([each for each in kept if each.kind == kind], places, kind, time)
        for kind in KINDS
        if any(each.kind == kind for each in kept)
    ]
    shared = {row: name for row, name in _SHARED.items()
              if any(_row(each, places) == row for each in kept)}  # fmt: skip
    top = min(shared, default=0)
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": f"simulated time ({time.unit})"},
                  "range": [from_s / time.size, until_s / time.size]},
        "yaxis": {"range": [rows - 0.5, top - 0.5], "zeroline": False, "showgrid": False,
                  "tickvals": list(shared), "ticktext": list(shared.values())},
        "hovermode": "closest",
        "height": 170 + 14 * (rows - top),
    }  # fmt: skip
    notes = []
    if (from_s, until_s) != (0.0, line.until_s):
        ends = (quantity("seconds", from_s, 4), quantity("seconds", until_s, 4))
        notes.append(f"Shown is the time from {ends[0]} to {ends[1]}.")
    if hidden := len({s.search for s in slices}) - len({s.search for s in kept}):
        notes.append(f"{hidden} searches that found no row are left out.")
    return {"data": data, "layout": layout}, " ".join(notes)


def _window(slices: Sequence[Slice], until_s: float) -> tuple[list[Slice], float, float]:
    """As many slices as can be drawn, from the middle of the run on: from when to when, cut off."""
    ordered = sorted(slices, key=lambda each: each.start_s)
    if len(ordered) <= _MOST_SLICES:
        return ordered, 0.0, until_s
    from_s = until_s / 2
    going_on = [each for each in ordered if each.start_s < from_s < each.end_s]
    later = [each for each in ordered if each.start_s >= from_s]
    most = max(_MOST_SLICES - len(going_on), 1)
    until_s = later[most].start_s if len(later) > most else until_s
    shown = [*going_on, *later[:most]]
    return [replace(each, start_s=max(each.start_s, from_s), end_s=min(each.end_s, until_s))
            for each in shown], from_s, until_s  # fmt: skip


def _row(each: Slice, places: dict[int, int]) -> int:
    """What concerns the batch, or a link, stands above the searches."""
    return places[each.search] if each.search >= 0 else _ABOVE.get(each.kind, -1)


def _places(slices: Sequence[Slice]) -> dict[int, int]:
    """A row for each search: the topmost one that is free from its first slice to its last."""
    spans: dict[int, tuple[float, float]] = {}
    for each in slices:
        first, last = spans.get(each.search, (each.start_s, each.end_s))
        spans[each.search] = (min(first, each.start_s), max(last, each.end_s))
    places: dict[int, int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for search, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        if search < 0:
            continue
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        places[search] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, places[search]))
    return places


def _bars(slices: Sequence[Slice], places: dict[int, int], kind: str, time: Scale) -> Figure:
    starts = np.array([each.start_s for each in slices]) / time.size
    lengths = np.array([each.end_s - each.start_s for each in slices]) / time.size
    title, colour = KINDS[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": title,
        "base": packed(starts),
        "x": packed(lengths),
        "y": [_row(each, places) for each in slices],
        "width": 0.8,
        "customdata": [_told(each) for each in slices],
        "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
        "hovertemplate": f"%{{customdata}}<extra>{title}</extra>",
    }


def _told(each: Slice) -> str:
    who = _SHARED[_ABOVE.get(each.kind, -1)] if each.search < 0 else f"search {each.search}"
    took = quantity("seconds", each.end_s - each.start_s)
    unit = _UNITS.get(each.kind)
    if not unit or not each.amount:
        return f"{who}: {took}"
    amount = quantity("bytes", each.amount) if unit == "bytes" else f"{each.amount:,} {unit}"
    return f"{who}: {took}, {amount}"
