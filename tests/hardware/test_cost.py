"""The cost model: textbook cases and published figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.machine.cost import CostModel, Reads
from arborsim.machine.lookup import load_geometry, load_profile


def model(gpu: str = "h100", name: str = "llama-3.1-8b") -> CostModel:
    return CostModel(load_profile(gpu), load_geometry(name))


def test_decode_of_one_sequence_is_bound_by_the_weights() -> None:
    cost = model().decode(Reads(1, 1000, 1000 * 131_072))
    lower_bound_s = 8.03e9 * 2 / 3.35e12  # 4.8 ms
    assert lower_bound_s < float(cost.total_s) < 1.5 * lower_bound_s
    assert cost.flops_s < 0.01 * cost.weights_s
    assert cost.layers_s == pytest.approx(32 * 32e-6)


def test_terms_add_up() -> None:
    cost = model().decode(Reads(4, 5000, 1e9, 1e8))
    memory_s = cost.weights_s + cost.kv_s
    expected = max(cost.flops_s, memory_s) + cost.dequantise_s + cost.layers_s + cost.step_s
    assert float(cost.total_s) == pytest.approx(expected)


def test_what_does_not_overlap_adds_up() -> None:
    reads = Reads(16, 50_000, 5e9)
    roofline = model().decode(reads)
    memory_s = roofline.weights_s + roofline.kv_s
    profile = replace(load_profile("h100"), overlap=0.25)
    partly = CostModel(profile, load_geometry("llama-3.1-8b")).decode(reads)
    shorter_s = min(float(roofline.flops_s), float(memory_s))
    assert float(partly.total_s - roofline.total_s) == pytest.approx(0.75 * shorter_s)


def test_large_batches_are_bound_by_compute() -> None:
    cost = model().decode(Reads(1024, 1024, 0.0))
    assert cost.flops_s > cost.weights_s


def test_prefill_grows_quadratically_in_the_end() -> None:
    costs = [model().prefill(n) for n in (65_536, 131_072)]
    assert costs[1].attention_s / costs[0].attention_s == pytest.approx(4, rel=1e-4)
    assert costs[1].matrices_s / costs[0].matrices_s == pytest.approx(2)


def test_prefill_in_parts_does_the_same_work() -> None:
    whole, first, second = (
        model().prefill(n, before) for n, before in ((900, 0), (400, 0), (500, 400))
    )
    assert first.attention_s + second.attention_s == pytest.approx(whole.attention_s)
    assert first.matrices_s + second.matrices_s == pytest.approx(whole.matrices_s)


def test_vectorised_like_one_by_one() -> None:
    kv_bytes = np.linspace(0, 1e10, 7)
    many = model().decode(Reads(1, kv_bytes / 131_072, kv_bytes)).total_s
    single = [float(model().decode(Reads(1, b / 131_072, b)).total_s) for b in kv_bytes]
    assert many.tolist() == single


def test_small_blocks_reach_a_tenth_of_the_link() -> None:
    cost = model()
    large = cost.transfer_s(1e9, 4e6, "h2d")
    small = cost.transfer_s(1e9, 40e3, "h2d")
    assert float(large) == pytest.approx(1e9 / 50e9, rel=0.01)
    assert 8 < small / large < 12.5


def test_pageable_memory_is_slower_and_nothing_is_free_of_latency_but_nothing() -> None:
    pageable = CostModel(load_profile("h100"), load_geometry("llama-3.1-8b"), pinned=False)
    assert float(pageable.transfer_s(1e9, 4e6, "d2h")) == pytest.approx(0.04, rel=0.01)
    assert float(model().transfer_s(1, 4e6, "d2h")) >= 10e-6
    assert float(model().transfer_s(0, 0, "d2h")) == 0


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_bandwidth_never_falls_with_block_size(a: float, b: float) -> None:
    profile = load_profile("h200")
    small, large = sorted((a, b))
    assert profile.link_bytes_per_s(small, "h2d") <= profile.link_bytes_per_s(large, "h2d")


def test_bandwidth_curve_passes_through_its_points() -> None:
    profile = load_profile("h200")
    speeds = profile.link_bytes_per_s(np.array(profile.block_bytes), "d2h")
    assert speeds == pytest.approx(profile.d2h_bytes_per_s * np.array(profile.block_efficiency))


def test_stream_waits_only_for_slower_transfers() -> None:
    cost = model()
    side = cost.stream(np.array([1.0, 1e-4]), np.array([1e9, 1e9]))
    assert side.exposed_s[0] == 0
    assert side.exposed_s[1] == pytest.approx(side.total_s[1] - 1e-4)


def test_eager_attention_materialises_probabilities() -> None:
    cost = model()
    assert cost.eager_prefill_bytes(1000) == 32 * 1000 * 1000 * 2
    assert float(cost.eager_rows_s(1000)) == pytest.approx(
        2 * 32 * 32 * 1000 * 4 / cost.profile.eager_bytes_per_s
    )


def test_quantised_tokens_take_a_byte_per_element_and_scales() -> None:
    cost = model()
    assert cost.elements_per_token == 65_536
    assert cost.scales_per_token == 2 * 32 * 8
