"""All measurements of a machine, in order."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from arborsim.core.errors import UsageError
from arborsim.products.calibrate import backend
from arborsim.trace.schema import Geometry
from arborsim_torch.hardware import kernels
from arborsim_torch.hardware.facts import all_facts
from arborsim_torch.hardware.launches import measure_launches, measure_moves
from arborsim_torch.hardware.memory import installed_bytes, memory_errors
from arborsim_torch.hardware.model import load_for_timing
from arborsim_torch.hardware.passes import make_design, time_passes
from arborsim_torch.hardware.searches import ITERATIONS, time_policies
from arborsim_torch.hardware.timing import Timer
from arborsim_torch.hardware.transfers import measure_link
from arborsim_torch.models import LoadedModel, geometry

_QUICK_POLICIES_S, _POLICIES_S = 4.0, 240.0
_LEAST_SEARCHES = 9  # of two policies over two prompts, and their yardsticks
_STEPS = 10  # how often `_Steps` is told of a new one, on CUDA
_WHAT = "measuring copies and kernels"


def measure(
    request: backend.HardwareRequest, on_progress: backend.OnProgress
) -> backend.HardwareMeasurements:
    """Measure; `UsageError`: the device or the model does not exist, or memory runs out."""
    with memory_errors(lambda: _too_large(request)):
        loaded, notes = load_for_timing(request)
        device = loaded.model.device
        quick = request.quick
        timer = Timer(device, 2, 5, 0.1) if quick else Timer(device, 3, 5, 0.6)
        shape, tell = geometry(loaded), _Steps(on_progress)
        link = measure_link(timer, quick, tell)
        measured = _kernels(timer, loaded, shape, quick, tell)
        tell("launches and moves")
        launches, moves = measure_launches(timer, loaded.model), measure_moves(timer, loaded.model)
        passes, left_out = time_passes(
            timer,
            loaded.model,
            make_design(device.type == "cuda", quick),
            partial(on_progress, "timing forward passes"),
        )
        policies, too_slow = _policies(timer, loaded, passes, request, on_progress)
    return backend.HardwareMeasurements(
        device=_name(device),
        on_cpu=device.type == "cpu",
        geometry=shape,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        memory_bytes=installed_bytes(device),
        host_memory_bytes=installed_bytes(torch.device("cpu")),
        versions=all_facts(loaded.model),
        link=link,
        kernels=measured,
        passes=tuple(passes),
        notes=(*notes, *left_out, *too_slow),
        policies=policies,
        launches=launches,
        moves=moves,
    )


class _Steps:
    """Counts what has been begun."""

    def __init__(self, on_progress: backend.OnProgress) -> None:
        self._on_progress, self._begun = on_progress, 0

    def __call__(self, what: str) -> None:
        self._on_progress(_WHAT, min(self._begun, _STEPS), _STEPS)
        self._begun += 1


def _kernels(
    timer: Timer, loaded: LoadedModel, shape: Geometry, quick: bool, tell: Callable[[str], None]
) -> backend.Kernels:
    dtype = loaded.model.dtype
    host = Timer(torch.device("cpu"), timer.rounds, timer.repeats, timer.limit_s)
    tell("matrix products")
    flops = kernels.matrix_flops(timer, dtype, quick)
    tell("reading memory")
    read, copied = kernels.read_rates(timer, quick), kernels.copy_rates(timer, quick)
    host_read = read if timer.device.type == "cpu" else kernels.read_rates(host, quick)
    tell("weights")
    weights = kernels.weights_rate(timer, loaded.model)
    tell("attention")
    kv = kernels.kv_rates(timer, shape, dtype, quick)
    eager = kernels.eager_rates(timer, shape, quick)
    tell("8 bits")
    written, dequantised = kernels.codec_rates(timer, shape, dtype)
    tell("gathering and choosing")
    gathered = kernels.gather_rates(timer, shape, dtype, quick)
    top_k, argpartition = kernels.choice_s(timer, quick)
    memory, moved = (read, copied, host_read, weights), (written, dequantised)
    return backend.Kernels(flops, *memory, kv, eager, *moved, gathered, top_k, argpartition)


def _policies(
    timer: Timer,
    loaded: LoadedModel,
    passes: Sequence[backend.Pass],
    request: backend.HardwareRequest,
    on_progress: backend.OnProgress,
) -> tuple[tuple[backend.PolicyTime, ...], tuple[str, ...]]:
    """Searches under policies, if the model is fast enough for them; and a note if it is not."""
    limit_s = _QUICK_POLICIES_S if request.quick else _POLICIES_S
    if request.policies:  # named ones are measured, however long it takes
        limit_s = math.inf
    step_s = max(one.seconds for one in passes if one.kind == "decode" and one.lanes == 1)
    if step_s * ITERATIONS * _LEAST_SEARCHES > limit_s:
        return (), ("the model is too slow for searches under policies: decisions alone are timed",)
    tell = partial(on_progress, "timing policies")
    model, names = loaded.model, request.policies
    return tuple(time_policies(timer, model, request.quick, limit_s, tell, names)), ()


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    cores = f", {len(names)} cores" if names else ""
    return f"{name}{cores}, {threads} thread{'s' if threads != 1 else ''}"


def _too_large(request: backend.HardwareRequest) -> UsageError:
    return UsageError(
        f"out of memory on {request.device} while measuring {request.model}: "
        "try --quick or a smaller --model"
    )
