"""The figures of a replay's page: what memory buys, policies by budgets, time, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from arborsim.core.measurements import thinned
from arborsim.core.units import quantity, scale_for
from arborsim.play.results import BASELINE, EpisodeResult, Row
from arborsim.products.replay import answers_words
from arborsim.products.replay.tables import COLUMNS
from arborsim.report import page
from arborsim.report.report import Choice
from arborsim.report.table import Column, scales
from arborsim.report.words import listed, nats

R = TypeVar("R", bound=Row)

#: Settings that differ by less than this share of full retention's memory need the same.
_SAME_MEMORY = 0.005
#: Numbers in markers that are as near, across and up, cover each other on a phone.
_NEAR = (0.04, 0.05)
_READABLE = "Attention kept: how much of what the recorded model looked at was still readable."

_PARTS = (
    ("Prefill", "prefill_s", "prefill"),
    ("Decode", "decode_s", "decode"),
    ("Rehydration", "rehydration_s", "rehydration"),
    ("Exposed transfer", "exposed_transfer_s", "transfer"),
    ("Policy", "policy_s", "policy"),
)
_LAYERS = (
    ("KV pages in HBM", "hbm_kv_bytes", "hbm"),
    ("Staging buffers (HBM)", "staging_bytes", "staging"),
    ("In flight to DDR (HBM)", "in_flight_bytes", "flight"),
    ("DDR", "ddr_bytes", "ddr"),
)


def time_splits(
    rows: Sequence[R],
    other_s: Callable[[R], float] = lambda row: 0.0,
    labels: tuple[str, ...] = (),
) -> list[Choice]:
    """One figure of the rows of a trace, or one per budget if there are too many bars.

    `other_s` is the time of a row that none of its parts is about.
    """
    if len(rows) <= page.MOST_BARS:
        return [Choice(_time_split(rows, other_s), (*labels, "all"))]
    budgets = dict.fromkeys(row.budget for row in rows if not row.is_baseline)
    groups = {b: [r for r in rows if r.is_baseline or r.budget == b] for b in budgets}
    return [Choice(_time_split(own, other_s), (*labels, b)) for b, own in groups.items()]


def _time_split(rows: Sequence[R], other_s: Callable[[R], float]) -> page.Figure:
    """Horizontal bars, one per policy and budget: where the seconds went."""
    scale = scale_for("seconds", [row.time.total_s + other_s(row) for row in rows])
    parts = [
        (title, [getattr(row.time, part) / scale.size for row in rows], paint)
        for title, part, paint in _PARTS
    ]
    parts.append(("Other", [other_s(row) / scale.size for row in rows], "evicted"))
    names = [f"{row.label}  {row.budget_label}" for row in rows]
    known = [part for part in parts if part[0] in ("Prefill", "Decode") or any(part[1])]
    across = page.axis(f"time over all searches ({scale.unit})")
    return page.stacked_bars(names, known, across, scale.unit)


def memory(result: EpisodeResult, points: int, clock: str = "simulated time") -> page.Figure:
    """Stacked areas of one search: bytes by tier over time, and the budget.

    At most about `points` samples are kept; the peaks among them.
    """
    series = result.measured.series
    keep = thinned(series, points)
    layers = [
        (name, np.asarray(getattr(series, field), dtype=float)[keep], paint)
        for name, field, paint in _LAYERS
    ]
    total = np.sum([values for _, values, _ in layers], axis=0)
    bounded = result.policy != BASELINE
    budget = result.budget_tokens * result.kv_bytes_per_token if bounded else 0
    scale = scale_for("bytes", [*total.tolist(), budget])
    times = np.asarray(series.time_s, dtype=float)[keep]
    seconds = scale_for("seconds", times.tolist())
    x = page.packed(times / seconds.size)
    data = [
        page.area(name, x, values / scale.size, paint, scale.unit)
        for name, values, paint in layers
        if paint == "hbm" or values.any()
    ]
    if budget and len(times):
        ends, level = [0.0, float(times[-1] / seconds.size)], [budget / scale.size] * 2
        line = {"width": 2, "dash": "dash", "color": "var(--ink)"}
        data.append(page.scatter("HBM budget", ends, level, line=line, hoverinfo="skip"))
    y = page.axis(f"KV cache ({scale.unit})", rangemode="tozero")
    return page.figure(data, page.axis(f"{clock} ({seconds.unit})"), y, 420, hovermode="x unified")


@dataclass(frozen=True)
class Metric:
    """A figure that policies are compared by."""

    column: Column[Row]
    title: str  #: on a button
    axis: str
    higher: bool  #: whether more is better

    def value(self, row: Row) -> float:
        """For a figure: per cent, or times full retention."""
        value = self.column.value(row)
        return 100 * value if self.column.kind == "percent" else value

    def show(self, row: Row, rows: Sequence[Row]) -> str:
        """For people, in the unit of `rows`."""
        if self is KL:
            return f"{nats(self.value(row))} nats"
        if self is RIGHT and self.value(row) == 0:  # a count of none is no "nothing"
            return "0%"
        scale = scales([self.column], rows)[self.column.key]
        unit = {"x": "×", "%": "%"}.get(scale.unit, f" {scale.unit}")
        return f"{scale.show(self.column.value(row))}{unit}"


def _accuracy(row: Row) -> float:
    return row.answers.accuracy if row.answers and row.answers.exact else math.nan


_RIGHT = replace(COLUMNS["right"], kind="percent", text=None, value=_accuracy)
RIGHT = Metric(_RIGHT, "Right answers", "right answers, counted live (%)", higher=True)
KL = Metric(
    replace(COLUMNS["kl"], text=None), "Divergence", "KL to full retention (nats)", higher=False
)
KEPT = Metric(COLUMNS["kept"], "Attention kept", "attention kept (%)", higher=True)
ERROR = Metric(COLUMNS["error"], "Output error", "relative output error (%)", higher=False)
TIMES = Metric(COLUMNS["time_vs_full"], "Time", "time relative to full retention", higher=False)
RATE = Metric(
    COLUMNS["full_rate_vs"],
    "Tokens/s, GPU full",
    "tokens/s with the GPU full, relative to full retention",
    higher=True,
)
PEAK = Metric(COLUMNS["hbm_vs_full"], "Peak HBM", "peak KV in HBM (% of full)", higher=False)

#: What says what a policy is worth, the best first.
WORTH = (RIGHT, KL, KEPT, ERROR)


def known_of(rows: Sequence[Row], metrics: Sequence[Metric]) -> list[Metric]:
    """Those of which some row has the figure."""
    return [metric for metric in metrics if known(metric, rows)]


def known(metric: Metric, rows: Sequence[Row]) -> bool:
    """Whether any row has the figure."""
    return any(not math.isnan(metric.value(row)) for row in rows)


def several(rows: Sequence[Row], metric: Metric) -> bool:
    """Whether there is enough to draw: two points show nothing that the table does not."""
    real = (row for row in rows if not (row.is_bound or row.idle))
    return sum(not math.isnan(metric.value(row)) for row in real) > 2


def efficient(rows: Sequence[Row], metric: Metric) -> list[Row]:
    """Rows that no other one beats in memory and `metric` at once, least memory first.

    The oracle, which cannot be built, does not compete.  Of rows that need the same memory, to half
    a per cent of full retention's, the best one stands for all.  More right answers count as better
    only where they are so visibly (`Score.beats`), or cannot be compared.
    """
    able = [r for r in rows if not r.is_bound and not math.isnan(metric.value(r))]
    sign = -1.0 if metric.higher else 1.0
    least = _SAME_MEMORY * max((r.peak_hbm_kv_bytes for r in able), default=0)

    def rank(row: Row) -> tuple[float, float, str]:
        step = round(row.peak_hbm_kv_bytes / least) if least else 0
        return step, sign * metric.value(row), row.policy

    found: list[Row] = []
    for row in sorted(able, key=rank):
        if not found or _better(row, found[-1], metric):
            found.append(row)
    return found


def _better(row: Row, other: Row, metric: Metric) -> bool:
    if metric is RIGHT and row.answers and other.answers and row.answers.alike(other.answers):
        return row.answers.beats(other.answers)
    sign = -1.0 if metric.higher else 1.0
    return sign * metric.value(row) < sign * metric.value(other) - 1e-9


def _no_different(row: Row, rows: Sequence[Row], metric: Metric) -> str:
    """Policies of as much memory whose right answers are not visibly other than the row's."""
    if metric is not RIGHT or row.answers is None:
        return ""
    size = row.peak_hbm_kv_bytes
    same = [
        each.policy
        for each in rows
        if each.policy != row.policy
        and each.answers
        and abs(each.peak_hbm_kv_bytes - size) <= 2 * _SAME_MEMORY * size
        and each.answers.alike(row.answers)
        and not row.answers.beats(each.answers)
    ]
    return f"; not visibly different: {listed(dict.fromkeys(same))}" if same else ""


