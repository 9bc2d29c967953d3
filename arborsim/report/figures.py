"""Plotly figures as plain dictionaries: data and layout, coloured by CSS variables.

Colours are written as ``var(--name)`` and resolved in the page, where they follow its light or
dark theme: the style sheet is the only place that knows a colour.  Names that come from files are
escaped, because Plotly reads a subset of HTML in labels.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.measurements import MemorySeries
from arborsim.report.aggregate import BASELINE, Row
from arborsim.report.results import EpisodeResult
from arborsim.report.units import scale_for

Figure = dict[str, Any]

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon",
            "triangle-down", "x", "pentagon")  # fmt: skip
_HUES = 8
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


def label(text: str) -> str:
    """`text` so that Plotly shows it and does not read it as markup."""
    return html.escape(text, quote=False)


def tradeoff(rows: Sequence[Row], policies: Sequence[str], against: str) -> Figure:
    """Peak HBM against ``"kept"`` (attention) or ``"time"``: one line per policy.

    Parameters
    ----------
    rows : sequence of Row
        Of one trace.
    policies : sequence of str
        All policies of the report, so that each keeps its colour and symbol between traces.
    against : {"kept", "time"}
    """
    scale = scale_for("bytes", [row.peak_hbm_kv_bytes for row in rows])
    relative = any(not math.isnan(row.relative.time) for row in rows)
    seconds = scale_for("seconds", [row.time.total_s for row in rows])
    data = []
    for number, policy in enumerate(policies):
        own = sorted((r for r in rows if r.policy == policy), key=lambda r: r.peak_hbm_kv_bytes)
        if not own:
            continue
        if against == "kept":
            y = [100 * row.attention_kept for row in own]
        elif relative:
            y = [row.relative.time for row in own]
        else:
            y = [row.time.total_s / seconds.size for row in own]
        colour = f"var(--c{number % _HUES})"
        data.append({
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(policy),
            "x": [row.peak_hbm_kv_bytes / scale.size for row in own],
            "y": y,
            "customdata": [label(row.budget_label) for row in own],
            "line": {"color": colour, "width": 1.5, "dash": "dot"},
            "marker": {"color": colour, "size": 11, "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                       "line": {"width": 1, "color": "var(--card)"}},
            "hovertemplate": f"<b>{label(policy)}</b>, budget %{{customdata}}<br>"
            f"peak HBM %{{x:.4g}} {scale.unit}<br>"
            + {"kept": "attention kept %{y:.1f} %", "time": "%{y:.3f} times full retention"
               if relative else f"%{{y:.4g}} {seconds.unit}"}[against] + "<extra></extra>",
        })  # fmt: skip
    title = {
        "kept": "attention kept (%)",
        "time": "time relative to full" if relative else f"total time ({seconds.unit})",
    }[against]
    layout = {
        "xaxis": {"title": {"text": f"peak KV in HBM ({scale.unit})"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": title}},
        "hovermode": "closest",
        "height": 400,
    }
    return {"data": data, "layout": layout}


def time_split(rows: Sequence[Row]) -> Figure:
    """Horizontal bars, one per policy and budget: where the seconds went (rows of one trace)."""
    scale = scale_for("seconds", [row.time.total_s for row in rows])
    # Bars are placed by number: two labels that look alike must not fall on one bar.
    places = list(range(len(rows)))
    names = [label(f"{row.policy}  {row.budget_label}") for row in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": places,
            "x": [getattr(row.time, part) / scale.size for row in rows],
            "customdata": names,
            "marker": {"color": f"var(--{colour})"},
            "hovertemplate": f"%{{customdata}}<br>{title} %{{x:.4g}} {scale.unit}<extra></extra>",
        }
        for title, part, colour in _PARTS
        if part in ("prefill_s", "decode_s") or any(getattr(row.time, part) for row in rows)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "xaxis": {"title": {"text": f"time over all searches ({scale.unit})"}},
        "yaxis": {"tickvals": places, "ticktext": names, "range": [len(rows) - 0.5, -0.5],
                  "zeroline": False, "showgrid": False},
        "height": 150 + 25 * len(rows),
    }  # fmt: skip
    return {"data": data, "layout": layout}


def memory(result: EpisodeResult, points: int) -> Figure:
    """Stacked areas of one search: bytes by tier over time, and the budget.

    At most about `points` samples are kept; the peaks among them.
    """
    series = result.measured.series
    keep = thinned(series, points)
    layers = [
        (name, np.asarray(getattr(series, field), dtype=float)[keep], colour)
        for name, field, colour in _LAYERS
    ]
    total = np.sum([values for _, values, _ in layers], axis=0)
    bounded = result.policy != BASELINE
    budget = result.budget_tokens * result.kv_bytes_per_token if bounded else 0
    scale = scale_for("bytes", [*total.tolist(), budget])
    times = np.asarray(series.time_s, dtype=float)[keep]
    seconds = scale_for("seconds", times.tolist())
    x = packed(times / seconds.size)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "bytes",
            "name": name,
            "x": x,
            "y": packed(values / scale.size),
            "line": {"width": 0, "color": f"var(--{colour})"},
            "fillcolor": f"var(--{colour})",
            "hovertemplate": f"%{{y:.4g}} {scale.unit}",
        }
        for name, values, colour in layers
        if colour == "hbm" or values.any()
    ]
    if budget and len(times):
        data.append({
            "type": "scatter",
            "mode": "lines",
            "name": "HBM budget",
            "x": [0.0, float(times[-1] / seconds.size)],
            "y": [budget / scale.size] * 2,
            "line": {"width": 2, "dash": "dash", "color": "var(--ink)"},
            "hoverinfo": "skip",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"simulated time ({seconds.unit})"}},
        "yaxis": {"title": {"text": f"KV cache ({scale.unit})"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "height": 420,
    }
    return {"data": data, "layout": layout}


def thinned(series: MemorySeries, points: int) -> np.ndarray:
    """Indices of about `points` samples: first and last, and per stretch the extremes.

    The extremes are those of what is in HBM, so that a peak of one sample survives.
    """
    n = len(series.time_s)
    if n <= points:
        return np.arange(n)
    hbm = (
        np.asarray(series.hbm_kv_bytes)
        + np.asarray(series.staging_bytes)
        + np.asarray(series.in_flight_bytes)
    )
    edges = np.linspace(0, n, max(points // 2, 1) + 1).astype(int)
    stretches = [(a, b) for a, b in itertools.pairwise(edges.tolist()) if b > a]
    kept = {0, n - 1}
    for a, b in stretches:
        kept |= {a + int(np.argmax(hbm[a:b])), a + int(np.argmin(hbm[a:b]))}
    return np.array(sorted(kept))


def packed(values: np.ndarray) -> dict[str, str]:
    """Single-precision numbers the way plotly.js reads them: half the size of decimal digits."""
    raw = np.ascontiguousarray(values, dtype="<f4").tobytes()
    return {"dtype": "f4", "bdata": base64.b64encode(raw).decode("ascii")}
