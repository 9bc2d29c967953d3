"""Make PyTorch pretend: the patches, put on and taken off."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from . import device as own
from . import functions, graphs, products
from .clocks import Event, Gpu, Stream
from .device import DEVICE, FUNCTIONS, OPERATORS, adopt, poison
from .functions import is_pinned, pin_memory, to
from .launches import LAUNCHERS
from .rules import device_generators

TOTAL_BYTES = 80 << 30
CAPABILITY = (9, 0)
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn",
              "randint", "randperm", "linspace", "eye", "empty_like", "zeros_like", "ones_like",
              "full_like", "rand_like", "randn_like", "empty_strided", "scalar_tensor")  # fmt: skip
#: They make their numbers on the host and copy them.
_COPIED = ("tensor", "as_tensor")


def _factory(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        is_device = device is not None and torch.device(device).type == "cuda"
        pinned = bool(kwargs.get("pin_memory"))
        if not is_device and not pinned:
            return original(*args, **kwargs)
        if is_device and pinned:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        kwargs.pop("pin_memory", None)
        if name in _COPIED:
            kwargs.pop("device")
            return to(original(*args, **kwargs), DEVICE)
        if any(own.on_device(x) for x in args) and is_device:
            return original(*args, **kwargs)
        kwargs["device"] = own.CPU
        fresh = original(*own.inner(args), **kwargs)
        if name.startswith("empty"):
            poison(fresh)
        result = adopt(fresh, pinned)
        own.touch(own.where_to(is_device, name), result, True, name)
        if is_device and not name.startswith("empty"):
            own.again(lambda: original(*own.inner(args), **kwargs), fresh)
        return result

    return made


class _Generator(torch.Generator):
    """Draws on the CPU, whatever device it is for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu")
        if torch.device(device).type == "cuda":
            device_generators[made._cdata] = made
        return made


class _OnDevice:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        _index(device)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _index(device: Any) -> None:
    if device is None or device == 0:
        return
    wanted = torch.device(device)
    if wanted.type != "cuda" or wanted.index not in (None, 0):
        raise ValueError(f"Expected a cuda device, but got: {device}")


def _apis(gpu: Gpu) -> dict[str, Any]:
    """What replaces parts of `torch.cuda`."""
    numbers = iter(range(1, 1 << 30))

    class PretendedStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            _index(device)
            super().__init__(gpu, f"stream {next(numbers)}")
            gpu.streams.append(self)

    class PretendedEvent(Event):
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            super().__init__(gpu, enable_timing)

    @contextlib.contextmanager
    def turned(chosen: Stream | None) -> Iterator[None]:
        before = gpu.stream()
        gpu.turn_to(chosen or before)
        try:
            yield
        finally:
            gpu.turn_to(before)

    def graph(
        captured: graphs.Graph, pool: Any = None, stream: Any = None,
        capture_error_mode: str = "global",
    ) -> Any:  # fmt: skip
        aside = PretendedStream() if stream is None else stream
        return graphs.captured(gpu, captured, turned(aside), pool)

    def capturing() -> bool:
        return gpu.capture is not None and gpu.stream() in gpu.capture.branches

    def synchronize(device: Any = None) -> None:
        _index(device)
        with gpu.lock:
            for each in gpu.streams:
                each.flush()
                gpu.host().learn(each.known)
            gpu.wait({}, "torch.cuda.synchronize")

    def reset(device: Any = None) -> None:
        gpu.peak = gpu.allocated

    def sync_debug(mode: str | int) -> None:
        gpu.sync_debug = ("default", "warn", "error").index(mode) if isinstance(mode, str) else mode

    def checked(answer: Callable[[], Any]) -> Callable[..., Any]:
        def call(device: Any = None) -> Any:
            _index(device)
            return answer()

        return call

    properties = SimpleNamespace(
        total_memory=TOTAL_BYTES, multi_processor_count=132, name="Pretended", major=CAPABILITY[0],
        minor=CAPABILITY[1], L2_cache_size=50 << 20, warp_size=32,
    )  # fmt: skip
    return {
        "Stream": PretendedStream, "Event": PretendedEvent, "stream": turned,
        "is_current_stream_capturing": capturing,
        "CUDAGraph": lambda: graphs.Graph(gpu), "graph": graph, "graph_pool_handle": graphs.Pool,
        "default_generators": (),
        "current_stream": checked(gpu.stream), "default_stream": checked(lambda: gpu.default),
        "set_sync_debug_mode": sync_debug, "get_sync_debug_mode": lambda: gpu.sync_debug,
        "synchronize": synchronize, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": _index, "device": _OnDevice,
        "empty_cache": lambda: None, "is_initialized": lambda: True, "init": lambda: None,
        "_lazy_init": lambda: None, "_lazy_call": lambda *_, **__: None,
        "mem_get_info": checked(lambda: (TOTAL_BYTES - gpu.allocated, TOTAL_BYTES)),
        "memory_allocated": checked(lambda: gpu.allocated),
        "max_memory_allocated": checked(lambda: gpu.peak),
        "memory_reserved": checked(lambda: gpu.allocated),
        "max_memory_reserved": checked(lambda: gpu.peak), "reset_peak_memory_stats": reset,
        "get_device_properties": checked(lambda: properties),
        "get_device_capability": checked(lambda: CAPABILITY),
        "get_device_name": checked(lambda: "Pretended"),
        "is_bf16_supported": lambda *_, **__: True, "manual_seed_all": lambda _: None,
    }  # fmt: skip


