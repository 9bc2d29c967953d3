"""Functions and operators whose behaviour on CUDA is more than their numbers."""

from __future__ import annotations

import copy as copying
from typing import Any, cast

import torch
from torch import Tensor

from . import device as own
from .clocks import Stream
from .device import (
    CPU,
    DEVICE,
    FUNCTIONS,
    OPERATORS,
    PretendedTensor,
    adopt,
    again,
    inner,
    keep,
    memory_of,
    on_device,
    run,
    touch,
    where_to,
)
from .rules import check_together, waits_for_data

aten = torch.ops.aten
_to, _new_like = torch.Tensor.to, torch.empty_like


def _wait(why: str) -> None:
    here = own.gpu[-1]
    with here.lock:
        stream = here.stream()
        stream.flush()
        here.wait(stream.known, why)


# -- across the link -------------------------------------------------------------------------------


def is_pinned(x: Any) -> bool:
    return isinstance(x, PretendedTensor) and x.memory.pinned


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten.copy_``: on the current stream if one side is on the device."""
    if target.numel() == 0:
        return target
    here, there = on_device(target), on_device(source)
    if here == there:
        return cast(Tensor, run(aten.copy_.default, target, source, non_blocking))
    host = source if here else target
    what = "copy_ to the device" if here else "copy_ to the host"
    with own.gpu[-1].lock:
        stream = own.gpu[-1].stream()
        behind = non_blocking and is_pinned(host)
        _enqueue(stream, what, behind, target, source)
        # Ordinary memory: what goes up is staged first, what comes down is waited for.
        if not behind and not (non_blocking and here):
            kind = "pinned" if is_pinned(host) else "pageable"
            _wait(f"{what} ({kind})")
    return target


def _enqueue(stream: Stream, what: str, behind: bool, target: Tensor, source: Tensor) -> None:
    gpu = own.gpu[-1]
    if gpu.capture is not None and not behind:
        gpu.fault(f"{what} inside of a capture, of memory that is not page-locked or at once")
    to, fro = inner(target), inner(source)

    def carry_out() -> None:
        with torch.inference_mode():
            to.copy_(fro)

    if gpu.capture is not None:
        gpu.launch(what)
        touch(stream, source, False, what)
        touch(stream, target, True, what)
        keep(target)
        again(carry_out)
        return carry_out()
    stream.learn(gpu.host().known)
    stream.tick()
    gpu.launches[what] += 1
    touch(stream, source, False, what)
    touch(stream, target, True, what)
    stream.pending.append(carry_out)
    if not behind or stream is gpu.default:
        stream.flush()


def moved(
    x: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool, **form: Any
) -> Tensor:
    """A copy of a tensor on the other side of the link."""
    up = device.type == "cuda"
    kind = x.dtype if dtype is None else dtype
    if up:
        x = x if kind == x.dtype else x.to(kind)  # on the side that is cheaper in bytes or not
        target = adopt(_new_like(inner(x), **form))
    else:
        # Memory that a copy behind the host's back goes to is page-locked.
        x = x if kind == x.dtype else x.to(kind)
        made = _new_like(inner(x), **form)
        target = adopt(made, pinned=True) if non_blocking else made
    own.poison(inner(target))
    if up:
        with own.gpu[-1].lock:
            touch(own.gpu[-1].launch("empty"), target, True, "empty")
    return copy_(target, x, non_blocking)


def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.Tensor.to` of any tensor while there is a pretended device."""
    rest = {key: value for key, value in kwargs.items() if key != "copy"}
    if "other" in rest:
        args, rest = (rest.pop("other"), *args), rest
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if len(args) > 3:  # (device, dtype, non_blocking, copy)
        kwargs["copy"], args = args[3], args[:3]
    device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **rest)
    pretended = isinstance(x, PretendedTensor)
    if device == own.META and pretended:
        return cast(Tensor, _to(inner(x), device))
    if device is None or (device.type == "cuda") == on_device(x) or x.device.type == "meta":
        if not pretended:
            return cast(Tensor, _to(x, *args, **kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            options: dict[str, Any] = {"copy": kwargs.get("copy", False)}
            if form is not None:
                options["memory_format"] = form
            return cast(Tensor, _to(x, dtype or x.dtype, **options))
    options = {} if form is None else {"memory_format": form}
    return moved(x, device, dtype, non_blocking, **options)


def _to_operator(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``aten._to_copy`` across the link, as C++ calls it."""
    device = kwargs.get("device")
    if device is None or (torch.device(device).type == "cuda") == on_device(x):
        kwargs.pop("device", None)
        return run(aten._to_copy.default, x, *args, **kwargs)
    return moved(x, torch.device(device), kwargs.get("dtype"), kwargs.get("non_blocking", False))


def pin_memory(x: Tensor, *_: Any) -> Tensor:
    if on_device(x):
        raise RuntimeError(f"cannot pin '{x.type()}' only dense CPU tensors can be pinned")
    if is_pinned(x):
        return x
    made = adopt(x.detach().clone(), pinned=True)
    touch(where_to(False, "pin_memory"), made, True, "pin_memory")
    return made


# -- reads by the host -----------------------------------------------------------------------------


def _host_read(x: Tensor, what: str) -> Tensor:
    """The numbers, as the host may read them."""
    if on_device(x):
        with own.gpu[-1].lock:
            stream = own.gpu[-1].launch(what)
            touch(stream, x, False, what)
        _wait(what)
    else:
        touch(where_to(False, what), x, False, what)
    return cast(Tensor, inner(x))


def numpy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_device(x):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    return _host_read(x, "numpy").numpy(*args, **kwargs)


def _reader(name: str) -> Any:
    def read(x: Tensor, *args: Any) -> Any:
        return getattr(_host_read(x, name), name)(*args)

    return read


def _refused(x: Tensor, *_: Any) -> Any:
    raise TypeError("the address of a pretended tensor")


# -- indexing --------------------------------------------------------------------------------------


def _parts(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def getitem(x: Tensor, index: Any) -> Tensor:
    """Views of basic indices, copies of tensors of indices."""
    pretended, chosen = _checked(x, index)
    result = inner(x)[inner(index)] if not isinstance(index, list) else inner(x)[index]
    memory = memory_of(result)
    storage = inner(x).untyped_storage()._cdata
    if result.untyped_storage()._cdata == storage and memory is not None:
        normal = torch.is_inference_mode_enabled() and not x.is_inference()
        with torch.inference_mode(torch.is_inference_mode_enabled() and not normal):
            return adopt(result)
    by = where_to(pretended, "index")
    for part in (x, *chosen):
        touch(by, part, False, "index")
    if not pretended:
        return cast(Tensor, result)
    made = adopt(result)
    touch(by, made, True, "index")
    source, where = inner(x), inner(index)
    again(lambda: source[where], result)
    if waits_for_data("index", (x, chosen)):
        _wait("index by the host's indices, or by a mask")
    return made


def setitem(x: Tensor, index: Any, value: Any) -> None:
    pretended, chosen = _checked(x, index)
    if isinstance(value, Tensor) and on_device(value) != pretended and value.dim():
        if chosen:
            check_together(aten.index_put_.default, "index_put_", [("values", value)], on_device)
            raise RuntimeError("Expected all tensors to be on the same device")
        getitem(x, index).copy_(value)
        return
    by = where_to(pretended, "index_put_")
    for part in (*chosen, value):
        touch(by, part, False, "index_put_")
    view = inner(x) if chosen else inner(x)[inner(index)]
    touch(by, adopt(view) if isinstance(x, PretendedTensor) else view, True, "index_put_")
    keep(x)
    target, where, new = inner(x), inner(index), inner(value)
    target[where] = new
    if pretended:
        again(lambda: target.__setitem__(where, new))
    if pretended and waits_for_data("index_put_", (x, chosen)):
        _wait("index_put_ by the host's indices, or by a mask")


def _checked(x: Tensor, index: Any) -> tuple[bool, list[Tensor]]:
    pretended = on_device(x)
    chosen = [part for part in _parts(index) if isinstance(part, Tensor)]
    if not pretended and any(on_device(part) for part in chosen):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    return pretended, chosen


# -- the rest --------------------------------------------------------------------------------------


def _deepcopy(x: PretendedTensor, memo: dict[int, Any]) -> Any:
    if id(x) not in memo:
        made: Any = adopt(copying.deepcopy(inner(x), {}), x.memory.pinned)
        if isinstance(x, torch.nn.Parameter):
            made = torch.nn.Parameter(made, x.requires_grad)
        memo[id(x)] = made
    return memo[id(x)]


def _cpu(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return to(x, CPU) if on_device(x) else x


def fill_tables() -> None:
    """Enter what is special into the tables of `device`."""
    T = torch.Tensor
    FUNCTIONS.update({
        _to: to, T.cpu: _cpu, T.cuda: lambda x, *_, **__: to(x, DEVICE), T.numpy: numpy,
        T.__array__: numpy, T.pin_memory: pin_memory, T.is_pinned: lambda x, *_: is_pinned(x),
        T.__getitem__: getitem, T.__setitem__: setitem,
        T.__deepcopy__: _deepcopy, T.data_ptr: _refused,
    })  # fmt: skip
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__repr__"):
        FUNCTIONS[getattr(T, name)] = _reader(name)
    OPERATORS.update({
        aten.copy_.default: copy_, aten._to_copy.default: _to_operator,
        aten._local_scalar_dense.default: lambda x: _host_read(x, "item").item(),
    })  # fmt: skip