class _Plane:
    """Rows of a trace as markers: memory across, a metric up."""

    def __init__(self, rows: Sequence[Row], metric: Metric) -> None:
        self.rows, self.metric = rows, metric
        self._relative = known(PEAK, rows)
        self._size = scales([COLUMNS["peak_hbm"]], rows)["peak_hbm"]

    @property
    def axes(self) -> tuple[page.Figure, page.Figure]:
        title = PEAK.axis if self._relative else f"peak KV in HBM ({self._size.unit})"
        # Shares from none to all: an axis of the values alone makes differences where none are.
        share = self.metric in (RIGHT, KEPT)
        up = {"range": [-3, 103], "zeroline": False} if share else {"rangemode": "tozero"}
        return page.axis(title, rangemode="tozero"), page.axis(self.metric.axis, **up)

    def across(self, row: Row) -> float:
        return PEAK.value(row) if self._relative else row.peak_hbm_kv_bytes / self._size.size

    def words(self, row: Row) -> str:
        peak = quantity("bytes", row.peak_hbm_kv_bytes)
        if self._relative:
            peak = f"{PEAK.show(row, self.rows)} of full retention's memory ({peak})"
        name = row.policy if row.is_baseline else f"{row.label} at budget {row.budget}"
        return f"{name}: {peak}, {self.metric.title.lower()} {self.metric.show(row, self.rows)}"

    def markers(self, rows: Sequence[Row]) -> page.Figure:
        names = [r.label if r.is_baseline else f"{r.label}, budget {r.budget}" for r in rows]
        return {
            "x": [round(self.across(row), 4) for row in rows],
            "y": [round(self.metric.value(row), 5) for row in rows],
            "customdata": list(map(page.label, names)),
            "hovertemplate": "<b>%{customdata}</b><br>memory %{x:.4g}<br>"
            f"{self.metric.axis} %{{y:.4g}}<extra></extra>",
        }

    def scatter(
        self, rows: Sequence[Row], name: str, marker: page.Figure, **look: Any
    ) -> page.Figure:
        found = [row.answers for row in rows if row.answers]
        if self.metric is RIGHT and len(found) == len(rows):
            look["error_y"] = page.whiskers(found, marker["color"])
        drawn = {"type": "scatter", "mode": "lines+markers", "name": name, "marker": marker}
        return {**drawn, **look, **self.markers(rows)}


