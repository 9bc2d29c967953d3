"""Plotly figures as plain dictionaries: data and layout, coloured by CSS variables.

Colours are written as ``var(--name)`` and resolved in the page, where they follow its light or
dark theme: the style sheet is the only place that knows a colour.  Names that come from files are
escaped, because Plotly reads a subset of HTML in labels.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.core.measurements import thinned
from arborsim.core.units import scale_for
from arborsim.run.aggregate import BASELINE, Row
from arborsim.run.results import EpisodeResult

Figure = dict[str, Any]

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


def time_split(rows: Sequence[Row]) -> Figure:
    """Horizontal bars, one per policy and budget: where the seconds went (rows of one trace)."""
    scale = scale_for("seconds", [row.time.total_s for row in rows])
    # Bars are placed by number: two labels that look alike must not fall on one bar.
    places = list(range(len(rows)))
    names = [label(f"{row.label}  {row.budget_label}") for row in rows]
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


def packed(values: np.ndarray, dtype: str = "f4") -> dict[str, str]:
    """Numbers the way plotly.js reads them: half the size of decimal digits.

    `dtype` is ``"f4"`` (single precision) or ``"u2"`` (whole numbers below 65536).
    """
    raw = np.ascontiguousarray(values, dtype=f"<{dtype}").tobytes()
    return {"dtype": dtype, "bdata": base64.b64encode(raw).decode("ascii")}
