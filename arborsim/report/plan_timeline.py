"""One machine over time: its memory by tier, and who does what when."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from arborsim.planning.results import PlanResult, Slice, Timeline
from arborsim.report.figures import Figure, packed
from arborsim.report.plan_figures import level
from arborsim.report.plan_words import numbered
from arborsim.report.units import Scale, quantity, scale_for
from arborsim.serving.options import KvPool

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
#: Bars that can be drawn and told apart, and rows of them.
_MOST_SLICES, _MOST_LANES = 2500, 48
_MOST_POINTS = 1000
_THICKNESS = {"down": 0.34, "up": 0.34}


def memory(result: PlanResult) -> Figure | None:
    """Stacked areas: what the HBM holds; host memory as a line beside them."""
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
    layers = [(name, np.full(len(keep), size), colour) for name, size, colour in _fixed(pool)]
    data = [
        _layer(name, packed(values / scale.size), x, colour, scale)
        for name, values, colour in (*layers, ("KV in HBM", kv, "hbm"))
    ]
    if host.any():
        data.append({
            "type": "scatter", "mode": "lines", "name": "KV in host memory", "x": x,
            "y": packed(host / scale.size), "line": {"color": "var(--ddr)", "width": 2},
            "hovertemplate": f"KV in host memory %{{y:.4g}} {scale.unit}<extra></extra>",
        })  # fmt: skip
    shapes = []
    if whole:
        top = whole / scale.size
        shapes.append(level(top))
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": f"simulated time ({time.unit})"}},
            "yaxis": {"title": {"text": f"memory ({scale.unit})"}, "rangemode": "tozero"},
            "shapes": shapes,
            "hovermode": "closest",
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


def _layer(name: str, y: Figure, x: Figure, colour: str, scale: Scale) -> Figure:
    return {
        "type": "scatter", "mode": "lines", "stackgroup": "hbm", "name": name, "x": x, "y": y,
        "line": {"width": 0, "color": f"var(--{colour})"}, "fillcolor": f"var(--{colour})",
        "hovertemplate": f"{name}: %{{y:.4g}} {scale.unit}<extra></extra>",
    }  # fmt: skip


def _thinned(line: Timeline) -> np.ndarray:
    """Indices of at most so many samples, evenly, with the fullest moment among them."""
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
    slices, until_s = _window(line.slices, line.until_s)
    lanes = _lanes(slices)
    kept = [each for each in slices if lanes.get(each.search, 0) < _MOST_LANES]
    time = scale_for("seconds", [until_s])
    rows = 1 + max((lanes.get(each.search, 0) for each in kept), default=0)
    data = []
    for kind, (title, colour) in KINDS.items():
        own = [each for each in kept if each.kind == kind]
        if own:
            data.append(_bars(own, lanes, title, colour, time, kind))
    batch = any(each.search < 0 for each in kept)
    layout = {
        "barmode": "overlay",
        "bargap": 0.1,
        "xaxis": {"title": {"text": f"simulated time ({time.unit})"},
                  "range": [0, until_s / time.size]},
        "yaxis": {"range": [rows - 0.5, -0.5 - batch], "zeroline": False, "showgrid": False,
                  "tickvals": [-1] if batch else [], "ticktext": ["batch"] if batch else []},
        "hovermode": "closest",
        "height": 170 + 14 * rows,
    }  # fmt: skip
    hidden = len({s.search for s in slices}) - len({s.search for s in kept})
    notes = [f"The first {quantity('seconds', until_s)} of the run with seed {line.seed}."]
    if hidden:
        notes.append(f"{hidden} searches that found no row are left out.")
    return {"data": data, "layout": layout}, " ".join(notes)


def _window(slices: Sequence[Slice], until_s: float) -> tuple[list[Slice], float]:
    """As many slices from the beginning as can be drawn, and up to when that is."""
    ordered = sorted(slices, key=lambda each: each.start_s)
    if len(ordered) <= _MOST_SLICES:
        return ordered, until_s
    return ordered[:_MOST_SLICES], ordered[_MOST_SLICES].start_s


def _lanes(slices: Sequence[Slice]) -> dict[int, int]:
    """A row for each search: the topmost one that is free from its first slice to its last."""
    spans: dict[int, tuple[float, float]] = {}
    for each in slices:
        first, last = spans.get(each.search, (each.start_s, each.end_s))
        spans[each.search] = (min(first, each.start_s), max(last, each.end_s))
    lanes = {-1: -1}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for search, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        if search < 0:
            continue
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[search] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, lanes[search]))
    return lanes


def _bars(
    slices: Sequence[Slice], lanes: dict[int, int], title: str, colour: str, time: Scale, kind: str
) -> Figure:
    starts = np.array([each.start_s for each in slices]) / time.size
    lengths = np.array([each.end_s - each.start_s for each in slices]) / time.size
    return {
        "type": "bar",
        "orientation": "h",
        "name": title,
        "base": packed(starts),
        "x": packed(lengths),
        "y": [lanes.get(each.search, 0) for each in slices],
        "width": _THICKNESS.get(kind, 0.82),
        "customdata": [_told(each) for each in slices],
        "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
        "hovertemplate": f"%{{customdata}}<extra>{title}</extra>",
    }


def _told(each: Slice) -> str:
    who = "batch" if each.search < 0 else f"search {each.search}"
    took = quantity("seconds", each.end_s - each.start_s)
    unit = _UNITS.get(each.kind)
    if not unit or not each.amount:
        return f"{who}: {took}"
    amount = quantity("bytes", each.amount) if unit == "bytes" else f"{each.amount:,} {unit}"
    return f"{who}: {took}, {amount}"
