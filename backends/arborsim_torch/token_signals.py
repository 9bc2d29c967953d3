"""Signals of tokens from their keys and values, and how signals wait and cross to the host.

They are computed in float32, whatever the cache's type, and rounded to float16 as in a trace.
Shapes: ``kv`` is ``[layers, 2, seqs, kv_heads, tokens, head_dim]``, keys then values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.tiers.copies import to_device

LAG_CHUNK = 128  #: positions per chunk (EpiKV's variant of Lag-KV)
LAG_EPSILON = 1e-6
SKETCH_SIZE = 16
_SKETCH_SEED = 0x6B6579


def head_variance(kv: Tensor) -> Tensor:
    """Population variance over channels, mean over KV heads; ``[layers, 2, seqs, tokens]``."""
    return kv.float().var(-1, correction=0).mean(3)


def key_norm(kv: Tensor) -> Tensor:
    """L2 norm of the keys, mean over KV heads; ``[layers, seqs, tokens]``."""
    norms: Tensor = torch.linalg.vector_norm(kv[:, 0].float(), dim=-1)
    return norms.mean(2)


def value_norm(kv: Tensor) -> Tensor:
    """L1 norm of the values, mean over KV heads; ``[layers, seqs, tokens]``."""
    return kv[:, 1].float().abs().sum(-1).mean(2)


def head_sizes(vectors: Tensor) -> Tensor:
    """L1 norms of vectors ``[..., head_dim]``, float64.

    Of their float16, as traces hold them: float64 adds these up exactly, in any order, so these are
    the bits that `arborsim.signals.vectors.ValueSize` makes of recorded ones.
    """
    return float16(vectors).double().abs().sum(-1)


class ChunkExtremes:
    """Lag-KV along one path (EpiKV's variant), with nothing kept but extremes.

    A token's keys and values are normalised per channel by minimum and maximum of the chunk of
    `LAG_CHUNK` positions before its own: ``(x - min) / (max - min + eps)``; those of the first
    chunk are taken as they are.  Only the extremes of two chunks are needed, so it does not matter
    what a cache has evicted since.
    """

    def __init__(self) -> None:
        self._before: tuple[Tensor, Tensor] | None = None  # minimum and maximum of the last chunk
        self._own: tuple[Tensor, Tensor] | None = None

    def copy(self) -> ChunkExtremes:
        """For a branch that goes on from here."""
        twin = ChunkExtremes()
        twin._before, twin._own = self._before, self._own
        return twin

    def deviations(self, kv: Tensor, start: int) -> Tensor:
        """Standard deviation over channels after normalising, mean over KV heads.

        Takes the path's next tokens, ``[layers, 2, kv_heads, tokens, head_dim]``, from position
        `start` on.  Returns ``[layers, 2, tokens]``.
        """
        x = kv.float()
        parts = []
        for first, stop in chunk_spans(start, start + x.shape[3]):
            if first % LAG_CHUNK == 0 and first:
                self._before, self._own = self._own, None
            span = x[:, :, :, first - start : stop - start]
            low, high = span.aminmax(dim=-2, keepdim=True)
            if self._own is not None:
                low, high = torch.minimum(low, self._own[0]), torch.maximum(high, self._own[1])
            self._own = (low, high)
            if self._before is not None:
                low, high = self._before
                span = (span - low) / (high - low + LAG_EPSILON)
            parts.append(span.std(-1, correction=0).mean(2))
        return torch.cat(parts, dim=-1)


def chunk_spans(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut positions ``start .. stop`` at chunk borders: (first, last + 1)."""
    spans = []
    while start < stop:
        end = min(stop, start // LAG_CHUNK * LAG_CHUNK + LAG_CHUNK)
        spans.append((start, end))
        start = end
    return spans


def sketch_matrix(features: int, device: torch.device) -> Tensor:
    """A fixed random projection, ``[features, SKETCH_SIZE]``; the same for the same model shape."""
    rng = np.random.default_rng([_SKETCH_SEED, features])
    matrix = rng.standard_normal((features, SKETCH_SIZE)) / np.sqrt(SKETCH_SIZE)
    return to_device(matrix.astype(np.float32), device)


_SMALL_BYTES = 1 << 16  # of a tensor that crosses to the host together with others
_LEAST_BLOCK = 16  # rows of a block that is kept as it is
_KEPT_VALUES = 1 << 20  # of a buffer that is kept
_LIMIT = float(torch.finfo(torch.float16).max)


def float16(values: Tensor) -> Tensor:
    """Rounded to the trace's float16; what overflows becomes its largest number."""
    return values.clamp(-_LIMIT, _LIMIT).half()


class TokenBuffer:
    """Rows ``[tokens, n]`` that wait on the device; memory stays for those that follow.

    Blocks of a prompt stay as they are: a buffer that grows would need their memory twice.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._data: Tensor | None = None
        self._count = 0  # rows in the buffer

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        buffered = 0 if self._data is None else self._data[: self._count].nbytes
        return buffered + sum(block.nbytes for block in self._blocks)

    def append(self, rows: Tensor) -> None:
        """Take rows, which must not be written again."""
        if not self._count and len(rows) >= _LEAST_BLOCK:
            self._blocks.append(rows)
            return
        end, held = self._count + len(rows), self._data
        if held is None or end > len(held):
            grown = rows.new_empty((max(end, 2 * self._count, 16), rows.shape[1]))
            if held is not None:
                grown[: self._count] = held[: self._count]
            self._data = held = grown
        held[self._count : end] = rows
        self._count = end

    def take(self) -> list[Tensor]:
        """All rows that wait, one after the other; to be copied before anything is appended."""
        found, self._blocks = self._blocks, []
        if self._data is not None and self._count:
            found.append(self._data[: self._count])
            self._count = 0
            if self._data.numel() > _KEPT_VALUES:
                self._data = None
        return found


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copies on the host, in one piece of memory; from CUDA, where it waits once for all of them.

    Small tensors are put together first, and copied as one.  Large ones would need their memory on
    the device twice.
    """
    if not tensors:
        return []
    if not tensors[0].is_cuda:
        return [np.array(tensor.numpy()) for tensor in tensors]
    # Wide types first: then every part is aligned.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    parts = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in order]
    # Page-locked: several times as fast, and PyTorch keeps the memory for the next time.
    there = torch.empty(sum(map(len, parts)), dtype=torch.uint8, pin_memory=True)
    start = 0
    for small, run in groupby(parts, lambda part: len(part) < _SMALL_BYTES):
        own = list(run)
        for part in [torch.cat(own)] if small and len(own) > 1 else own:
            there[start : start + len(part)].copy_(part, non_blocking=True)
            start += len(part)
    torch.cuda.current_stream(parts[0].device).synchronize()
    packed, start = np.asarray(there.numpy()), 0
    found: dict[int, np.ndarray] = {}
    for i, part in zip(order, parts, strict=True):
        kind = torch.empty(0, dtype=tensors[i].dtype).numpy().dtype
        stop = start + len(part)
        found[i] = packed[start:stop].view(kind).reshape(tuple(tensors[i].shape))
        start = stop
    return [found[i] for i in range(len(tensors))]


def top_entries(row: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The `top` largest entries of a row, ascending, their values, and the mass of the others."""
    if len(row) <= top:
        return np.arange(len(row), dtype=np.int32), row.astype(np.float16), 0.0
    index = np.sort(np.argpartition(row, -top)[-top:]).astype(np.int32)
    kept = row[index]
    rest = max(0.0, float(row.sum(dtype=np.float64)) - float(kept.sum(dtype=np.float64)))
    return index, kept.astype(np.float16), rest
