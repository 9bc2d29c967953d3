"""Rates of kernels: matrix products, memory and weights, attention, 8 bits, gathering, top-k.

On CUDA what streams through memory does so over buffers that are `BEYOND_CACHE` together: the L2
cache of an H100 holds 50 MB, and reads several times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from arborsim.trace.schema import Geometry
from arborsim_torch.hardware.memory import sizes_that_fit
from arborsim_torch.hardware.model import count_parameters
from arborsim_torch.hardware.timing import Timer
from arborsim_torch.kernels.fused import sdpa
from arborsim_torch.kernels.piece import Piece, in_triton
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.tiers.codec import Fp8, Plain

SIZES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
MIB = 1 << 20
_WEIGHTS_LIMIT_S = 2.0
READS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LARGE_READS = (*READS, 1024 * MIB)
#: Bytes of buffers that are gone through in turn on CUDA: several times any L2 cache.
BEYOND_CACHE = 256 * MIB


def buffers(device: torch.device, size: int) -> int:
    """How many buffers of `size` bytes no cache of the device holds; one on a CPU.

    A CPU's caches are part of the machine: what decodes on it is often within them.
    """
    return 1 if device.type == "cpu" else max(1, -(-BEYOND_CACHE // size))


def matrix_flops(timer: Timer, dtype: torch.dtype, quick: bool) -> dict[int, float]:
    """FLOP/s of square products by size; random values, as zeros can be faster."""
    found = {}
    sizes = SIZES[timer.device.type]
    for n in sizes[:-1] if quick else sizes:
        a, b = (torch.randn(n, n, device=timer.device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        found[n] = 2 * n**3 / timer.seconds(partial(torch.mm, a, b, out=out))
    return found


def read_rates(timer: Timer, quick: bool) -> dict[int, float]:
    """Bytes per second at which buffers of each size are summed up."""
    sizes = LARGE_READS if timer.device.type == "cuda" else READS
    found = {}
    for size in sizes_that_fit(sizes[:-1] if quick else sizes, 1, timer.device):
        buffer = torch.ones(size // 4, device=timer.device)
        found[size] = size / timer.seconds(buffer.sum)
    return found


def copy_rates(timer: Timer, quick: bool) -> dict[int, float]:
    """Bytes per second, read and written, at which buffers of each size are copied."""
    sizes = LARGE_READS if timer.device.type == "cuda" else READS
    found = {}
    for size in sizes_that_fit(sizes[:-1] if quick else sizes, 2, timer.device):
        buffer = torch.ones(size // 4, device=timer.device)
        out = torch.zeros_like(buffer)
        found[size] = 2 * size / timer.seconds(partial(out.copy_, buffer))
    return found


@torch.inference_mode()
def weights_rate(timer: Timer, model: Any) -> float:
    """Bytes per second of a pass of one row through all weight matrices, one after another.

    The bytes are those that the cost model counts: of all parameters.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    rows = {
        width: torch.randn(1, width, device=timer.device, dtype=model.dtype)
        for width in {weight.shape[1] for weight in weights}
    }
    size: int = count_parameters(model) * model.dtype.itemsize

    def work() -> None:
        for weight in weights:
            F.linear(rows[weight.shape[1]], weight)

    # A large model's takes longer than other measurements may.
    return size / replace(timer, limit_s=max(timer.limit_s, _WEIGHTS_LIMIT_S)).seconds(work)


LENGTHS = {"cpu": (256, 1024, 4096, 16384), "cuda": (1024, 4096, 16384, 65536)}


@torch.inference_mode()
def kv_rates(timer: Timer, geometry: Geometry, dtype: torch.dtype, quick: bool) -> dict[int, float]:
    """Bytes per second of keys and values that attention of one query reads, by length.

    By the kernel that decode steps run: `attend_pieces` where Triton is, `sdpa` elsewhere.
    """
    found = {}
    for n in _lengths(timer, geometry, quick):
        shape = (geometry.kv_heads, n, geometry.head_dim)
        size = 2 * geometry.kv_heads * n * geometry.head_dim * dtype.itemsize
        draw = partial(torch.randn, device=timer.device, dtype=dtype)
        pools = draw(buffers(timer.device, size), 2, *shape)
        group = geometry.heads // geometry.kv_heads
        query = draw(geometry.kv_heads, group, geometry.head_dim)
        found[n] = size / timer.seconds(*(_attention(query, pool) for pool in pools))
    return found


