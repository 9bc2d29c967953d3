"""EpiKV's bands: the depths at which hidden-state change marks important tokens (arXiv:2606.26472).

A token is important if the answer changes when it is occluded (section 3.4, appendix C).  For every
layer, the rolling mean of the hidden-state change is correlated with that label.  The layer with
the highest correlation is A, the one with the lowest is B. The runs of layers around them with the
same sign are the bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.statistics import bootstrap, spearman
from arborsim.products.calibrate.backend import OccludedTrace, OcclusionRequest, Occlusions
from arborsim.products.calibrate.documents import (
    MAIN,
    MUTED,
    SECOND,
    Calibration,
    figure,
    interval,
    rounded,
    software,
)
from arborsim.signals.rolling import rolling_mean_std, rolling_z

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROLLING = 64  #: tokens of the rolling mean, as in the paper
FIRST_LAYER = 1  #: layer 0 reads embeddings: its change depends on neighbouring words alone
LEAST_SHARE = 0.05  #: of important tokens, and of unimportant ones
_EPSILON = 1e-6  # of the z-score (Eq. 3)
_NOTHING = np.empty(0)


@dataclass(frozen=True)
class Bands:
    """How rolling hidden-state change goes with importance: float64 ``[layers]``, and the bands."""

    #: Mean over traces of the correlation inside each trace: what ranks tokens of one cache
    mean: np.ndarray
    #: 95% interval of `mean`, by bootstrap over traces
    low: np.ndarray
    high: np.ndarray
    pooled: np.ndarray  # correlation over the tokens of all traces together, as in the paper
    per_trace: np.ndarray  # ``[traces, layers]``; NaN for a trace whose tokens are all alike
    #: Layers of the contrast
    a: int
    b: int
    #: First and last layer around each
    band_a: tuple[int, int]
    band_b: tuple[int, int]
    important: float  # share of the reasoning tokens that are important
    #: Traces that hold both kinds of tokens (the effective n), and reasoning tokens in all traces
    traces: int
    tokens: int
    #: Correlation of EpiKV's score ``z_A - z_B`` with the labels: mean over traces, each with
    #: layers chosen on the others, and its 95% interval
    contrast: tuple[float, float, float]

    @property
    def opposed(self) -> bool:
        """Whether A is certainly positive and B certainly negative, as the paper found."""
        return bool(self.low[self.a] > 0 and self.high[self.b] < 0)

    def shown(self, layer: int) -> str:
        """The mean correlation of a layer, with its interval."""
        return f"{self.mean[layer]:+.3f} [{self.low[layer]:+.3f}, {self.high[layer]:+.3f}]"


def sliding_windows(tokens: int, window: int, stride: int) -> np.ndarray:
    """Windows that cover ``0 .. tokens - 1``, int64 ``[windows, 2]``. The last may be shorter."""
    first = np.arange(0, max(1, tokens - window + stride), stride, dtype=np.int64)
    return np.stack([first, np.minimum(first + window, tokens)], axis=1)


def token_labels(trace: OccludedTrace) -> np.ndarray:
    """Bool ``[reasoning tokens]``: is any window that covers the token important?"""
    labels = np.zeros(len(trace.hidden_change), dtype=bool)
    for first, stop in trace.windows[trace.flipped].tolist():
        labels[first:stop] = True
    return labels


def find_bands(traces: Sequence[OccludedTrace], seed: int) -> Bands:
    """Correlate every layer with the labels, and choose.

    Raises `UsageError` if nearly all tokens have the same label.
    """
    labels = [token_labels(trace) for trace in traces]
    everything = np.concatenate(labels)
    share = float(everything.mean())
    mixed = sum(bool(own.any() and not own.all()) for own in labels)
    if mixed < 2 or not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        raise UsageError(
            f"{share:.1%} of {len(everything)} reasoning tokens are important, and {mixed} of "
            f"{len(traces)} traces hold both kinds: bands cannot be chosen from such labels"
        )
    # Float64 ``[layers, tokens]``; the window holds reasoning tokens only, as the policies' do.
    smooth = [
        np.stack([rolling_mean_std(_NOTHING, g, ROLLING)[0] for g in change.astype(np.float64).T])
        for change in (trace.hidden_change for trace in traces)
    ]
    pairs = zip(smooth, labels, strict=True)
    rho = np.array([[spearman(change, own) for change in layers] for layers, own in pairs])
    mean = np.nanmean(rho, axis=0)
    informative = rho[~np.isnan(rho).all(axis=1)]
    low, high = bootstrap(lambda chosen: informative[chosen].mean(axis=0), len(informative), seed)
    stacked = np.concatenate(smooth, axis=1)
    a, b = choose_layers(mean)
    return Bands(
        mean,
        low,
        high,
        np.array([spearman(change, everything) for change in stacked]),
        rho,
        a,
        b,
        run_around(mean, a, b),
        run_around(-mean, b, a),
        share,
        mixed,
        len(everything),
        _contrast(traces, labels, rho, seed),
    )


def choose_layers(mean: np.ndarray) -> tuple[int, int]:
    """Layers with the highest and the lowest correlation. Of equals the lower one."""
    usable = mean[FIRST_LAYER:]
    return FIRST_LAYER + int(np.argmax(usable)), FIRST_LAYER + int(np.argmin(usable))


def run_around(mean: np.ndarray, layer: int, other: int) -> tuple[int, int]:
    """First and last layer of the longest run around `layer` in which `mean` is positive.

    Without a positive value at `layer` itself, the run is that layer alone.  It never takes in
    the layer `other`, which is the other band's.
    """
    first = last = layer
    if mean[layer] > 0:
        joins = mean > 0
        joins[:FIRST_LAYER], joins[other] = False, False
        while joins[first - 1]:
            first -= 1
        while last + 1 < len(mean) and joins[last + 1]:
            last += 1
    return first, last


def _contrast(
    traces: Sequence[OccludedTrace], labels: Sequence[np.ndarray], rho: np.ndarray, seed: int
) -> tuple[float, float, float]:
    """Held-out correlation of ``z_A - z_B``: layers of each trace are chosen on the others."""
    found = []
    for number, (trace, own) in enumerate(zip(traces, labels, strict=True)):
        if np.isnan(rho[number]).all():
            continue
        a, b = choose_layers(np.nanmean(np.delete(rho, number, axis=0), axis=0))
        z_a, z_b = (
            rolling_z(_NOTHING, trace.hidden_change[:, layer].astype(np.float64), ROLLING, _EPSILON)
            for layer in (a, b)
        )
        found.append(spearman(z_a - z_b, own))
    held_out = np.array(found)
    low, high = bootstrap(lambda chosen: held_out[chosen].mean(), len(held_out), seed)
    return float(held_out.mean()), float(low), float(high)


def bands_calibration(
    bands: Bands, occlusions: Occlusions, request: OcclusionRequest, seed: int, command: str
) -> Calibration:
    """EpiKV's layers and bands as shares of the depth."""
    depth = len(bands.mean)
    single = {"layer_a": bands.a / depth, "layer_b": bands.b / depth}
    ends = ("a_first", "a_last", "b_first", "b_last")
    layers = (*bands.band_a, *bands.band_b)
    edges = {name: layer / depth for name, layer in zip(ends, layers, strict=True)}
    verdict = (
        "as in the paper, A is positive and B negative"
        if bands.opposed
        else "unlike in the paper, the intervals do not show A positive and B negative"
    )
    return Calibration(
        kind="bands",
        model=occlusions.model,
        layers=depth,
        traces=len(occlusions.traces),
        tokens=bands.tokens,
        seed=seed,
        command=command,
        policies={"epikv": single, "hs-variance": single, "band-adaptive": edges},
        finding=(
            f"A: layer {bands.a} of {depth} (rho {bands.shown(bands.a)}), "
            f"B: layer {bands.b} (rho {bands.shown(bands.b)}); {verdict}"
        ),
        protocol={
            "split": request.split,
            "first_problem": request.first,
            "problems_tried": occlusions.problems,
            "task_options": dict(request.choice.task_options),
            "window_tokens": request.window,
            "stride_tokens": request.stride,
            "padding": occlusions.padding,
            "regenerate": request.regenerate,
            "rolling_tokens": ROLLING,
            "first_layer": FIRST_LAYER,
            "interval": "95%, bootstrap over traces",
        },
        versions=software("numpy", "scipy", "torch", "transformers"),
        evidence={
            "important_share": rounded(bands.important),
            "effective_n": bands.traces,
            "held_out_contrast": rounded(bands.contrast),
            "layer": {
                name: rounded(getattr(bands, name).tolist())
                for name in ("mean", "low", "high", "pooled")
            },
        },
    )


