"""Published figures that follow from geometry and hardware, and some that contradict them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile, profile_names
from arborsim.machine.machine import kv_room
from arborsim.machine.numbers import numbers_of
from arborsim.machine.profile import HardwareProfile
from tests.simulator.bench import Bench

GIB = 2**30


def test_concurrent_requests_of_epikv() -> None:
    """EpiKV, appendix I: Llama-3.1-8B on 80 GB, without eviction and with a budget of 2,048."""
    token = load_geometry("llama-3.1-8b").kv_bytes_per_token
    room = 0.9 * 80 * GIB - 16 * GIB
    assert room // (32_768 * token) == 14
    assert room // (2_048 * token) == 224


def prefill_bytes(tokens: int, fused: bool) -> int:
    """HBM of a prefill of Llama-3.1-8B whose attention rows are all kept, as a recorder of
    attention weights asks for (``output_attentions``), or of none."""
    cost = CostModel(load_profile("a100-80"), load_geometry("llama-3.1-8b"))
    g = cost.geometry
    kept = 0 if fused else g.layers * cost.prompt_rows_bytes(tokens)
    return g.weight_bytes + tokens * g.kv_bytes_per_token + cost.workspace_bytes(tokens) + kept


def test_the_wall_of_attention_matrices_at_8k() -> None:
    """EpiKV, section 4: on an 80 GB A100 a pass that returns attention weights takes 52 GB at 4,096
    tokens and fails at 8,192; FlashAttention reaches 65,536 at 48 GB."""
    memory = load_profile("a100-80").hbm_bytes
    assert prefill_bytes(4_096, fused=False) == pytest.approx(52e9, rel=0.03)
    assert prefill_bytes(8_192, fused=False) > memory
    assert prefill_bytes(65_536, fused=True) < memory
    # The cache and the weights alone are half of the 48 GB; what else is held depends on the code.
    assert 25e9 < prefill_bytes(65_536, fused=True) < 48e9


@pytest.mark.parametrize(
    ("tokens", "fused", "fits"),
    [(4_096, False, True), (8_192, False, False), (8_192, True, True), (65_536, True, True)],
)
def test_the_wall_in_a_replay(tokens: int, fused: bool, fits: bool) -> None:
    bench = Bench(
        load_profile("a100-80"), load_geometry("llama-3.1-8b"), fused=fused, keep_matrices=True
    )
    bench.prefill(tokens)
    assert bench.executor.measurements().fits is fits


def test_matrices_of_one_layer_hit_the_wall_later() -> None:
    """What the simulator charges policies that use rows as they come: a layer at a time."""
    cost = CostModel(load_profile("a100-80"), load_geometry("llama-3.1-8b"))
    assert cost.prompt_rows_bytes(8_192) == 32 * 8_192**2 * 2
    assert cost.prompt_rows_bytes(8_192) < 5e9
    assert cost.prompt_rows_bytes(65_536) > cost.profile.hbm_bytes
    # Each doubling of the prompt costs four times the time.
    assert cost.prompt_rows_s(8_192) / cost.prompt_rows_s(4_096) == pytest.approx(4)


#: Memory hierarchy, figure 5: (tokens, ms from the GPU, ms to the GPU), at 22 and 15 GB/s.
FIGURE_5 = [(64, 1.1, 1.5), (600, 8.6, 13.1)]


@pytest.mark.parametrize(("tokens", "down_ms", "up_ms"), FIGURE_5)
def test_latencies_of_the_memory_hierarchy(tokens: int, down_ms: float, up_ms: float) -> None:
    """They follow from the paper's bandwidths if the cache has 28 KV heads; the model has 4."""
    real = load_geometry("r1-distill-qwen-7b")
    claimed = replace(real, kv_heads=28)
    for milliseconds, gbytes_per_s in ((down_ms, 22), (up_ms, 15)):
        all_heads = 1e3 * tokens * claimed.kv_bytes_per_token / (gbytes_per_s * 1e9)
        assert all_heads == pytest.approx(milliseconds, rel=0.28)
        real_heads = 1e3 * tokens * real.kv_bytes_per_token / (gbytes_per_s * 1e9)
        assert real_heads < 0.19 * milliseconds


#: Memory hierarchy, table 11 (18 in the appendix): model, sequences, tokens, GB of KV as printed.
TABLE_11 = [
    ("r1-distill-qwen-7b", 1, 2_000, 0.5),
    ("r1-distill-qwen-7b", 8, 2_000, 3.8),
    ("r1-distill-qwen-7b", 1, 16_000, 3.8),
    ("llama-3.1-70b", 8, 4_000, 80.0),
]


