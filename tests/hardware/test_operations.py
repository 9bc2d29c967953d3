"""Decisions that no one measured in an engine: from operations, for the batch, with a range."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from arborsim.core.errors import UnknownName
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import ServingOptions
from arborsim.machine.operations import OPERATIONS, UNDECLARED, operations_of, parsed
from arborsim.machine.price import Price
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.products.validate.published import Kept, request

GEOMETRY = load_geometry("llama-3.1-8b")


def price(engine: str = "vllm", gpus: int = 1) -> Price:
    profile = load_profile("h100", engine=engine)
    return Price(CostModel(profile, GEOMETRY), ServingOptions(tensor_parallel=gpus))


def deciding_s(policy: str, clients: int) -> float:
    """Seconds that decisions with every token add to requests at once that hold 512 tokens."""
    held, profile, found = np.full(255, 512), load_profile("h100", engine="vllm"), []
    for decides in (held > 0, held < 0):
        demand = request(GEOMETRY, 512, 256, Kept(policy, held, decides))
        engine = ServingEngine([demand], profile, GEOMETRY)
        found.append(engine.run(ClosedLoop(clients, (0,) * clients)).total_s)
    return found[0] - found[1]


def test_a_batch_launches_the_kernels_of_its_decisions_once() -> None:
    """StreamingLLM launches one in each layer, whatever the number of sequences."""
    layers, kernel_s = GEOMETRY.layers, price().forward.kernel_s
    for clients in (1, 16):  # whose prompts are one step
        assert deciding_s("streaming-llm", clients) == pytest.approx(255 * layers * kernel_s)


def test_a_build_that_takes_sequence_after_sequence_launches_them_for_each() -> None:
    assert deciding_s("rkv", 8) == pytest.approx(8 * deciding_s("rkv", 1))  # as fitted to vLLM's
    of_operations = price().operations(operations_of("rkv")).seconds
    assert of_operations.decision_base_s > 0
    assert of_operations.deciding_layer_s == 0


def test_bytes_of_a_decision_are_those_of_its_operations() -> None:
    """Moving keys and values of 1,000 tokens together reads and writes them once, on each GPU."""
    for gpus in (1, 2):
        made = price(gpus=gpus)
        seconds = made.operations({"decision": ["compaction"]}).seconds
        profile = made.cost.profile
        speed = profile.hbm_bytes_per_s * profile.mbu * gpus
        expected = 2 * 1000 * GEOMETRY.kv_bytes_per_token / speed
        assert seconds.decision_s(1000) == pytest.approx(expected)
        launched = OPERATIONS["compaction"].kernels * made.forward.kernel_s
        assert seconds.deciding_layer_s == pytest.approx(launched)


def test_pairs_of_keys_grow_with_the_square_of_the_tokens() -> None:
    seconds = price().operations({"sequence": ["similarity"]}).seconds
    none, half, whole = (float(seconds.decision_s(n)) for n in (0, 4096, 8192))
    grown = whole - none - 2 * (half - none)
    pairs = GEOMETRY.kv_heads * 2 * GEOMETRY.head_dim * 4096**2 * 2 * GEOMETRY.layers
    assert grown > pairs / load_profile("h100").flops_per_s


def test_an_engine_without_graphs_takes_the_hosts_time_for_a_kernel() -> None:
    for engine in ("transformers", "flashinfer"):
        made = price(engine)
        assert made.engine is not None
        found = made.operations({"step": ["sums"]}).seconds
        assert found.layer_s == pytest.approx(made.engine.launch_s)


def test_the_range_holds_what_was_simulated() -> None:
    for name in ("h2o", "streaming-llm", "snapkv", "rkv", "kivi", "quest"):
        built = price().operations(operations_of(name))
        data_s = 2 * 900 * built.seconds.decision_base_s
        low, middle, high = built.range_s(1000, 800, 2 * 900, data_s + 0.5)
        assert 0 < low < middle <= high, name


def test_measured_builds_are_not_replaced() -> None:
    made = price()
    assert made.from_operations("rkv") is None
    assert made.from_operations("full") is None
    assert made.from_operations("h2o") is not None
    assert made.engine is not None
    rkv = replace(made.engine.integrations["rkv"], from_operations=True)
    engine = replace(made.engine, integrations={"rkv": rkv})
    profile = replace(made.cost.profile, engine=engine)
    assert Price(CostModel(profile, GEOMETRY)).from_operations("rkv") is not None


def test_a_policy_that_declares_nothing_is_priced_as_most_are() -> None:
    assert operations_of("staircase") == operations_of("never-heard-of") == UNDECLARED
    with pytest.raises(UnknownName, match="compacton"):
        parsed(["compacton"])