def bands_figure(bands: Bands, title: str) -> Figure:
    """Correlation with importance per layer: mean with interval, pooled, and single traces."""
    from plotly import graph_objects as plot

    layers = np.arange(len(bands.mean))
    colours = [MUTED] * len(layers)
    for (first, last), colour in ((bands.band_a, MAIN), (bands.band_b, SECOND)):
        colours[first : last + 1] = [colour] * (last + 1 - first)

    def points(x: np.ndarray, y: np.ndarray, name: str, **marker: Any) -> plot.Scatter:
        return plot.Scatter(x=x, y=y, name=name, mode="markers", marker=marker)

    ends = interval(bands.low, bands.mean, bands.high)
    means = plot.Bar(x=layers, y=bands.mean, error_y=ends, marker_color=colours)
    means.name = "mean over traces, 95% interval"
    every = np.repeat(layers, len(bands.per_trace)), bands.per_trace.T.ravel()
    single = points(*every, "single traces", color="rgba(120, 120, 120, 0.35)", size=6)
    look = {"color": "#111", "symbol": "line-ew-open", "size": 14}
    pooled = points(layers, bands.pooled, "all tokens pooled", **look)
    x = {"title": "layer (A and B coloured)", "dtick": 1}
    return figure(title, [means, single, pooled], x, "Spearman rho with importance")
