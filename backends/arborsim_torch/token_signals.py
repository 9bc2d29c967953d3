"""Signals of tokens from their keys and values; all in float32, whatever the cache's type.

Shapes: ``kv`` is ``[layers, 2, lanes, kv_heads, tokens, head_dim]``, keys then values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LAG_CHUNK = 128  #: positions per chunk (EpiKV's variant of Lag-KV)
LAG_EPSILON = 1e-6
SKETCH_SIZE = 16
_SKETCH_SEED = 0x6B6579


def head_variance(kv: Tensor) -> Tensor:
    """Population variance over channels, mean over KV heads; ``[layers, 2, lanes, tokens]``."""
    return kv.float().var(-1, correction=0).mean(3)


def key_norm(kv: Tensor) -> Tensor:
    """L2 norm of the keys, mean over KV heads; ``[layers, lanes, tokens]``."""
    return torch.linalg.vector_norm(kv[:, 0].float(), dim=-1).mean(2)


def value_norm(kv: Tensor) -> Tensor:
    """L1 norm of the values, mean over KV heads; ``[layers, lanes, tokens]``."""
    return kv[:, 1].float().abs().sum(-1).mean(2)


def lag_deviation(kv: Tensor, reference: Tensor | None) -> Tensor:
    """Standard deviation over channels after normalising by the chunk before, mean over KV heads.

    Parameters
    ----------
    kv : Tensor
        Tokens of one chunk of `LAG_CHUNK` positions (EpiKV's variant of Lag-KV).
    reference : Tensor or None
        Keys and values of the whole chunk before, whose minimum and maximum per channel normalise:
        ``(x - min) / (max - min + eps)``.  None in the first chunk: raw deviation.

    Returns
    -------
    Tensor ``[layers, 2, lanes, tokens]``
    """
    x = kv.float()
    if reference is not None:
        low, high = reference.float().aminmax(dim=-2, keepdim=True)
        x = (x - low) / (high - low + LAG_EPSILON)
    return x.std(-1, correction=0).mean(3)


def chunk_spans(start: int, stop: int) -> list[tuple[int, int, int]]:
    """Cut positions ``start .. stop`` at chunk borders: (first, last + 1, start of the chunk)."""
    spans = []
    while start < stop:
        chunk = start // LAG_CHUNK * LAG_CHUNK
        end = min(stop, chunk + LAG_CHUNK)
        spans.append((start, end, chunk))
        start = end
    return spans


def sketch_matrix(features: int, device: torch.device) -> Tensor:
    """A fixed random projection, ``[features, SKETCH_SIZE]``; the same for the same model shape."""
    rng = np.random.default_rng([_SKETCH_SEED, features])
    matrix = rng.standard_normal((features, SKETCH_SIZE)) / np.sqrt(SKETCH_SIZE)
    return torch.from_numpy(matrix.astype(np.float32)).to(device)


def top_entries(row: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The `top` largest entries of an attention row, and the mass of the others.

    Parameters
    ----------
    row : float32 ``[positions]``
    top : int

    Returns
    -------
    index : int32, ascending
    value : float16
    rest : float
    """
    if len(row) <= top:
        return np.arange(len(row), dtype=np.int32), row.astype(np.float16), 0.0
    index = np.sort(np.argpartition(row, -top)[-top:]).astype(np.int32)
    kept = row[index]
    rest = max(0.0, float(row.sum(dtype=np.float64)) - float(kept.sum(dtype=np.float64)))
    return index, kept.astype(np.float16), rest
