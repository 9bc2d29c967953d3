"""Matrix products, reading memory, and reading a model's weights for a single row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from arborsim_torch.hardware.memory import sizes_that_fit
from arborsim_torch.hardware.model import count
from arborsim_torch.hardware.timing import Timer

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
    size: int = count(model) * model.dtype.itemsize

    def work() -> None:
        for weight in weights:
            F.linear(rows[weight.shape[1]], weight)

    # A large model's takes longer than other measurements may.
    return size / replace(timer, limit_s=max(timer.limit_s, _WEIGHTS_LIMIT_S)).seconds(work)
