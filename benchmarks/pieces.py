"""Decode attention that reads slots in place against gathering, decoding and attending.

``python benchmarks/pieces.py [--out reports/benchmarks/pieces.json] [--device cuda]`` takes about
half a minute.

One query of 12 heads over 6 KV heads of 64 numbers, in a random half of the slots (and, at full
precision, in all of them in order).  Both ways run in turn on the same tensors, ``--repeats``
times, after two that do not count; shown is the least time of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from arborsim.core.formats import Format
from arborsim_torch.kernels.fused import sdpa
from arborsim_torch.kernels.piece import Piece
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.tiers.codec import Codec, Fp8, Packed, Plain

HEADS, KV_HEADS, HEAD_DIM = 12, 6, 64
SCALE = HEAD_DIM**-0.5


def codecs(dtype: torch.dtype) -> dict[str, Codec]:
    packed = Packed(Format(4, 16, scale_bytes=1), HEAD_DIM)
    return {"plain": Plain(dtype), "fp8": Fp8(), "4 bits": packed}


def problem(codec: Codec, slots: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """A query, stored keys and values of `slots` slots, their scales, and an index of half."""
    random = torch.Generator().manual_seed(slots)
    q = torch.randn(1, HEADS, HEAD_DIM, generator=random).to(device, dtype)
    vectors = torch.randn(2, KV_HEADS, slots, HEAD_DIM, generator=random).to(device, dtype)
    data, scale = codec.encode(vectors)
    index = torch.randperm(slots, generator=random)[: slots // 2].sort().values.to(device)
    return q, data, scale, index.to(torch.int32)


def gathered(q: Tensor, data: Tensor, scale: Tensor | None, codec: Codec, index: Tensor) -> Tensor:
    raw = data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data
    found = raw.index_select(2, index).view(data.dtype)
    by = None if scale is None else scale.index_select(2, index)
    keys, values = codec.decode(found, by, q.dtype)
    rows = q.view(1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    return sdpa(rows, keys[None], values[None], SCALE, None)


def least(ways: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Seconds of each way, run in turn."""
    seconds = dict.fromkeys(ways, float("inf"))
    for repeat in range(repeats + 2):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:
                seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


@torch.inference_mode()
def measure(slots: int, dtype: torch.dtype, device: str, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, codec in codecs(dtype).items():
        q, data, scale, index = problem(codec, slots, dtype, device)
        scales = (None, None) if scale is None else scale[..., 0].unbind()
        piece = Piece(*data, codec, *scales, index, len(index))
        ways = {
            "gathered": lambda q=q, d=data, s=scale, c=codec, i=index: gathered(q, d, s, c, i),
            "in_place": lambda q=q, p=piece: attend_pieces(q, [p], SCALE),
            "with_mass": lambda q=q, p=piece: attend_pieces(q, [p], SCALE, mass=True),
        }
        if name == "plain":
            whole = Piece(*data, codec, None, None, None, slots)
            rows = q.view(1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            ways["sdpa_of_all"] = lambda r=rows, d=data: sdpa(
                r, d[0][None], d[1][None], SCALE, None
            )
            ways["all_in_place"] = lambda q=q, p=whole: attend_pieces(q, [p], SCALE)
        times = least(ways, device, repeats)
        found[name] = {
            "us": {way: round(1e6 * taken, 1) for way, taken in times.items()},
            "times_faster": round(times["gathered"] / times["in_place"], 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for slots in (1024, 4096, 16384):
            name = f"{str(dtype).removeprefix('torch.')}, {slots} slots"
            figures[name] = measure(slots, dtype, options.device, options.repeats)
            print(f"{name}: {json.dumps(figures[name])}", file=sys.stderr)
    text = json.dumps({"torch": torch.__version__, "repeats": options.repeats, **figures}, indent=2)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
