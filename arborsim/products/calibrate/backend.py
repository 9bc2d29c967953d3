"""Requests of a calibration to a live model or a machine, without importing any framework.

A backend that can say what answers depend on is a `CalibratingBackend`. One that can measure the
machine it runs on is a `MeasuringBackend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.play.backends import get_backend
from arborsim.play.problem_sets import ProblemChoice

#: Told what is being done, and how much of it: ``(what, done, total)``.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ModelChoice:
    """A reference model and its problems."""

    #: As for `arborsim record`
    model: str = "chain"
    task: str = ""
    task_options: Mapping[str, Any] = field(default_factory=dict)  # e.g. ``lines`` of `chain`.
    device: str = "cpu"
    batch: int = 32  # sequences at a time
    problems: ProblemChoice | None = None  # judged ones in words, for a language model


@dataclass(frozen=True)
class OcclusionRequest:
    """Which windows of which reasonings to occlude (EpiKV, section 3.4 and appendix C)."""

    choice: ModelChoice
    traces: int  # correctly answered greedy reasonings to use
    split: str = "train"
    first: int = 0  # number of the first problem
    #: Tokens
    window: int = 32
    stride: int = 16
    #: What is generated anew after a window was occluded: the answer alone, as in the paper, or
    #: everything after the window
    regenerate: str = "answer"
    #: Tokens a regenerated reasoning may have beyond the original's place of the answer
    answer_tokens: int = 48


@dataclass(frozen=True)
class OccludedTrace:
    """One reasoning, and which of its windows the answer depends on."""

    problem: int
    #: float16 [reasoning tokens, layers]: of the reasoning as it was generated, without its answer
    hidden_change: np.ndarray
    #: int64 [windows, 2]: first token of each window, counted from the start of the reasoning, and
    #: last one + 1
    windows: np.ndarray
    flipped: np.ndarray  # bool [windows]: whether the answer changed when the window was occluded


@dataclass(frozen=True)
class Occlusions:
    """All traces of a request."""

    model: str  # its full name
    padding: str  # the token that stood in for occluded ones
    problems: int  # tried until there were enough correct answers
    traces: tuple[OccludedTrace, ...]


@dataclass(frozen=True)
class Masking:
    """A block of a recorded path, to be hidden from everything after it."""

    problem: int
    prompt: tuple[int, ...]
    path: tuple[int, ...]  # generated tokens from the prompt to the end of the block
    block_tokens: int  # how many of them are the block


@dataclass(frozen=True)
class MaskingRequest:
    """Blocks to hide, one at a time."""

    choice: ModelChoice
    split: str  # where the problems come from
    recorded: str  # full name of the model that decoded the blocks
    items: Sequence[Masking]


@dataclass(frozen=True)
class Maskings:
    """Whether greedy continuations answer right."""

    #: bool [items]: after the end of each block, with all keys and values readable, and without the
    #: block's
    whole: np.ndarray
    masked: np.ndarray


@runtime_checkable
class CalibratingBackend(Protocol):
    """A live model that can be asked what its answers depend on."""

    def occlude(self, request: OcclusionRequest, on_progress: OnProgress) -> Occlusions:
        """Occlude windows of greedy reasonings."""
        ...

    def mask(self, request: MaskingRequest, on_progress: OnProgress) -> Maskings:
        """Hide blocks of recorded paths."""
        ...


def get_calibrating_backend() -> CalibratingBackend:
    """The backend, or a `UsageError` if it cannot calibrate or lacks what it needs."""
    backend = get_backend()
    if not isinstance(backend, CalibratingBackend):
        raise UsageError("the torch backend cannot calibrate: it lacks `occlude` and `mask`")
    return backend


@dataclass(frozen=True)
class HardwareRequest:
    """Hardware to measure, and with which model."""

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
    """Single operations, in the model's number format. Rates per second."""

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


class Spread(NamedTuple):
    """Seconds of something that was repeated `n` times."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Launches:
    """Seconds of the host until what it launches is launched. Nothing waits for the device."""

    kernel: Spread  # one small kernel, many of which are launched after each other
    graph: Spread | None = None  # one CUDA graph; None where there are none
    #: A decode step of one sequence, kernel by kernel, of the model cut to its first n layers;
    #: empty where a call computes before it returns
    steps: Mapping[int, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """Tokens that were moved to DDR and staged again, and the host's own work on that."""

    groups: int  # cache groups with tokens among them
    size_bytes: int  # that crossed the link, in both directions
    transfers: int
    seconds: float  # median of several, without waits


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


class Quiet(NamedTuple):
    """A policy in a search whose budget holds everything: nothing is decided."""

    lanes: int  # sequences that decode together
    thought: int  # iterations between two turns
    per_iteration_s: float  # the policy's seconds, turns included, per iteration
    layer_s: float = 0.0  # by how much each layer took longer than under full retention


@dataclass(frozen=True)
class PolicyTime:
    """One search under one policy, and the same search under full retention."""

    name: str
    #: Whether the policy reads attention rows, and whether it rounds tokens
    rows: bool
    quantises: bool
    layers: int
    tokens: float  # tokens among which decisions are made, mean
    iterations: int
    decisions: int
    #: Of all iterations
    decode_s: float
    policy_s: float
    #: The same under full retention
    full_decode_s: float
    full_policy_s: float
    quiet: tuple[Quiet, ...] = ()  # searches whose budget holds everything
    turns: int = 0  # from one thought to the next
    lanes: float = 1  # sequences that decode together, mean; more than 1 in a tree

    @property
    def decides_often(self) -> bool:
        """Whether the search says something about what a decision takes."""
        return self.decisions * 4 >= self.iterations

    @property
    def decision_s(self) -> float:
        """Seconds per decision beyond what full retention handles."""
        return max(0.0, self.policy_s - self.full_policy_s) / self.decisions

    @property
    def layer_s(self) -> float:
        """By how much each layer of an iteration took longer."""
        return (self.decode_s - self.full_decode_s) / (self.iterations * self.layers)


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
    launches: Launches | None = None
    moves: tuple[Moved, ...] = ()


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
