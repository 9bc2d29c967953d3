"""`arborsim_torch.kernels.pieces.attend_pieces` in PyTorch's own operations.

On the CPU, a plain piece without an index goes to PyTorch's fused attention.  Everything else is
read a tile at a time, which stays in the cache of a CPU: its logits are written into one matrix of
all pieces, of which one softmax is taken, and its values are added up the same way.  Scales of
8-bit vectors are factors of logits and of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import pack, softmax_, unpack
from arborsim_torch.kernels.merge import accumulator, merge
from arborsim_torch.tiers.codec import Packed, Plain

if TYPE_CHECKING:
    from arborsim_torch.kernels.pieces import Piece

_TILE_SLOTS = 512  # of 6 heads of 64 numbers: 0.8 MB in float32
_FEW_ROWS = 3  # up to which fused attention in 16 bits is faster by query head
_FP8_UNIT = 256.0  # of e4m3 numbers whose bits are taken for those of float16


def attend_pieces_torch(
    q: Tensor, pieces: Sequence[Piece], scale: float, *, mass: bool = False
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """`attend_pieces` without checks."""
    seqs, _, _ = q.shape
    kv_heads = len(pieces[0].keys)
    held = [piece for piece in pieces if seqs and piece.room and piece.keys.shape[1]]
    apart = [piece for piece in held if not mass and _fused(q, piece)]
    parts = [_attend_fused(q, piece, scale) for piece in apart]
    masses: list[Tensor] = []
    if len(apart) < len(held):
        together = [piece for piece in held if mass or not _fused(q, piece)]
        out, lse, masses = _attend_tiles(q, together, scale, mass)
        parts.append((out, lse))
    if not parts:
        empty = q.new_full(q.shape[:2], float("-inf"), dtype=accumulator(q.dtype))
        parts.append((torch.zeros_like(q), empty))
    out, lse = parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))
    if not mass:
        return out, lse, None
    found = iter(masses)
    none = (seqs, kv_heads)
    return out, lse, [
        next(found) if piece.room and piece.keys.shape[1] and seqs
        else lse.new_zeros((*none, piece.room))
        for piece in pieces
    ]  # fmt: skip


def _fused(q: Tensor, piece: Piece) -> bool:
    return piece.index is None and isinstance(piece.codec, Plain) and q.device.type == "cpu"


def _attend_fused(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's attention for CPU, whose operator returns the log-sum-exp."""
    kv_heads, seqs = len(piece.keys), len(q)
    keys, values = piece.keys[:, : piece.room], piece.values[:, : piece.room]
    rows = pack(q[:, :, None], kv_heads)
    bias = nothing = None
    if piece.mask is not None:
        mask = piece.mask.transpose(0, 1)  # [kv_heads or 1, seqs or 1, room]
        nothing = ~mask.any(-1)
        bias = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
        if len(piece.mask) > 1:
            group = rows.shape[1] // seqs
            bias = bias.repeat_interleave(group, 1)
            nothing = nothing.repeat_interleave(group, 1)
    if q.element_size() == 2 and rows.shape[1] <= _FEW_ROWS:
        each = (-1, rows.shape[1], -1, -1)  # KV heads are the batch, a group's heads its heads
        by_row = None if bias is None else bias[:, :, None]
        out, lse = _fused_for_cpu(
            rows[:, :, None], keys[:, None].expand(each), values[:, None].expand(each), by_row,
            scale,
        )  # fmt: skip
        out, lse = out[:, :, 0], lse[:, :, 0]
    else:
        out, lse = _fused_for_cpu(
            rows[None], keys[None], values[None], None if bias is None else bias[None], scale
        )
        out, lse = out[0], lse[0]
    if nothing is not None:
        lse = lse.masked_fill(nothing, float("-inf"))  # it says 0
    return unpack(out, seqs, 1)[:, :, 0], unpack(lse, seqs, 1)[:, :, 0]


def _fused_for_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    return found[0], found[1]


