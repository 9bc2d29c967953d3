"""What uneven heads cost and save: ``python benchmarks/ragged.py``.

Decoding steps over a cache whose KV heads hold numbers of tokens of their own, the same on average,
through arborsim's cache: median CPU time of a step, and the bytes of the tokens and of the tensors
that hold them.  A model with random weights (6 layers of 4 KV heads) on one thread.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arborsim.core.tiers import Tier
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.tiers.link import HostLink

PROMPT, STEPS, TURNS = 2048, 40, 3
HEADS = {
    "equal": (1024, 1024, 1024, 1024),
    "nearly equal": (1050, 1024, 1024, 998),
    "uneven": (1700, 1500, 600, 296),
    "one of four": (1900, 732, 732, 732),
}


def measure(model: LlamaForCausalLM, numbers: tuple[int, ...]) -> tuple[float, int, int]:
    """Milliseconds of a step, bytes used, and bytes of the tensors."""
    with HostLink("cpu") as link:
        cache = TieredCache(Layout.of(model, "head"))
        decoder = TreeDecoder(model, cache=cache)
        decoder.prefill((np.arange(PROMPT) % 128).tolist())
        decoder.open(1, 0)
        decoder.activate([1])
        keep = np.resize(numbers, cache.layout.groups)[:, None]
        gone = GroupTokenPairs(*np.nonzero(np.arange(PROMPT) < PROMPT - keep))
        Mover(cache, link).move(gone, np.full(len(gone), Tier.EVICTED, dtype=np.int8))
        taken = []
        for _ in range(STEPS):
            began = time.thread_time()
            decoder.step([3])
            taken.append(1e3 * (time.thread_time() - began))
        used, tensors = cache.used_bytes(Place.HBM), cache.capacity_bytes(Place.HBM)
    return float(np.median(taken)), used, tensors


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    seen = {name: [measure(model, HEADS[name]) for _ in range(TURNS)] for name in HEADS}
    print(f"{'heads':14}{'ms a step':>10}{'tokens, MB':>12}{'tensors, MB':>13}")
    for name, found in seen.items():
        ms, used, tensors = (float(np.median(column)) for column in zip(*found, strict=True))
        print(f"{name:14}{ms:10.2f}{used / 1e6:12.2f}{tensors / 1e6:13.2f}")


if __name__ == "__main__":
    main()
