"""Figures of a plan: times, use and parts of the time over loads, and one machine over time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from arborsim.core.units import Scale, quantity, scale_for
from arborsim.products.plan.results import CandidateResult, LoadPoint, PlanResult, Slice, Timeline
from arborsim.products.plan.words import (
    RESOURCES,
    cost,
    load_axis,
    numbered,
    saturates,
    short_names,
)
from arborsim.report import page
from arborsim.report.page import Figure
from arborsim.report.report import Choice

#: Of the limit: times beyond it say only that the machine is overloaded.
_ABOVE_LIMIT = 2.0
MOST_LINES = 6
#: Colours of the shares that are drawn (`Utilisation`), the last three where they are not zero.
_SHARES = {"hbm": "hbm", "memory": "c3", "compute": "c0"}
_IF_USED = {"host": "ddr", "pcie_down": "flight", "pcie_up": "c2"}
#: Of a load: the shape of its points, and what that means.
_VERDICTS = {
    "met": ("circle", "target met"),
    "target": ("x", "latency target missed"),
    "throughput": ("triangle-up", "searches arrive faster than they end"),
    "run length": ("diamond-open", "runs too short to tell"),
    "above a miss": ("square-open", "met, but a smaller load was missed"),
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
    leading = {row.number: place for place, row in enumerate(result.named())}
    rows = [row for row in result.met() if len(row.curve) > 1]
    return sorted(rows, key=lambda row: (leading.get(row.number, 2), *_rank(row)))


def _rank(row: CandidateResult) -> tuple[float, int]:
    """Cheapest first; without prices, fastest first."""
    if row.at_largest is None:
        return math.inf, row.number
    price = cost(row)
    return (-row.at_largest.served_per_s.value if math.isnan(price) else price), row.number


class TimeKind(NamedTuple):
    """A kind of time that is drawn over loads."""

    title: str
    axis: str
    read: Callable[[LoadPoint], float]  #: in seconds
    limit_s: float | None = None


def time_kinds(result: PlanResult) -> list[TimeKind]:
    """Per search first."""

    def p95(name: str) -> Callable[[LoadPoint], float]:
        return lambda point: float(getattr(point, name).p95)

    rank = result.target.of("search")
    search, at = f"arrival to answer, {rank:g}th percentile (s)", "95th percentile (s)"
    return [
        TimeKind("Per search", search, lambda p: p.at_percentile.value, result.search_limit_s),
        TimeKind("Per token", f"time per output token, {at}", p95("token_s"), result.token_limit_s),
        TimeKind(
            "First token",
            f"arrival to first token, {at}",
            p95("first_token_s"),
            result.first_token_limit_s,
        ),
        TimeKind("Waiting", f"arrival to admission, {at}", p95("waiting_s")),
    ]


def against_load(result: PlanResult) -> list[Choice]:
    """Times against load, one line per candidate; a plot per kind of time, with its limit."""
    rows = with_curves(result)[:MOST_LINES]
    names = short_names(rows)
    lines = [(names[row.number], row, row) for row in rows]
    points = [point for row in rows for point in row.curve]
    kinds = time_kinds(result) if rows else []
    return [Choice(over_load(result, k, lines, points), (k.title,)) for k in kinds]


def _verdict(row: CandidateResult, point: LoadPoint) -> str:
    """A name of `_VERDICTS`: whether the load is met, or why it is beyond the largest one."""
    if not point.meets:
        return "target"
    if row.largest is None or point.load <= row.largest * (1 + 1e-9):
        return "met"
    # Served in time, but such a run does not show that it goes on like this.
    return row.limited_by if row.limited_by in ("throughput", "run length") else "above a miss"


def scatter(
    name: str, x: Iterable[float], y: Iterable[float], mode: str, marker: Figure, **others: Any
) -> Figure:
    """Points, or a line through them, under a name in the legend."""
    drawn = {"x": [page.rounded(each) for each in x], "y": [page.rounded(each) for each in y]}
    named: Figure = {"type": "scatter", "mode": mode, "name": name, "marker": marker}
    return named | drawn | others


def legend_entry(name: str, paint: str, shape: str) -> Figure:
    """An entry of the legend without points."""
    marker = {"color": paint, "size": 10, "symbol": shape}
    return scatter(name, [math.nan], [math.nan], "markers", marker, hoverinfo="skip")


def curve(
    row: CandidateResult,
    read: Callable[[LoadPoint], float],
    name: str,
    number: int,
    unit: str,
    dashed: bool = False,
) -> Figure:
    """A line over loads; points tell what is served, whether that is in time, and what runs out."""
    verdicts = [_verdict(row, point) for point in row.curve]
    paint, dash = page.colour(number + 1), "dot" if dashed else "solid"
    texts = [
        [_VERDICTS[each][1], saturates(point), f"{point.served_per_s.value:.3g}"]
        for point, each in zip(row.curve, verdicts, strict=True)
    ]
    hover = (
        f"<b>{page.label(name)}</b><br>offered %{{x:.4g}} {unit}<br>served %{{customdata[2]}} "
        "searches/s<br>%{y:.4g} s<br>%{customdata[0]}<br>runs out first: %{customdata[1]}"
        "<extra></extra>"
    )
    return scatter(
        page.label(name),
        (point.load for point in row.curve),
        map(read, row.curve),
        "lines" if dashed else "lines+markers",
        {
            "color": paint,
            "size": [7 if each == "met" else 10 for each in verdicts],
            "symbol": [_VERDICTS[each][0] for each in verdicts],
        },
        line={"color": paint, "width": 1.5 if dashed else 2.2, "dash": dash},
        showlegend=not dashed,
        customdata=texts,
        hovertemplate=hover,
    )


def marks(rows: Iterable[CandidateResult]) -> list[Figure]:
    """Entries of the legend for the shapes of points beyond the largest load."""
    verdicts = {_verdict(row, point) for row in rows for point in row.curve} - {"met"}
    shapes = [shown for each, shown in _VERDICTS.items() if each in verdicts]
    return [legend_entry(text, "var(--soft)", shape) for shape, text in shapes]


def over_load(
    result: PlanResult,
    kind: TimeKind,
    lines: Sequence[tuple[str, CandidateResult, CandidateResult]],
    points: Sequence[LoadPoint],
    **loads: Any,
) -> Figure:
    """Times over loads, with their limit.

    A line has a name, a candidate, and the candidate as it was before, dotted if it is another.
    The axis ends above all `points`, or where the machine is overloaded; `loads` are settings of
    the axis of loads.
    """
    data = []
    for number, (name, row, before) in enumerate(lines):
        for one in (row,) if before is row else (before, row):
            data.append(curve(one, kind.read, name, number, result.unit, dashed=one is not row))
    data += marks([row for _, row, _ in lines])
    top = 1.08 * max(filter(math.isfinite, map(kind.read, points)), default=1.0) or 1.0
    if (limit := kind.limit_s) is not None:
        top = 1.25 * limit if top <= limit else min(top, _ABOVE_LIMIT * limit)
    x = page.axis(load_axis(result), rangemode="tozero", **loads)
    y = page.axis(kind.axis, range=[0, top])
    return page.figure(data, x, y, 420, **page.limit_line("target", kind.limit_s))


def saturation(result: PlanResult) -> list[Choice]:
    """A plot per candidate: how much of its machine it uses as the load grows."""
    return [
        Choice(_used(row, result), (row.name,), _first(row, result)) for row in with_curves(result)
    ]


def _used(row: CandidateResult, result: PlanResult) -> Figure:
    data = []
    for name, paint in (_SHARES | _IF_USED).items():
        values = [100 * getattr(point.used, name) for point in row.curve]
        if name in _IF_USED and not any(values):
            continue
        title, colour = RESOURCES[name][0].upper() + RESOURCES[name][1:], f"var(--{paint})"
        hover = f"{title} %{{y:.1f}} %<extra></extra>"
        line, marker = {"color": colour, "width": 2}, {"color": colour, "size": 6}
        loads = (point.load for point in row.curve)
        mode = "lines+markers"
        data.append(scatter(title, loads, values, mode, marker, line=line, hovertemplate=hover))
    x = page.axis(load_axis(result), rangemode="tozero")
    y = page.axis("used (%)", range=[0, 103])
    shapes = [] if row.largest is None else [page.upright(row.largest)]
    return page.figure(data, x, y, 380, hovermode="x unified", shapes=shapes)


def _first(row: CandidateResult, result: PlanResult) -> str:
    """One sentence: the busiest part along the curve, and what is that from which load on."""
    spans = groupby(row.curve, saturates)
    (what, _), *later = [(what, next(points).load) for what, points in spans]
    words = [f"At small loads the busiest part is {what}" if later else f"At every load: {what}"]
    words += [f"from {at:.3g} {result.unit} on, {what}" for what, at in later]
    return f"{'; '.join(words)}. The dashed line is the largest load that meets the target."


def time_split(result: PlanResult) -> Figure | None:
    """Horizontal bars at the largest load: shares of the time, what is left is idle."""
    met = sorted(result.met(), key=_rank)
    known = [(row, point) for row in met if (point := row.at_largest) and point.total_s > 0]
    rows = known[: page.MOST_BARS]
    if not rows:
        return None
    parts = [
        (title, [100 * getattr(point.busy, name) / point.total_s for _, point in rows], paint)
        for title, name, paint in _PARTS
    ]
    idle = [max(0.0, 100 - 100 * point.busy.total_s / point.total_s) for _, point in rows]
    parts.append(("Idle", idle, "line"))
    x = page.axis("share of the time (%)", range=[0, 100])
    short = list(short_names(row for row, _ in rows).values())
    shown = [part for part in parts if any(part[1])]
    return page.stacked_bars([row.name for row, _ in rows], shown, x, "%", short)


#: Kinds of `Slice`: title, colour, unit of its amount.
_KINDS = {
    "waiting": ("waiting", "evicted", ""),
    "prefill": ("prefill", "prefill", "tokens"),
    "recompute": ("recomputing", "rehydration", "tokens"),
    "decode": ("decode", "hbm", "sequences"),
    "policy": ("policy", "policy", "tokens"),
    "swap": ("swapping", "flight", "bytes"),
    "down": ("to host memory", "ddr", "bytes"),
    "up": ("from host memory", "quantised", "bytes"),
}
#: Bars that stay distinct, and rows of them.
_MOST_SLICES, _MOST_ROWS = 2500, 48
_MOST_POINTS = 1000
#: Rows above the searches: what concerns a link, or else the batch (-1).
_ABOVE = {"up": -2, "down": -3}
_SHARED = {-1: "batch", -2: "from host", -3: "to host"}


def memory(result: PlanResult) -> Figure | None:
    """Stacked areas: what the HBM holds; host memory as a line over them."""
    line = result.timeline
    if line is None or len(line.series.time_s) < 2:
        return None
    seconds, kv, host = (
        np.asarray(values, dtype=float)[_thinned(line)]
        for values in (line.series.time_s, line.series.hbm_kv_bytes, line.series.host_bytes)
    )
    pool = numbered(result, line.candidate).pool
    layers, whole = [("KV in HBM", kv, "hbm")], 0
    if pool is not None:
        whole, rest = pool.hbm_bytes, pool.workspace_bytes + pool.reserve_bytes
        fixed = (
            ("Weights", pool.weight_bytes, "prefill"),
            ("Workspace and reserve", rest, "decode"),
        )
        layers = [("KV in HBM", kv * pool.copies, "hbm")]
        layers = [(name, np.full(len(kv), float(n)), paint) for name, n, paint in fixed] + layers
    most = sum(values.max() for _, values, _ in layers)
    scale, time = scale_for("bytes", [whole, most, host.max()]), scale_for("seconds", seconds)
    x, top = page.packed(seconds / time.size), whole / scale.size
    data = [
        page.area(name, x, values / scale.size, paint, scale.unit) for name, values, paint in layers
    ]
    if host.any():
        drawn = {"x": x, "y": page.packed(host / scale.size), "mode": "lines", "type": "scatter"}
        look = {"name": "KV in host memory", "line": {"color": "var(--ddr)", "width": 2}}
        data.append(drawn | look | {"hovertemplate": f"%{{y:.4g}} {scale.unit}"})
    room: Figure = {"range": [0, 1.15 * top]} if whole else {"rangemode": "tozero"}
    x_axis = page.axis(f"simulated time ({time.unit})")
    y_axis = page.axis(f"memory ({scale.unit})", **room)
    limit = page.limit_line("HBM", top if whole else None)
    return page.figure(data, x_axis, y_axis, 400, hovermode="x unified", **limit)


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
    lanes = _lanes(slices)
    rows = [lanes.get(each.search, _ABOVE.get(each.kind, -1)) for each in slices]
    placed = [(row, each) for row, each in zip(rows, slices, strict=True) if row < _MOST_ROWS]
    time = scale_for("seconds", [until_s])
    by_kind = {kind: [pair for pair in placed if pair[1].kind == kind] for kind in _KINDS}
    data = [_bars(own, kind, time) for kind, own in by_kind.items() if own]
    used = {row for row, _ in placed}
    shared = {row: name for row, name in _SHARED.items() if row in used}
    bottom, top = 1 + max(used, default=0), min(shared, default=0)
    notes = []
    if (from_s, until_s) != (0.0, line.until_s):
        first, last = (quantity("seconds", end, 4) for end in (from_s, until_s))
        notes.append(f"Shown is the time from {first} to {last}.")
    if hidden := len({s.search for s in slices}) - len({s.search for _, s in placed}):
        notes.append(f"{hidden} searches that found no row are left out.")
    shown = [from_s / time.size, until_s / time.size]
    x = page.axis(f"simulated time ({time.unit})", range=shown)
    y = page.named_axis(list(shared), list(shared.values()), (bottom - 0.5, top - 0.5))
    height = 170 + 14 * (bottom - top)
    return page.figure(data, x, y, height, barmode="overlay"), " ".join(notes)


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
    cut = [
        replace(each, start_s=max(each.start_s, from_s), end_s=min(each.end_s, until_s))
        for each in shown
    ]
    return cut, from_s, until_s


def _lanes(slices: Sequence[Slice]) -> dict[int, int]:
    """A row for each search: the topmost one that is free from its first slice to its last."""
    spans: dict[int, tuple[float, float]] = {}
    for each in slices:
        if each.search >= 0:
            first, last = spans.get(each.search, (each.start_s, each.end_s))
            spans[each.search] = (min(first, each.start_s), max(last, each.end_s))
    lanes: dict[int, int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for search, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[search] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, lanes[search]))
    return lanes


def _bars(placed: Sequence[tuple[int, Slice]], kind: str, time: Scale) -> Figure:
    starts, ends = np.array([(each.start_s, each.end_s) for _, each in placed]).T
    title, paint, unit = _KINDS[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": title,
        "width": 0.8,
        "base": page.packed(starts / time.size),
        "x": page.packed((ends - starts) / time.size),
        "y": [row for row, _ in placed],
        "customdata": [_hover(row, each, unit) for row, each in placed],
        "marker": {"color": f"var(--{paint})", "line": {"width": 0}},
        "hovertemplate": f"%{{customdata}}<extra>{title}</extra>",
    }


def _hover(row: int, each: Slice, unit: str) -> str:
    who = _SHARED[row] if each.search < 0 else f"search {each.search}"
    took = quantity("seconds", each.end_s - each.start_s)
    if not unit or not each.amount:
        return f"{who}: {took}"
    amount = quantity("bytes", each.amount) if unit == "bytes" else f"{each.amount:,} {unit}"
    return f"{who}: {took}, {amount}"
