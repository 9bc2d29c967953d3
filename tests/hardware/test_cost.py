"""The cost model: textbook cases and published figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.formats import FP8
from arborsim.core.row_uses import ALL_QUERIES
from arborsim.machine.cost import CostModel
from arborsim.machine.integration import Longer
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import decode_rows, row_queries
from arborsim.machine.price import Price
from arborsim.machine.program import DemandInfo
from arborsim.policies.registry import build


def model(gpu: str = "h100", name: str = "llama-3.1-8b") -> CostModel:
    return CostModel(load_profile(gpu), load_geometry(name))


def test_decode_of_one_sequence_is_bound_by_the_weights() -> None:
    cost = model()
    lower_bound_s = 8.03e9 * 2 / 3.35e12  # 4.8 ms
    assert lower_bound_s < float(cost.decode_s(1, 1000, 1000 * 131_072)) < 1.5 * lower_bound_s
    assert cost.flops_s(1, 1000) < 0.01 * cost.weights_read_s(1)
    assert cost.layers_s(1) == pytest.approx(32 * 32e-6)


def test_terms_add_up() -> None:
    cost = model()
    memory_s = cost.weights_read_s(4) + cost.kv_read_s(1e9)
    expected = max(cost.flops_s(4, 5000), memory_s) + cost.dequantise_s(1e8) + cost.layers_s(4)
    expected += cost.profile.per_step_s + 4 * cost.profile.per_sequence_s
    assert float(cost.decode_s(4, 5000, 1e9, 1e8)) == pytest.approx(expected)


def test_attention_and_reading_keys_and_values_by_hand() -> None:
    known = {"flops_per_s": 1e15, "mfu": 0.5, "hbm_bytes_per_s": 3e12, "kv_read_efficiency": 0.8}
    cost = CostModel(replace(load_profile("h100"), **known), load_geometry("llama-3.1-8b"))
    pair = 4 * 32 * 32 * 128  # scores and weighted values: layers, heads, and numbers of each
    attention_s = 5000 * pair / 0.5e15
    assert cost.flops_s(4, 5000) - cost.flops_s(4, 0) == pytest.approx(attention_s)
    assert cost.kv_read_s(1e9) == pytest.approx(1e9 / (0.8 * 3e12))


def test_what_does_not_overlap_adds_up() -> None:
    roofline = model()
    memory_s = roofline.weights_read_s(16) + roofline.kv_read_s(5e9)
    profile = replace(load_profile("h100"), overlap=0.25)
    partly = CostModel(profile, load_geometry("llama-3.1-8b"))
    shorter_s = min(float(roofline.flops_s(16, 50_000)), float(memory_s))
    slower_s = partly.decode_s(16, 50_000, 5e9) - roofline.decode_s(16, 50_000, 5e9)
    assert float(slower_s) == pytest.approx(0.75 * shorter_s)


def test_large_batches_are_bound_by_compute() -> None:
    assert model().flops_s(1024, 1024) > model().weights_read_s(1024)


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
    many = model().decode_s(1, kv_bytes / 131_072, kv_bytes)
    single = [float(model().decode_s(1, b / 131_072, b)) for b in kv_bytes]
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


def test_streams_in_the_time_of_the_link() -> None:
    cost = model()
    latency_s = 32 * cost.profile.pcie_latency_s
    layer_bytes = 1e9 / 32
    speed = cost.profile.link_bytes_per_s(layer_bytes / 2, "h2d")
    assert float(cost.stream_s(1e9)) == pytest.approx(latency_s + 1e9 / float(speed))
    assert cost.stream_s(np.array([0.0, 1e9])).tolist() == [0.0, float(cost.stream_s(1e9))]


def test_eager_attention_materialises_probabilities() -> None:
    cost = model()
    assert cost.prompt_rows_bytes(1000) == 32 * 1000 * 1000 * 2
    assert float(cost.eager_rows_s(1000)) == pytest.approx(
        2 * 32 * 32 * 1000 * 4 / cost.profile.eager_bytes_per_s
    )


def live(gpu: str = "h200", name: str = "llama-3.1-8b") -> CostModel:
    return CostModel(load_profile(gpu, engine="live"), load_geometry(name))


@pytest.mark.parametrize(("queries", "groups"), [(4, 1), (300, 1), (64, 256), (1, 32)])
def test_rows_of_a_live_prompt_are_made_again_in_tiles(queries: int, groups: int) -> None:
    cost, tokens, present = live(), 300, 20
    g, p = cost.geometry, cost.profile
    pairs = sum(present + at + 1 for at in range(tokens - queries, tokens))
    flops = 2 * 32 * 32 * 128 * pairs
    summed = 0 if groups > 1 else 32 * (4 + 4) * pairs  # one mean row, read and written in fp32
    wanted = flops / (p.flops_per_s * p.mfu) + summed / p.eager_bytes_per_s
    found = cost.prompt_rows_s(tokens, present, queries, groups)
    assert found == pytest.approx(wanted, rel=1e-12)
    # The same products as attention's, less those with the values.
    whole = cost.prefill(queries, tokens + present - queries).attention_s
    assert flops / (p.flops_per_s * p.mfu) == pytest.approx(whole / 2, rel=1e-12)
    assert g.layers * g.heads == 1024


def test_no_matrix_of_a_live_prompt_is_held() -> None:
    cost, eager = live(), CostModel(load_profile("h200", engine="transformers"), live().geometry)
    at = (8_192, 65_536)
    short, long = (cost.prompt_rows_bytes(n) for n in at)
    assert long == 8 * short == 1024 * 65_536 * 10
    assert [eager.prompt_rows_bytes(n) for n in at] == [32 * n * n * 2 for n in at]
    assert cost.prompt_rows_bytes(65_536, queries=64) == 64 * 65_536 * 10
    assert cost.prompt_rows_bytes(65_536, groups=256) == 256 * 65_536 * 32
    assert eager.prompt_rows_s(at[0], queries=64) == eager.prompt_rows_s(at[0])


@pytest.mark.parametrize("queries", [0, 1, 700, 1100, 3000])
def test_parts_of_a_prompt_make_the_rows_of_the_whole(queries: int) -> None:
    price = Price(live())
    info = DemandInfo("", 0, "", "", "stage", "", 1, fused=False, row_queries=queries)
    tokens, block = 3000, 1024
    parts = [
        price.rows_s(min(block, tokens - at), at, info, max(0, tokens - at - block))
        for at in range(0, tokens, block)
    ]
    assert sum(parts) == pytest.approx(price.rows_s(tokens, 0, info), rel=1e-12)
    assert bool(parts[0]) == (queries > tokens - block)
    assert price.rows_s(tokens, 0, replace(info, fused=True)) == 0


@pytest.mark.parametrize(
    ("policy", "queries"),
    [("h2o", ALL_QUERIES), ("snapkv", 64), ("tova", 1), ("raas", 0), ("rkv", 0)],
)
def test_policies_say_whose_rows_they_read(policy: str, queries: int) -> None:
    assert row_queries(build(policy)) == queries


@pytest.mark.parametrize(
    ("policy", "reads"),
    [("h2o", True), ("arkv", True), ("snapkv", False), ("duoattention", False), ("rkv", False)],
)
def test_policies_say_whether_they_read_rows_while_decoding(policy: str, reads: bool) -> None:
    assert decode_rows(build(policy)) == reads


def test_a_mask_is_paid_once_and_rows_for_several_tokens_too() -> None:
    profile = replace(load_profile("h100"), wide_per_layer_s=2e-6)
    cost = CostModel(profile, model().geometry)
    least = cost.layers_s(1)
    longer = [
        (cost.layers_s(tokens, Longer(*longer_s)) - least) / cost.geometry.layers * 1e6
        for longer_s in ((0.0, 0.0), (3e-6, 0.0), (3e-6, 5e-6)) for tokens in (1, 2)
    ]  # fmt: skip
    assert longer == pytest.approx([0, 2, 3, 3, 3, 7])


def test_quantised_tokens_take_a_byte_per_element_and_scales() -> None:
    assert FP8.token_bytes(model().geometry) == 65_536 + 4 * 2 * 32 * 8
