"""Triton kernels that add up the rows of a block of a prompt, from its attention's log-sum-exp.

A program makes the weights of some queries and keys again, head by head, as ``exp(logit - lse)``:
no weight is written, and a row only once it is averaged.  Sums over queries add one tile after the
other in float64, so that they have the same bits in every run.

`arborsim_torch.kernels.rows_triton` launches these.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mean_weights(
    q, k, lse, first_head, query, key, queries, before, scale,
    q_head, q_query, q_dim, k_head, k_slot, k_dim,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, averaged over the heads from `first_head` on; 0 for keys after a query."""
    dim = tl.arange(0, BLOCK_DIM)
    there = (query < queries)[:, None] & (dim < DIM)[None, :]
    held = (key < before + queries)[:, None] & (dim < DIM)[None, :]
    total = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)
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
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the rows of the queries from `first` on to `mean`, ``[queries - first, keys]``."""
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    row = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    query = first + row
    found = _mean_weights(
        q, k, lse, tl.program_id(2).to(tl.int64), query, key, queries, before, scale,
        q_head, q_query, q_dim, k_head, k_slot, k_dim,
        HEADS, MEMBERS, DIM, BLOCK_DIM, BLOCK_QUERIES, BLOCK_KEYS, FACTOR,
    )  # fmt: skip
    counts = tl.load(good + query, mask=query < queries, other=0) != 0
    to = mean + row.to(tl.int64)[:, None] * (before + queries) + key[None, :]
    wanted = counts[:, None] & (key < before + queries)[None, :]
    tl.store(to, tl.load(to, mask=wanted, other=0.0) + found, mask=wanted)


@triton.jit(do_not_specialize=["first", "recent", "queries", "before"])
def sum_group_rows(
    q, k, lse, good, sums, newest, first, recent, queries, before, scale,
    q_head, q_query, q_dim, k_head, k_slot, k_dim,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, FACTOR: tl.constexpr,
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
            q_head, q_query, q_dim, k_head, k_slot, k_dim,
            HEADS, MEMBERS, DIM, BLOCK_DIM, BLOCK_QUERIES, BLOCK_KEYS, FACTOR,
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
