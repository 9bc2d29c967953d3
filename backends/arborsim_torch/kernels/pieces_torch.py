"""`arborsim_torch.kernels.pieces.attend_pieces` in PyTorch's own operations.

On the CPU, a plain piece goes to PyTorch's fused attention, unless masses are wanted: as it lies,
or in 16 bits as slots of an index that are copied a few thousand at a time.  Everything else is
read a tile at a time, which stays in the cache of a CPU: its logits are written into one matrix of
all pieces, of which one softmax is taken, and its values are added up the same way.  Scales of
8-bit vectors are factors of logits and of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import accumulator, finite, pack, softmax_, unpack
from arborsim_torch.kernels.fused import attend_cpu
from arborsim_torch.kernels.piece import Elsewhere, Piece
from arborsim_torch.tiers.codec import E4M3_UNIT, Packed, Plain, e4m3_as_half

_TILE_NUMBERS = 1 << 17  # 0.5 MB in float32: a tile and its stored form stay in a CPU's cache
_LEAST_TILE = 64
_COPIED_BYTES = 1 << 22  # of keys that are copied for fused attention
_FEW_ROWS = 3  # up to which fused attention in 16 bits is faster by query head


def attend_pieces_torch(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    *,
    mass: bool = False,
    elsewhere: Elsewhere | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`attend_pieces` without checks."""
    (seqs, heads, dim), kind = q.shape, accumulator(q.dtype)
    kv_heads = pieces[0].keys.shape[0]
    for piece in pieces:
        if piece.ready is not None:
            piece.ready()
    rows = pack(q[:, :, None], kv_heads) if seqs > 1 else q.reshape(kv_heads, -1, dim)
    held = [piece for piece in pieces if seqs and piece.room and piece.keys.shape[1]]
    tiled = [piece for piece in held if mass or not _fused(piece)]
    chunks = (chunk for piece in held if not mass and _fused(piece) for chunk in _chunks(piece))
    fused = [attend_fused(rows, *chunk, scale, seqs) for chunk in chunks]
    masses: list[Tensor] = []
    far = None if elsewhere is None else elsewhere.packed()
    if far is not None:
        fused.append((far[..., :dim].to(kind), far[..., dim].to(kind)))
    if not tiled and not fused:
        out, lse = torch.zeros_like(rows), rows.new_full(rows.shape[:2], -torch.inf, dtype=kind)
    elif len(fused) == 1 and not tiled:
        out, lse = fused[0]
    else:
        # What was attended to apart is one more entry each: its logarithm a logit, its output a
        # value.  So there is one softmax, and nothing to be merged.
        rooms = [piece.room for piece in tiled]
        weights = rows.new_empty((*rows.shape[:2], sum(rooms) + len(fused)), dtype=kind)
        *of_piece, of_fused = weights.split([*rooms, len(fused)], dim=-1)
        _write_logits(of_piece, tiled, rows.to(kind) * scale, seqs)
        for i, (_, part) in enumerate(fused):
            of_fused[:, :, i] = part
        lse = softmax_(weights)
        if mass:
            masses = [own.unflatten(1, (seqs, -1)).mean(2).transpose(0, 1) for own in of_piece]
        out = _weighted_values(of_piece, tiled, rows, kind)
        for i, (part, _) in enumerate(fused):
            out += of_fused[:, :, i, None] * part
    of_far: list[Tensor] = []
    if far is not None and mass:
        weights = (far[..., dim + 1 :].to(kind) - finite(lse)[..., None]).exp_()
        of_far.append(weights.unflatten(1, (seqs, -1)).mean(2).transpose(0, 1))
    if out.dtype != q.dtype:
        out = out.to(q.dtype)
    if seqs == 1:  # each call on a tensor counts where a step has one of these per layer
        out, lse = out.reshape(1, heads, dim), lse.reshape(1, heads)
    else:
        out, lse = unpack(out, seqs, 1)[:, :, 0], unpack(lse, seqs, 1)[:, :, 0]
    if not mass:
        return out, lse, None
    found = dict(zip(map(id, tiled), masses, strict=True))
    empty = (lse.new_zeros((seqs, kv_heads, piece.room)) for piece in pieces)
    every = [found.get(id(piece), none) for piece, none in zip(pieces, empty, strict=True)] + of_far
    return out, lse, every[0] if len(every) == 1 else torch.cat(every, dim=-1)


