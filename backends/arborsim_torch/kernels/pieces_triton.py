"""Attention over pieces in Triton: how a call is cut into programs, and its launches.

At decode there is little to compute and much to read, so each program serves all query heads of a
KV head and, where they fit, all sequences: a slot is read once for all of them.  A piece's entries
are split over as many programs as fill the GPU (flash-decoding; Dao et al. 2023), and the parts of
all pieces are merged at once: a launch per piece, one to merge, and one for all masses or their
mean over heads.  What is launched depends on shapes alone.  What the programs do is in
`arborsim_torch.kernels.pieces_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arborsim_torch.kernels import pieces_kernels as kernels
from arborsim_torch.kernels.piece import Elsewhere, MeanRows, Piece
from arborsim_torch.tiers.codec import Codec, Packed

_MOST_ROWS = 64  # query heads x sequences in one program; tensor cores take at least 16
_MOST_SPLITS = 128  # of a piece: merging them reads as much as 128 slots do
_MERGED_AT_ONCE = 64  # splits whose outputs are in registers
_PROGRAMS_PER_SM = 2
_MASSES_AT_ONCE = 512  # entries whose weights a program averages over a group's heads
_MEANS_AT_ONCE = 128  # and over all heads
_HEADS_AT_ONCE = 8, 32  # whose logits are loaded together, in these two
_FP8_CAPABILITY = (8, 9)  # Ada and Hopper convert e4m3 in hardware; Triton refuses it on older ones
_OF_RECORDS = ("BITS", "GROUP", "SCALE_BYTES", "ZERO_BYTES", "STEPS", "OUTLIERS", "TOGETHER")


class LaunchShape(NamedTuple):
    """How a call is cut into programs.

    A program reads `block` entries at a time, for `block_rows` rows; `row_blocks` of these serve
    all sequences.  Each of the `splits` has `per_split` entries, a multiple of `block`.
    """

    block: int
    block_rows: int
    row_blocks: int
    per_split: int
    splits: int
    warps: int


def launch_shape(
    room: int, rows: int, kv_heads: int, dim: int, itemsize: int, processors: int, packed: bool
) -> LaunchShape:
    """Cut `room` > 0 entries so that `processors` streaming multiprocessors all have work.

    Blocks are as large as the registers of compute capability 9.0 hold: see
    `reports/benchmarks/pieces_compiled.md`.  `rows` are sequences times query heads per KV head.
    Queries of 4 bytes have no exact tensor cores, and what is `packed` takes twice the registers.
    """
    block = 64 if dim * itemsize <= 256 and not packed else 32
    most_rows = _MOST_ROWS if itemsize == 2 else 16
    block_rows = min(most_rows, max(16, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    wanted = triton.cdiv(_PROGRAMS_PER_SM * processors, kv_heads * row_blocks)
    blocks = triton.cdiv(room, block)
    per_split = block * triton.cdiv(blocks, min(wanted, blocks, _MOST_SPLITS))
    warps = 4 if itemsize == 2 and block_rows == 16 else 8
    return LaunchShape(
        block, block_rows, row_blocks, per_split, triton.cdiv(room, per_split), warps
    )


def attend_pieces_triton(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    *,
    mass: bool = False,
    means: MeanRows | None = None,
    parts: Sequence[tuple[Tensor, Tensor]] = (),
    elsewhere: Elsewhere | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`arborsim_torch.kernels.pieces.attend_pieces` in Triton; unchecked arguments.

    `parts` are outputs ``[kv_heads, rows, head_dim]`` and log-sum-exps ``[kv_heads, rows]`` over
    other keys: they are merged with the pieces' as further splits, and not with `mass` or `means`.
    """
    seqs, heads, dim = q.shape
    kv_heads = pieces[0].keys.shape[0]
    rows = seqs * (heads // kv_heads)
    own = sum(piece.room for piece in pieces)
    entries = own + (0 if elsewhere is None else elsewhere.room)
    out = torch.empty((seqs, heads, dim), dtype=q.dtype, device=q.device)
    lse = _wide(q, seqs, heads)
    masses = _wide(q, seqs, kv_heads, entries) if mass else None
    if seqs == 0 or (own == 0 and not parts and elsewhere is None):
        if means is not None:
            means.numbers.add_(1)
        return out.zero_(), lse.fill_(-torch.inf), masses
    processors = _processors(q.device)
    cuts = [
        launch_shape(max(piece.room, 1), rows, kv_heads, dim, q.element_size(), processors, packed)
        for piece in pieces
        for packed in [isinstance(piece.codec, Packed)]
    ]
    splits = sum(cut.splits for piece, cut in zip(pieces, cuts, strict=True) if piece.room)
    splits += len(parts)
    part_out = _wide(q, splits, kv_heads, rows, dim)
    part_lse = _wide(q, splits, kv_heads, rows)
    weighs = mass or means is not None
    logits = _wide(q, kv_heads, rows, own) if weighs else part_lse
    block_dim = max(16, triton.next_power_of_2(dim))
    shape: dict[str, Any] = {"HEADS": heads // kv_heads, "DIM": dim, "BLOCK_DIM": block_dim}
    split = (part_out, part_lse, logits)
    first_split = first_entry = 0
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        for piece, cut in zip(pieces, cuts, strict=True):
            if not piece.room:
                continue
            if piece.ready is not None:
                piece.ready()
            _attend(q, piece, cut, split, scale, (first_split, first_entry), shape, weighs)
            first_split += cut.splits
            first_entry += piece.room
        for other in parts:
            part_out[first_split].copy_(other[0])
            part_lse[first_split].copy_(other[1])
            first_split += 1
        far = q if elsewhere is None else elsewhere.packed()
        kept, far_row = (logits, far, lse), far.shape[-1]
        same = {"HEADS": shape["HEADS"], "DIM": dim, "FAR": elsewhere is not None, "num_warps": 4}
        parts_of_row = (part_out, part_lse, far, out, lse)
        block = min(_MERGED_AT_ONCE, triton.next_power_of_2(max(splits, 1)))
        kernels.merge_splits[(rows, kv_heads)](
            *parts_of_row, splits, rows, far_row, **same, BLOCK_DIM=block_dim, BLOCK=block
        )
        if masses is not None:
            same |= {"BLOCK": _MASSES_AT_ONCE, "TOGETHER": _power(same["HEADS"], _HEADS_AT_ONCE[0])}
            cells = (triton.cdiv(entries, _MASSES_AT_ONCE), kv_heads, seqs)
            kernels.mean_mass[cells](*kept, masses, own, entries, rows, far_row, **same)
        if means is not None:
            place, more, total = means.position, means.further, means.total
            given = (*kept, place, place if more is None else more, total, means.numbers)
            sizes = (own, entries, rows, far_row, len(place), total.shape[1], kv_heads)
            same |= {"BLOCK": _MEANS_AT_ONCE, "TOGETHER": _power(heads, _HEADS_AT_ONCE[1])}
            grid = (triton.cdiv(entries, _MEANS_AT_ONCE), seqs)
            kernels.add_mean_mass[grid](*given, *sizes, **same, FURTHER=more is not None)
    return out, lse, masses


def _attend(
    q: Tensor,
    piece: Piece,
    cut: LaunchShape,
    parts: tuple[Tensor, Tensor, Tensor],
    scale: float,
    first: tuple[int, int],
    shape: dict[str, Any],
    mass: bool,
) -> None:
    """All splits of a piece, `first` being its first split and its first entry."""
    seqs, heads, _ = q.shape
    kv_heads = piece.keys.shape[0]
    k, v, k_scale, v_scale = piece.keys, piece.values, piece.key_scale, piece.value_scale
    if k.dtype == torch.float8_e4m3fn:  # as bytes: loads have a type for what is masked off
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    how = storage(piece.codec, shape["DIM"], shape["BLOCK_DIM"], _e4m3_in_hardware(q.device))
    if how["KIND"] == "grouped" and k_scale is not None:
        k_scale = k_scale.view(torch.int16)
    optional = (k_scale, v_scale, piece.index, piece.mask, piece.member)
    tensors = (q, k, v, *(_or(each, q) for each in optional), *parts)
    numbers = (piece.room, seqs * (heads // kv_heads), cut.per_split, *first, parts[2].shape[-1])
    strides = (*q.stride(), *k.stride(), *v.stride(), *_strides(k_scale, 2)[:2])
    strides += (*_strides(v_scale, 2), *_strides(piece.index, 2), *_mask_strides(piece.mask))
    strides += _strides(piece.member, 2)
    how |= {"INDEXED": piece.index is not None, "MASKED": piece.mask is not None, "LOGITS": mass}
    how |= {"BLOCK_ROWS": cut.block_rows, "BLOCK": cut.block, "FACTOR": factor_type(q)}
    grid, options = (cut.splits, kv_heads, cut.row_blocks), {"num_warps": cut.warps}
    kernels.attend_split[grid](
        *tensors, scale, *numbers, *strides, **shape, **how, **options, num_stages=3
    )


def storage(codec: Codec, dim: int, block_dim: int, e4m3: bool = True) -> dict[str, Any]:
    """The parameters of `attend_split` that describe a format, by name.

    `dim` are the numbers of a vector, `block_dim` the power of 2 that holds them.  `e4m3` says
    whether the GPU converts these numbers.
    """
    if not isinstance(codec, Packed):
        kind = codec.name if codec.name != "fp8" or e4m3 else "fp8 bits"
        return {"KIND": kind, "KEY_OUTLIERS": 1, **dict.fromkeys(_OF_RECORDS, 1)}
    each = codec.format
    return {
        "KIND": "grouped" if codec.scaled else "packed",
        "BITS": each.bits,
        "GROUP": each.group if each.group < dim else block_dim,
        "SCALE_BYTES": each.scale_bytes,
        "ZERO_BYTES": each.zero_bytes,
        "STEPS": each.steps,
        "OUTLIERS": each.outliers_of(dim),
        "TOGETHER": each.scale_tokens,
        "KEY_OUTLIERS": each.outliers_of(each.scale_tokens),
    }


def reads(piece: Piece, dim: int) -> bool:
    """Whether the kernels can read a piece's format as it lies."""
    if not isinstance(piece.codec, Packed):
        return True
    each = piece.codec.format
    power, spans = each.group & (each.group - 1) == 0, piece.key_scale
    aligned = spans is not None and spans.storage_offset() % 2 == each.span_bytes % 2 == 0
    even = not piece.codec.scaled or aligned
    bytes_follow = piece.keys.stride(2) == piece.values.stride(2) == 1
    return (power or each.group >= dim) and even and bytes_follow


def _power(number: int, most: int) -> int:
    """The power of 2 that holds a number, or `most`."""
    return min(most, int(triton.next_power_of_2(number)))


def _wide(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer has to be passed even where none is read."""
    if tensor is None:
        return other
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """Strides by KV head and so on; 0 for the head that a flat index does not have."""
    if tensor is None:
        return (0,) * axes
    stride = tensor.stride()
    return stride if len(stride) >= axes else (0, *stride)


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """Strides by sequence, KV head and entry; 0 along what the mask has one of for all."""
    if mask is None:
        return (0, 0, 0)
    return tuple(0 if n == 1 else by for n, by in zip(mask.shape, mask.stride(), strict=True))


def factor_type(q: Tensor) -> Any:
    """The type of products: the queries', but the interpreter cannot multiply bfloat16."""
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 else tl.bfloat16


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs one program after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _e4m3_in_hardware(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
