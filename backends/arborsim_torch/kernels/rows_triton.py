"""Rows of a block of a prompt in Triton: the launches of `arborsim_torch.kernels.rows_kernels`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from arborsim_torch.kernels.pieces_triton import factor_type
from arborsim_torch.kernels.rows import BlockRows
from arborsim_torch.kernels.rows_kernels import add_mean_rows, sum_group_rows


def add_rows(q: Tensor, k: Tensor, lse: Tensor, scale: float, kept: BlockRows) -> None:
    """Take in the rows of a block (`arborsim_torch.kernels.rows.attend_rows`).

    Runs on CUDA, or on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``).

    Parameters
    ----------
    q, k, scale, kept
        As for `attend_rows`.
    lse : float32 Tensor ``[heads, queries]``
        Natural log-sum-exp of the logits; a row whose one is not finite is not a number.
    """
    heads, queries, dim = q.shape
    kv_heads, n, _ = k.shape
    good, lse, size = lse.isfinite(), lse.contiguous(), 64 if q.element_size() == 2 else 32
    of_tile: dict[str, Any] = {
        "MEMBERS": heads // kv_heads, "DIM": dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
        "BLOCK_QUERIES": size, "BLOCK_KEYS": size, "FACTOR": factor_type(q), "num_warps": 4,
    }  # fmt: skip
    given = (q, k, lse)
    numbers = (queries, n - queries, scale, *q.stride(), *k.stride())
    blocks = triton.cdiv(n, size)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        if kept.mean is not None and kept.numbers is not None:
            whole = good.all(0)
            kept.numbers += whole[queries - kept.of_mean :, None]
            add_mean_rows[(blocks, triton.cdiv(kept.of_mean, size), 1)](
                *given, whole.view(torch.uint8), kept.mean, queries - kept.of_mean, *numbers,
                HEADS=heads, **of_tile,
            )  # fmt: skip
        if kept.groups is not None:
            groups = kv_heads if kept.groups == "head" else 1
            apart = good.view(groups, -1, queries).all(1)
            kept.newest = torch.empty((groups, n), dtype=torch.float32, device=q.device)
            sums = torch.empty((groups, n), dtype=torch.float64, device=q.device)
            sum_group_rows[(blocks, groups)](
                *given, apart.view(torch.uint8), sums, kept.newest, queries - kept.of_groups,
                kept.recent, *numbers, HEADS=heads // groups, **of_tile,
            )  # fmt: skip
            kept.sums = sums if kept.of_groups > 1 or kept.recent else None
