"""Triton kernels that attend over scattered slots: one split of the tokens, the merge, the mass.

Each split has an online softmax; `merge_splits` puts the parts together.  The logits are kept, 4
bytes per query head against the hundreds that a slot has, so that `mean_mass` gets every weight as
``exp(logit - lse)``.  `arborsim_torch.kernels.scattered_triton` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Lengths change from step to step: a kernel per kind of number would be compiled again and again.
@triton.jit(do_not_specialize=["n", "rows"])
def attend_split(
    q, k, v, k_scale, v_scale, index, mask, part_out, part_lse, logits,
    scale, n, rows, per_split,
    q_seq, q_head, q_dim, k_head, k_slot, k_dim, v_head, v_slot, v_dim,
    k_scale_head, k_scale_slot, v_scale_head, v_scale_slot,
    index_head, index_spot, mask_seq, mask_head, mask_spot,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr, LOGITS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """One split of the tokens, one KV head, one block of rows (sequence x head of the group)."""
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # pools pass 2^31 elements
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    seq = (row // GROUP).to(tl.int64)
    there = row < rows
    inside = dim < DIM

    q += seq[:, None] * q_seq + (head * GROUP + row % GROUP)[:, None] * q_head
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
            at = seq[:, None] * mask_seq + head * mask_head + spot[None, :] * mask_spot
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
def merge_splits(
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
def mean_mass(logits, lse, mass, n, rows, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of one sequence at one KV head, averaged over the heads of its group."""
    head, seq = tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1)
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        base = tl.load(lse + (seq * heads + head) * GROUP + member)
        base = tl.where(base == float("-inf"), 0.0, base)
        row = head * rows + seq * GROUP + member
        logit = tl.load(logits + row * n + spot, mask=spot < n, other=float("-inf"))
        total += tl.exp(logit - base)
    tl.store(mass + (seq * heads + head) * n + spot, total / GROUP, mask=spot < n)
