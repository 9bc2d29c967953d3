"""Copies between device and host: bandwidth by block size, both directions at once, latency.

Copies of page-locked memory are timed on the stream that they are on: the host only queues them.
On a CPU, where "HBM" and "DDR" are the same memory, the copies are between two buffers there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from arborsim.products.calibrate.backend import LinkRates
from arborsim_torch.hardware.memory import sizes_that_fit
from arborsim_torch.hardware.timing import Timer
from arborsim_torch.tiers.link import HostLink, host_empty

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = tuple(4 * KIB << i for i in range(15))  # 4 KiB .. 64 MiB
QUICK_BLOCKS = BLOCKS[::2]
_MOVED = 32 * MIB  # per measurement, so that small blocks are many ...
_MOST_COPIES = 512  # ... but not endlessly many
_QUEUED = 4  # blocks in each direction, of those that cross at once
_POOL = 64 * MIB  # blocks come from all over it, not from a cache


def measure_link(timer: Timer, quick: bool, tell: Callable[[str], None]) -> LinkRates:
    """All of `LinkRates`; `tell` is told what comes next."""
    host = torch.device("cpu")
    blocks = sizes_that_fit(QUICK_BLOCKS if quick else BLOCKS, 4, timer.device, host)
    pool = max(blocks[-1], sizes_that_fit((MIB, 16 * MIB, _POOL), 4, timer.device, host)[-1])
    pinned = timer.device.type == "cuda"
    tell("copies")
    latency = _latency(timer, pinned)
    fast = [_curve(timer, blocks, pool, pinned, up, latency) for up in (True, False)]
    slow: list[tuple[float, ...]] = [(), ()]
    if pinned:
        tell("copies, pageable memory")
        slow = [_curve(timer, blocks, pool, False, up, latency) for up in (True, False)]
    tell("copies in both directions")
    return LinkRates(
        blocks, fast[0], fast[1], slow[0], slow[1], latency, _both_ways(timer, blocks[-1])
    )


def _latency(timer: Timer, pinned: bool) -> float:
    """Latency of a transfer of nothing worth mentioning, until it is known to be over."""
    here = torch.zeros(64, dtype=torch.uint8, device=timer.device)
    there = host_empty((64,), torch.uint8, pinned)
    return timer.whole_seconds(lambda: here.copy_(there, non_blocking=pinned))


def _curve(
    timer: Timer, blocks: tuple[int, ...], pool: int, pinned: bool, up: bool, latency_s: float
) -> tuple[float, ...]:
    """Bytes per second by block size, `up` being to the device."""
    device = torch.zeros(pool, dtype=torch.uint8, device=timer.device)
    host = host_empty((pool,), torch.uint8, pinned).zero_()
    source, target = (host, device) if up else (device, host)
    return tuple(_rate(timer, source, target, block, pinned, latency_s) for block in blocks)


def _rate(
    timer: Timer, source: Tensor, target: Tensor, block: int, pinned: bool, latency_s: float
) -> float:
    """Copies of `block` bytes from places spread over the source to as many in the target."""
    places = len(source) // block
    count = max(1, min(_MOVED // block, _MOST_COPIES, places))
    stride = places // count * block
    pairs = [
        (source[i : i + block], target[i : i + block]) for i in range(0, count * stride, stride)
    ]

    def work() -> None:
        for each, into in pairs:
            into.copy_(each, non_blocking=pinned)

    if pinned:
        return len(pairs) * block / timer.queued_seconds(work)
    seconds = timer.whole_seconds(work)
    # One latency is the transfer's own; the model charges it apart.
    return len(pairs) * block / max(seconds - latency_s, 0.1 * seconds)


def _both_ways(timer: Timer, block: int) -> float:
    """Both directions of the link that live runs use, at once; bytes per second of both."""
    device = [torch.zeros(block, dtype=torch.uint8, device=timer.device) for _ in range(2)]
    with HostLink(timer.device) as link:
        host = [link.host_empty((block,), torch.uint8).zero_() for _ in range(2)]

        # Enough that the waits for them are next to nothing.
        times, best = _QUEUED if timer.device.type == "cuda" else 1, float("inf")
        for _ in range(timer.rounds * timer.repeats):  # by the clock: other threads do the work
            began = time.perf_counter()
            link.up_blocks([(host[0], device[0])] * times)
            link.down_blocks([(device[1], host[1])] * times)
            link.wait_all()
            best = min(best, time.perf_counter() - began)
        return 2 * times * block / best
