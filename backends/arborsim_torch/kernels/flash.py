"""Attention without a matrix of logits, by fused kernels that also return the log-sum-exp.

Prefill reads its history without a mask and itself causally, and merges the two.  Decoding reads
the start of a pool as one contiguous cache, in place.  Which kernels there are, and which of them
is taken, is in `arborsim_torch.kernels.fused`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import accumulator, attend, merge, pack, unpack
from arborsim_torch.kernels.fused import KERNELS, choose
from arborsim_torch.kernels.packages import Kernel, decode
from arborsim_torch.kernels.piece import Piece


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    *,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of queries that read all keys, or (`causal`) as many, each up to its own.

    `kernel` is a key of `KERNELS`, or "dense"; `choose`'s by default.  Returns outputs and
    log-sum-exps ``[seqs, heads, queries]``.  Raises `ValueError` if the heads do not divide into
    the KV heads, if there is not one key per query in causal attention, or no such kernel.
    """
    seqs, heads, queries, dim = q.shape
    kv_heads, n, _ = k.shape
    if causal and n != queries:
        raise ValueError(f"causal attention of {queries} queries over {n} keys: one key per query")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} groups")
    if n == 0 or queries == 0:  # the kernel for CPU divides by both
        lse = q.new_full((seqs, heads, queries), float("-inf"), dtype=accumulator(q.dtype))
        return torch.zeros_like(q), lse
    name = kernel or choose(q.device, q.dtype, dim).name
    if name == "dense":
        mask = q.new_ones((1, 1, n, n), dtype=torch.bool).tril_() if causal else None
        return attend(q, k, v, scale, mask)
    if name not in KERNELS:
        known = ", ".join(("dense", *KERNELS))
        raise ValueError(f"no attention kernel {name!r}; there are {known}")
    return _grouped(KERNELS[name], q, k, v, scale, causal)


def attend_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    history: tuple[Tensor, Tensor] | None = None,
    *,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a block of new tokens over a history and over themselves, as of `attend_flash`.

    Query i reads the block's first i + 1 tokens and all of the history (in any order).
    """
    own = attend_flash(q, k, v, scale, causal=True, kernel=kernel)
    if history is None or history[0].shape[1] == 0:
        return own
    past = attend_flash(q, *history, scale, kernel=kernel)
    return merge((past[0], own[0]), (past[1], own[1]))


def attend_prefix(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over a piece's `Prefix` by flash-attn's kernels for decoding, without its rest.

    The sequences read the same keys, so they are taken for further heads of one sequence: each key
    is read once.  A block table is not needed, and not used: with one, flash-attn 2.8.4 looks at
    the length on the host (``seqlens_k.max().item()``), so that no CUDA graph could hold the call.

    Takes queries ``[seqs, heads, head_dim]``.  Returns outputs ``[kv_heads, rows, head_dim]`` and
    log-sum-exps ``[kv_heads, rows]``; rows are ordered by sequence, then by head of the group.
    """
    assert piece.prefix is not None
    kv_heads, dim = len(piece.keys), q.shape[2]
    # [batch, tokens, heads, head_dim], with whatever strides; all of the room, so that how the
    # kernel splits its work depends on shapes alone.
    keys, values = (x[:, : piece.room].transpose(0, 1)[None] for x in (piece.keys, piece.values))
    rows = pack(q[:, :, None], kv_heads).reshape(1, 1, -1, dim)
    out, lse = decode(piece.prefix.package, rows, keys, values, piece.prefix.length, scale)
    return out.reshape(kv_heads, -1, dim), lse.reshape(kv_heads, -1)


def _grouped(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Run a kernel that wants as many KV heads as query heads, without repeating keys."""
    seqs, _, queries, dim = q.shape
    kv_heads = len(k)
    packed = pack(q, kv_heads)
    if causal:
        # A head of the group is a head of a batch of KV heads; its keys are a view (stride 0).
        split = packed.view(kv_heads, -1, queries, dim)
        wanted = (-1, split.shape[1], -1, -1)
        out, lse = kernel(split, k[:, None].expand(wanted), v[:, None].expand(wanted), scale, True)
    else:
        out, lse = kernel(packed[None], k[None], v[None], scale, False)
    out, lse = out.reshape(kv_heads, -1, dim), lse.reshape(kv_heads, -1)
    return unpack(out, seqs, queries), unpack(lse, seqs, queries)
