"""What `arborsim calibrate hardware` measures, and the cost model's numbers that follow.

A backend measures (`MeasuringBackend.measure_hardware`); `fit_passes` finds rates and overheads in
forward passes that were timed.  `arborsim.machine.cost.CostModel` says that a pass takes
``max(compute, memory)``, plus the part of the shorter one that is not hidden, plus overheads.
Where it is known which is longer, that is linear in the unknown times per FLOP, byte, layer, step
and sequence.  So: guess which, solve bounded non-negative least squares of the relative
errors, look again, until nothing changes (as convex piecewise-linear fits are made: Magnani and
Boyd 2009, section 2).  The share that overlaps is tried on a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from scipy.optimize import lsq_linear

from arborsim.calibrate.backend import OnProgress
from arborsim.calibrate.policy_cost import PolicyTime
from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.live.backends import get_backend
from arborsim.machine.cost import CostModel
from arborsim.machine.profile import HardwareProfile

OVERLAPS = tuple(i / 10 for i in range(11))
_ROUNDS = 30
#: Unknowns: seconds per FLOP, per byte of keys and values, per layer, step and sequence.
_COMPUTE, _MEMORY, _OVERHEAD = 0, 1, slice(2, 5)
_UNKNOWNS = 5


@dataclass(frozen=True)
class HardwareRequest:
    """What to measure."""

    #: A reference model, a folder, or ``config:`` and a geometry's name (random weights)
    model: str = "chain"
    device: str = "cpu"  # ``cpu``, ``cuda`` or ``cuda:1``
    quick: bool = False  # fewer sizes, fewer repetitions
    #: Policies to time in live searches, however long that takes; empty for as many as the time
    #: allows
    policies: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinkRates:
    """Copies between device and host in contiguous blocks."""

    block_bytes: tuple[int, ...]  # rising
    #: Bytes per second for blocks of each size, page-locked host memory; the time of an empty
    #: transfer is taken off
    h2d: tuple[float, ...]
    d2h: tuple[float, ...]
    #: The same with ordinary host memory; empty where the two are the same (a CPU)
    pageable_h2d: tuple[float, ...]
    pageable_d2h: tuple[float, ...]
    latency_s: float  # of an empty transfer
    both_bytes_per_s: float  # large blocks, both directions at once, added up


@dataclass(frozen=True)
class Kernels:
    """Single operations, in the model's number format; rates per second."""

    matrix_flops: Mapping[int, float]  # square matrix products by size
    #: Reading a buffer of n bytes on the device; copying one there (bytes read and written);
    #: reading one in host memory
    read_bytes: Mapping[int, float]
    copy_bytes: Mapping[int, float]
    host_read_bytes: Mapping[int, float]
    weights_bytes: float  # all parameters, when each weight matrix is multiplied with one row
    #: Keys and values read by fused attention of one query, by number of tokens
    kv_bytes: Mapping[int, float]
    #: Probability rows written (softmax) and read back (mean over heads), by number of tokens
    eager_bytes: Mapping[int, float]
    #: Quantised bytes (data and scales) written and read, by format
    quantise_bytes: Mapping[str, float]
    dequantise_bytes: Mapping[str, float]
    #: Tokens' keys or values collected by index, by number of tokens; bytes read and written
    gather_bytes: Mapping[int, float]
    #: Seconds to choose a sixteenth of n scores: on the device, and on the host in NumPy
    top_k_s: Mapping[int, float]
    argpartition_s: Mapping[int, float]


@dataclass(frozen=True)
class Pass:
    """One kind of forward pass of the model, cut to its first layers, and the time it took."""

    kind: Literal["decode", "prefill"]
    layers: int  # of the model that was run
    parameters: int  # that count as read by it
    lanes: int  # sequences; 1 for a prefill
    tokens: int  # new ones of each sequence
    attended: float  # tokens on a sequence's path when it is over
    shared: float  # tokens of all paths, each counted once: what a kernel for trees reads
    seconds: float
    held_out: bool = False  # not to be fitted to