def _attend_tiles(
    q: Tensor, pieces: Sequence[Piece], scale: float, mass: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    seqs, heads, dim = q.shape
    kv_heads = len(pieces[0].keys)
    rows = pack(q[:, :, None], kv_heads).to(accumulator(q.dtype)) * scale
    scratch = rows.new_empty((kv_heads, _TILE_SLOTS, dim))
    weights = rows.new_empty((kv_heads, rows.shape[1], sum(piece.room for piece in pieces)))
    of_piece = weights.split([piece.room for piece in pieces], dim=-1)
    for own, piece in zip(of_piece, pieces, strict=True):
        for at, keys in _tiles(piece, True, scratch):
            own[:, :, at] = torch.bmm(rows, keys.transpose(1, 2))
        factor = _factor(piece, piece.key_scale)
        if factor is not None:
            own.mul_(factor[:, None])
        readable = _readable(piece)
        if readable is not None:
            each = own.unflatten(1, (seqs, heads // kv_heads))
            each.masked_fill_(~readable.transpose(0, 1)[:, :, None], float("-inf"))
    lse = softmax_(weights)
    masses = []
    if mass:
        masses = [
            own.unflatten(1, (seqs, heads // kv_heads)).mean(2).transpose(0, 1) for own in of_piece
        ]
    out = torch.zeros_like(rows)
    for own, piece in zip(of_piece, pieces, strict=True):
        factor = _factor(piece, piece.value_scale)
        if factor is not None:
            own.mul_(factor[:, None])
        for at, values in _tiles(piece, False, scratch):
            out.baddbmm_(own[:, :, at], values)
    return unpack(out, seqs, 1)[:, :, 0].to(q.dtype), unpack(lse, seqs, 1)[:, :, 0], masses


def _readable(piece: Piece) -> Tensor | None:
    """Bool ``[seqs or 1, kv_heads or 1, room]``."""
    if piece.index is None:
        return piece.mask
    held = piece.index >= 0
    held = held[None, None] if held.ndim == 1 else held[None]
    return held if piece.mask is None else held & piece.mask


def _factor(piece: Piece, scales: Tensor | None) -> Tensor | None:
    """By what logits or weights are multiplied, ``[kv_heads, room]``, if vectors have a scale."""
    if scales is None or isinstance(piece.codec, Packed):
        return None
    found = _looked_up(scales, piece, slice(0, piece.room))
    return found * _FP8_UNIT if piece.keys.dtype == torch.float8_e4m3fn else found


def _tiles(piece: Piece, keys: bool, scratch: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Entries, and their vectors ``[kv_heads, entries, head_dim]`` but for their scales."""
    stored = piece.keys if keys else piece.values
    whole = stored.dtype == scratch.dtype and piece.index is None
    step = piece.room if whole or stored.is_cuda else scratch.shape[1]
    for first in range(0, piece.room, step):
        at = slice(first, min(first + step, piece.room))
        yield at, _vectors(piece, keys, _looked_up(stored, piece, at), at, scratch)


def _vectors(piece: Piece, keys: bool, stored: Tensor, at: slice, scratch: Tensor) -> Tensor:
    if isinstance(piece.codec, Packed):
        if not keys or not piece.codec.scaled:
            return piece.codec.vectors(stored).to(scratch.dtype)
        assert piece.member is not None
        assert piece.key_scale is not None
        member = _looked_up(piece.member, piece, at)
        group = member // piece.codec.together
        spans = _rows(piece.key_scale, group)
        number = (member - group * piece.codec.together)[..., None]
        return piece.codec.grouped_keys(stored, spans, number).to(scratch.dtype)
    if stored.dtype == scratch.dtype:
        return stored
    if stored.dtype == torch.float8_e4m3fn:
        # PyTorch converts these one by one on a CPU.  Sign, 4 bits of exponent and 3 of mantissa
        # are where float16 has them after a shift, and mean 2^-8 of what they did.
        wide = stored.view(torch.int8).to(torch.int16)
        stored = wide.mul_(128).bitwise_and_(-0x4001).view(torch.float16)
    if stored.shape[1] > scratch.shape[1]:
        return stored.to(scratch.dtype)
    return scratch[:, : stored.shape[1]].copy_(stored)


def _looked_up(table: Tensor, piece: Piece, at: slice) -> Tensor:
    """What a table by slot, ``[capacity]`` or ``[kv_heads, capacity, ...]``, has of entries."""
    if piece.index is None:
        return table[at] if table.ndim == 1 else table[:, at]
    return _rows(table, piece.index[..., at].clamp(min=0))


def _rows(table: Tensor, slot: Tensor) -> Tensor:
    """Rows of ``[n]`` or ``[kv_heads, n, ...]``, by slots of all heads or of each."""
    kind = table.dtype
    if kind == torch.float8_e4m3fn:  # which cannot be indexed everywhere
        table = table.view(torch.int8)
    if table.ndim == 1:
        found = table.index_select(0, slot.reshape(-1)).view(slot.shape)
    elif slot.ndim == 1:
        found = table.index_select(1, slot)
    else:
        found = torch.stack([own.index_select(0, at) for own, at in zip(table, slot, strict=True)])
    return found.view(kind)
