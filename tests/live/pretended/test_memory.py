"""Memory of a live search as the simulator predicts it, against the tensors that are allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arborsim.core.measurements import Measurements
from arborsim.policies.registry import build
from arborsim.search import make_search
from arborsim_torch.cache.layout import Place
from arborsim_torch.decoder import run_together
from arborsim_torch.live.policy_search import CacheOptions, PolicySearch, SearchSetup
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.sources import RandomSource

from .arming import pretend

VOCABULARY, WITHIN = 500, 0.03


@dataclass(frozen=True)
class Searched:
    """A search, and at which moment it holds most."""

    policy: str
    largest: str
    prompt: int = 256
    budget: int = 300
    new: int = 12
    block: int = 64
    settings: dict[str, str] = field(default_factory=dict)
    reserves: bool = True


CASES = (
    Searched("full", "prompt"),
    Searched("full", "prompt", prompt=350, new=60),  # grows while it decodes
    Searched("full", "prompt", prompt=512, block=16),
    Searched("full", "growing", prompt=512, block=16, reserves=False),  # as trees
    Searched("streaming-llm", "prompt"),
    Searched("streaming-llm", "shrinking", 512, 200, block=16,
             settings={"pin_prompt": "false"}),
    Searched("h2o", "prompt"),
    Searched("h2o", "prompt", prompt=512, budget=600),
    Searched("h2o", "prompt", prompt=2048, budget=2100),  # its rows are more than all else
    Searched("vatp", "prompt", prompt=2048, budget=2100),
    Searched("epikv", "prompt", settings={"recent": "32"}),
    Searched("adakv", "prompt"),
    Searched("tova", "prompt"),
)  # fmt: skip


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=896, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 16,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(torch.bfloat16).to("cuda")


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.policy} {c.prompt} {c.budget} {c.largest}"
)
def test_the_peak_is_the_predicted_one(case: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    if not case.reserves:
        monkeypatch.setattr(PolicySearch, "_reserve", lambda *_: None)
    policy = build(case.policy, case.settings)
    with pretend() as gpu:
        model = make_model()
        weights = gpu.allocated
        shape = geometry(LoadedModel("tiny", model))
        assert shape.weight_bytes == pytest.approx(weights, rel=1e-3)
        source = RandomSource(VOCABULARY, case.prompt, case.new, case.new)
        setup = SearchSetup(
            model, source, lambda: make_search("linear"), 0.0, 0, case.new, prefill_block=case.block
        )
        search = PolicySearch(setup, source.problem(0), policy, case.budget, CacheOptions())
        pool = search.cache.pools[Place.HBM]
        steps = search.steps()
        tokens, most = next(steps), 0
        for _ in range(case.new - 2):
            logits = run_together([search.prepare(tokens)])
            most = max(most, int(pool.slots.high.max()))
            tokens = steps.send(logits[0][:, 0])
        steps.close()
        allocated = gpu.peak - weights
        held = most * shape.full_bytes_per_token
        predicted = search.memory(Measurements(peak_after_first_decision_bytes=held), shape)
    assert predicted.peak.name == case.largest
    assert predicted.peak.bytes == pytest.approx(allocated, rel=WITHIN)
