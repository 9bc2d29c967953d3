"""Rates of kernels: matrix products, memory and weights, attention, 8 bits, gathering, top-k."""

from __future__ import annotations

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
from arborsim_torch.tiers.codec import Fp8, Int8

SIZES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
MIB = 1 << 20
_WEIGHTS_LIMIT_S = 2.0
READS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LARGE_READS = (*READS, 1024 * MIB)


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


LENGTHS = (256, 1024, 4096, 16384)


@torch.inference_mode()
def kv_rates(timer: Timer, geometry: Geometry, dtype: torch.dtype, quick: bool) -> dict[int, float]:
    """Bytes per second of keys and values that fused attention of one query reads, by length."""
    found = {}
    for n in _lengths(timer, geometry, quick):
        keys, values = (
            torch.randn(
                1, geometry.kv_heads, n, geometry.head_dim, device=timer.device, dtype=dtype
            )
            for _ in range(2)
        )
        group = geometry.heads // geometry.kv_heads
        query = torch.randn_like(keys[:, :, :group])
        seconds = timer.seconds(partial(sdpa, query, keys, values))
        found[n] = 2 * keys.numel() * keys.element_size() / seconds
    return found


@torch.inference_mode()
def eager_rates(timer: Timer, geometry: Geometry, quick: bool) -> dict[int, float]:
    """Bytes per second at which probability rows are written and read back, by length.

    Written by the softmax of the logits of all heads, read by the mean over heads, in float32: what
    a policy that reads attention needs in addition to a fused kernel.
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
    lengths = LENGTHS[:-1] if quick else LENGTHS
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
    written, read = {}, {}
    count = _tokens(timer, geometry, quick=True)[-1]
    shape = (2, geometry.kv_heads, count, geometry.head_dim)
    vectors = torch.randn(shape, device=timer.device).to(dtype)
    for codec in (Fp8(), Int8()):
        data, scale = codec.encode(vectors)
        size = vectors[..., 0].numel() * codec.bytes_per_token(geometry.head_dim)
        written[codec.name] = size / timer.seconds(partial(codec.encode, vectors))
        read[codec.name] = size / timer.seconds(partial(codec.decode, data, scale, dtype))
    return written, read


@torch.inference_mode()
def gather_rates(
    timer: Timer, geometry: Geometry, dtype: torch.dtype, quick: bool
) -> dict[int, float]:
    """Bytes read and written per second when every second token is collected by index."""
    found = {}
    for count in _tokens(timer, geometry, quick):
        vectors = torch.randn(count, geometry.kv_heads * geometry.head_dim, device=timer.device).to(
            dtype
        )
        order = torch.randperm(count, device=timer.device)[: count // 2].sort().values
        seconds = timer.seconds(partial(vectors.index_select, 0, order))
        found[count] = 2 * len(order) * vectors[0].numel() * vectors.element_size() / seconds
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
