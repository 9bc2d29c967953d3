"""Packages of attention kernels by what they offer here, and why the others are not used.

flash-attn comes in three generations: 2 is `flash_attn`, 3 is `flash_attn_interface`, and 4 is
`flash_attn.cute`, which alone leaves `flash_attn` a package without any function.  So no package is
believed by its name: its function has to be there, and a call on a few tokens, made once for a
device, a type and a size of heads, has to give what attention is defined as.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import attend

# What a kernel takes and gives: queries [batch, heads, queries, head_dim], keys and values
# [batch, heads, n, head_dim], scale, causal -> output like the queries, natural log-sum-exp
# [batch, heads, queries].
Kernel = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]

_OUT, _LSE = 0.03, 0.03  # largest errors of 16-bit types; numbers and logits are below 1


@dataclass(frozen=True)
class Package:
    """An attention package and its functions."""

    name: str
    module: str  #: as it is imported
    #: functions for blocks of queries, and over contiguous caches of which a length is read
    prefill: str
    decode: str = ""
    #: what makes `prefill` return the log-sum-exp
    lse: dict[str, Any] = field(default_factory=dict)
    head_dims: tuple[int, ...] = ()  #: sizes of heads, if not all multiples of 8


# The first that works is taken; 4 compiles for every new form of a call, so it comes late.
_BOTH = ("flash_attn_func", "flash_attn_with_kvcache", {"return_attn_probs": True})
_LIST = (
    Package("flash-attn-3", "flash_attn_interface", *_BOTH),
    Package("flash-attn", "flash_attn", *_BOTH),
    Package("flash-attn-4", "flash_attn.cute", "flash_attn_func", lse={"return_lse": True}),
    Package("flashinfer", "flashinfer", "single_prefill_with_kv_cache", head_dims=(64, 128, 256)),
)
PACKAGES = {each.name: each for each in _LIST}
#: Packages that read contiguous caches in decode steps.
DECODERS = tuple(each.name for each in PACKAGES.values() if each.decode)


def prefill(name: str) -> Kernel:
    """A package's kernel for blocks of queries."""
    package = PACKAGES[name]
    return functools.partial(_flashinfer if name == "flashinfer" else _flash, package)


def decode(
    name: str, q: Tensor, keys: Tensor, values: Tensor, length: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query of each head over the start of a cache, by one of `DECODERS`.

    Takes queries ``[1, 1, heads, head_dim]``, keys and values ``[1, tokens, kv_heads, head_dim]``,
    and how many tokens to read, int32 ``[1]``.  Returns outputs like the queries, and log-sum-exps
    ``[1, heads, 1]``.
    """
    package = PACKAGES[name]
    found = getattr(importlib.import_module(package.module), package.decode)(
        q, keys, values, cache_seqlens=length, softmax_scale=scale, return_softmax_lse=True
    )
    return found[0], found[1]


def _flash(
    package: Package, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Generations return output and log-sum-exp, and more or nothing after them."""
    found = getattr(importlib.import_module(package.module), package.prefill)(
        *(part.transpose(1, 2) for part in (q, k, v)),
        softmax_scale=scale,
        causal=causal,
        **package.lse,
    )
    return found[0].transpose(1, 2), found[1]


def _flashinfer(
    package: Package, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """FlashInfer takes one request at a time; its log-sum-exp is to base 2."""
    function = getattr(importlib.import_module(package.module), package.prefill)
    parts = [
        function(
            queries.transpose(0, 1).contiguous(),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            causal=causal,
            sm_scale=scale,
            return_lse=True,
        )
        for queries, keys, values in zip(q, k, v, strict=True)
    ]
    out = torch.stack([part[0].transpose(0, 1) for part in parts])
    return out, torch.stack([part[1].T for part in parts]) * math.log(2.0)


def first_that_works(
    what: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[str, str]:
    """A package for "prefill" or "decode" on CUDA and why it is taken; "" and why none is."""
    reasons = []
    for name, package in PACKAGES.items():
        why = why_not(name, what, device, dtype, head_dim)
        if not why:
            return name, f"{package.module}.{getattr(package, what)} works here"
        if why != _MISSING and getattr(package, what):
            reasons.append(why)
    return "", "; ".join(reasons) or "no package of attention kernels is installed"


_MISSING = "not installed"


@functools.cache
def why_not(name: str, what: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why a package's function is not used, in a line; "" if it works."""
    package = PACKAGES[name]
    function = getattr(package, what)
    if not function:
        return f"{package.module} reads no contiguous caches"
    if package.head_dims and head_dim not in package.head_dims:
        return f"{package.module} takes no heads of {head_dim}"
    try:
        module = importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        own = error.name is not None and f"{package.module}.".startswith(f"{error.name}.")
        return _MISSING if own else f"{package.module} cannot be imported ({_line(error)})"
    except Exception as error:  # compiled parts raise anything
        return f"{package.module} cannot be imported ({_line(error)})"
    if not callable(getattr(module, function, None)):
        return f"{package.module} has no {function}"
    try:
        with torch.inference_mode():
            wrong = _try_decode if what == "decode" else _try_prefill
            apart = wrong(name, device, dtype, head_dim)
    except Exception as error:
        return f"{package.module}.{function} fails ({_line(error)})"
    return f"{package.module}.{function} gives {apart}" if apart else ""


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _numbers(*shape: int) -> Tensor:
    """Numbers between -1 and 1, the same each time."""
    return torch.arange(math.prod(shape), dtype=torch.float32).mul_(0.7).sin_().view(shape)


def _try_prefill(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Try a block of 5 queries, over 9 keys and over themselves; returns what is wrong."""
    kernel, scale = prefill(name), 1 / head_dim
    for n, causal in ((9, False), (5, True)):
        q, k, v = _numbers(2, 5, head_dim), _numbers(2, n, head_dim), _numbers(2, n, head_dim)
        v = v.flip(1)
        mask = torch.ones((1, 1, 5, n), dtype=torch.bool).tril() if causal else None
        there = [part.to(device, dtype)[None] for part in (q, k, v)]
        found = kernel(there[0], there[1], there[2], scale, causal)
        if apart := _apart(found, attend(q[None], k, v, scale, mask)):
            return apart
    return ""


def _try_decode(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Try 4 heads that read 20 of 32 tokens of 2 KV heads; returns what is wrong."""
    scale, length = 1 / head_dim, 20
    q, pool = _numbers(1, 1, 4, head_dim), _numbers(2, 2, 32, head_dim)
    keys, values = (part.transpose(0, 1)[None] for part in pool.to(device, dtype).unbind())
    count = torch.full((1,), length, dtype=torch.int32, device=device)
    out, lse = decode(name, q.to(device, dtype), keys, values, count, scale)
    wanted = attend(q.transpose(1, 2), pool[0, :, :length], pool[1, :, :length], scale)
    return _apart((out.transpose(1, 2), lse), wanted)


def _apart(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> str:
    for what, one, other, most in zip(
        ("outputs", "log-sum-exps"), found, wanted, (_OUT, _LSE), strict=True
    ):
        if one is None or one.shape != other.shape:
            shape = None if one is None else list(one.shape)
            return f"{what} of shape {shape}, not {list(other.shape)}"
        far = float((one.cpu().float() - other).abs().max())
        if not far <= most:
            return f"{what} that are {far:.2g} off"
    return ""