@pytest.mark.parametrize(("model", "sequences", "tokens", "printed_gb"), TABLE_11)
def test_kv_table_of_the_memory_hierarchy(
    model: str, sequences: int, tokens: int, printed_gb: float
) -> None:
    """Every cell is 4 to 8 times what the models keep, whose KV heads are fewer than heads."""
    real = load_geometry(model)
    kept_gb = sequences * real.path_bytes(tokens) / 1e9
    assert kept_gb == pytest.approx({0.5: 0.115, 3.8: 0.918, 80.0: 10.49}[printed_gb], rel=0.01)
    assert 4 < printed_gb / kept_gb < 8
    every_head = sequences * replace(real, kv_heads=real.heads).path_bytes(tokens) / 1e9
    assert printed_gb < every_head  # nor do all query heads give the printed figure


def test_800_megabytes_for_2000_tokens_are_28_heads() -> None:
    real = load_geometry("r1-distill-qwen-7b")
    assert replace(real, kv_heads=28).path_bytes(2_000) == pytest.approx(800e6, rel=0.01)
    assert real.path_bytes(2_000) == pytest.approx(115e6, rel=0.01)
    assert load_geometry("r1-distill-qwen-14b").layers == 48  # the paper says 40


def test_how_a_pool_comes_about() -> None:
    profile, geometry = load_profile("h100"), load_geometry("llama-3.1-8b")
    pool = kv_room(profile, geometry)
    hbm_bytes = 81_559 * 2**20
    assert pool.hbm_bytes == hbm_bytes
    assert pool.reserve_bytes == pytest.approx(0.1 * hbm_bytes, abs=1)
    assert pool.weight_bytes == 2 * 8_030_261_248
    activations = 8_192 * (2 * 4096 + 2 * 40 * 128 + 3 * 14336) * 2 + 128_256 * 4
    assert pool.activation_bytes == activations
    assert pool.context_bytes == int(0.15 * GIB)
    assert pool.pool_bytes == hbm_bytes - sum(
        (pool.reserve_bytes, pool.weight_bytes, pool.activation_bytes, pool.context_bytes)
    )
    assert pool.tokens == pool.pool_bytes // 131_072
    assert not pool.unbounded


def test_pools_of_other_forms() -> None:
    h100 = load_profile("h100")
    assert kv_room(h100, load_geometry("mistral-7b-v0.1")).unbounded
    assert kv_room(h100, load_geometry("llama-3.1-70b")).pool_bytes < 0
    assert kv_room(h100, load_geometry("llama-3.1-70b")).tokens == 0
    gemma = load_geometry("gemma-3-12b")
    pool = kv_room(h100, gemma)
    assert gemma.path_bytes(pool.tokens) <= pool.pool_bytes < gemma.path_bytes(pool.tokens + 1)


def test_every_number_of_a_profile_has_a_meaning() -> None:
    others = {"name", "sources", "evidence", "policies", "kernels", "engine", "memories"}
    numbers = {entry.name for entry in fields(HardwareProfile)} - others
    profile = replace(load_profile("h100"), sources=dict.fromkeys(numbers, "here"))
    assert {number.name for number in numbers_of(profile)} == numbers
    assert all(number.about and number.unit for number in numbers_of(profile))


@pytest.mark.parametrize("gpu", profile_names())
def test_numbers_of_shipped_profiles(gpu: str) -> None:
    profile = load_profile(gpu)
    numbers = numbers_of(profile)
    assert {number.name for number in numbers if number.assumed} == set(profile.assumed())
    assert all(number.date or number.assumed for number in numbers)


def test_numbers_in_the_units_people_quote() -> None:
    shown = {number.name: number for number in numbers_of(load_profile("h100"))}
    assert shown["hbm_bytes_per_s"].text == "3350 GB/s"
    assert shown["flops_per_s"].text == "989.5 TFLOP/s"
    assert shown["per_layer_s"].text == "32 us"
    assert shown["block_bytes"].text == "8, 72, 512, 2560 KiB"
    assert shown["mfu"].text == "0.6"
    assert (shown["hbm_bytes_per_s"].source, shown["hbm_bytes_per_s"].date) == (
        "BLIS, read 2026-11", "2026-11",
    )  # fmt: skip