def pareto(rows: Sequence[Row], metric: Metric, trace: str = "") -> Choice:
    """The plot of one trace; the efficient settings in words; each policy can be highlighted."""
    plane = _Plane(rows, metric)
    shown = [row for row in rows if not math.isnan(metric.value(row))]
    best = efficient(rows, metric)
    real = [row for row in shown if not row.is_bound]
    policies = list(dict.fromkeys(row.policy for row in real))
    dot = {"color": "var(--accent)", "size": 18, "line": {"width": 1.5, "color": "var(--card)"}}
    numbered = plane.scatter(
        best,
        "efficient (numbers: see below)",  # names would overlap
        dot,
        line={"color": "var(--accent)", "width": 2},
        mode="lines+markers+text",
        text=_numbers(plane, best, shown),
        textfont={"color": "var(--card)", "size": 11},
    )
    beaten = _beaten(plane, [row for row in real if row not in best], policies)
    oracles = dict.fromkeys(row.policy for row in shown if row.is_bound)
    bound = [_bound(plane, [row for row in shown if row.policy == each]) for each in oracles]
    texts = [plane.words(row) + _no_different(row, real, metric) for row in best]
    ring = {"symbol": "circle-open", "size": 13, "line": {"width": 3, "color": "var(--c2)"}}
    line = {"color": "var(--c2)", "width": 1.5, "dash": "dot"}
    lines = {
        policy: [plane.scatter(own, page.label(policy), {"color": "var(--c2)", **ring}, line=line)]
        for policy in policies
        if (own := [row for row in shown if row.policy == policy])
    }
    figure = page.figure([*beaten, *bound, numbered], *plane.axes, 460)
    notes = answers_words.footnotes(rows) if metric is RIGHT else []
    if metric is KL:
        notes = answers_words.fidelity_notes(rows)
    if metric is KEPT:
        notes = [_READABLE, answers_words.not_ranking()]
    note = " ".join(filter(None, notes))
    return Choice(figure, (trace, metric.title), note, texts, lines)