@dataclass(frozen=True)
class HardwareMeasurements:
    """Everything a backend measured."""

    device: str  # name of the GPU or CPU, with the number of threads used on a CPU
    on_cpu: bool
    geometry: Geometry  # of the whole model
    dtype: str
    #: Installed
    memory_bytes: int
    host_memory_bytes: int
    versions: Mapping[str, str]  # of the software
    link: LinkRates
    kernels: Kernels
    passes: tuple[Pass, ...]
    notes: tuple[str, ...] = ()  # what was left out, and why
    #: Searches under policies; empty if the model is too slow for them
    policies: tuple[PolicyTime, ...] = ()


@runtime_checkable
class MeasuringBackend(Protocol):
    """A framework that can measure the machine it runs on."""

    def measure_hardware(
        self, request: HardwareRequest, on_progress: OnProgress
    ) -> HardwareMeasurements:
        """Measure copies, kernels and forward passes."""
        ...


def get_measuring_backend() -> MeasuringBackend:
    """The backend, or a `UsageError` if it cannot measure or lacks what it needs."""
    backend = get_backend()
    if not isinstance(backend, MeasuringBackend):
        raise UsageError("the torch backend cannot measure: it lacks `measure_hardware`")
    return backend


@dataclass(frozen=True)
class Fitted:
    """The cost model's numbers that follow from timed passes."""

    mfu: float
    kv_read_efficiency: float
    overlap: float
    per_layer_s: float
    per_step_s: float
    per_sequence_s: float


@dataclass(frozen=True)
class PassAgreement:
    """Predictions against measurements."""

    passes: int
    #: Share of the variance of the seconds that is explained; NaN for fewer than two passes
    r2: float
    #: Of the relative errors ``|predicted - measured| / measured``
    median: float
    largest: float


def fit_passes(
    passes: Sequence[Pass],
    geometry: Geometry,
    flops_per_s: float,
    bytes_per_s: float,
    weights_bytes_per_s: float,
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
    weights_bytes = np.array([_shape(each, geometry).weight_bytes for each in used])
    weights_s = weights_bytes / weights_bytes_per_s
    seconds = np.array([each.seconds for each in used])
    least = np.array([1 / flops_per_s, 1 / bytes_per_s, 0.0, 0.0, 0.0])
    tried = [
        (*_alternate(work, weights_s, seconds, least, overlap, start), overlap)
        for overlap in OVERLAPS
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


def predicted_s(profile: HardwareProfile, geometry: Geometry, one: Pass) -> float:
    """What the cost model, as replays use it, says of a pass."""
    model = CostModel(profile, _shape(one, geometry))
    if one.kind == "prefill":
        return model.prefill_s(one.tokens)
    kv_bytes = one.shared * model.geometry.kv_bytes_per_token
    return float(model.decode_s(one.lanes, one.lanes * one.attended, kv_bytes))


def agreement(
    profile: HardwareProfile, geometry: Geometry, passes: Sequence[Pass]
) -> PassAgreement:
    """How well `profile` predicts `passes`; at least one."""
    measured = np.array([each.seconds for each in passes])
    predicted = np.array([predicted_s(profile, geometry, each) for each in passes])
    relative = np.abs(predicted - measured) / measured
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - predicted) ** 2).sum())
    return PassAgreement(
        len(passes),
        1 - missed / spread if spread > 0 else float("nan"),
        float(np.median(relative)),
        float(relative.max()),
    )


def _shape(one: Pass, geometry: Geometry) -> Geometry:
    """Of the model that was run: the first layers of the whole one."""
    return replace(geometry, layers=one.layers, parameters=one.parameters)


def _work(one: Pass, geometry: Geometry) -> list[float]:
    """What each unknown is multiplied with."""
    shape = _shape(one, geometry)
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
