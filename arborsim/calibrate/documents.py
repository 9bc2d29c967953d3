"""From results to the file that is kept: which policy gets which setting, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arborsim.calibrate.arkv import Tuning
from arborsim.calibrate.backend import OcclusionRequest, Occlusions
from arborsim.calibrate.bands import FIRST_LAYER, ROLLING, Bands
from arborsim.calibrate.blocks import Searches, recording
from arborsim.calibrate.document import Calibration, software
from arborsim.calibrate.msve import FEATURES, Msve
from arborsim.trace.reader import TraceReader

_DIGITS = 6


def bands_calibration(
    bands: Bands, occlusions: Occlusions, request: OcclusionRequest, seed: int, command: str
) -> Calibration:
    """EpiKV's layers and bands as shares of the depth."""
    depth = len(bands.layers)
    single = {"layer_a": bands.a / depth, "layer_b": bands.b / depth}
    a, b = bands.layers[bands.a], bands.layers[bands.b]
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
        policies={
            "epikv": single,
            "hs-variance": single,
            "band-adaptive": {
                "a_first": bands.band_a[0] / depth,
                "a_last": bands.band_a[1] / depth,
                "b_first": bands.band_b[0] / depth,
                "b_last": bands.band_b[1] / depth,
            },
        },
        finding=(
            f"A: layer {bands.a} of {depth} (rho {_signed(a.mean, a.low, a.high)}), "
            f"B: layer {bands.b} (rho {_signed(b.mean, b.low, b.high)}); {verdict}"
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
            "important_share": _rounded(bands.important),
            "effective_n": bands.traces,
            "held_out_contrast": _rounded(bands.contrast),
            "layer": {
                "mean": [_rounded(item.mean) for item in bands.layers],
                "low": [_rounded(item.low) for item in bands.layers],
                "high": [_rounded(item.high) for item in bands.layers],
                "pooled": [_rounded(item.pooled) for item in bands.layers],
            },
        },
    )


def msve_calibration(
    msve: Msve, searches: Searches, ridge: float, seed: int, command: str
) -> Calibration:
    """Theta of ArborKV's MSVE."""
    theta = {
        f"theta_{name}": _rounded(value) for name, value in zip(FEATURES, msve.theta, strict=True)
    }
    return Calibration(
        kind="msve",
        model=searches.model,
        layers=searches.layers,
        traces=msve.traces,
        tokens=sum(block.masking.block_tokens for block in searches.blocks if block.whole),
        seed=seed,
        command=command,
        policies={"arborkv": theta},
        finding=(
            f"without a block of its path, the answer is lost in {msve.lost:.0%} of {msve.blocks} "
            f"cases; held-out AUC of MSVE {msve.auc:.3f}"
        ),
        protocol={
            "target": "answer lost by greedy decoding after the block, without its keys and values",
            "features": "as read when the search ends",
            "ridge": ridge,
            "interval": "95%, bootstrap over traces",
            "recordings": searches.recordings,
        },
        versions=software("numpy", "scipy", "torch", "transformers"),
        evidence={name: _rounded(value) for name, value in asdict(msve).items() if name != "theta"},
    )


def arkv_calibration(
    tuning: Tuning,
    traces: Sequence[Path],
    tuned_on: int,
    held_out: int,
    budgets: Sequence[str],
    seed: int,
    command: str,
) -> Calibration:
    """ARKV's temperatures and gamma; `tuned_on` and `held_out` count episodes."""
    readers = [TraceReader(path) for path in traces]
    before, after = tuning.held_out if held_out else tuning.tuned_on
    where = "held out" if held_out else "tuned on"
    return Calibration(
        kind="arkv",
        model=readers[0].info.model,
        layers=readers[0].info.geometry.layers,
        traces=tuned_on,
        tokens=sum(each.num_tokens for reader in readers for each in reader.episodes()),
        seed=seed,
        command=command,
        policies={"arkv": {name: _rounded(value) for name, value in tuning.values.items()}},
        finding=(
            f"output error {after:.4f} against {before:.4f} with the published values, "
            f"on the episodes {where}"
        ),
        protocol={
            "objective": "relative error of the attention output, mean over budgets and episodes",
            "budgets": list(budgets),
            "trials": len(tuning.errors),
            "episodes_held_out": held_out,
            "recordings": {reader.path.name: recording(reader) for reader in readers},
        },
        versions=software("numpy", "optuna"),
        evidence={
            "tuned_on": _rounded(tuning.tuned_on),
            "held_out": _rounded(tuning.held_out),
            "errors": _rounded(tuning.errors),
        },
    )


def _rounded(value: Any) -> Any:
    """Floats as they are shown: the last bits depend on the machine and say nothing."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    return value


def _signed(mean: float, low: float, high: float) -> str:
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
