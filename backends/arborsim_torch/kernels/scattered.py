"""Decode attention that reads scattered slots of a pool, and the mass that each received.

On CUDA a Triton kernel reads the slots where they lie (`arborsim_torch.kernels.scattered_triton`);
elsewhere, and where Triton or the GPU cannot, the same in plain operations on a gathered copy.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import attend_with_mass
from arborsim_torch.kernels.merge import accumulator

EIGHT_BIT = (torch.float8_e4m3fn, torch.int8)
_FP8_CAPABILITY = (8, 9)  # Ada and Hopper convert e4m3 in hardware; Triton refuses it on older ones


def attend_scattered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    want_mass: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention of one query per sequence over chosen slots of a pool.

    Parameters
    ----------
    q : Tensor ``[seqs, heads, head_dim]``
    k, v : Tensor ``[kv_heads, capacity, head_dim]``
        Of q's type, or float8_e4m3fn or int8 with scales.  What `index` names must be finite.
    index : int32 Tensor ``[n]`` or ``[kv_heads, n]``
        Slots to read, in any order; -1 = padding, never read.  Not checked against the
        capacity: that would make the host wait.
    scale : float
        Factor of the inner products.
    mask : bool Tensor ``[seqs, n]`` or ``[seqs, kv_heads, n]``, or None
        True = readable, by entry of `index`; None if all of it is.
    k_scale, v_scale : float32 Tensor ``[kv_heads, capacity]``
        Factors of 8-bit keys and values.
    want_mass : bool
        Whether to return the mass; without, no logits are written.

    Returns
    -------
    out : Tensor ``[seqs, heads, head_dim]``
        0 for a sequence that reads nothing.
    lse : float32 Tensor ``[seqs, heads]``
        Natural log-sum-exp of the logits, -inf for a sequence that reads nothing.
    mass : float32 Tensor ``[seqs, kv_heads, n]`` or None
        Attention weights averaged over the query heads of a KV head.

    Raises
    ------
    ValueError
        If shapes or types do not fit, or 8-bit data comes without scales.
    """
    check(q, k, v, index, mask, k_scale, v_scale)
    take = attend_scattered_torch
    if q.is_cuda and runs_on(q.device, q.dtype, k.dtype):
        from arborsim_torch.kernels.scattered_triton import attend_scattered_triton

        take = attend_scattered_triton
    return take(q, k, v, index, scale, mask, k_scale=k_scale, v_scale=v_scale, want_mass=want_mass)


def attend_scattered_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    want_mass: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`attend_scattered` in plain operations, on a copy of the slots; same signature."""
    held = index >= 0
    kind = None if k_scale is None else accumulator(q.dtype)
    keys, values = rows_of(k, index, k_scale, kind), rows_of(v, index, v_scale, kind)
    readable = held.expand(len(k), -1)[None]
    if mask is not None:
        readable = readable & (mask[:, None] if mask.ndim == 2 else mask)
    out, lse, mass = attend_with_mass(
        q[:, :, None].to(keys.dtype), keys, values, scale, readable[:, :, None], per_group=True
    )
    return out[:, :, 0].to(q.dtype), lse[:, :, 0], mass[:, :, 0] if want_mass else None


def rows_of(
    pool: Tensor, index: Tensor, scales: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy slots of a pool ``[kv_heads, capacity, head_dim]``; 0 where the index is -1.

    Parameters
    ----------
    pool : Tensor
    index : int Tensor ``[n]`` or ``[kv_heads, n]``
    scales : float32 Tensor ``[kv_heads, capacity]`` or None
    dtype : torch.dtype or None
        Of the result; None for the pool's.

    Returns
    -------
    Tensor ``[kv_heads, n, head_dim]``
    """
    dtype = dtype or pool.dtype
    if pool.shape[1] == 0:  # an empty pool has only padding to offer
        return pool.new_zeros((len(pool), index.shape[-1], pool.shape[2]), dtype=dtype)
    slot = index.clamp(min=0).to(torch.int64)
    rows = _take(pool, slot).to(dtype)
    if scales is not None:
        rows = rows * _take(scales, slot)[..., None].to(dtype)
    padding = index < 0
    if index.is_cuda or bool(padding.any()):  # asking CUDA would make the host wait
        rows.masked_fill_(padding[..., None], 0.0)
    return rows


def _take(pool: Tensor, slot: Tensor) -> Tensor:
    """``pool[head, slot[head]]``; on CPU advanced indexing is four times slower than this."""
    if slot.ndim == 1:
        return pool.index_select(1, slot)
    if pool.is_cuda:
        return pool[torch.arange(len(pool), device=pool.device)[:, None], slot]
    return torch.stack([own.index_select(0, at) for own, at in zip(pool, slot, strict=True)])


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Refuse what a kernel would read wrongly; looks at shapes and types only, not at data."""
    (seqs, heads, dim), (kv_heads, capacity, _) = q.shape, k.shape
    n = index.shape[-1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} groups")
    if v.shape != k.shape or k.shape[2] != dim:
        raise ValueError(f"queries of {dim}, keys {list(k.shape)}, values {list(v.shape)}")
    if tuple(index.shape) not in ((n,), (kv_heads, n)):
        raise ValueError(f"an index of shape {list(index.shape)} for {kv_heads} KV heads")
    if mask is not None and tuple(mask.shape) not in ((seqs, n), (seqs, kv_heads, n)):
        raise ValueError(f"a mask of shape {list(mask.shape)} for {seqs} sequences and {n} slots")
    if v.dtype != k.dtype or (k.dtype != q.dtype and k.dtype not in EIGHT_BIT):
        raise ValueError(f"queries of {q.dtype}, keys of {k.dtype}, values of {v.dtype}")
    for scales in (k_scale, v_scale):
        if (scales is not None) != (k.dtype in EIGHT_BIT):
            raise ValueError(f"keys and values of {k.dtype} need scales exactly if they are 8-bit")
        if scales is not None and tuple(scales.shape) != (kv_heads, capacity):
            raise ValueError(f"scales {list(scales.shape)} for slots {[kv_heads, capacity]}")


@functools.cache
def runs_on(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether the Triton kernel can run there on these types."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (_FP8_CAPABILITY if stored == torch.float8_e4m3fn else (8, 0))
