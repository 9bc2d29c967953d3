"""Speed of moves across the link: tokens scattered over HBM go to DDR and come back.

    python benchmarks/transfers.py --out reports/benchmarks/transfers.json
    python benchmarks/transfers.py --device cuda --tokens 65536

The yardstick carries the same tokens group by group through memory of their own, with a gather or a
scatter on the host, as moves did before they were lists of blocks; both run in turns.  On CUDA the
copies are compared with one large copy of page-locked memory as well.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from arborsim.core.tiers import Tier
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.pool import Pool, StoredTokens
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.tiers.link import HostLink


@dataclass
class Speed:
    """Of moves of one grouping; rates in GB/s of wall time, medians.

    Attributes
    ----------
    copies : int
        Of one move down.
    peak_share : float or None
        Rate of the copies themselves, as a share of one large page-locked copy's; the lower of both
        directions.
    """

    grouping: str
    moved_mb: float
    copies: int
    down_gb_per_s: float
    up_gb_per_s: float
    times_yardstick_down: float
    times_yardstick_up: float
    peak_share: float | None = None


def _filled(layout: Layout, link: HostLink, tokens: int) -> TieredCache:
    cache = TieredCache(layout, link=link)
    cache.open(0, -1)
    cache.activate([0])
    metadata = cache.begin(np.zeros((1, tokens), dtype=np.int64))
    shape = (1, layout.kv_heads, tokens, layout.head_dim)
    for layer in range(layout.layers):
        new = torch.randn(shape, device=layout.device).to(layout.dtype)
        metadata.store(layer, new, new)
    cache.select(np.zeros((layout.groups, tokens), dtype=bool))  # nothing is staged
    # HBM keeps its memory, as in the yardstick.
    cache.shrink = lambda: None  # type: ignore[method-assign]
    return cache


def _group_by_group(cache: TieredCache, link: HostLink, cells: GroupTokenPairs) -> tuple[Any, Any]:
    """The yardstick's two ways, as functions."""
    pool, layout = cache.pools[Place.HBM], cache.layout
    host = Pool(layout, pool.codec, torch.device("cpu"))
    groups = list(cells.by_group())
    host.grow(cache.num_tokens)
    slots = {group: host.take(np.full(len(t), group), t) for group, t in groups}

    def down() -> None:
        for group, token in groups:
            block = pool.read(group, pool.slots.of[group, token]).data
            there = link.host_empty(block.shape, block.dtype)
            link.down(block.contiguous(), there).wait()
            host.write(group, slots[group], StoredTokens(there))

    def up() -> None:
        for group, token in groups:
            block = host.read(group, slots[group]).data.contiguous()
            out = torch.empty(block.shape, dtype=block.dtype, device=layout.device)
            link.up(block, out).wait()
            pool.write(group, pool.slots.of[group, token].astype(np.int64), StoredTokens(out))

    return down, up


def measure(layout: Layout, tokens: int, repeats: int, peak: float | None) -> Speed:
    rng = np.random.default_rng(0)
    with HostLink(layout.device) as link, HostLink(layout.device) as other, torch.inference_mode():
        cache = _filled(layout, link, tokens)
        mover = Mover(cache, link)
        cells = GroupTokenPairs(*np.nonzero(rng.random((layout.groups, tokens)) < 0.5))
        size = len(cells) * cache.pools[Place.HBM].bytes_per_slot

        def move(tier: Tier) -> None:
            mover.move(cells, np.full(len(cells), tier, dtype=np.int8))
            mover.settle(wait=True)

        before = _group_by_group(cache, other, cells)
        ours = (lambda: move(Tier.DDR), lambda: move(Tier.HBM))
        taken: dict[str, list[float]] = {"down": [], "up": [], "down before": [], "up before": []}
        for number in range(repeats + 1):
            for name, work in zip(taken, (*ours, *before), strict=True):
                _synchronize(layout.device)
                begun = time.perf_counter()
                work()
                _synchronize(layout.device)
                if number:  # the first finds no memory
                    taken[name].append(time.perf_counter() - begun)
        seconds = {name: median(each) for name, each in taken.items()}
        copies = link.downward.copies // (repeats + 1)
        rates = [t.carried_bytes / t.busy_s for t in (link.downward, link.upward)]
        cache.close()
    return Speed(
        layout.grouping, round(size / 1e6, 1), copies,
        round(size / seconds["down"] / 1e9, 3), round(size / seconds["up"] / 1e9, 3),
        round(seconds["down before"] / seconds["down"], 2),
        round(seconds["up before"] / seconds["up"], 2),
        None if peak is None else round(min(rates) / peak, 3),
    )  # fmt: skip


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> float | None:
    """Bytes per second of one large page-locked copy, the slower direction; None on the CPU."""
    if device.type != "cuda":
        return None
    with HostLink(device) as link:
        there = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
        here = link.host_empty(there.shape, there.dtype).zero_()
        for _ in range(4):
            link.down(there, here).wait()
            link.up(here, there).wait()
        return min(t.carried_bytes / t.busy_s for t in (link.downward, link.upward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    peak, found = _peak(device), []
    for grouping in GROUPINGS:
        layout = Layout(12, 4, 64, torch.float32, device, grouping)
        found.append(asdict(measure(layout, options.tokens, options.repeats, peak)))
        print(json.dumps(found[-1]), flush=True)
    text = json.dumps(
        {"tokens": options.tokens, "repeats": options.repeats, "moves": found}, indent=2
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
