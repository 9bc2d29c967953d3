"""What CUDA refuses or makes the host wait for, where the CPU does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Generators that were asked for on the device, by what they are to C++.
device_generators: dict[int, torch.Generator] = {}

#: Operators that take a number as a tensor without axes on the CPU although they are not pointwise.
_SCALARS = ("where", "masked_fill", "masked_fill_", "fill_", "index_put", "index_put_", "lerp",
            "_index_put_impl_", "full", "clamp", "isclose", "allclose", "linspace")  # fmt: skip
#: Operators whose indices may lie on the host.
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
#: Operators whose result's shape or value the host must know.
_WAITING = ("nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "equal",
            "unique_consecutive", "is_nonzero", "_local_scalar_dense", "item", "allclose",
            "bincount", "argwhere", "_assert_async")  # fmt: skip
#: What CUDA can do with 8-bit floats: move them and convert them.
_FLOAT8 = ("to", "_to_copy", "copy_", "view", "view_dtype", "empty", "empty_like", "clone", "slice",
           "select", "narrow", "fill_", "zero_", "zeros", "zeros_like", "new_empty", "new_zeros",
           "unsqueeze", "squeeze", "reshape", "flatten", "expand", "transpose", "permute", "detach",
           "cat", "contiguous", "as_strided", "unbind", "split", "movedim", "t", "alias",
           "split_with_sizes", "chunk", "expand_as", "view_as", "_unsafe_view", "unflatten",
           "float", "numel", "record_stream")  # fmt: skip
#: Matrix products of whole numbers are not implemented.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "addmv", "mv", "dot")


def check_together(
    operator: Any, name: str, given: list[tuple[str, Any]], on_device: Callable[[Any], bool]
) -> None:
    """Refuse arguments on different devices, as CUDA's kernels do."""
    for key, value in given:
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(x, Tensor) or on_device(x):
                continue
            if name in ("copy_", "_to_copy", "to", "set_"):
                continue
            number = x.dim() == 0
            if number and (torch.Tag.pointwise in operator.tags or name in _SCALARS):
                continue
            if name in _INDEXED and key == "indices":
                first = given[0][1]
                if on_device(first):
                    continue
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor"
                    " (cpu)"
                )
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (when checking argument for argument {key} in method "
                f"wrapper_CUDA_{name})"
            )


def check_type(name: str, given: list[Tensor]) -> None:
    """Refuse types for which CUDA has no kernel."""
    if name not in _FLOAT8 and any(
        x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for x in given
    ):
        raise NotImplementedError(f"\"{name}_cuda\" not implemented for 'Float8_e4m3fn'")
    if name in _PRODUCTS and any(
        not x.is_floating_point() and not x.is_complex() for x in given if x.dim()
    ):
        raise RuntimeError(f'"{name}_cuda" not implemented for whole numbers')


def check_generator(generator: Any) -> None:
    if generator is not None and generator._cdata not in device_generators:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def waits_for_data(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the host waits until the result is known."""
    if name in _WAITING:
        return True
    if name in _INDEXED:
        return any(
            x is not None
            and ((x.device.type == "cpu" and x.dim() > 0) or x.dtype in (torch.bool, torch.uint8))
            for x in args[1]
        )
    if name == "repeat_interleave":
        return len(args) > 1 and isinstance(args[1], Tensor)
    return False


def check_flash(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What PyTorch's FlashAttention takes on CUDA."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[1] % k.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    check_rows(q, k, v)


def check_rows(*parts: Tensor) -> None:
    if any(x.stride(-1) != 1 for x in parts):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if any(x.dim() != 4 for x in parts):
        raise RuntimeError("expected tensors of four axes")


def check_bias(bias: Tensor, q: Tensor, k: Tensor) -> None:
    """What memory-efficient attention wants of a bias."""
    if bias.dtype != q.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    if bias.shape != (*q.shape[:3], k.shape[2]):
        raise RuntimeError(f"attn_bias: expected the shape of the logits, got {tuple(bias.shape)}")
    if any(step % 8 for step, n in zip(bias.stride()[:3], bias.shape, strict=False) if n > 1):
        raise RuntimeError("attn_bias is not correctly aligned: strides must divide by 8")
