"""Tensors that say ``cuda:0``, or that they are page-locked, and hold a tensor of the CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .clocks import Gpu, Memory, Stream, Timeline
from .graphs import refill
from .rules import (
    check_generator,
    check_together,
    check_type,
    waits_for_data,
)

CPU = torch.device("cpu")
DEVICE, META = torch.device("cuda", 0), torch.device("meta")

#: The device there is, while there is one (`arming.pretend`).
gpu: list[Gpu] = []
_memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
#: Functions that are not left to PyTorch, by the function itself (`functions`).
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
#: Operators likewise (`functions`).
OPERATORS: dict[Any, Callable[..., Any]] = {}


class PretendedTensor(torch.Tensor):
    """A tensor of the device or in page-locked memory.

    Attributes
    ----------
    inner : Tensor
        The numbers, on the CPU.
    memory : Memory
    """

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> PretendedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            # Without CUDA, C++ has no guard for its devices: there the tensor has no data at all.
            device=CPU if memory.pinned else META,
        )
        made.inner, made.memory = inner, memory
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CPU if self.memory.pinned else DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.memory.pinned

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.memory.pinned

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.recorded.add(stream.id)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = FUNCTIONS.get(function)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = OPERATORS.get(operator)
        return (own or functools.partial(run, operator))(*args, **(kwargs or {}))


def on_device(x: Any) -> bool:
    return isinstance(x, PretendedTensor) and not x.memory.pinned


def inner(x: Any) -> Any:
    """The same without pretence, also in lists."""
    if isinstance(x, PretendedTensor):
        return x.inner
    if isinstance(x, (list, tuple)):
        return type(x)(inner(each) for each in x)
    return x


def tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from tensors(each)


def memory_of(x: Tensor) -> Memory | None:
    """The pretended memory that a CPU tensor lies in."""
    return _memories.get(x.untyped_storage()._cdata)


def adopt(x: Tensor, pinned: bool = False) -> PretendedTensor:
    """A CPU tensor without other references, as one of the device, or as page-locked."""
    key = x.untyped_storage()._cdata
    memory = _memories.get(key)
    if memory is None:
        memory = Memory(gpu[-1], x.untyped_storage().nbytes(), pinned)
        _memories[key] = memory
        capture = gpu[-1].capture
        if capture is not None:
            if pinned:
                gpu[-1].fault("page-locked memory is allocated inside of a capture")
            capture.fresh.add(memory)
            if not pinned:
                capture.pool.blocks.add(memory)
    return PretendedTensor(x, memory)


def span_of(x: Tensor) -> tuple[int, int] | None:
    """First and last byte of a tensor in its memory."""
    if x.numel() == 0:
        return None
    size, first = x.element_size(), x.storage_offset()
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return first * size, (first + reach + 1) * size


def rows_of(x: Tensor, dim: int, index: Tensor) -> Iterator[Tensor]:
    """The runs of rows that an index names."""
    rows = torch.unique(index)
    starts = torch.cat([rows[:1], rows[1:][rows[1:] != rows[:-1] + 1]]).tolist()
    ends = torch.cat([rows[:-1][rows[1:] != rows[:-1] + 1], rows[-1:]]).tolist()
    return (x.narrow(dim, a, b + 1 - a) for a, b in zip(starts, ends, strict=True))


def touch(by: Timeline, x: Any, write: bool, what: str, part: Tensor | None = None) -> None:
    """Note that an operation accesses a tensor, or a part of it, if its memory is pretended."""
    if isinstance(x, PretendedTensor):
        span = span_of(x.inner if part is None else part)
        capture = x.memory.gpu.capture
        if span is not None and capture is not None and by in capture.branches:
            capture.access(by, x.memory, span, write)
        elif span is not None:
            with x.memory.gpu.lock:
                x.memory.touch(by, span, write, what)


def again(redo: Callable[[], Any], into: Any = None) -> None:
    """How a captured graph does the last operation again, and where its results go."""
    capture = gpu[-1].capture
    if capture is None:
        return
    capture.results += tensors(into)
    capture.notes[-1].again = lambda: refill(into, redo()) if into is not None else redo()


def keep(x: Any) -> None:
    """A tensor is about to be written: a capture has no effect."""
    capture = gpu[-1].capture
    if capture is not None and isinstance(x, PretendedTensor):
        capture.keep(x.memory, x.inner)


def where_to(is_device: bool, what: str) -> Timeline:
    """The timeline on which an operation runs."""
    here = gpu[-1]
    with here.lock:
        if is_device:
            return here.launch(what)
        host = here.host()
        host.tick()
        return host


@functools.cache
def _signature(operator: Any) -> tuple[tuple[str, bool], ...]:
    """Names of the arguments and whether they are written."""
    return tuple(
        (a.name, a.alias_info is not None and a.alias_info.is_write)
        for a in operator._schema.arguments
    )


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out an operator on the inner tensors, after checks, and note what it accesses."""
    signature = _signature(operator)
    given = [*zip(signature, args, strict=False)]
    given += [((name, written), kwargs[name]) for name, written in signature if name in kwargs]
    found = [(x, written) for (_, written), value in given for x in tensors(value)]
    is_device = any(on_device(x) for x, _ in found)
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted) != META:  # C++ asks for its own device
        is_device = torch.device(wanted).type == "cuda"
    name = operator._schema.name.removeprefix("aten::")
    if is_device:
        check_together(operator, name, [(key, value) for (key, _), value in given], on_device)
        check_type(name, [x for x, _ in found])
        check_generator(kwargs.get("generator"))
    plain = {
        key: CPU if key == "device" and value is not None else inner(value)
        for key, value in kwargs.items()
        if key != "pin_memory"
    }
    # Before the numbers are computed: a copy on the way may have to end first.
    timeline = where_to(is_device, name) if _accesses(operator) else None
    for x, is_written in found:
        if is_written:
            keep(x)
    given_inner = inner(args)
    result = operator(*given_inner, **plain)
    by_inner = {id(x.inner): x for x, _ in found if isinstance(x, PretendedTensor)}
    outs = list(tensors(result))
    before = {x.untyped_storage()._cdata for x in by_inner_tensors(found)}
    views = [out.untyped_storage()._cdata in before for out in outs]
    written = [x for x, is_written in found if is_written]
    if not (outs and all(views) and not written):  # a view accesses nothing
        timeline = timeline or where_to(is_device, name)
        for x, is_written in found:
            # The host reads just these rows while copies go into others.
            some = name == "index_select" and x is args[0] and not is_device
            for part in rows_of(inner(x), *inner(args[1:])) if some else [None]:
                touch(timeline, x, is_written, name, part)
        if is_device:
            again(lambda: operator(*given_inner, **plain), None if written else result)
    if is_device and waits_for_data(name, args):
        here = gpu[-1]
        here.wait(here.stream().known, name)
    return _wrapped(result, by_inner, is_device, timeline, name, _normal(found))


