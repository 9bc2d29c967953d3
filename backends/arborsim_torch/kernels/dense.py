"""Attention by plain matrix products, with any mask, and with the mass that each key received.

The logits exist as one matrix here; `arborsim_torch.kernels.flash` attends without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arborsim_torch.kernels.merge import accumulator, finite


def pack(q: Tensor, kv_heads: int) -> Tensor:
    """Queries ``[seqs, heads, queries, head_dim]`` as ``[kv_heads, rows, head_dim]``.

    Rows are ordered by sequence, head of the group, query.
    Raises `ValueError` if the heads do not divide into `kv_heads` groups.
    """
    seqs, heads, queries, dim = q.shape
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} groups")
    split = q.reshape(seqs, kv_heads, heads // kv_heads, queries, dim)
    return split.transpose(0, 1).reshape(kv_heads, -1, dim)


def unpack(packed: Tensor, seqs: int, queries: int) -> Tensor:
    """``[kv_heads, rows, ...]`` as ``[seqs, heads, queries, ...]``: undoes `pack`."""
    split = packed.view(len(packed), seqs, -1, queries, *packed.shape[2:])
    return split.transpose(0, 1).flatten(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention: outputs, and log-sum-exps ``[seqs, heads, queries]``.

    Raises `ValueError` if the query heads do not divide into the KV heads.  Without a `mask`
    ``[seqs or 1, kv_heads or 1, queries or 1, n]`` all may be read.
    """
    out, lse, _ = attend_weights(q, k, v, scale, mask)
    return out, lse


def attend_weights(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend`, and weights ``[seqs, kv_heads, group, queries, n]``."""
    seqs, heads, queries, _ = q.shape
    kv_heads, n, _ = k.shape
    weights = wide_product(pack(q, kv_heads), k.transpose(1, 2)).mul_(scale)
    rows = weights.view(kv_heads, seqs, heads // kv_heads, queries, n)
    if mask is not None:
        rows.masked_fill_(~mask.transpose(0, 1)[:, :, None], float("-inf"))
    lse = softmax_(weights)
    out = wide_product(weights, v).to(q.dtype)
    return unpack(out, seqs, queries), unpack(lse, seqs, queries), rows.transpose(0, 1)


def softmax_(logits: Tensor) -> Tensor:
    """Turn logits into weights where they stand; a row of -inf becomes 0.  The log-sum-exp."""
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], float("-inf"))
    highest = finite(logits.amax(-1, keepdim=True))
    total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
    # Only a row of -inf sums to 0: elsewhere the highest logit adds 1.
    logits.div_(total.masked_fill(total == 0, 1.0))
    return (total.log() + highest)[..., 0]


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product with float32 sums that stay float32; of float64 in float64.

    Logits that are rounded to 16 bits lose two digits of the weights, and float16 overflows.
    On CUDA `a` is read in the type of `b`, so that tensor cores are used.
    """
    kind = torch.promote_types(accumulator(a.dtype), b.dtype)
    if kind != b.dtype and a.is_cuda and hasattr(torch.ops.aten.bmm, "dtype"):
        return torch.bmm(a.to(b.dtype), b, out_dtype=kind)
    return torch.bmm(a.to(kind), b.to(kind))
