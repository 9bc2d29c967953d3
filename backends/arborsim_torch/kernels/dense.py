"""Attention by plain matrix products, with any mask and each key's mass, and merging of parts.

The logits exist as one matrix here; `arborsim_torch.kernels.flash` attends without.

With ``lse_i`` the logarithm of the sum of exponentials over part i of the keys, the whole is
``sum_i exp(lse_i - lse) out_i`` with ``lse = log(sum_i exp(lse_i))``: exact but for rounding.  The
online softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867), as split-K decoding and cascade
attention use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type to add numbers up in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def finite(lse: Tensor) -> Tensor:
    """`lse` with 0 where there was no key: then ``exp(-inf - 0) = 0`` instead of NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the attention ``[..., head_dim]`` over parts by their log-sum-exps ``[...]``.

    What stands where a log-sum-exp is -inf is ignored: there the part has no key.  Raises
    `ValueError` without parts, or with unequal numbers of outputs and log-sum-exps.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outputs and {len(lses)} log-sum-exps to merge")
    kind = accumulator(outs[0].dtype)
    for part in (*outs[1:], *lses):
        kind = torch.promote_types(kind, part.dtype)
    each = torch.stack([part.to(kind) for part in lses])
    lse = each[0] if len(each) == 1 else torch.logsumexp(each, dim=0)  # one stays as it is
    base = finite(lse)
    total = torch.zeros(outs[0].shape, dtype=kind, device=outs[0].device)
    for out, part in zip(outs, lses, strict=True):
        weight = torch.exp(part.to(kind) - base)[..., None]
        # What stands where no key was read may be anything, NaN too.
        total += (out * weight).masked_fill_(part[..., None] == float("-inf"), 0.0)
    return total.to(outs[0].dtype), lse


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
