"""Launches of a decode step as the engine profile ``live`` has them, against those that happen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arborsim.core.tiers import RECALLS
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_engine, load_profile
from arborsim.machine.machine import Machine, decode_rows, parts_in_ddr, parts_read
from arborsim.policies.base import row_uses
from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.decoder import run_together
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.live.validate import ValidationRun
from arborsim_torch.sources import RandomSource

from .arming import pretend

VOCABULARY = 97
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
    new: int = 24


CASES = (
    Searched("full"), Searched("epikv", {"recent": "8"}), Searched("h2o", {"per": "shared"}),
    Searched("adakv"),  # rows of KV heads
    # Two formats in HBM, and two that were recalled from DDR:
    Searched("staircase", prompt=20, budget=40, new=40),
)  # fmt: skip


def make_model(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(torch.bfloat16).to("cuda")


def launches_of(
    case: Searched, layers: int, graphs: bool = False, recall: str = "stage"
) -> tuple[int, int]:
    """Kernels of the last forward pass of a search, and of what follows it until the next."""
    with pretend() as gpu:
        source = RandomSource(VOCABULARY, case.prompt, case.new, case.new)
        setup = SearchSetup(
            make_model(layers),
            source,
            lambda: make_search("linear"),
            0.0,
            0,
            case.new,
            graphs=graphs,
        )
        policy = build(case.policy, case.settings)
        options = CacheOptions(recall=recall)
        search = PolicySearch(setup, source.problem(0), policy, case.budget, options)
        steps = search.steps()
        tokens = next(steps)
        for _ in range(case.new - 2):
            gpu.launches.clear()
            logits = run_together([search.prepare(tokens)])
            found = _kernels(gpu.launches)
            gpu.launches.clear()
            tokens = steps.send(logits[0][:, 0])
            after = _kernels(gpu.launches)
        steps.close()
    return found, after


def _kernels(launches: Counter[str]) -> int:
    return sum(count for name, count in launches.items() if name not in NO_KERNELS)


IN_DDR = Searched("hierarchy", {"pin_prompt": "false", "recent": "8", "interval": "8"}, budget=40)
#: Whose tokens in DDR are in two formats by the end
TWO_IN_DDR = replace(IN_DDR, settings={**IN_DDR.settings, "hbm_ratio": "0.2",
                                       "quantised_ratio": "0.5"})  # fmt: skip
RECALLED = [(TWO_IN_DDR, recall) for recall in RECALLS]
RECALLED += [(CASES[-1], "near"), (CASES[-1], "ondemand")]


@pytest.mark.parametrize(
    ("case", "recall"), [*((case, "stage") for case in CASES), *RECALLED],
    ids=lambda each: each if isinstance(each, str) else each.policy,
)  # fmt: skip
def test_a_layer_launches_what_the_engine_profile_says(case: Searched, recall: str) -> None:
    (one, after), (other, _) = (launches_of(case, layers, recall=recall) for layers in DEPTHS)
    counted = (other - one) / (DEPTHS[1] - DEPTHS[0])
    engine, policy = load_engine("live"), build(case.policy, case.settings)
    rows = not policy.fused and decode_rows(policy)
    groups = 1 if all(use.grouping == "shared" for use in row_uses(policy)) else 4
    added = engine.added_launches(1, parts_read(policy), rows, recall, parts_in_ddr(policy), groups)
    assert engine.layer_launches + added == counted
    if case.policy == "full":
        assert one - DEPTHS[0] * counted + after == engine.step_launches


def test_counting_large_entries_adds_few_launches_to_a_layer() -> None:
    """ThinKV reads rows of single heads, which it counts where they are."""
    case = Searched("thinkv-paper", {"segment": "1000"}, budget=100)
    plain, counted = (
        (launches_of(each, DEPTHS[1])[0] - launches_of(each, DEPTHS[0])[0])
        / (DEPTHS[1] - DEPTHS[0])
        for each in (CASES[0], case)
    )
    assert 0 < counted - plain <= 12


def test_a_graph_is_one_launch_whatever_the_depth() -> None:
    steps = {layers: sum(launches_of(CASES[0], layers, graphs=True)) for layers in DEPTHS}
    assert set(steps.values()) == {load_engine("live-graphs").step_launches}


def test_a_graph_that_streams_ddr_leaves_the_first_layers_copy_to_the_host() -> None:
    """Whatever the depth: copies of all other layers are in the graph."""
    streamed, staged = (  # the last step reads DDR
        {sum(launches_of(IN_DDR, layers, graphs=True, recall=recall)) for layers in DEPTHS}
        for recall in ("stream", "stage")
    )
    (launches,) = staged
    assert streamed == {launches + 1}


@pytest.mark.parametrize(
    ("policy", "recall", "graphs", "engine"),
    [
        ("hierarchy", "stage", True, "live-graphs"), ("hierarchy", "stream", True, "live-graphs"),
        ("hierarchy", "near", True, "live"), ("hierarchy", "ondemand", True, "live"),
        ("h2o", "near", True, "live-graphs"),  # which puts nothing into DDR
        ("hierarchy", "stream", False, "live"),
    ],
)  # fmt: skip
def test_a_validation_prices_graphs_where_steps_are_captured(
    policy: str, recall: str, graphs: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedExecutor, "of", lambda machine, *_: machine)
    device = SimpleNamespace(device=torch.device("cuda"))
    run: Any = SimpleNamespace(
        loaded=SimpleNamespace(model=device), machine=Machine(load_profile("h100")), info=None,
        request=SimpleNamespace(recall=recall, overlap=True), setup=SimpleNamespace(graphs=graphs),
    )  # fmt: skip
    machine: Any = ValidationRun._simulated(run, build(policy))
    assert machine.profile.engine.name == engine
