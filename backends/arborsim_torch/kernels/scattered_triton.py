# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels that attend over scattered slots: split over the tokens, merged, then the mass.

At decode there is little to compute and much to read, so each program serves all query heads of a
KV head and, where they fit, all lanes: a slot is read once for all of them.  The tokens are split
over as many programs as fill the GPU (flash-decoding; Dao et al. 2023), each with an online
softmax; `_merge` puts the parts together.  The logits are kept, 4 bytes per query head against
the hundreds that a slot has, so that `_mass` gets every weight as ``exp(logit - lse)``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_ROWS = 64  # query heads x lanes in one program; tensor cores take at least 16
_MOST_SPLITS = 128  # their outputs are merged in registers
_PROGRAMS_PER_SM = 2


# Lengths change from step to step: a kernel per kind of number would be compiled again and again.
@triton.jit(do_not_specialize=["n", "rows"])
def _attend(
    q, k, v, k_scale, v_scale, index, mask, part_out, part_lse, logits,
    scale, n, rows, per_split,
    q_lane, q_head, q_dim, k_head, k_slot, k_dim, v_head, v_slot, v_dim,
    k_scale_head, k_scale_slot, v_scale_head, v_scale_slot,
    index_head, index_spot, mask_lane, mask_head, mask_spot,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr, LOGITS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """One split of the tokens, one KV head, one block of rows (lane x head of the group)."""
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # pools pass 2^31 elements
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    lane = (row // GROUP).to(tl.int64)
    there = row < rows
    inside = dim < DIM

    q += lane[:, None] * q_lane + (head * GROUP + row % GROUP)[:, None] * q_head
    queries = tl.load(q + dim[None, :] * q_dim, mask=there[:, None] & inside[None, :], other=0.0)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)

    first = split * per_split
    last = tl.minimum(first + per_split, n)
    for start in range(first, last, BLOCK):
        spot = start + tl.arange(0, BLOCK)
        slot = tl.load(index + head * index_head + spot * index_spot, mask=spot < last, other=-1)
        held = slot >= 0
        slot = slot.to(tl.int64)
        wanted = held[:, None] & inside[None, :]
        keys = tl.load(
            k + head * k_head + slot[:, None] * k_slot + dim[None, :] * k_dim, mask=wanted, other=0
        )
        values = tl.load(
            v + head * v_head + slot[:, None] * v_slot + dim[None, :] * v_dim, mask=wanted, other=0
        )
        if FP8:
            keys = keys.to(tl.float8e4nv, bitcast=True)
            values = values.to(tl.float8e4nv, bitcast=True)
        if SCALED:
            # Every 8-bit number is exact in the queries' type, so keys need their factor only
            # after the product; the weights times small factors would leave float16's range.
            # By way of float32 because the interpreter makes no bfloat16 of integers.
            keys = keys.to(tl.float32).to(queries.dtype)
            by_value = tl.load(
                v_scale + head * v_scale_head + slot * v_scale_slot, mask=held, other=0.0
            )
            values = (values.to(tl.float32) * by_value[:, None]).to(queries.dtype)
        products = tl.dot(queries.to(FACTOR), tl.trans(keys.to(FACTOR)), input_precision="ieee")
        products *= scale
        if SCALED:
            by_key = tl.load(
                k_scale + head * k_scale_head + slot * k_scale_slot, mask=held, other=0.0
            )
            products *= by_key[None, :]
        readable = there[:, None] & held[None, :]
        if MASKED:
            at = lane[:, None] * mask_lane + head * mask_head + spot[None, :] * mask_spot
            readable &= tl.load(mask + at, mask=readable, other=0) != 0
        products = tl.where(readable, products, float("-inf"))
        if LOGITS:
            where = (head * rows + row[:, None]) * n + spot[None, :]
            tl.store(logits + where, products, mask=there[:, None] & (spot < last)[None, :])

        higher = tl.maximum(highest, tl.max(products, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        weights = tl.exp(products - base[:, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None]
        weights = weights.to(values.dtype).to(FACTOR)
        out = tl.dot(weights, values.to(FACTOR), out, input_precision="ieee")
        highest = higher

    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), highest + tl.log(tl.where(empty, 1.0, total)))
    out = out / tl.where(empty, 1.0, total)[:, None]
    place = (split.to(tl.int64) * tl.num_programs(1) + head) * rows + row
    tl.store(part_lse + place, lse, mask=there)
    tl.store(
        part_out + place[:, None] * DIM + dim[None, :], out, mask=there[:, None] & inside[None, :]
    )


@triton.jit(do_not_specialize=["splits", "rows"])
def _merge(
    part_out, part_lse, out, lse, splits, rows,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row: see `arborsim_torch.kernels.merge`."""
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    split = tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_DIM)
    place = (split.to(tl.int64) * heads + head) * rows + row
    parts = tl.load(part_lse + place, mask=split < splits, other=float("-inf"))
    highest = tl.max(parts, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(parts - base)
    total = tl.sum(weights, 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    outs = tl.load(
        part_out + place[:, None] * DIM + dim[None, :],
        mask=(split < splits)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(outs * weights[:, None], 0) / total
    to = (row // GROUP) * heads * GROUP + head * GROUP + row % GROUP
    tl.store(lse + to, tl.where(empty, float("-inf"), base + tl.log(total)))
    tl.store(out + to * DIM + dim, merged.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit(do_not_specialize=["n", "rows"])
def _mass(logits, lse, mass, n, rows, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of one lane at one KV head, averaged over the heads of its group."""
    head, lane = tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1)
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        base = tl.load(lse + (lane * heads + head) * GROUP + member)
        base = tl.where(base == float("-inf"), 0.0, base)
        row = head * rows + lane * GROUP + member
        logit = tl.load(logits + row * n + spot, mask=spot < n, other=float("-inf"))
        total += tl.exp(logit - base)
    tl.store(mass + (lane * heads + head) * n + spot, total / GROUP, mask=spot < n)


class Plan(NamedTuple):
    """How a call is cut into programs.

    Attributes
    ----------
    block : int
        Tokens that a program reads at a time.
    block_rows : int
        Rows of a program; `row_blocks` of them serve all lanes.
    row_blocks : int
    per_split : int
        Tokens of a split, a multiple of `block`.
    splits : int
    warps : int
    """

    block: int
    block_rows: int
    row_blocks: int
    per_split: int
    splits: int
    warps: int


def plan(n: int, rows: int, kv_heads: int, dim: int, itemsize: int, processors: int) -> Plan:
    """Cut `n` > 0 tokens so that `processors` streaming multiprocessors all have work.

    Blocks are as large as the registers of compute capability 9.0 hold (64 rows spill 24 bytes).

    Parameters
    ----------
    n : int
    rows : int
        Lanes times query heads per KV head.
    kv_heads : int
    dim : int
        Elements of a key.
    itemsize : int
        Bytes of an element of the queries; float32 has no tensor cores to keep it exact.
    processors : int
    """
    block = 64 if dim * itemsize <= 256 else 32
    most_rows = _MOST_ROWS if itemsize == 2 else 16
    block_rows = min(most_rows, max(16, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    wanted = triton.cdiv(_PROGRAMS_PER_SM * processors, kv_heads * row_blocks)
    blocks = triton.cdiv(n, block)
    per_split = block * triton.cdiv(blocks, min(wanted, blocks, _MOST_SPLITS))
    warps = 4 if itemsize == 2 and block_rows == 16 else 8
    return Plan(block, block_rows, row_blocks, per_split, triton.cdiv(n, per_split), warps)


def attend_scattered_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    want_mass: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`arborsim_torch.kernels.scattered.attend_scattered` in Triton; unchecked arguments.

    Runs on CUDA, or on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``).  Never makes
    the host wait.
    """
    lanes, heads, dim = q.shape
    kv_heads, n = len(k), index.shape[-1]
    rows = lanes * (heads // kv_heads)
    out = torch.empty((lanes, heads, dim), dtype=q.dtype, device=q.device)
    lse = _wide(q, lanes, heads)
    mass = _wide(q, lanes, kv_heads, n) if want_mass else None
    if n == 0 or lanes == 0:
        return out.zero_(), lse.fill_(float("-inf")), mass
    cut = plan(n, rows, kv_heads, dim, q.element_size(), _processors(q.device))
    part_out = _wide(q, cut.splits, kv_heads, rows, dim)
    part_lse = _wide(q, cut.splits, kv_heads, rows)
    logits = _wide(q, kv_heads, rows, n) if want_mass else part_lse
    fp8 = k.dtype == torch.float8_e4m3fn
    if fp8:  # as bytes: loads have a type for what is masked off
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    shape: dict[str, Any] = {
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
    }
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        _attend[(cut.splits, kv_heads, cut.row_blocks)](
            q, k, v, _or(k_scale, q), _or(v_scale, q), index, _or(mask, q),
            part_out, part_lse, logits, scale, n, rows, cut.per_split,
            *q.stride(), *k.stride(), *v.stride(),
            *_strides(k_scale, 2), *_strides(v_scale, 2), *_strides(index, 2), *_strides(mask, 3),
            **shape, BLOCK_ROWS=cut.block_rows, BLOCK=cut.block,
            SCALED=k_scale is not None, FP8=fp8, MASKED=mask is not None, LOGITS=want_mass,
            FACTOR=_factor_type(q),
            num_warps=cut.warps, num_stages=3,
        )  # fmt: skip
        _merge[(rows, kv_heads)](
            part_out, part_lse, out, lse, cut.splits, rows,
            **shape, BLOCK=triton.next_power_of_2(cut.splits), num_warps=4,
        )  # fmt: skip
        if mass is not None:
            _mass[(triton.cdiv(n, 1024), kv_heads, lanes)](
                logits, lse, mass, n, rows, GROUP=shape["GROUP"], BLOCK=1024, num_warps=4
            )
    return out, lse, mass


def _wide(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer has to be passed even where none is read."""
    if tensor is None:
        return other
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """Strides by KV head and so on; 0 for the head that a flat index or mask does not have."""
    if tensor is None:
        return (0,) * axes
    stride = tensor.stride()
    return stride if len(stride) == axes else (*stride[:-1], 0, stride[-1])


def _factor_type(q: Tensor) -> Any:
    """What the kernel multiplies in: the queries' type, but the interpreter cannot in bfloat16."""
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 else tl.bfloat16


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs one program after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
