"""What attention reads, and what it costs to have its probabilities."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from arborsim.trace.schema import Geometry
from arborsim_torch.hardware.memory import sizes_that_fit
from arborsim_torch.hardware.timing import Timer

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
        seconds = timer.seconds(partial(F.scaled_dot_product_attention, query, keys, values))
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
