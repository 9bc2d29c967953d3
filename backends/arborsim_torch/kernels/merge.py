"""Merging attention over disjoint parts of the keys into attention over all of them.

With ``lse_i`` the logarithm of the sum of exponentials over part i, the whole is
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
    lse = _logsumexp(torch.stack([part.to(kind) for part in lses]))
    base = finite(lse)
    total = torch.zeros(outs[0].shape, dtype=kind, device=outs[0].device)
    for out, part in zip(outs, lses, strict=True):
        weight = torch.exp(part.to(kind) - base)[..., None]
        # What stands where no key was read may be anything, NaN too.
        total += (out * weight).masked_fill_(part[..., None] == float("-inf"), 0.0)
    return total.to(outs[0].dtype), lse


def _logsumexp(parts: Tensor) -> Tensor:
    """Over the first axis; of one part exactly that part."""
    return parts[0] if len(parts) == 1 else torch.logsumexp(parts, dim=0)
