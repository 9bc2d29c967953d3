"""Attention as its definition says, in float64, one query and one key at a time."""

import math

import numpy as np
import torch


def numbers(seed, *shape, dtype=torch.float32):
    """Standard normal numbers."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def literal(q, k, v, scale, mask=None):
    """Output, log-sum-exp and weights ``[seqs, heads, queries, n]``, as float64 arrays.

    `mask` is ``[seqs, kv_heads, queries, n]``, already of full shape, or None.
    """
    q, k, v = (np.asarray(part.detach().double()) for part in (q, k, v))
    seqs, heads, queries, dim = q.shape
    kv_heads, n, _ = k.shape
    out = np.zeros((seqs, heads, queries, dim))
    lse = np.full((seqs, heads, queries), -math.inf)
    weights = np.zeros((seqs, heads, queries, n))
    for seq, head, query in np.ndindex(seqs, heads, queries):
        group = head // (heads // kv_heads)
        read = [j for j in range(n) if mask is None or bool(mask[seq, group, query, j])]
        if not read:
            continue
        logits = [scale * float(q[seq, head, query] @ k[group, j]) for j in read]
        highest = max(logits)
        total = sum(math.exp(logit - highest) for logit in logits)
        lse[seq, head, query] = highest + math.log(total)
        for j, logit in zip(read, logits, strict=True):
            weight = math.exp(logit - highest) / total
            weights[seq, head, query, j] = weight
            out[seq, head, query] += weight * v[group, j]
    return out, lse, weights


def by_group(weights, kv_heads):
    """Weights averaged over the heads of each KV head, ``[seqs, kv_heads, queries, n]``."""
    seqs, heads, queries, n = weights.shape
    return weights.reshape(seqs, kv_heads, heads // kv_heads, queries, n).mean(2)


def assert_near(found, wanted, atol=2e-6, rtol=2e-5):
    """Equal but for rounding, infinities included."""
    np.testing.assert_allclose(
        np.asarray(found.detach().double()), np.asarray(wanted), atol=atol, rtol=rtol
    )
