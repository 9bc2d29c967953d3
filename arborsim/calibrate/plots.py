"""One figure per calibration, as a page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arborsim.calibrate.arkv import Tuning
from arborsim.calibrate.bands import Bands
from arborsim.calibrate.msve import FEATURES, Msve
from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_A, _B, _TRACE, _OTHER = "#0b7a75", "#b8432f", "rgba(120, 120, 120, 0.35)", "#5b6770"


def bands_figure(bands: Bands, title: str) -> Figure:
    """Correlation with importance per layer: mean with interval, pooled, and single traces."""
    from plotly.graph_objects import Bar, Figure, Scatter

    layers = [item.layer for item in bands.layers]
    mean = [item.mean for item in bands.layers]
    colours = [_OTHER] * len(layers)
    for (first, last), colour in ((bands.band_a, _A), (bands.band_b, _B)):
        colours[first : last + 1] = [colour] * (last + 1 - first)
    figure = Figure(
        Bar(
            x=layers,
            y=mean,
            marker_color=colours,
            name="mean over traces, 95% interval",
            error_y={
                "symmetric": False,
                "array": [item.high - item.mean for item in bands.layers],
                "arrayminus": [item.mean - item.low for item in bands.layers],
            },
        )
    )
    figure.add_trace(
        Scatter(
            x=np.repeat(layers, len(bands.layers[0].per_trace)),
            y=[rho for item in bands.layers for rho in item.per_trace],
            mode="markers",
            marker={"color": _TRACE, "size": 6},
            name="single traces",
        )
    )
    figure.add_trace(
        Scatter(
            x=layers,
            y=[item.pooled for item in bands.layers],
            mode="markers",
            marker={"color": "#111", "symbol": "line-ew-open", "size": 14},
            name="all tokens pooled",
        )
    )
    figure.update_xaxes(title="layer (A and B coloured)", dtick=1)
    figure.update_yaxes(title="Spearman rho with importance")
    return _styled(figure, title)


def msve_figure(msve: Msve, title: str) -> Figure:
    """Theta with its intervals, each coefficient in units of its own interval's scale."""
    from plotly.graph_objects import Figure, Scatter

    scale = [max(abs(low), abs(high), 1e-12) for low, high in zip(msve.low, msve.high, strict=True)]
    share = [value / size for value, size in zip(msve.theta, scale, strict=True)]
    figure = Figure(
        Scatter(
            x=share,
            y=[f"{name} ({value:.3g})" for name, value in zip(FEATURES, msve.theta, strict=True)],
            mode="markers",
            marker={"color": _A, "size": 12},
            error_x={
                "symmetric": False,
                "array": [h / s - m for h, s, m in zip(msve.high, scale, share, strict=True)],
                "arrayminus": [m - w / s for w, s, m in zip(msve.low, scale, share, strict=True)],
            },
        )
    )
    figure.add_vline(x=0, line_color=_OTHER)
    figure.update_xaxes(title="theta, as a share of the far end of its 95% interval")
    return _styled(figure, title)


def arkv_figure(tuning: Tuning, title: str) -> Figure:
    """Error of every trial, and the least so far."""
    from plotly.graph_objects import Figure, Scatter

    trials = list(range(1, len(tuning.errors) + 1))
    figure = Figure(
        Scatter(x=trials, y=tuning.errors, mode="markers", marker={"color": _OTHER}, name="trial")
    )
    least = np.minimum.accumulate(tuning.errors)
    figure.add_trace(
        Scatter(x=trials, y=least, mode="lines", line={"color": _A}, name="least so far")
    )
    figure.update_xaxes(title="trial (1: published values)")
    figure.update_yaxes(title="relative error of the attention output")
    return _styled(figure, title)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a page that holds plotly.js and the data; the same figure gives the same bytes.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    text = figure.to_html(include_plotlyjs=True, full_html=True, div_id="calibration")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _styled(figure: Figure, title: str) -> Figure:
    figure.update_layout(
        title={"text": title.replace("; ", "<br>"), "font": {"size": 14}},
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
        margin={"t": 60, "r": 20},
    )
    return figure
