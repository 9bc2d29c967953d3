"""Policies against NVIDIA's kvpress: do they keep the same tokens of a prompt?

Needs ``pip install kvpress`` (0.5.5 was compared).  ``python benchmarks/against_kvpress.py 500``
draws queries, keys and values of 500 random prompts, lets a press and a policy cut each to the same
number of tokens, and compares what every KV head holds, set for set.

The newest token stays on both sides: policies by key protect it, presses get its score raised above
all others, and its key is like its query, so that TOVA, which here as published does not protect
it, keeps it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvpress import (
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

from arborsim.core.events import Prefill, TokenRun
from arborsim.core.head_rows import VectorRows
from arborsim.core.observations import Observations
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.methods.attention import Tova
from arborsim.policies.methods.baselines import StreamingLLM
from arborsim.policies.methods.keys import KeyDiff, KeyNorm, LagKVOfficial
from arborsim.policies.methods.snapkv import SnapKV
from arborsim.signals.scores import ScoreBook

KV_HEADS, GROUP, SIZE = 2, 2, 16
WINDOW, LAG = 8, 10


@dataclass(frozen=True)
class Prompt:
    """One layer's vectors of a random prompt; float16 ``[tokens, heads, size]``."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)


def random_prompt(rng: np.random.Generator) -> Prompt:
    tokens = int(rng.integers(2 * WINDOW, 200))
    queries = rng.normal(size=(tokens, KV_HEADS * GROUP, SIZE))
    keys, values = (rng.normal(size=(tokens, KV_HEADS, SIZE)) for _ in range(2))
    keys[-1] = 3 * queries[-1].reshape(KV_HEADS, GROUP, SIZE).mean(axis=1)
    return Prompt(*(vectors.astype(np.float16) for vectors in (queries, keys, values)))


def kept_by_press(press: Any, prompt: Prompt, count: int) -> list[set[int]]:
    """Tokens that each KV head keeps."""
    keys, values, queries = (
        torch.tensor(vectors.astype(np.float64)).transpose(0, 1)[None]
        for vectors in (prompt.keys, prompt.values, prompt.queries)
    )
    logits = queries @ keys.repeat_interleave(GROUP, dim=1).transpose(2, 3) / SIZE**0.5
    logits += torch.full(logits.shape[2:], -torch.inf).triu(1)
    config = SimpleNamespace(num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS)
    module = SimpleNamespace(config=config, head_dim=SIZE)
    hidden = torch.zeros(1, len(prompt), 1)
    scores = press.score(module, hidden, keys, values, logits.softmax(dim=-1), {})
    scores[..., -1] = scores.max() + 1
    return [set(one.tolist()) for one in scores.topk(count, dim=-1).indices[0]]


def kept_by_policy(policy: Policy, prompt: Prompt, count: int) -> list[set[int]]:
    tokens = len(prompt)
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append([0], tokens)
    tree.activate((0,))
    layers = [vectors[:, None] for vectors in (prompt.queries, prompt.keys, prompt.values)]
    rows = VectorRows(
        layers[0], layers[1], np.arange(tokens), np.arange(tokens), np.zeros(tokens, np.int32),
        np.full(tokens, -1, np.int32),
    )  # fmt: skip
    observed = Observations(tokens, head_attention=rows, keys=layers[1], values=layers[2])
    run = TokenRun((0,), tokens, np.zeros(tokens, np.int32), observed)
    book = ScoreBook(policy.scores(), 1)
    book.begin(run, tree, generated=False)
    book.skip(tokens)
    groups = {"shared": 1, "layer": 1, "head": KV_HEADS}[policy.grouping]
    tier = np.zeros((groups, tokens), dtype=np.int8)
    view = CacheView(tier, book.values(), tree, (0,), tokens, count, 0, 128)
    plan = policy.decide(view, Prefill(run))
    held = (tier if plan is None else plan.tiers) < Tier.DDR
    return [
        set(np.flatnonzero(row).tolist()) for row in np.repeat(held, KV_HEADS // groups, axis=0)
    ]


PAIRS: dict[str, tuple[Policy, Any]] = {
    "snapkv": (SnapKV(window=WINDOW), lambda ratio: SnapKVPress(ratio, window_size=WINDOW)),
    "tova": (Tova(pin_prompt=False), TOVAPress),
    "streaming-llm": (StreamingLLM(pin_prompt=False), StreamingLLMPress),
    "key-norm": (KeyNorm(pin_prompt=False, recent=1), KnormPress),
    "keydiff": (KeyDiff(pin_prompt=False, recent=1), KeyDiffPress),
    "lag-kv-official": (
        LagKVOfficial(pin_prompt=False, sinks=4, lag=LAG),
        lambda ratio: LagKVPress(ratio, n_sink=4, lag_size=LAG),
    ),
}


def main(cases: int) -> None:
    for name, (policy, press) in PAIRS.items():
        rng = np.random.default_rng(0)
        same = 0
        for _ in range(cases):
            prompt = random_prompt(rng)
            ratio = float(rng.uniform(0.05, 0.7))
            count = max(WINDOW + 1, int(len(prompt) * (1 - ratio)))
            if isinstance(policy, LagKVOfficial):  # keeps half of each partition, whatever is asked
                parts = (len(prompt) - policy.sinks) // LAG - 1
                count = len(prompt) - max(0, parts) * LAG // 2
            made = press(max(0.0, 1 - (count + 0.5) / len(prompt)))
            same += kept_by_press(made, prompt, count) == kept_by_policy(policy, prompt, count)
        print(f"{name}: {same} of {cases} prompts")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
