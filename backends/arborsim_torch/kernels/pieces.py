"""Attention of one query per sequence over pieces: slots of several pools, read where they lie.

Each piece is in one format.  Its output and log-sum-exp are merged with those of the others, which
is exact but for rounding (`arborsim_torch.kernels.dense`), so nothing is decoded into a copy and
nothing is put into the order of tokens.

On CUDA these are Triton kernels (`arborsim_torch.kernels.pieces_triton`): a launch per piece, one
that merges, and one for all masses, or for their mean over heads.  What the host attends to is
merged by the same launches.  Elsewhere, and where Triton, the GPU or a format does not fit,
`arborsim_torch.kernels.pieces_torch`.  The start of a pool that all sequences read goes to
flash-attn if a piece says so (`Piece.prefix`) and no masses are wanted.

Nothing here waits for the device, and no shape depends on data: a call can be captured in a CUDA
graph as long as rooms and pieces stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from arborsim_torch.kernels.dense import merge, pack, unpack
from arborsim_torch.kernels.flash import attend_prefix
from arborsim_torch.kernels.piece import Elsewhere, MeanRows, Piece, check, in_triton
from arborsim_torch.kernels.pieces_torch import attend_pieces_torch


def attend_pieces(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    *,
    mass: bool = False,
    means: MeanRows | None = None,
    elsewhere: Elsewhere | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention of one query per sequence over all pieces together, and `elsewhere`.

    Returns outputs, log-sum-exps ``[seqs, heads]``, and if `mass` says so and there are no `means`
    to add it to, float32 ``[seqs, kv_heads, entries]``, of each piece, then of `elsewhere`: weights
    under the softmax over all of it, averaged over the query heads of each KV head.  Raises
    `ValueError` if shapes or types do not fit.
    """
    if not pieces:
        raise ValueError("attention over no piece: give at least one, of no room if need be")
    for piece in pieces:
        check(q, piece)
    if not mass and means is None and len(q) and any(piece.prefix is not None for piece in pieces):
        return *_attend_apart(q, pieces, scale, elsewhere), None
    if in_triton(q.device, q.dtype):
        from arborsim_torch.kernels import pieces_triton

        if all(pieces_triton.reads(piece, q.shape[2]) for piece in pieces):
            return pieces_triton.attend_pieces_triton(
                q, pieces, scale, mass=mass, means=means, elsewhere=elsewhere
            )
    weighs = mass or means is not None
    out, lse, found = attend_pieces_torch(q, pieces, scale, mass=weighs, elsewhere=elsewhere)
    if means is not None and found is not None:
        means.add(found)
    return out, lse, found if mass else None


def _attend_apart(
    q: Tensor, pieces: Sequence[Piece], scale: float, elsewhere: Elsewhere | None
) -> tuple[Tensor, Tensor]:
    """Each prefix by flash-attn, and what is left by the other kernels."""
    parts = [attend_prefix(q, piece, scale) for piece in pieces if piece.prefix is not None]
    left = [piece if piece.prefix is None else piece.prefix.rest for piece in pieces]
    others = [piece for piece in left if piece is not None and piece.room]
    seqs, kv_heads = len(q), len(pieces[0].keys)
    if others and in_triton(q.device, q.dtype):
        from arborsim_torch.kernels import pieces_triton

        if all(pieces_triton.reads(piece, q.shape[2]) for piece in others):
            out, lse, _ = pieces_triton.attend_pieces_triton(
                q, others, scale, parts=parts, elsewhere=elsewhere
            )
            return out, lse
    if elsewhere is not None:
        packed = elsewhere.packed()
        parts.append((packed[..., : q.shape[2]], packed[..., q.shape[2]]))
    if others:
        out, lse, _ = attend_pieces_torch(q, others, scale)
        parts.append(
            (pack(out[:, :, None], kv_heads), pack(lse[:, :, None, None], kv_heads)[..., 0])
        )
    out, lse = parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))
    return unpack(out, seqs, 1)[:, :, 0], unpack(lse, seqs, 1)[:, :, 0]
