"""Triton kernels that attend over a piece: one split of its entries, the merge, the mass.

Each split has an online softmax; `merge_splits` puts those of all pieces together.  The logits are
kept, 4 bytes per query head against the hundreds that a slot has, so that `mean_mass` and
`add_mean_mass` get every weight as ``exp(logit - lse)``.  What is packed into bytes is unpacked in
registers (`arborsim_torch.tiers.codec.Packed` says how it lies there).

`arborsim_torch.kernels.pieces_triton` launches these.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

# Lengths change from step to step, and with them strides and where a layer's mask begins: a kernel
# per kind of number would be compiled again and again.
_LENGTHS = ["room", "rows", "first_split", "first_entry", "entries"]
_STRIDES = ["index_head", "mask_seq", "mask_head", "member_head"]


@triton.jit(do_not_specialize=_LENGTHS + _STRIDES, do_not_specialize_on_alignment=["mask"])
def attend_split(
    q, k, v, k_scale, v_scale, index, mask, member, part_out, part_lse, logits,
    scale, room, rows, per_split, first_split, first_entry, entries,
    q_seq, q_head, q_dim, k_head, k_slot, k_dim, v_head, v_slot, v_dim,
    k_scale_head, k_scale_slot, v_scale_head, v_scale_slot,
    index_head, index_spot, mask_seq, mask_head, mask_spot, member_head, member_slot,
    HEADS: constexpr, DIM: constexpr, BLOCK_DIM: constexpr,
    BLOCK_ROWS: constexpr, BLOCK: constexpr,
    KIND: constexpr, INDEXED: constexpr, MASKED: constexpr, LOGITS: constexpr,
    FACTOR: constexpr, BITS: constexpr, GROUP: constexpr, SCALE_BYTES: constexpr,
    ZERO_BYTES: constexpr, STEPS: constexpr, OUTLIERS: constexpr,
    TOGETHER: constexpr, KEY_OUTLIERS: constexpr,
):  # fmt: skip
    """One split of the entries, one KV head, one block of rows (sequence x head of the group)."""
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # pools pass 2^31 elements
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    seq = (row // HEADS).to(tl.int64)
    there = row < rows
    inside = dim < DIM
    SCALED: tl.constexpr = KIND == "fp8" or KIND == "fp8 bits"
    PACKED: tl.constexpr = KIND == "packed" or KIND == "grouped"

    q += seq[:, None] * q_seq + (head * HEADS + row % HEADS)[:, None] * q_head
    queries = tl.load(q + dim[None, :] * q_dim, mask=there[:, None] & inside[None, :], other=0.0)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)

    first = split * per_split
    last = tl.minimum(first + per_split, room)
    for start in range(first, last, BLOCK):
        spot = start + tl.arange(0, BLOCK)
        if INDEXED:
            at = index + head * index_head + spot * index_spot
            slot = tl.load(at, mask=spot < last, other=-1)
            held = slot >= 0
        else:
            slot = spot
            held = spot < last
        slot = slot.to(tl.int64)
        key = k + head * k_head + slot[:, None] * k_slot
        value = v + head * v_head + slot[:, None] * v_slot
        if PACKED:
            if KIND == "grouped":
                at = member + head * member_head + slot * member_slot
                where = tl.load(at, mask=held, other=0)
                group = (where // TOGETHER).to(tl.int64)
                span = k_scale + head * k_scale_head + group[:, None] * k_scale_slot
                number = (where % TOGETHER)[:, None]
                keys = _grouped(
                    key, span, number, held, dim, DIM, BITS, ZERO_BYTES, STEPS, KEY_OUTLIERS
                )
            else:
                keys = _unpacked(
                    key, held, dim, DIM, BITS, GROUP, SCALE_BYTES, ZERO_BYTES, STEPS, OUTLIERS
                )
            values = _unpacked(
                value, held, dim, DIM, BITS, GROUP, SCALE_BYTES, ZERO_BYTES, STEPS, OUTLIERS
            )
            keys = keys.to(queries.dtype)
            values = values.to(queries.dtype)
        else:
            wanted = held[:, None] & inside[None, :]
            keys = tl.load(key + dim[None, :] * k_dim, mask=wanted, other=0)
            values = tl.load(value + dim[None, :] * v_dim, mask=wanted, other=0)
        if KIND == "fp8":
            keys = keys.to(tl.float8e4nv, bitcast=True)
            values = values.to(tl.float8e4nv, bitcast=True)
        if KIND == "fp8 bits":
            keys = _e4m3(keys)
            values = _e4m3(values)
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
            to = (head * rows + row[:, None]) * entries + first_entry + spot[None, :]
            tl.store(logits + to, products, mask=there[:, None] & (spot < last)[None, :])

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
    place = ((first_split + split).to(tl.int64) * tl.num_programs(1) + head) * rows + row
    tl.store(part_lse + place, lse, mask=there)
    tl.store(
        part_out + place[:, None] * DIM + dim[None, :], out, mask=there[:, None] & inside[None, :]
    )


@triton.jit
def _e4m3(bits):
    """Float32 of e4m3 numbers: sign, exponent and mantissa as float16 has them mean 2^-8 of it."""
    wide = bits.to(tl.uint16)
    shifted = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return shifted.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _half(at, wanted):
    """Float32 of float16 numbers whose address may be odd."""
    low = tl.load(at, mask=wanted, other=0).to(tl.uint16)
    high = tl.load(at + 1, mask=wanted, other=0).to(tl.uint16)
    return ((high << 8) | low).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _codes(at, held, dim, DIM, BITS):
    """Whole numbers ``[slots, dims]`` of a record's first bytes, the first in the lowest bits."""
    EACH: tl.constexpr = 8 // BITS
    byte = tl.arange(0, dim.shape[0] // EACH)
    wanted = held[:, None] & (byte < (DIM + EACH - 1) // EACH)[None, :]
    packed = tl.load(at + byte[None, :], mask=wanted, other=0)
    if BITS == 8:
        codes = packed
    elif BITS == 4:
        codes = tl.interleave(packed & 15, packed >> 4)
    else:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        codes = tl.interleave(even, tl.interleave((packed >> 2) & 3, packed >> 6))
    return codes.to(tl.float32)


@triton.jit
def _unpacked(at, held, dim, DIM, BITS, GROUP, SCALE_BYTES, ZERO_BYTES, STEPS, OUTLIERS):
    """Vectors ``[slots, dims]`` of whole records."""
    codes = _codes(at, held, dim, DIM, BITS)
    BLOCK: tl.constexpr = held.shape[0]
    BLOCK_DIM: tl.constexpr = dim.shape[0]
    # Groups of a vector: as many as have a scale, and as many as fill the block.
    SCALES: tl.constexpr = (DIM + GROUP - 1) // GROUP
    GROUPS: tl.constexpr = BLOCK_DIM // GROUP if GROUP < BLOCK_DIM else 1
    at += (DIM * BITS + 7) // 8
    group = tl.arange(0, GROUPS)
    wanted = held[:, None] & (group < SCALES)[None, :]
    if SCALE_BYTES == 1:
        step = _e4m3(tl.load(at + group[None, :], mask=wanted, other=0))
    else:
        step = _half(at + 2 * group[None, :], wanted)
    at += SCALES * SCALE_BYTES
    if ZERO_BYTES:
        low = _half(at + 2 * group[None, :], wanted)
        x = codes * _spread(step, BLOCK, GROUPS, BLOCK_DIM) + _spread(low, BLOCK, GROUPS, BLOCK_DIM)
    else:
        x = (codes - STEPS) * _spread(step, BLOCK, GROUPS, BLOCK_DIM)
    at += SCALES * ZERO_BYTES
    for i in tl.static_range(OUTLIERS):
        kept = _half(at + 2 * i, held[:, None])
        spot = tl.load(at + 2 * (OUTLIERS + i), mask=held[:, None], other=0).to(tl.int32)
        spot += tl.load(at + 2 * (OUTLIERS + i) + 1, mask=held[:, None], other=0).to(tl.int32) * 256
        x = tl.where(dim[None, :] == spot, kept, x)
    return tl.where(held[:, None] & (dim < DIM)[None, :], x, 0.0)


@triton.jit
def _spread(x, BLOCK: constexpr, GROUPS: constexpr, BLOCK_DIM: constexpr):
    """``[slots, groups]`` to the dims of each group."""
    wide = tl.broadcast_to(x[:, :, None], (BLOCK, GROUPS, BLOCK_DIM // GROUPS))
    return tl.reshape(wide, (BLOCK, BLOCK_DIM))


@triton.jit
def _grouped(at, span, number, held, dim, DIM, BITS, ZERO_BYTES, STEPS, OUTLIERS):
    """Keys ``[slots, dims]`` of codes, with the spans (of int16) of their groups of tokens."""
    codes = _codes(at, held, dim, DIM, BITS)
    wanted = held[:, None] & (dim < DIM)[None, :]
    FIRST: tl.constexpr = 2 if ZERO_BYTES else 1
    span += dim[None, :] * (FIRST + 2 * OUTLIERS)
    step = tl.load(span, mask=wanted, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    if ZERO_BYTES:
        low = tl.load(span + 1, mask=wanted, other=0).to(tl.float16, bitcast=True).to(tl.float32)
        x = codes * step + low
    else:
        x = (codes - STEPS) * step
    for i in tl.static_range(OUTLIERS):
        kept = tl.load(span + FIRST + i, mask=wanted, other=0).to(tl.float16, bitcast=True)
        spot = tl.load(span + FIRST + OUTLIERS + i, mask=wanted, other=0)
        x = tl.where(spot == number, kept.to(tl.float32), x)
    return tl.where(wanted, x, 0.0)


@triton.jit(do_not_specialize=["splits", "rows", "far_row"])
def merge_splits(
    part_out, part_lse, far, out, lse, splits, rows, far_row,
    HEADS: constexpr, DIM: constexpr, BLOCK_DIM: constexpr, BLOCK: constexpr,
    FAR: constexpr,
):  # fmt: skip
    """Merge the splits of one row, of all pieces: see `arborsim_torch.kernels.dense`.

    With `FAR` also the host's part: ``far[kv_heads, rows, far_row]`` has output, log-sum-exp, and
    logits, which `mean_mass` reads.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    dim = tl.arange(0, BLOCK_DIM)
    highest = float("-inf")
    total = 0.0
    merged = tl.zeros([BLOCK_DIM], tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        place = (split.to(tl.int64) * heads + head) * rows + row
        parts = tl.load(part_lse + place, mask=split < splits, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(parts, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(parts - base)
        shrink = tl.exp(highest - base)
        outs = tl.load(
            part_out + place[:, None] * DIM + dim[None, :],
            mask=(split < splits)[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 0)
        merged = merged * shrink + tl.sum(outs * weights[:, None], 0)
        highest = higher
    if FAR:
        far += (head.to(tl.int64) * rows + row) * far_row
        part = tl.load(far + DIM)
        higher = tl.maximum(highest, part)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(part - base)
        shrink = tl.exp(highest - base)
        total = total * shrink + weight
        merged = merged * shrink + weight * tl.load(far + dim, mask=dim < DIM, other=0.0)
        highest = higher
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    to = (row // HEADS) * heads * HEADS + head * HEADS + row % HEADS
    tl.store(lse + to, tl.where(empty, float("-inf"), highest + tl.log(total)))
    tl.store(out + to * DIM + dim, (merged / total).to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit(do_not_specialize=["own", "entries", "rows", "far_row"])
def mean_mass(
    logits, far, lse, mass, own, entries, rows, far_row,
    HEADS: constexpr, DIM: constexpr, BLOCK: constexpr, TOGETHER: constexpr,
    FAR: constexpr,
):  # fmt: skip
    """Weights of one sequence at one KV head, averaged over its query heads; of all pieces.

    These have `own` entries.  With `FAR` those of the host follow, up to `entries`.
    """
    kv_head, seq = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    far += DIM + 1  # to the logits of its first row
    heads = tl.num_programs(1)
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, HEADS, TOGETHER):
        head = first + tl.arange(0, TOGETHER)
        there = head < HEADS
        head += kv_head * HEADS
        total += _weights(
            logits, far, lse, head, there, heads, seq, spot, own, entries, rows, far_row, HEADS, FAR
        )
    tl.store(mass + (seq * heads + kv_head) * entries + spot, total / HEADS, mask=spot < entries)


@triton.jit(do_not_specialize=["own", "entries", "rows", "far_row", "first", "positions"])
def add_mean_mass(
    logits, far, lse, position, further, row, numbers, own, entries, rows, far_row, first,
    positions, heads, HEADS: constexpr, DIM: constexpr, BLOCK: constexpr,
    TOGETHER: constexpr, FAR: constexpr, FURTHER: constexpr,
):  # fmt: skip
    """Weights of one sequence, averaged over all heads, added where their entries stand.

    `position` is that of the `first` entries, `further` of those after them.  Entries with weight
    stand apart, so each place is added to once.  A row that is not a number is left out.
    """
    seq = tl.program_id(1).to(tl.int64)
    far += DIM + 1
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, heads * HEADS, TOGETHER):
        head = begin + tl.arange(0, TOGETHER)
        there = head < heads * HEADS
        total += _weights(
            logits, far, lse, head, there, heads, seq, spot, own, entries, rows, far_row, HEADS, FAR
        )
    at = tl.load(position + spot, mask=spot < first, other=0).to(tl.int64)
    if FURTHER:
        later = (spot >= first) & (spot < entries)
        at = tl.where(later, tl.load(further + spot - first, mask=later, other=0).to(tl.int64), at)
    counts = (spot < entries) & (total > 0.0)
    place = row + seq * positions + at
    before = tl.load(place, mask=counts, other=0.0)
    tl.store(place, before + total / (heads * HEADS), mask=counts)
    if tl.program_id(0) == 0:
        broken = tl.max((total != total).to(tl.int32), 0)
        tl.store(numbers + seq, tl.load(numbers + seq) + 1 - broken)


@triton.jit
def _weights(
    logits, far, lse, head, there, heads, seq, spot, own, entries, rows, far_row, HEADS, FAR
):
    """Sum over some query heads of a sequence, loaded as one tile: loads do not wait."""
    base = tl.load(lse + seq * heads * HEADS + head, mask=there, other=0.0)
    base = tl.where(base == float("-inf"), 0.0, base)
    row = (head // HEADS).to(tl.int64) * rows + seq * HEADS + head % HEADS
    held = there[:, None] & (spot < own)[None, :]
    at = row[:, None] * own + spot[None, :]
    logit = tl.load(logits + at, mask=held, other=float("-inf"))
    if FAR:
        at = row[:, None] * far_row + (spot - own)[None, :]
        held = there[:, None] & ((spot >= own) & (spot < entries))[None, :]
        logit = tl.where(held, tl.load(far + at, mask=held, other=float("-inf")), logit)
    return tl.sum(tl.exp(logit - base[:, None]), 0)