def _fused(piece: Piece) -> bool:
    """Tiles of listed slots are faster than copies for fused attention, but not in 16 bits."""
    faster = piece.index is None or piece.keys.element_size() == 2
    return faster and isinstance(piece.codec, Plain) and piece.keys.device.type == "cpu"


def _chunks(piece: Piece) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and what is readable of them: all in place, or a few slots at a time, copied."""
    keys, values, room = piece.keys, piece.values, piece.room
    if piece.index is None:
        if room < keys.shape[1]:
            keys, values = keys[:, :room], values[:, :room]
        yield keys, values, piece.mask
        return
    step = max(_LEAST_TILE, _COPIED_BYTES // (keys[:, 0].numel() * keys.element_size()))
    readable = _readable(piece)
    assert readable is not None
    for first in range(0, room, step):
        at = slice(first, min(first + step, room))
        yield _looked_up(keys, piece, at), _looked_up(values, piece, at), readable[..., at]


def attend_fused(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, seqs: int
) -> tuple[Tensor, Tensor]:
    """PyTorch's attention for CPU, whose operator returns the log-sum-exp.

    Takes and returns rows ``[kv_heads, rows, head_dim]`` of `arborsim_torch.kernels.dense.pack`,
    with one query per sequence; vectors are contiguous, of one type.  The mask is ``[seqs or 1,
    kv_heads or 1, n]``, the log-sum-exp ``[kv_heads, rows]``.
    """
    bias = nothing = None
    if mask is not None:
        by_row = mask.transpose(0, 1)  # [kv_heads or 1, seqs or 1, room]
        nothing = ~by_row.any(-1)
        bias = torch.where(by_row, 0.0, -torch.inf).to(rows.dtype)
        if len(mask) > 1:
            group = rows.shape[1] // seqs
            bias = bias.repeat_interleave(group, 1)
            nothing = nothing.repeat_interleave(group, 1)
    if rows.element_size() == 2 and rows.shape[1] <= _FEW_ROWS:
        each = (-1, rows.shape[1], -1, -1)  # KV heads are the batch, a group's heads its heads
        alone = None if bias is None else bias[:, :, None]
        repeated = (keys[:, None].expand(each), values[:, None].expand(each))
        out, lse = attend_cpu(rows[:, :, None], *repeated, scale, bias=alone)
        out, lse = out[:, :, 0], lse[:, :, 0]
    else:
        bias = None if bias is None else bias[None]
        out, lse = attend_cpu(rows[None], keys[None], values[None], scale, bias=bias)
        out, lse = out[0], lse[0]
    if nothing is not None:
        lse = lse.masked_fill(nothing, -torch.inf)  # it says 0
    return out, lse


def _write_logits(
    logits: Sequence[Tensor], pieces: Sequence[Piece], rows: Tensor, seqs: int
) -> None:
    """Write each piece's logits into ``[kv_heads, rows, room]``."""
    for own, piece in zip(logits, pieces, strict=True):
        for at, keys in _tiles(piece, True, rows.dtype):
            own[:, :, at] = torch.bmm(rows, keys.transpose(1, 2))
        factor = _factor(piece, piece.key_scale)
        if factor is not None:
            own.mul_(factor[:, None])
        readable = _readable(piece)
        if readable is not None:
            each = own.unflatten(1, (seqs, -1))
            each.masked_fill_(~readable.transpose(0, 1)[:, :, None], -torch.inf)