def _threads(gpu: Gpu, stack: contextlib.ExitStack) -> None:
    """Work handed to a pool comes after the handing over, and before its result is taken."""
    submit, outcome, failure = ThreadPoolExecutor.submit, Future.result, Future.exception
    done = Future.done

    def submitted(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, after = dict(gpu.host().known), {}

        def work() -> Any:
            gpu.host().learn(before)
            try:
                return function(*args, **kwargs)
            finally:
                after.update(gpu.host().known)

        future: Any = submit(pool, work)
        future.pretended_known = after
        return future

    def joined(original: Any) -> Any:
        def call(future: Any, *args: Any) -> Any:
            try:
                return original(future, *args)
            finally:
                if done(future):
                    gpu.host().learn(getattr(future, "pretended_known", {}))

        return call

    stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", submitted))
    for name, original in (("result", outcome), ("exception", failure), ("done", done)):
        stack.enter_context(mock.patch.object(Future, name, joined(original)))


def _forget_answers() -> None:
    """What was remembered of devices."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(("arborsim_torch.kernels", "arborsim_torch.hardware")):
            continue
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextlib.contextmanager
def pretend(patience: int = 0) -> Iterator[Gpu]:
    """A pretended device ``cuda:0``; at the end, every fault that was found is raised.

    Parameters
    ----------
    patience : int
        How often an event that was not waited for says that it has not happened yet.
    """
    gpu = Gpu(patience)
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    tensor_to = torch.Tensor.to
    _device_constructors()  # what ``with torch.device(...)`` heeds: remembered when first asked
    functions.fill_tables()
    products.fill_tables()
    own.gpu.append(gpu)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _forget_answers()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        for name, original in originals.items():
            patch(mock.patch.object(torch, name, _factory(name, original)))
        for name, stand_in in _apis(gpu).items():
            patch(mock.patch.object(torch.cuda, name, stand_in))
        patch(mock.patch.object(torch, "Generator", _Generator))
        ended = mock.patch.object(
            torch._C, "_cuda_endAllocateToPool", lambda _, pool: pool.end(), create=True
        )
        patch(ended)
        if hasattr(torch.accelerator, "empty_host_cache"):
            patch(mock.patch.object(torch.accelerator, "empty_host_cache"))
        patched = {
            "to": to, "is_pinned": lambda x, *_: is_pinned(x), "pin_memory": pin_memory,
            "cuda": lambda x, *_, **__: to(x, DEVICE),
        }  # fmt: skip
        for name, function in patched.items():
            patch(mock.patch.object(torch.Tensor, name, function))
            FUNCTIONS[function] = function
        if importlib.util.find_spec("triton") is not None:
            for module, launchers in LAUNCHERS.items():
                launches = importlib.import_module(f"arborsim_torch.kernels.{module}")
                for name, stand_in in launchers.items():
                    patch(mock.patch.object(launches, name, stand_in))
        _threads(gpu, stack)
        try:
            yield gpu
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    assert torch.Tensor.to is tensor_to
    own.gpu.pop()
    FUNCTIONS.clear()
    OPERATORS.clear()
    device_generators.clear()
    _forget_answers()
    if any(pool.recording for pool in gpu.pools):
        gpu.faults.append("memory is still allocated for a capture that has failed")
    if gpu.faults:
        raise AssertionError("\n".join(dict.fromkeys(gpu.faults)))