def _attention(query: Tensor, pool: Tensor) -> Callable[[], Any]:
    """Attend ``[kv_heads, group, head_dim]`` over keys, values ``[2, kv_heads, n, head_dim]``."""
    keys, values = pool
    if not in_triton(query.device, query.dtype):
        return partial(sdpa, query[None], keys[None], values[None])
    piece = Piece(keys, values, Plain(query.dtype), None, None, None, keys.shape[1])
    return partial(attend_pieces, query.flatten(0, 1)[None], [piece], query.shape[-1] ** -0.5)


@torch.inference_mode()
def eager_rates(timer: Timer, geometry: Geometry, quick: bool) -> dict[int, float]:
    """Bytes per second at which probability rows are written and read back, by length.

    Written by the softmax of the logits of all heads, read by the mean over heads, in float32: what
    a policy that reads attention needs in addition to a fused kernel.  A layer's rows are read
    right after they are written, so a cache may hold them here as there.
    """
    found = {}
    for n in _lengths(timer, geometry, quick):
        logits = torch.randn(geometry.heads, n, device=timer.device)
        seconds = timer.seconds(partial(_mean_row, logits))
        found[n] = 2 * logits.numel() * 4 / seconds
    return found


def _mean_row(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1).mean(0)


def _lengths(timer: Timer, geometry: Geometry, quick: bool) -> tuple[int, ...]:
    per_token = 2 * geometry.kv_heads * geometry.head_dim * geometry.kv_bytes_per_element
    every = LENGTHS[timer.device.type]
    lengths = every[:-1] if quick else every
    fitting = sizes_that_fit(tuple(n * per_token for n in lengths), 2, timer.device)
    return lengths[: len(fitting)]


TOKENS = (256, 2048, 16384)
SCORES = (1024, 8192, 32768)
_KEPT = 16  # one score in 16 is chosen


@torch.inference_mode()
def codec_rates(
    timer: Timer, geometry: Geometry, dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, float]]:
    """Quantised bytes per second written and read back, by format; a layer's keys and values."""
    codec, counts = Fp8(), _tokens(timer, geometry, quick=timer.device.type == "cpu")
    shape = (2, geometry.kv_heads, counts[-1], geometry.head_dim)
    size = shape[1] * shape[2] * codec.bytes_per_token(geometry.head_dim)
    pools = [
        torch.randn(shape, device=timer.device).to(dtype)
        for _ in range(buffers(timer.device, size))
    ]
    written = size / timer.seconds(*(partial(codec.encode, x) for x in pools))
    stored = [codec.encode(x) for x in pools]
    read = size / timer.seconds(
        *(partial(codec.decode, data, scale, dtype) for data, scale in stored)
    )
    return {codec.name: written}, {codec.name: read}


@torch.inference_mode()
def gather_rates(
    timer: Timer, geometry: Geometry, dtype: torch.dtype, quick: bool
) -> dict[int, float]:
    """Bytes read and written per second when every second token is collected by index."""
    found = {}
    width = geometry.kv_heads * geometry.head_dim
    for count in _tokens(timer, geometry, quick):
        number = buffers(timer.device, count * width * dtype.itemsize)
        pools = torch.randn(number, count, width, device=timer.device, dtype=dtype)
        order = torch.randperm(count, device=timer.device)[: count // 2].sort().values
        seconds = timer.seconds(*(partial(pool.index_select, 0, order) for pool in pools))
        found[count] = 2 * len(order) * width * dtype.itemsize / seconds
    return found


def choice_s(timer: Timer, quick: bool) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of `torch.topk` on the device and of `numpy.argpartition` on the host, by size."""
    on_device, on_host = {}, {}
    host = Timer(torch.device("cpu"), timer.rounds, timer.repeats, timer.limit_s)
    for count in SCORES[:-1] if quick else SCORES:
        scores = torch.rand(count, device=timer.device)
        values = np.random.default_rng(0).random(count, dtype=np.float32)
        kept = count // _KEPT
        on_device[count] = timer.seconds(partial(torch.topk, scores, kept))
        on_host[count] = host.seconds(partial(np.argpartition, values, kept))
    return on_device, on_host


def _tokens(timer: Timer, geometry: Geometry, quick: bool) -> tuple[int, ...]:
    per_token = 2 * geometry.kv_heads * geometry.head_dim * 4
    counts = TOKENS[:-1] if quick else TOKENS
    return counts[: len(sizes_that_fit(tuple(n * per_token for n in counts), 4, timer.device))]