def by_inner_tensors(found: list[tuple[Tensor, bool]]) -> Iterator[Tensor]:
    return (x.inner if isinstance(x, PretendedTensor) else x for x, _ in found)


def _normal(found: list[tuple[Tensor, bool]]) -> bool:
    """A view of a tensor made outside inference mode is such a tensor as well."""
    return torch.is_inference_mode_enabled() and any(
        isinstance(x, PretendedTensor) and not x.is_inference() for x, _ in found
    )


@functools.cache
def _accesses(operator: Any) -> bool:
    """Whether it is certain beforehand that the operator does more than make a view."""
    returns = operator._schema.returns
    return not returns or any(r.alias_info is None or r.alias_info.is_write for r in returns)


def _wrapped(
    result: Any,
    known: dict[int, PretendedTensor],
    is_device: bool,
    timeline: Timeline | None,
    name: str,
    normal: bool,
) -> Any:
    if isinstance(result, (list, tuple)):
        parts = [_wrapped(x, known, is_device, timeline, name, normal) for x in result]
        return parts if isinstance(result, list) else tuple(parts)
    if not isinstance(result, Tensor) or isinstance(result, PretendedTensor):
        return result
    if id(result) in known:
        return known[id(result)]
    memory = memory_of(result)
    if memory is None and not is_device:
        return result  # in ordinary memory
    fresh = memory is None
    if normal and not fresh:
        with torch.inference_mode(False):
            return adopt(result)
    made = adopt(result)
    if fresh and timeline is not None:
        _poison(name, result)
        touch(timeline, made, True, name)
    return made


def _poison(name: str, fresh: Tensor) -> None:
    """Memory that was not written holds anything."""
    if name in ("empty", "empty_like", "new_empty", "empty_strided", "empty_permuted"):
        poison(fresh)


def poison(fresh: Tensor) -> None:
    if fresh.is_floating_point() and fresh.numel() and fresh.itemsize > 1:
        fresh.fill_(float("nan"))


def caller() -> str:
    """The first frame of the project that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "arborsim_torch" in path or "/benchmarks/" in path:
            return f"{path.rsplit('/', 2)[-2]}/{path.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
