"""Memory of a live search as the simulator predicts it, against the tensors that are allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arborsim.core.tiers import NUM_TIERS, RECALLS
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.live_memory import LiveSearch
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.moves import MostMoved
from arborsim.policies.registry import build
from arborsim.products.validate.compare import DualExecutor
from arborsim.searches import make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.ondemand import PageAttention
from arborsim_torch.decoder import run_together
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.live.validate import held
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.sources import RandomSource

from .arming import pretend
from .clocks import Gpu

VOCABULARY, WITHIN = 500, 0.03
TREES = frozenset({"arborkv"})  # searched in a tree
#: Tables of slots, logits and what else does not grow with the model, as toys are small.
TABLE_BYTES = 8192


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
    layers: int = 2
    recall: str = "stage"


SHARED = {"per": "shared"}
IN_8_BITS = {"pin_prompt": "false", "interval": "16", "recent": "16", "hbm_ratio": "0.2",
             "quantised_ratio": "0.5"}  # fmt: skip
CASES = (
    Searched("full", "prompt"),
    Searched("full", "prompt", prompt=350, new=60),  # grows while it decodes
    Searched("full", "prompt", prompt=512, block=16),
    Searched("full", "growing", prompt=512, block=16, reserves=False),  # as trees
    Searched("streaming-llm", "prompt"),
    Searched("streaming-llm", "shrinking", 512, 450, block=16,
             settings={"pin_prompt": "false"}),
    Searched("h2o", "prompt", settings=SHARED),
    Searched("h2o", "prompt", prompt=512, budget=600, settings=SHARED),
    # Its rows are more than all else:
    Searched("h2o", "prompt", prompt=2048, budget=2100, settings=SHARED),
    Searched("h2o", "prompt", prompt=2048, budget=2100, block=128, settings=SHARED),
    Searched("vatp", "prompt", prompt=2048, budget=2100),
    Searched("epikv", "prompt", settings={"recent": "32"}),
    Searched("epikv", "prompt", prompt=512, budget=700, layers=6),
    Searched("adakv", "prompt"),
    Searched("tova", "prompt"),
    Searched("key-norm", "prompt", prompt=2048, budget=2100),
    Searched("quest", "prompt", prompt=2048, budget=2100),
    Searched("freekv", "prompt", prompt=2048, budget=2200),
    # Signals of the whole prompt wait, rows of its last queries are made, large entries counted:
    *(Searched(name, largest, 512, 160, settings={"pin_prompt": "false"}) for name, largest in (
        ("hs-cosine", "prompt"), ("attn-hs", "prompt"), ("expected-attention", "prompt"),
        ("redundancy", "prompt"), ("rkv", "prompt"), ("thinkv-paper", "prompt"),
        ("arkv", "last rows"), ("arkv-quant", "last rows"), ("arkv-origin", "last rows"))),
    # Tokens in 8 bits, in DDR and staged, of which there are none while the first ones move:
    Searched("staircase", "prompt", 512, 160, settings={"pin_prompt": "false"}),
    Searched("hierarchy", "prompt", 512, 160, settings=IN_8_BITS),
    Searched("hierarchy", "moving", 512, 160, block=16, settings=IN_8_BITS),
    # Its double buffer grows, without the old one next to the new:
    Searched("hierarchy", "moving", 256, 520, 260, 16, {**IN_8_BITS, "interval": "32",
             "hbm_ratio": "0.1", "quantised_ratio": "0"}, recall="stream"),
    Searched("arkv", "last rows", 4096, 4200, block=512),
    Searched("hs-cosine", "prompt", 4096, 4300, block=512),
)  # fmt: skip


def make_model(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=896, num_hidden_layers=layers,
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
    everywhere = MostMoved(reached=np.ones(NUM_TIERS, dtype=np.bool_))
    assert allocated > 0
    assert search.memory(measured, shape, everywhere).apart_bytes == allocated


#: Searches whose moves are watched: with tokens in DDR, quantised ones, and a tree.
MOVED = (
    *(Searched("hierarchy", "", 64, 300, 240, 16, {"interval": "64", "recent": "16"}, recall=recall)
      for recall in RECALLS),
    Searched("hierarchy", "", 64, 200, 200, 16,
             {"interval": "64", "recent": "16", "hbm_ratio": "0.2", "quantised_ratio": "0.5"}),
    Searched("arkv", "", prompt=256, budget=200, new=40),
    Searched("arkv-quant", "", prompt=256, budget=200, new=40),
    Searched("kivi", "", prompt=256, budget=400, new=40, settings={"residual": "32"}),
    Searched("kivi", "", prompt=256, budget=400, new=40,
             settings={"residual": "32", "outliers": "0.02"}),
    Searched("arborkv", "", prompt=64, budget=260, new=64, block=16),
)  # fmt: skip
#: Slots of the tokens that move, int64, on the device: of a portion, as it is read and written.
INDEX_BYTES = 4096


@contextmanager
def moves_watched(gpu: Gpu, most: list[int]) -> Iterator[None]:
    """Note what pools and moves take at most, beside what else there is when a move begins."""

    def watched(original: Any) -> Any:
        def call(mover: Mover, *args: Any, **kwargs: Any) -> Any:
            if most[0] > 0:  # within another
                return original(mover, *args, **kwargs)
            cache, before = mover.cache, gpu.peak
            if isinstance(cache.host_attention, PageAttention):
                cache.host_attention._rows.clear()  # tables that moves give up, whatever they do
            pools = sum(p.capacity_bytes for at, p in cache.pools.items() if not at.on_host)
            streamed = 0 if cache.stream is None else cache.stream.buffer_bytes
            beside = gpu.allocated - pools - cache.buffer_bytes + streamed
            gpu.peak, most[0] = gpu.allocated, 1
            try:
                return original(mover, *args, **kwargs)
            finally:
                most[0] = 0
                most.append(gpu.peak - beside)
                gpu.peak = max(before, gpu.peak)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("move", "settle", "activate"):
            patch.setattr(Mover, name, watched(getattr(Mover, name)))
        yield


def next_to_its_simulation(
    case: Searched, model: Any, overlap: bool = True
) -> tuple[PolicySearch, Callable[[], LiveSearch]]:
    """A search, and what its simulation says of its memory once it is over."""
    tree = case.policy in TREES
    made: list[DualExecutor] = []
    shape = geometry(LoadedModel("tiny", model))
    policy = build(case.policy, case.settings)

    def wrap(live: LiveExecutor, mover: Mover) -> DualExecutor:
        machine = Machine(load_profile("h100"), page_tokens=1, recall=case.recall, overlap=overlap)
        simulated = SimulatedExecutor(
            machine, shape, groups=mover.cache.layout.groups, formats=policy.formats
        )
        made.append(DualExecutor(live, simulated, lambda: held(mover)))
        return made[0]

    source = RandomSource(VOCABULARY, case.prompt, case.new, 16 if tree else case.new)
    setup = SearchSetup(
        model, source,
        lambda: make_search("beam-4", width=4) if tree else make_search("linear"),
        0.7 if tree else 0.0, 0, case.new, prefill_block=case.block,
    )  # fmt: skip
    options = CacheOptions(recall=case.recall, overlap=overlap)
    search = PolicySearch(setup, source.problem(0), policy, case.budget, options, wrap=wrap)

    def predicted() -> LiveSearch:
        simulated = made[0].simulated
        return search.memory(simulated.measurements(), shape, simulated.most_moved)

    return search, predicted


@pytest.mark.parametrize(
    "case", MOVED, ids=lambda c: " ".join((c.policy, c.recall, *c.settings.values()))
)
def test_what_moves_take_is_what_the_simulator_predicts(case: Searched) -> None:
    with pretend() as gpu:
        model = make_model()
        search, simulated = next_to_its_simulation(case, model, overlap=False)
        most, ends = [0], list[Ended]()
        with moves_watched(gpu, most):
            run_batched([search], 1, lambda _, ended: ends.append(ended))
        assert isinstance(ends[0], EpisodeResult), ends[0]
        predicted = simulated()
        if case.recall == "stream":  # its buffers grow by a quarter, and after moves
            predicted = replace(predicted, apart_bytes=0)
    moments = [each.bytes for each in predicted.moments() if each.name in ("moving", "shrinking")]
    assert max(moments) == pytest.approx(max(most), rel=WITHIN, abs=INDEX_BYTES)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.policy} {c.prompt} {c.budget} {c.block} {c.largest}"
)
def test_the_peak_is_the_predicted_one(case: Searched, monkeypatch: pytest.MonkeyPatch) -> None:
    if not case.reserves:
        monkeypatch.setattr(PolicySearch, "_reserve", lambda *_: None)
    with pretend() as gpu:
        model = make_model(case.layers)
        weights = gpu.allocated
        assert geometry(LoadedModel("tiny", model)).weight_bytes == pytest.approx(weights, rel=1e-3)
        search, simulated = next_to_its_simulation(case, model)
        ends: list[Ended] = []
        run_batched([search], 1, lambda _, ended: ends.append(ended))
        assert isinstance(ends[0], EpisodeResult), ends[0]
        allocated, predicted = gpu.peak - weights, simulated().peak
    assert predicted.name == case.largest
    assert predicted.bytes == pytest.approx(allocated, rel=WITHIN, abs=TABLE_BYTES)
