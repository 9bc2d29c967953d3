"""Fused attention kernels under one signature, and which of them to take.

All are FlashAttention (Dao 2023, arXiv:2307.08691) or close kin: PyTorch's own for CPU and CUDA,
memory-efficient attention for float32 on CUDA, and packages where they work
(`arborsim_torch.kernels.packages`).  PyTorch's are its internal operators: the public function
keeps the log-sum-exp to itself, and chooses a backend anew in every call.  On recent GPUs it tries
cuDNN first, which plans again at each new length, and so at each decoded token.  `sdpa` therefore
calls one operator by name, and `pinned` keeps models that call the public function away from cuDNN.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from arborsim_torch.kernels.packages import PACKAGES, Kernel, first_that_works, prefill

_HALF = (torch.float16, torch.bfloat16)


class Choice(NamedTuple):
    """A kernel's name and why it was chosen: a key of `KERNELS`, or "dense"."""

    name: str
    reason: str


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The kernel that `attend_flash` takes for queries, keys and values of a device and a type."""
    if device.type == "cpu":
        return Choice("torch-cpu", "PyTorch's fused attention for CPU takes every type")
    if device.type != "cuda":
        return Choice("dense", f"no fused attention with a log-sum-exp for {device.type}")
    if dtype == torch.float32:
        return Choice("torch-efficient", "flash kernels take 16-bit types only")
    if dtype not in _HALF:
        return Choice("dense", f"no fused attention takes {dtype}")
    if head_dim > 256 or head_dim % 8:
        return Choice("dense", f"flash kernels take multiples of 8 up to 256, not {head_dim}")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return Choice("torch-efficient", "flash kernels need compute capability 8.0")
    name, why = first_that_works("prefill", device, dtype, head_dim)
    return Choice(name or "torch-flash", why if name else f"PyTorch's FlashAttention: {why}")


def choose_decode(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The kernel of decode steps for plain keys and values of a shared prefix.

    One of `arborsim_torch.kernels.packages.DECODERS`, "triton" or "torch".  All else (masks,
    formats, what attention rows are wanted of) is Triton's on CUDA, whatever this says: flash-attn
    gives no weights.
    """
    if device.type != "cuda" or not _importable("triton") or dtype not in (*_HALF, torch.float32):
        return Choice("torch", "Triton's kernels need CUDA, and types of 16 or 32 bits")
    if torch.cuda.get_device_capability(device) < (8, 0):
        return Choice("torch", "the kernels need compute capability 8.0")
    if dtype not in _HALF or head_dim > 256 or head_dim % 8:
        return Choice("triton", f"flash-attn takes no heads of {head_dim} in {dtype}")
    name, why = first_that_works("decode", device, dtype, head_dim)
    return Choice(name or "triton", why if name else f"Triton's kernels: {why}")


@functools.cache
def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def attend_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PyTorch's attention for CPU; `bias` is added to the logits."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return found[0], found[1]


def _torch_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def _torch_efficient(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return found[0], found[1][:, :, : q.shape[2]]  # it pads the queries to whole blocks


def choose_sdpa(
    device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool = False
) -> Choice:
    """Which of PyTorch's backends `sdpa` runs: "torch-cpu", "-flash", "-efficient" or "-math"."""
    if device.type == "cpu":
        return Choice("torch-cpu", "PyTorch's fused attention for CPU takes every type")
    if device.type != "cuda" or dtype not in (*_HALF, torch.float32) or head_dim % 8:
        return Choice("torch-math", f"no fused attention for {device.type}, {dtype}, {head_dim}")
    if masked or dtype == torch.float32:
        return Choice("torch-efficient", "flash kernels take no mask, and 16-bit types only")
    if head_dim > 256 or torch.cuda.get_device_capability(device) < (8, 0):
        return Choice("torch-efficient", "flash kernels need head_dim <= 256 and sm_80")
    return Choice("torch-flash", "16-bit types without a mask")


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by the one backend of `choose_sdpa`.

    Of ``[batch, heads, n, head_dim]``, with ``head_dim ** -0.5`` for no scale.  If `causal`, which
    goes without a mask, query i reads the keys 0..i.
    """
    name = choose_sdpa(q.device, q.dtype, q.shape[-1], mask is not None).name
    bias = None if mask is None or name == "torch-math" else _bias(q, mask)
    out: Tensor
    if name == "torch-cpu":
        out = attend_cpu(q, k, v, scale, causal, bias)[0]
    elif name == "torch-flash":
        out = _torch_flash(q, k, v, scale, causal)[0]
    elif name == "torch-efficient":
        copies = q.shape[1] // k.shape[1]
        if copies > 1:
            k, v = (part.repeat_interleave(copies, 1) for part in (k, v))
        bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, False, 0.0, causal, scale=scale
        )[0]
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
            )
    return out


def _bias(q: Tensor, mask: Tensor) -> Tensor:
    """The bias of a mask; rows begin at multiples of 16, as the kernel for CUDA wants."""
    n = mask.shape[-1]
    room = -(-n // _ALIGNED) * _ALIGNED if q.is_cuda else n
    bias = q.new_zeros((*mask.shape[:-1], room))[..., :n]
    return bias.masked_fill_(~mask, float("-inf"))


_ALIGNED = 16


@contextmanager
def pinned(device: torch.device, *, math: bool = False) -> Iterator[None]:
    """Keep models that call PyTorch's public function to its own kernels.

    On CUDA flash attention where it can, memory-efficient attention where there is a mask or
    float32; on the CPU its one fused kernel.  Anything else is an error of PyTorch's, unless `math`
    allows plain operations where none of these fits.
    """
    allowed = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        allowed.append(SDPBackend.EFFICIENT_ATTENTION)
    if math or device.type not in ("cpu", "cuda"):
        allowed.append(SDPBackend.MATH)
    with sdpa_kernel(allowed):
        yield


KERNELS: dict[str, Kernel] = {
    "torch-cpu": attend_cpu,
    "torch-flash": _torch_flash,
    "torch-efficient": _torch_efficient,
    **{name: prefill(name) for name in PACKAGES},
}
