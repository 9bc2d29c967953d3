"""What is done to tokens that are kept, moved or rounded: 8 bits, gathering, choosing."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from arborsim.trace.schema import Geometry
from arborsim_torch.hardware.memory import sizes_that_fit
from arborsim_torch.hardware.timing import Timer
from arborsim_torch.tiers.codec import Fp8, Int8

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
