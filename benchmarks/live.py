"""Speed of the live cache: against transformers' own, and what policies and copies cost.

    python benchmarks/live.py --out reports/benchmarks/live.json

Figures are ratios within one run.  The yardstick is transformers' `DynamicCache` with its SDPA
attention; steps of both alternate, so that a noisy machine is as noisy for either.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.batches import run_batched
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.hardware.facts import all_facts
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.sources import RandomSource

#: Name, layers, width, heads, KV heads, MLP: a tiny model is all overhead, a larger one is not.
SHAPES = {
    "tiny (6 x 128)": (6, 128, 4, 2, 256),
    "small (12 x 768)": (12, 768, 12, 4, 2048),
}
POLICIES: dict[str, dict[str, str]] = {
    "full": {},
    "streaming-llm": {},
    "epikv": {"recent": "32"},
    "h2o per=shared": {"per": "shared"},
    "hierarchy": {"recent": "32", "interval": "32"},
    "arkv": {},
}
VOCABULARY = 1000


@dataclass
class Speed:
    """Tokens per second of both caches, medians over steps that alternate."""

    model: str
    context_tokens: int
    ours_tokens_per_s: float
    theirs_tokens_per_s: float
    ratio: float


@dataclass
class Share:
    """Where the time of one search under a policy goes, as shares of its wall time."""

    model: str
    policy: str
    tokens_per_s: float
    policy_share: float
    exposed_share: float
    hidden_share: float
    peak_tokens: int


def make_model(shape: tuple[int, ...]) -> Any:
    layers, width, heads, kv_heads, inner = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=1 << 16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def against_dynamic_cache(name: str, model: Any, context: int, steps: int) -> Speed:
    """Decode with both caches in turns."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    prompt = torch.randint(0, VOCABULARY, (1, context))
    decoder = TreeDecoder(model)
    decoder.prefill(prompt[0].tolist())
    decoder.open(1, 0)
    decoder.activate([1])
    theirs = DynamicCache(config=twin.config)
    with torch.inference_mode(), pinned(twin.device):
        twin(prompt, past_key_values=theirs)
        ours_s, theirs_s = [], []
        for _ in range(steps):
            begun = time.perf_counter()
            decoder.step([5])
            between = time.perf_counter()
            twin(torch.tensor([[5]]), past_key_values=theirs)
            ours_s.append(between - begun)
            theirs_s.append(time.perf_counter() - between)
    ours, other = 1 / median(ours_s), 1 / median(theirs_s)
    return Speed(name, context, round(ours, 1), round(other, 1), round(ours / other, 3))


def shares(name: str, model: Any, prompt: int, tokens: int) -> list[Share]:
    """One search per policy at half of the tokens."""
    source = RandomSource(VOCABULARY, prompt, tokens, tokens)
    setup = SearchSetup(model, source, lambda: make_search("linear"), 0.0, 0, tokens)
    found = []
    for policy, settings in POLICIES.items():
        one = PolicySearch(
            setup, source.problem(0), build(policy.split()[0], settings),
            max(prompt + 64, tokens // 2), CacheOptions(),
        )  # fmt: skip
        outcomes: list[Any] = []
        begun = time.perf_counter()
        run_batched([one], 1, lambda search, ended, to=outcomes: to.append(search.outcome(ended)))
        wall_s = time.perf_counter() - begun
        m = outcomes[0].measured
        share = Share(
            model=name,
            policy=policy,
            tokens_per_s=round(m.generated_tokens / wall_s, 1),
            policy_share=round(m.time.policy_s / wall_s, 4),
            exposed_share=round(m.time.exposed_transfer_s / wall_s, 4),
            hidden_share=round(m.time.hidden_transfer_s / wall_s, 4),
            peak_tokens=m.peak_hbm_kv_tokens,
        )
        found.append(share)
    return found


def made_with() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or "cpu",
        **all_facts(make_model(SHAPES["tiny (6 x 128)"])),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, contexts = (10, (64,)) if options.quick else (200, (256, 1024, 4096))
    speeds, found = [], []
    for name, shape in SHAPES.items():
        model = make_model(shape)
        for context in contexts:
            speeds.append(against_dynamic_cache(name, model, context, steps))
            print(speeds[-1])
        for share in shares(name, model, 64, 64 if options.quick else 512):
            found.append(share)
            print(share)
    if options.out:
        record = {
            **made_with(), "speeds": [asdict(s) for s in speeds],
            "shares": [asdict(s) for s in found],
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
