"""Memory of a live search as the simulator predicts it, against the tensors that are allocated."""

from __future__ import annotations

from collections.abc import Iterator
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
    recall: str = "stage"


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


def begun(case: Searched, model: Any) -> PolicySearch:
    source = RandomSource(VOCABULARY, case.prompt, case.new, case.new)
    setup = SearchSetup(
        model, source, lambda: make_search("linear"), 0.0, 0, case.new, prefill_block=case.block
    )
    policy = build(case.policy, case.settings)
    options = CacheOptions(recall=case.recall)
    return PolicySearch(setup, source.problem(0), policy, case.budget, options)


def searched(case: Searched, search: PolicySearch) -> Iterator[None]:
    """After each forward pass."""
    steps = search.steps()
    tokens = next(steps)
    for _ in range(case.new - 2):
        logits = run_together([search.prepare(tokens)])
        yield
        tokens = steps.send(logits[0][:, 0])
    steps.close()


#: Searches that keep tokens apart from those at full precision in HBM, in all tiers of the policy.
APART = (
    Searched("kivi", "", prompt=16, new=64, block=16, settings={"residual": "32"}),
    Searched("arkv-quant", "", prompt=16, budget=48, new=64, block=16),
    Searched("hierarchy", "", 16, 100, 64, 16, {"interval": "16", "recent": "16"}),
    Searched("hierarchy", "", 16, 60, 64, 16,
             {"interval": "16", "recent": "16", "hbm_ratio": "0.2", "quantised_ratio": "0.5"}),
    Searched("staircase", "", prompt=32, budget=64, new=64, block=16),
    Searched("freekv", "", prompt=16, budget=58, new=64, block=16),
    Searched("freekv", "", prompt=16, budget=58, new=64, block=16, recall="ondemand"),
)  # fmt: skip


@pytest.mark.parametrize("case", APART, ids=lambda c: f"{c.policy} {c.budget} {c.recall}")
def test_what_lies_in_other_pools_is_predicted_to_the_byte(case: Searched) -> None:
    with pretend():
        model = make_model()
        search, allocated = begun(case, model), 0
        pools = search.cache.pools
        apart = [at for at in pools if at != Place.HBM and not at.on_host]
        for _ in searched(case, search):
            held = sum(pools[at].capacity_bytes for at in apart) + search.cache.buffer_bytes
            allocated = max(allocated, held)
        measured, shape = search.measurements(), geometry(LoadedModel("tiny", model))
    assert allocated > 0
    assert search.memory(measured, shape).apart_bytes == allocated


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.policy} {c.prompt} {c.budget} {c.largest}"
)
def test_the_peak_is_the_predicted_one(case: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    if not case.reserves:
        monkeypatch.setattr(PolicySearch, "_reserve", lambda *_: None)
    with pretend() as gpu:
        model = make_model()
        weights = gpu.allocated
        shape = geometry(LoadedModel("tiny", model))
        assert shape.weight_bytes == pytest.approx(weights, rel=1e-3)
        search, most = begun(case, model), 0
        for _ in searched(case, search):
            most = max(most, int(search.cache.pools[Place.HBM].slots.high.max()))
        allocated = gpu.peak - weights
        held = most * shape.full_bytes_per_token
        predicted = search.memory(Measurements(peak_after_first_decision_bytes=held), shape)
    assert predicted.peak.name == case.largest
    assert predicted.peak.bytes == pytest.approx(allocated, rel=WITHIN)
