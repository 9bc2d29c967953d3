"""Launches of a decode step as the engine profile ``live`` has them, against those that happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arborsim.machine.lookup import load_engine
from arborsim.machine.machine import parts_read
from arborsim.policies.registry import build
from arborsim.search import make_search
from arborsim_torch.decoder import run_together
from arborsim_torch.live.policy_search import CacheOptions, PolicySearch, SearchSetup
from arborsim_torch.sources import RandomSource

from .arming import pretend

VOCABULARY, TOKENS = 97, 24
DEPTHS = (2, 4)
#: They reserve memory or make a view: nothing runs on the device.
NO_KERNELS = ("empty", "empty_like", "empty_strided", "new_empty")


@dataclass(frozen=True)
class Searched:
    """A search in which the policy keeps tokens in all of its tiers by the end."""

    policy: str
    settings: dict[str, str] = field(default_factory=dict)
    prompt: int = 40
    budget: int = 48
    recall: str = "stage"


CASES = (
    Searched("full"), Searched("streaming-llm"), Searched("epikv", {"recent": "8"}),
)  # fmt: skip


def make_model(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(torch.bfloat16).to("cuda")


def launches_of(case: Searched, layers: int) -> int:
    """Kernels of the last forward pass of a search."""
    with pretend() as gpu:
        source = RandomSource(VOCABULARY, case.prompt, TOKENS, TOKENS)
        setup = SearchSetup(
            make_model(layers), source, lambda: make_search("linear"), 0.0, 0, TOKENS, graphs=False
        )
        policy = build(case.policy, case.settings)
        search = PolicySearch(
            setup, source.problem(0), policy, case.budget, CacheOptions(recall=case.recall)
        )
        steps = search.steps()
        tokens = next(steps)
        for _ in range(TOKENS - 2):
            gpu.launches.clear()
            logits = run_together([search.prepare(tokens)])
            found = Counter(gpu.launches)
            tokens = steps.send(logits[0][:, 0])
        steps.close()
    return sum(count for name, count in found.items() if name not in NO_KERNELS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.policy} {case.recall}")
def test_a_layer_launches_what_the_engine_profile_says(case: Searched) -> None:
    one, other = (launches_of(case, layers) for layers in DEPTHS)
    counted = (other - one) / (DEPTHS[1] - DEPTHS[0])
    engine, policy = load_engine("live"), build(case.policy, case.settings)
    added = engine.added_launches(1, parts_read(policy), not policy.fused)
    assert engine.layer_launches + added == counted
    if case.policy == "full":
        around = one - DEPTHS[0] * counted
        assert around <= engine.step_launches  # which has the choice of the token, too
