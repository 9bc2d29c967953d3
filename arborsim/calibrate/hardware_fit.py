"""Fit the cost model's rates and overheads to forward passes that were timed.

`arborsim.machine.cost.CostModel` says that a pass takes ``max(compute, memory)``, plus the part of
the shorter one that is not hidden, plus overheads.  Where it is known which of the two is longer,
that is linear in the unknown times per FLOP, byte, layer, step and sequence.  So: guess which,
solve bounded non-negative least squares of the relative errors, look again, until nothing changes
(as convex piecewise-linear fits are made: Magnani and Boyd 2009, section 2).  The share that
overlaps is tried on a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import lsq_linear

from arborsim.calibrate.hardware import Pass
from arborsim.core.errors import UsageError
from arborsim.machine.cost import CostModel, Reads
from arborsim.machine.profile import HardwareProfile
from arborsim.trace.schema import Geometry

OVERLAPS = tuple(i / 10 for i in range(11))
_ROUNDS = 30
#: Unknowns: seconds per FLOP, per byte of keys and values, per layer, step and sequence.
_COMPUTE, _MEMORY, _OVERHEAD = 0, 1, slice(2, 5)
_UNKNOWNS = 5


@dataclass(frozen=True)
class Fitted:
    """The cost model's numbers that follow from timed passes.

    Attributes
    ----------
    mfu, kv_read_efficiency : float
    overlap : float
    per_layer_s, per_step_s, per_sequence_s : float
    """

    mfu: float
    kv_read_efficiency: float
    overlap: float
    per_layer_s: float
    per_step_s: float
    per_sequence_s: float


@dataclass(frozen=True)
class Agreement:
    """Predictions against measurements.

    Attributes
    ----------
    passes : int
    r2 : float
        Share of the variance of the seconds that is explained; NaN for fewer than two passes.
    median, largest : float
        Of the relative errors ``|predicted - measured| / measured``.
    """

    passes: int
    r2: float
    median: float
    largest: float


def fit_passes(
    passes: Sequence[Pass],
    geometry: Geometry,
    flops_per_s: float,
    bytes_per_s: float,
    weights_bytes_per_s: float,
    overlaps: Sequence[float] = OVERLAPS,
) -> Fitted:
    """Fit to the passes that are not held out.

    Parameters
    ----------
    passes : sequence of Pass
    geometry : Geometry
        Of the whole model.
    flops_per_s, bytes_per_s : float
        Peaks that no rate may exceed.
    weights_bytes_per_s : float
        At which weights are read for one row: time that depends on the layers alone cannot be
        told from overhead, so this is measured apart.
    overlaps : sequence of float
        Those to choose from.

    Raises
    ------
    UsageError
        Fewer passes than unknowns.
    """
    used = [each for each in passes if not each.held_out]
    if len(used) < _UNKNOWNS or {each.kind for each in used} != {"decode", "prefill"}:
        raise UsageError(
            f"{len(used)} timed passes are too few for {_UNKNOWNS} unknowns: "
            "choose a smaller model, or run without --quick"
        )
    work = np.array([_work(each, geometry) for each in used])
    weights_s = np.array([_weights(each, geometry) for each in used]) / weights_bytes_per_s
    seconds = np.array([each.seconds for each in used])
    least = np.array([1 / flops_per_s, 1 / bytes_per_s, 0.0, 0.0, 0.0])
    tried = [
        (*_alternate(work, weights_s, seconds, least, overlap, start), overlap)
        for overlap in overlaps
        for start in (True, False)
    ]
    _, x, overlap = min(tried, key=lambda each: each[0])
    return Fitted(
        mfu=float(least[_COMPUTE] / x[_COMPUTE]),
        kv_read_efficiency=float(least[_MEMORY] / x[_MEMORY]),
        overlap=overlap,
        per_layer_s=float(x[2]),
        per_step_s=float(x[3]),
        per_sequence_s=float(x[4]),
    )


def fitted_profile(profile: HardwareProfile, fitted: Fitted) -> HardwareProfile:
    """The profile with the fitted numbers in it."""
    return replace(profile, **vars(fitted))


def predicted_s(profile: HardwareProfile, geometry: Geometry, one: Pass) -> float:
    """What the cost model, as replays use it, says of a pass."""
    model = CostModel(profile, cut(geometry, one))
    if one.kind == "prefill":
        return model.prefill(one.tokens).total_s
    kv_bytes = one.shared * model.geometry.kv_bytes_per_token
    return float(model.decode(Reads(one.lanes, one.lanes * one.attended, kv_bytes)).total_s)


def agreement(profile: HardwareProfile, geometry: Geometry, passes: Sequence[Pass]) -> Agreement:
    """How well `profile` predicts `passes`; at least one."""
    measured = np.array([each.seconds for each in passes])
    predicted = np.array([predicted_s(profile, geometry, each) for each in passes])
    relative = np.abs(predicted - measured) / measured
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - predicted) ** 2).sum())
    return Agreement(
        len(passes),
        1 - missed / spread if spread > 0 else float("nan"),
        float(np.median(relative)),
        float(relative.max()),
    )


def cut(geometry: Geometry, one: Pass) -> Geometry:
    """The geometry of the model that was run: the first layers of the whole one."""
    return replace(geometry, layers=one.layers, parameters=one.parameters)


def _work(one: Pass, geometry: Geometry) -> list[float]:
    """What each unknown is multiplied with."""
    shape = cut(geometry, one)
    flops = 2.0 * one.parameters * one.lanes * one.tokens
    pairs = one.lanes * one.attended
    if one.kind == "prefill":
        pairs = one.tokens * (one.tokens + 1) / 2
    return [
        flops + 4.0 * shape.layers * shape.heads * shape.head_dim * pairs,
        one.shared * shape.kv_bytes_per_token,
        float(one.layers),
        1.0,
        float(one.lanes),
    ]


def _weights(one: Pass, geometry: Geometry) -> int:
    return cut(geometry, one).weight_bytes


def _alternate(
    work: np.ndarray, weights_s: np.ndarray, seconds: np.ndarray, least: np.ndarray,
    overlap: float, compute_bound: bool,
) -> tuple[float, np.ndarray]:  # fmt: skip
    """Sum of squared relative errors and the unknowns, starting from one guess for all passes."""
    bound = np.full(len(seconds), compute_bound)
    best = (np.inf, least)
    for _ in range(_ROUNDS):
        x = _solve(work, weights_s, seconds, least, overlap, bound)
        compute = work[:, _COMPUTE] * x[_COMPUTE]
        memory = weights_s + work[:, _MEMORY] * x[_MEMORY]
        hidden = overlap * np.minimum(compute, memory)
        predicted = compute + memory - hidden + work[:, _OVERHEAD] @ x[_OVERHEAD]
        error = float((((predicted - seconds) / seconds) ** 2).sum())
        if error < best[0]:
            best = (error, x)
        if ((compute >= memory) == bound).all():
            break
        bound = compute >= memory
    return best


def _solve(
    work: np.ndarray, weights_s: np.ndarray, seconds: np.ndarray, least: np.ndarray,
    overlap: float, bound: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Bounded least squares of the relative errors, `bound` saying what is compute-bound."""
    of_compute = np.where(bound, 1.0, 1 - overlap)
    of_memory = np.where(bound, 1 - overlap, 1.0)
    rows = work.copy()
    rows[:, _COMPUTE] *= of_compute
    rows[:, _MEMORY] *= of_memory
    rows /= seconds[:, None]
    target = 1 - of_memory * weights_s / seconds
    # Units of which one explains a pass: the unknowns differ by twelve orders of magnitude.
    unit = 1 / np.maximum(rows.max(axis=0), 1e-300)
    unit = np.where(rows.max(axis=0) > 0, unit, 1.0)
    found = lsq_linear(rows * unit, target, bounds=(least / unit, np.inf), method="bvls")
    return np.asarray(np.maximum(found.x * unit, least))
