"""What `arborsim calibrate hardware` asks of a machine, and what comes back.

A backend measures (`MeasuringBackend.measure_hardware`), `arborsim.calibrate.hardware_fit` fits
the cost model's overheads to the forward passes, and `arborsim.calibrate.hardware_profile` makes
the file of it.  Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

from arborsim.calibrate.backend import OnProgress
from arborsim.calibrate.policy_cost import PolicyTime
from arborsim.core.errors import UsageError
from arborsim.live.backends import get_backend
from arborsim.trace.schema import Geometry


@dataclass(frozen=True)
class HardwareRequest:
    """What to measure.

    Attributes
    ----------
    model : str
        A reference model, a folder, or ``config:`` and a geometry's name (random weights).
    device : str
        ``cpu``, ``cuda`` or ``cuda:1``.
    dtype : str
        "auto" is the type the weights are stored in.
    quick : bool
        Fewer sizes, fewer repetitions.
    policies : tuple of str
        Policies to time in live searches, however long that takes; empty for as many as the time
        allows.
    """

    model: str = "chain"
    device: str = "cpu"
    dtype: str = "auto"
    quick: bool = False
    policies: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinkRates:
    """Copies between device and host in contiguous blocks.

    Attributes
    ----------
    block_bytes : tuple of int
        Rising.
    h2d, d2h : tuple of float
        Bytes per second for blocks of each size, page-locked host memory; the time of an empty
        transfer is taken off.
    pageable_h2d, pageable_d2h : tuple of float
        The same with ordinary host memory; empty where the two are the same (a CPU).
    latency_s : float
        Of an empty transfer.
    both_bytes_per_s : float
        Large blocks, both directions at once, added up.
    """

    block_bytes: tuple[int, ...]
    h2d: tuple[float, ...]
    d2h: tuple[float, ...]
    pageable_h2d: tuple[float, ...]
    pageable_d2h: tuple[float, ...]
    latency_s: float
    both_bytes_per_s: float


@dataclass(frozen=True)
class Kernels:
    """Single operations, in the model's number format; rates per second.

    Attributes
    ----------
    matrix_flops : mapping of int to float
        Square matrix products by size.
    read_bytes, copy_bytes, host_read_bytes : mapping of int to float
        Reading a buffer of so many bytes on the device; copying one there (bytes read and
        written); reading one in host memory.
    weights_bytes : float
        All parameters, when each weight matrix is multiplied with one row.
    kv_bytes : mapping of int to float
        Keys and values read by fused attention of one query, by number of tokens.
    eager_bytes : mapping of int to float
        Probability rows written (softmax) and read back (mean over heads), by number of tokens.
    quantise_bytes, dequantise_bytes : mapping of str to float
        Quantised bytes (data and scales) written and read, by format.
    gather_bytes : mapping of int to float
        Tokens' keys or values collected by index, by number of tokens; bytes read and written.
    top_k_s, argpartition_s : mapping of int to float
        Seconds to choose a sixteenth of so many scores: on the device, and on the host in NumPy.
    """

    matrix_flops: Mapping[int, float]
    read_bytes: Mapping[int, float]
    copy_bytes: Mapping[int, float]
    host_read_bytes: Mapping[int, float]
    weights_bytes: float
    kv_bytes: Mapping[int, float]
    eager_bytes: Mapping[int, float]
    quantise_bytes: Mapping[str, float]
    dequantise_bytes: Mapping[str, float]
    gather_bytes: Mapping[int, float]
    top_k_s: Mapping[int, float]
    argpartition_s: Mapping[int, float]


@dataclass(frozen=True)
class Pass:
    """One kind of forward pass of the model, cut to its first layers, and the time it took.

    Attributes
    ----------
    kind : {"decode", "prefill"}
    layers : int
        Of the model that was run.
    parameters : int
        That count as read by it.
    lanes : int
        Sequences; 1 for a prefill.
    tokens : int
        New ones of each sequence.
    attended : float
        Tokens on a sequence's path when it is over.
    shared : float
        Tokens of all paths, each counted once: what a kernel for trees reads.
    seconds : float
    held_out : bool
        Not to be fitted to.
    """

    kind: Literal["decode", "prefill"]
    layers: int
    parameters: int
    lanes: int
    tokens: int
    attended: float
    shared: float
    seconds: float
    held_out: bool = False


@dataclass(frozen=True)
class HardwareMeasurements:
    """Everything a backend measured.

    Attributes
    ----------
    device : str
        Name of the GPU or CPU, with the number of threads used on a CPU.
    on_cpu : bool
    geometry : Geometry
        Of the whole model.
    dtype : str
    memory_bytes, host_memory_bytes : int
        Installed.
    versions : mapping
        Of the software.
    link : LinkRates
    kernels : Kernels
    passes : tuple of Pass
    notes : tuple of str
        What was left out, and why.
    policies : tuple of PolicyTime
        Searches under policies; empty if the model is too slow for them.
    """

    device: str
    on_cpu: bool
    geometry: Geometry
    dtype: str
    memory_bytes: int
    host_memory_bytes: int
    versions: Mapping[str, str]
    link: LinkRates
    kernels: Kernels
    passes: tuple[Pass, ...]
    notes: tuple[str, ...] = ()
    policies: tuple[PolicyTime, ...] = ()


@runtime_checkable
class MeasuringBackend(Protocol):
    """A framework that can measure the machine it runs on."""

    def measure_hardware(
        self, request: HardwareRequest, on_progress: OnProgress
    ) -> HardwareMeasurements:
        """Measure copies, kernels and forward passes."""
        ...


def get_measuring_backend(name: str = "torch") -> MeasuringBackend:
    """The backend called `name`, if it can measure.

    Raises
    ------
    UsageError
        It cannot, or what it needs is not installed.
    """
    backend = get_backend(name)
    if not isinstance(backend, MeasuringBackend):
        raise UsageError(f"the {name} backend cannot measure: it lacks `measure_hardware`")
    return cast(MeasuringBackend, backend)
