"""A stand-in for the package flash-attn, which needs CUDA: its decode attention in float64.

The signature is that of flash-attn 2.8.3 (``flash_attn/flash_attn_interface.py``), and so is what
is refused (``csrc/flash_attn/flash_api.cpp``); `calls` counts calls.
"""

import torch

VERSION = "2.8.3"
#: Names and defaults of its parameters, as published.
PUBLISHED = (
    "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False)"
)

calls = [0]
TYPES = (torch.float16, torch.bfloat16)  #: that are not refused


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """Output ``[batch, 1, heads, head_dim]`` and log-sum-exp ``[batch, heads, 1]``."""
    calls[0] += 1
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
              alibi_slopes)  # fmt: skip
    assert all(each is None for each in unused)
    assert (window_size, softcap, num_splits, causal) == ((-1, -1), 0.0, 0, False)
    assert rotary_interleaved
    assert return_softmax_lse
    batch, queries, heads, dim = q.shape
    _, n, kv_heads, _ = k_cache.shape
    assert k_cache.shape == v_cache.shape == (batch, n, kv_heads, dim)
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.dtype in TYPES
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert queries == 1
    assert heads % kv_heads == 0
    assert dim <= 256
    assert cache_seqlens.dtype == torch.int32
    assert tuple(cache_seqlens.shape) == (batch,)
    assert cache_seqlens.is_contiguous()
    wide = torch.float64
    rows = q.to(wide).view(batch, kv_heads, heads // kv_heads, dim)
    keys, values = (x.to(wide).transpose(1, 2) for x in (k_cache, v_cache))
    logits = torch.matmul(rows, keys.transpose(2, 3)) * softmax_scale
    there = torch.arange(n, device=q.device) < cache_seqlens[:, None, None, None]
    logits = logits.masked_fill(~there, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    out = torch.matmul(torch.exp(logits - lse[..., None]), values)
    return (
        out.view(batch, 1, heads, dim).to(q.dtype),
        lse.view(batch, heads, 1).to(torch.float32),
    )