def _weighted_values(
    weights: Sequence[Tensor], pieces: Sequence[Piece], rows: Tensor, kind: torch.dtype
) -> Tensor:
    """Their sum, ``[kv_heads, rows, head_dim]``; overwrites the weights."""
    out = torch.zeros_like(rows, dtype=kind)
    for own, piece in zip(weights, pieces, strict=True):
        factor = _factor(piece, piece.value_scale)
        if factor is not None:
            own.mul_(factor[:, None])
        for at, values in _tiles(piece, False, kind):
            out.baddbmm_(own[:, :, at], values)
    return out


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
    return found * E4M3_UNIT if piece.keys.dtype == torch.float8_e4m3fn else found


def _tiles(piece: Piece, keys: bool, kind: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Entries, and their vectors ``[kv_heads, entries, head_dim]`` but for their scales."""
    stored = piece.keys if keys else piece.values
    kv_heads, _, width = stored.shape
    if (stored.dtype == kind and piece.index is None) or stored.is_cuda:
        step, scratch = piece.room, None
    else:
        dim = piece.codec.head_dim if isinstance(piece.codec, Packed) else width
        step = min(piece.room, max(_LEAST_TILE, _TILE_NUMBERS // (kv_heads * dim)))
        scratch = stored.new_empty((kv_heads, step, dim), dtype=kind)
    for first in range(0, piece.room, step):
        at = slice(first, min(first + step, piece.room))
        yield at, _vectors(piece, keys, _looked_up(stored, piece, at), at, scratch, kind)


def _vectors(
    piece: Piece, keys: bool, stored: Tensor, at: slice, scratch: Tensor | None, kind: torch.dtype
) -> Tensor:
    if isinstance(piece.codec, Packed):
        if not keys or not piece.codec.scaled:
            return piece.codec.vectors(stored).to(kind)
        assert piece.member is not None
        assert piece.key_scale is not None
        member = _looked_up(piece.member, piece, at)
        group = member // piece.codec.scale_tokens
        spans = rows_at(piece.key_scale, group)
        number = (member - group * piece.codec.scale_tokens)[..., None]
        return piece.codec.grouped_keys(stored, spans, number).to(kind)
    if stored.dtype == kind:
        return stored
    if stored.dtype == torch.float8_e4m3fn:
        stored = e4m3_as_half(stored)
    return stored.to(kind) if scratch is None else scratch[:, : stored.shape[1]].copy_(stored)


def _looked_up(table: Tensor, piece: Piece, at: slice) -> Tensor:
    """Entries of a table by slot, ``[capacity]`` or ``[kv_heads, capacity, ...]``."""
    if piece.index is None:
        return table[at] if table.ndim == 1 else table[:, at]
    return rows_at(table, piece.index[..., at].clamp(min=0))


def rows_at(table: Tensor, slot: Tensor) -> Tensor:
    """Rows of ``[n]`` or ``[kv_heads, n, ...]``, by slots of all heads or of each."""
    kind = table.dtype
    if kind == torch.float8_e4m3fn:  # which cannot be indexed everywhere
        table = table.view(torch.int8)
    if table.ndim == 1:
        return table.index_select(0, slot.reshape(-1)).view(slot.shape)
    if slot.ndim == 1:
        return table.index_select(1, slot).view(kind)
    if table.stride(0) == 0:
        flat = table[0]
    elif table.is_contiguous():  # one call for all heads instead of one each
        heads, n = table.shape[:2]
        flat = table.flatten(0, 1)
        slot = slot + torch.arange(0, heads * n, n, device=slot.device, dtype=slot.dtype)[:, None]
    else:
        each = [own.index_select(0, at) for own, at in zip(table, slot, strict=True)]
        return torch.stack(each).view(kind)
    found = flat.index_select(0, slot.reshape(-1))
    return found.view(*slot.shape, *table.shape[2:]).view(kind)
