"""Triton kernels for what a decoder layer does between its matrix products, and their launches.

In plain operations these are 30 launches of a decode step's 40 in a layer, each of a few
microseconds for a few kilobytes.  Here they are four: a residual sum with the norm that reads it
(twice), rotary positions together with the store into the cache's slots, and SiLU times up.

Numbers are rounded where the plain operations of transformers round them: what differs is the order
in which a norm's squares are added up, and the last bit of an exponential.

All run on CUDA, or on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

_BLOCK = 1024  # products of SiLU and up that a program makes


@triton.jit
def add_norm_rows(
    x, add, weight, total, normed, eps, SIZE: constexpr, BLOCK: constexpr, ADD: constexpr
):
    """RMSNorm of a row ``[size]`` of ``x + add`` (`ADD`), which is kept, or of `x` alone."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    spot = tl.arange(0, BLOCK)
    inside = spot < SIZE
    own = tl.load(x + row + spot, mask=inside, other=0.0)
    kind = own.dtype
    if ADD:
        other = tl.load(add + row + spot, mask=inside, other=0.0)
        own = (own.to(tl.float32) + other.to(tl.float32)).to(kind)
        tl.store(total + row + spot, own, mask=inside)
    wide = own.to(tl.float32)
    variance = tl.sum(wide * wide, 0) / SIZE
    wide = (wide * tl.rsqrt(variance + eps)).to(kind).to(tl.float32)
    factor = tl.load(weight + spot, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + spot, (wide * factor).to(kind), mask=inside)


# Rows of a step change: a kernel per kind of number would be compiled again and again.
@triton.jit(do_not_specialize=["first", "slot_head"], do_not_specialize_on_alignment=["slots"])
def rotate_rows(
    q, k, v, cos, sin, slots, keys, values, out, first,
    slot_head, key_head, key_slot, value_head, value_slot,
    MEMBERS: constexpr, BLOCK_MEMBERS: constexpr, HALF: constexpr, BLOCK_HALF: constexpr,
):  # fmt: skip
    """Turn a KV head's queries and key of a sequence; the key and the value go to their slot."""
    own, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (first + own).to(tl.int64)
    member = tl.arange(0, BLOCK_MEMBERS)
    spot = tl.arange(0, BLOCK_HALF)
    inside = spot < HALF
    turn = row * (2 * HALF) + spot
    low_cos = tl.load(cos + turn, mask=inside, other=0.0)
    high_cos = tl.load(cos + turn + HALF, mask=inside, other=0.0)
    low_sin = tl.load(sin + turn, mask=inside, other=0.0)
    high_sin = tl.load(sin + turn + HALF, mask=inside, other=0.0)

    head_of_row = row * tl.num_programs(1) + head
    at = (head_of_row * MEMBERS + member)[:, None] * (2 * HALF) + spot[None, :]
    there = (member < MEMBERS)[:, None] & inside[None, :]
    low = tl.load(q + at, mask=there, other=0.0)
    high = tl.load(q + at + HALF, mask=there, other=0.0)
    tl.store(out + at, _turned(low, -high.to(tl.float32), low_cos, low_sin), mask=there)
    turned = _turned(high, low.to(tl.float32), high_cos, high_sin)
    tl.store(out + at + HALF, turned, mask=there)

    at = head_of_row * (2 * HALF) + spot
    low = tl.load(k + at, mask=inside, other=0.0)
    high = tl.load(k + at + HALF, mask=inside, other=0.0)
    slot = tl.load(slots + head * slot_head + own)
    key = keys + head * key_head + slot * key_slot + spot
    tl.store(key, _turned(low, -high.to(tl.float32), low_cos, low_sin), mask=inside)
    tl.store(key + HALF, _turned(high, low.to(tl.float32), high_cos, high_sin), mask=inside)
    value = values + head * value_head + slot * value_slot + spot
    tl.store(value, tl.load(v + at, mask=inside, other=0.0), mask=inside)
    tl.store(value + HALF, tl.load(v + at + HALF, mask=inside, other=0.0), mask=inside)


@triton.jit
def _turned(x, across, cos, sin):
    """``x cos + across sin``, each product rounded to the type of `x`."""
    along = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    return (along + (across * sin.to(tl.float32)).to(x.dtype).to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["count"])
def silu_product(gate, up, out, count, BLOCK: constexpr):
    """``silu(gate) up``, element by element."""
    spot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = spot < count
    own = tl.load(gate + spot, mask=inside, other=0.0)
    wide = own.to(tl.float32)
    wide = (wide / (1.0 + tl.exp(-wide))).to(own.dtype).to(tl.float32)
    other = tl.load(up + spot, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + spot, (wide * other).to(own.dtype), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of two tensors ``[..., size]``, and its RMSNorm as `LlamaRMSNorm` has it.

    Without a residual nothing is added, and the sum is `x` itself.  The weight has the type of `x`.
    """
    x = x.contiguous()
    size, normed = x.shape[-1], torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    tensors = (x, x if residual is None else residual.contiguous(), weight, total, normed)
    shape = {"SIZE": size, "BLOCK": block, "ADD": residual is not None}
    with _on(x):
        add_norm_rows[(x.numel() // size,)](
            *tensors, eps, **shape, num_warps=8 if block > 2048 else 4, enable_fp_fusion=False
        )
    return total, normed


def rotate_and_store(
    projected: tuple[Tensor, Tensor, Tensor],
    turn: tuple[Tensor, Tensor],
    out: Tensor,
    first: int,
    target: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Rotary positions of rows from `first` on, whose keys and values go to slots of a pool.

    `projected` are queries, keys and values ``[rows, heads * head_dim]`` of all rows, `turn`
    cosines and sines ``[rows, head_dim]`` in their type.  The turned queries are written to `out`,
    contiguous ``[rows, heads, head_dim]``.  `target` are the pool's keys and values ``[kv_heads or
    1, capacity, head_dim]``, and int64 slots ``[kv_heads or 1, n]`` of n rows: 1 where all heads
    have the same.
    """
    q, k, v, cos, sin = (part.contiguous() for part in (*projected, *turn))
    keys, values, slots = target
    dim = out.shape[2]
    kv_heads = k.shape[1] // dim
    half, members = dim // 2, out.shape[1] // kv_heads
    tensors = (q, k, v, cos, sin, slots, keys, values, out)
    strides = (_by_head(slots), _by_head(keys), keys.stride(1), _by_head(values), values.stride(1))
    shape = {"MEMBERS": members, "BLOCK_MEMBERS": triton.next_power_of_2(members)}
    shape |= {"HALF": half, "BLOCK_HALF": triton.next_power_of_2(half)}
    with _on(q):
        rotate_rows[(slots.shape[1], kv_heads)](
            *tensors, first, *strides, **shape, num_warps=2, enable_fp_fusion=False
        )


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two tensors of one shape and type."""
    gate, up, out = gate.contiguous(), up.contiguous(), torch.empty_like(gate)
    with _on(gate):
        silu_product[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate, up, out, gate.numel(), BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


def _by_head(tensor: Tensor) -> int:
    """Elements from one KV head to the next; 0 where one is all."""
    return tensor.stride(0) if len(tensor) > 1 else 0


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