def _numbers(plane: _Plane, best: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """In the markers of efficient settings; of those that lie on each other the top one has all."""
    wide = max(map(plane.across, shown), default=0.0)
    values = list(map(plane.metric.value, shown))
    high = max(values, default=0.0) - min(values, default=0.0)
    texts: list[str] = []
    for number, row in enumerate(best, 1):
        first = str(number)
        if number > 1:
            across = plane.across(row) - plane.across(best[number - 2])
            up = plane.metric.value(row) - plane.metric.value(best[number - 2])
            if abs(across) <= _NEAR[0] * wide and abs(up) <= _NEAR[1] * high:
                first, texts[-1] = texts[-1].partition("–")[0], ""
        texts.append(first if first == str(number) else f"{first}–{number}")
    return texts


def _beaten(plane: _Plane, rows: Sequence[Row], policies: Sequence[str]) -> list[page.Figure]:
    """Settings that others beat: by policy if there are few policies, else all alike."""
    if len(policies) > page.COLOURS:
        dot = {"color": "var(--dot)", "size": 7, "line": {"width": 0}}
        return [plane.scatter(rows, "others", dot, mode="markers")]
    found = []
    for i, policy in enumerate(policies):
        marker = {"color": page.colour(i), "size": 10, "symbol": page.symbol(i)}
        if own := [row for row in rows if row.policy == policy]:
            found.append(plane.scatter(own, page.label(policy), marker, mode="markers"))
    return found


def _bound(plane: _Plane, rows: Sequence[Row]) -> page.Figure:
    """The line of an oracle, which knows the future: the best row at each memory."""
    metric, best = plane.metric, dict[float, Row]()
    for row in sorted(rows, key=metric.value, reverse=not metric.higher):
        best[round(plane.across(row), 1)] = row
    name = f"{rows[0].policy}: knows the future, only evicts"
    marker = {"color": "var(--bound)", "size": 10, "symbol": "diamond-open"}
    line = {"color": "var(--bound)", "width": 1.5, "dash": "dash"}
    return plane.scatter(sorted(best.values(), key=plane.across), name, marker, line=line)


def heat(rows: Sequence[Row], metric: Metric, trace: str = "") -> Choice:
    """Policies by budgets: the best first, those that do not keep to the budget last."""
    rows = [row for row in rows if not row.is_baseline]
    budgets = list(dict.fromkeys(row.budget for row in rows))
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

    found = []
    for row in {row.policy: row for row in rows}.values():
        own = [cells.get((row.policy, budget), math.nan) for budget in budgets]
        if metric is RIGHT and all(map(math.isnan, own)):
            continue  # of oracles and of most policies none were counted
        text = ["" if math.isnan(value) else scale.show(value) for value in own]
        shades = list(map(shade, own))
        worst_last = [1.0 if one is None else -one for one in shades]
        place = (not row.is_oracle, not row.bounded, worst_last, row.policy)
        found.append((place, row.label, text, shades))
    _, names, texts, shades_of = zip(*sorted(found, key=lambda each: each[0]), strict=True)
    drawn = {
        "type": "heatmap",
        "x": [page.label(f"budget {each}") for each in budgets],
        "y": list(map(page.label, names)),
        "z": shades_of,
        "text": texts,
        "texttemplate": "%{text}",
        "textfont": {"color": "var(--ink)"},
        "colorscale": [[0, "var(--cool)"], [1, "var(--heat)"]],
        "hoverinfo": "skip",
        "showscale": False,
        "zmin": 0,
        "zmax": 1,
        "xgap": 2,
        "ygap": 2,
    }
    x, y = ({"showgrid": False, "type": "category"} for _ in range(2))
    rule = {"autorange": "reversed"}
    figure = page.figure([drawn], x, y | rule, 90 + 26 * len(names))
    unit = {"x": "times full retention"}.get(scale.unit, scale.unit)
    note = (
        f"{metric.title} ({unit}) by budget; {'more' if metric.higher else 'less'} is better, and "
        "blue. Sorted by the first budget; an empty cell was left out."
    )
    return Choice(figure, (trace, metric.title), note)
