"""Triton kernels that add up the rows of a block of a prompt, and their launches.

A program makes the weights of some queries and keys again, head by head, as ``exp(logit - lse)``:
no weight is written, and a row only once it is averaged.  Sums over queries add one tile after the
other in float64, so that they have the same bits in every run.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from arborsim_torch.kernels.piece import BlockRows
from arborsim_torch.kernels.pieces_triton import factor_type


@triton.jit
def _mean_weights(
    q, k, lse, first_head, query, key, queries, before, scale,
    q_head, q_query, q_dim, k_head, k_slot, k_dim, HEADS, MEMBERS, DIM, BLOCK_DIM, FACTOR,
):  # fmt: skip
    """Weights of a tile, averaged over the heads from `first_head` on; 0 for keys after a query."""
    dim = tl.arange(0, BLOCK_DIM)
    there = (query < queries)[:, None] & (dim < DIM)[None, :]
    held = (key < before + queries)[:, None] & (dim < DIM)[None, :]
    total = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    for member in range(HEADS):
        head = first_head + member
        own = q + head * q_head + query[:, None] * q_query + dim[None, :] * q_dim
        kv_head = head // MEMBERS
        other = k + kv_head * k_head + key.to(tl.int64)[:, None] * k_slot + dim[None, :] * k_dim
        vectors = tl.load(own, mask=there, other=0.0).to(FACTOR)
        keys = tl.load(other, mask=held, other=0.0).to(FACTOR)
        logits = tl.dot(vectors, tl.trans(keys), input_precision="ieee") * scale
        level = tl.load(lse + head * queries + query, mask=query < queries, other=0.0)
        total += tl.exp(logits - level[:, None])
    seen = key[None, :] <= before + query[:, None]
    return tl.where(seen, total / HEADS, 0.0)


# Lengths change from block to block: a kernel per kind of number would be compiled again and again.
@triton.jit(do_not_specialize=["first", "queries", "before"])
def add_mean_rows(
    q, k, lse, good, mean, first, queries, before, scale,
    q_head, q_query, q_dim, k_head, k_slot, k_dim,
    HEADS: constexpr, MEMBERS: constexpr, DIM: constexpr, BLOCK_DIM: constexpr,
    BLOCK_QUERIES: constexpr, BLOCK_KEYS: constexpr, FACTOR: constexpr,
):  # fmt: skip
    """Add the rows of the queries from `first` on to `mean`, ``[queries - first, keys]``."""
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    row = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    query = first + row
    found = _mean_weights(
        q, k, lse, tl.program_id(2).to(tl.int64), query, key, queries, before, scale,
        q_head, q_query, q_dim, k_head, k_slot, k_dim, HEADS, MEMBERS, DIM, BLOCK_DIM, FACTOR,
    )  # fmt: skip
    counts = tl.load(good + query, mask=query < queries, other=0) != 0
    to = mean + row.to(tl.int64)[:, None] * (before + queries) + key[None, :]
    wanted = counts[:, None] & (key < before + queries)[None, :]
    tl.store(to, tl.load(to, mask=wanted, other=0.0) + found, mask=wanted)


@triton.jit(do_not_specialize=["first", "recent", "queries", "before"])
def sum_group_rows(
    q, k, lse, good, sums, newest, first, recent, queries, before, scale,
    q_head, q_query, q_dim, k_head, k_slot, k_dim,
    HEADS: constexpr, MEMBERS: constexpr, DIM: constexpr, BLOCK_DIM: constexpr,
    BLOCK_QUERIES: constexpr, BLOCK_KEYS: constexpr, FACTOR: constexpr,
):  # fmt: skip
    """Sum of a group's rows from query `first` on, and its last row; both ``[groups, keys]``.

    A sum leaves out what queries pay their own `recent` newest keys.
    """
    group = tl.program_id(1)
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    total = tl.zeros([BLOCK_KEYS], tl.float64)
    last = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(first, queries, BLOCK_QUERIES):
        query = start + tl.arange(0, BLOCK_QUERIES)
        found = _mean_weights(
            q, k, lse, group.to(tl.int64) * HEADS, query, key, queries, before, scale,
            q_head, q_query, q_dim, k_head, k_slot, k_dim, HEADS, MEMBERS, DIM, BLOCK_DIM, FACTOR,
        )  # fmt: skip
        counts = tl.load(good + group * queries + query, mask=query < queries, other=0) != 0
        counted = counts[:, None] & (key[None, :] + recent <= before + query[:, None])
        total += tl.sum(tl.where(counted, found, 0.0).to(tl.float64), 0)
        newer = tl.where(counts[:, None], found, float("nan"))
        last += tl.sum(tl.where((query == queries - 1)[:, None], newer, 0.0), 0)
    n = before + queries
    to = group.to(tl.int64) * n + key
    tl.store(sums + to, total, mask=key < n)
    tl.store(newest + to, last, mask=key < n)


def add_rows(q: Tensor, k: Tensor, lse: Tensor, scale: float, kept: BlockRows) -> None:
    """Take in the rows of a block (`arborsim_torch.kernels.rows.attend_rows`).

    `lse` is the log-sum-exp ``[heads, queries]``; a row whose one is not finite is not a number.
    """
    heads, queries, dim = q.shape
    kv_heads, n, _ = k.shape
    good, lse, size = lse.isfinite(), lse.contiguous(), 64 if q.element_size() == 2 else 32
    of_tile: dict[str, Any] = dict.fromkeys(("BLOCK_QUERIES", "BLOCK_KEYS"), size)
    of_tile |= {"MEMBERS": heads // kv_heads, "FACTOR": factor_type(q), "num_warps": 4}
    of_tile |= {"DIM": dim, "BLOCK_DIM": max(16, triton.next_power_of_2(dim))}
    given = (q, k, lse)
    numbers = (queries, n - queries, scale, *q.stride(), *k.stride())
    blocks = triton.cdiv(n, size)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        if kept.mean is not None and kept.numbers is not None:
            whole, first = good.all(0), queries - kept.of_mean
            kept.numbers += whole[first:, None]
            own = (*given, whole.view(torch.uint8), kept.mean)
            grid = (blocks, triton.cdiv(kept.of_mean, size), 1)
            add_mean_rows[grid](*own, first, *numbers, HEADS=heads, **of_tile)
        if kept.groups is not None:
            groups = kv_heads if kept.groups == "head" else 1
            apart = good.view(groups, -1, queries).all(1)
            kept.newest = torch.empty((groups, n), dtype=torch.float32, device=q.device)
            sums = torch.empty((groups, n), dtype=torch.float64, device=q.device)
            tensors = (*given, apart.view(torch.uint8), sums, kept.newest)
            numbers = (queries - kept.of_groups, kept.recent, *numbers)
            sum_group_rows[(blocks, groups)](*tensors, *numbers, HEADS=heads // groups, **of_tile)
            kept.sums = sums if kept.of_groups > 1 or kept.recent else None
