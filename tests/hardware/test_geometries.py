"""Model geometries: published numbers of weights and known sizes of a token, and odd configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arborsim.core.errors import TraceError, UnknownName, UsageError
from arborsim.machine.config import with_kv_dtype
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import (
    geometries_like,
    geometry_names,
    load_geometry,
    load_profile,
)
from arborsim.machine.machine import KvPool, ServingOptions
from arborsim.trace.schema import Geometry, TraceInfo

#: Published number of weights (of Gemma 3 12B: without its vision tower), and bytes of KV of one
#: token in bf16 over all layers: 2 x layers x KV heads x head_dim x 2, or layers x (512 + 64) x 2.
PUBLISHED = {
    "llama-3.1-8b": (8.03e9, 2 * 32 * 8 * 128 * 2),
    "llama-3.1-70b": (70.6e9, 2 * 80 * 8 * 128 * 2),
    "llama-3.2-1b": (1.24e9, 2 * 16 * 8 * 64 * 2),
    "llama-3.2-3b": (3.21e9, 2 * 28 * 8 * 128 * 2),
    "qwen2.5-7b": (7.62e9, 2 * 28 * 4 * 128 * 2),
    "qwen3-4b": (4.02e9, 2 * 36 * 8 * 128 * 2),
    "qwen3-8b": (8.19e9, 2 * 36 * 8 * 128 * 2),
    "qwen3-32b": (32.8e9, 2 * 64 * 8 * 128 * 2),
    "r1-distill-qwen-1.5b": (1.78e9, 2 * 28 * 2 * 128 * 2),
    "r1-distill-qwen-7b": (7.62e9, 2 * 28 * 4 * 128 * 2),
    "r1-distill-qwen-14b": (14.8e9, 2 * 48 * 8 * 128 * 2),
    "r1-distill-qwen-32b": (32.8e9, 2 * 64 * 8 * 128 * 2),
    "mistral-7b-v0.1": (7.24e9, 2 * 32 * 8 * 128 * 2),
    "mistral-7b-v0.3": (7.25e9, 2 * 32 * 8 * 128 * 2),
    "llemma-34b": (33.7e9, 2 * 48 * 8 * 128 * 2),
    "gemma-3-1b": (1.00e9, 2 * 26 * 1 * 256 * 2),
    "gemma-3-12b": (11.77e9, 2 * 48 * 8 * 256 * 2),
    "deepseek-v2-lite": (15.7e9, 27 * (512 + 64) * 2),
    "deepseek-v3": (671.0e9, 61 * (512 + 64) * 2),
    "gpt-oss-120b": (116.83e9, 2 * 36 * 8 * 64 * 2),
    "gpt-oss-20b": (20.91e9, 2 * 24 * 8 * 64 * 2),
    "qwen3-235b-a22b": (235.1e9, 2 * 94 * 4 * 128 * 2),
    "qwen3-30b-a3b": (30.53e9, 2 * 48 * 4 * 128 * 2),
}


@pytest.mark.parametrize("name", sorted(set(geometry_names()) - {"chain", "game24"}))
def test_weights_and_bytes_per_token(name: str) -> None:
    parameters, kv_bytes_per_token = PUBLISHED[name]
    geometry = load_geometry(name)
    assert geometry.parameters == pytest.approx(parameters, rel=0.001 if geometry.experts else 0.02)
    assert geometry.kv_bytes_per_token == kv_bytes_per_token


def test_facts_everybody_quotes() -> None:
    assert load_geometry("llama-3.1-8b").kv_bytes_per_token == 131_072
    assert load_geometry("r1-distill-llama-8b").kv_bytes_per_token == 131_072
    assert load_geometry("r1-distill-qwen-7b").kv_bytes_per_token == 57_344
    assert load_geometry("deepseek-v2-lite").kv_bytes_per_token == 31_104
    # 2.4e9 weights are active per token, embeddings aside (102,400 x 2,048).
    active = load_geometry("deepseek-v2-lite").active_parameters - 102_400 * 2_048
    assert active == pytest.approx(2.4e9, rel=0.03)


def test_a_cache_in_8_bits_takes_half() -> None:
    for name in ("llama-3.1-8b", "deepseek-v2-lite", "gemma-3-1b"):
        plain = load_geometry(name)
        fp8 = with_kv_dtype(plain, "fp8")
        assert 2 * fp8.path_bytes(3000) == plain.path_bytes(3000)
        assert fp8.weight_bytes == plain.weight_bytes
        assert fp8.name == f"{name}, fp8 KV"
        assert with_kv_dtype(plain, "bf16") is plain
    with pytest.raises(UnknownName, match="fp8"):
        with_kv_dtype(load_geometry("qwen3-4b"), "fp4")


BASE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "vocab_size": 100, "sliding_window": 8,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "full_attention"]


def load(folder: Path, **changes: Any) -> Geometry:
    path = folder / "config.json"
    path.write_text(json.dumps({**BASE, **changes}), encoding="utf-8")
    return load_geometry(path)


@pytest.mark.parametrize(
    ("changes", "window_layers"),
    [
        ({"model_type": "mistral"}, 6),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "gemma2"}, 3),
        ({"model_type": "gemma3_text"}, 5),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, 4),
        ({"model_type": "qwen3", "max_window_layers": 4, "use_sliding_window": True}, 2),
        ({"model_type": "qwen2", "max_window_layers": 6, "use_sliding_window": True}, 0),
        ({"layer_types": KINDS * 2}, 2),
        ({"layer_types": ["full_attention"] * 6}, 0),
    ],
)
def test_which_layers_have_a_window(
    tmp_path: Path, changes: dict[str, Any], window_layers: int
) -> None:
    geometry = load(tmp_path, **changes)
    assert geometry.window_layers == window_layers
    assert geometry.window == (8 if window_layers else 0)
    assert geometry.full_layers == 6 - window_layers


QWEN = {"model_type": "qwen3", "use_sliding_window": True}
LATENT = {
    "model_type": "deepseek_v2", "sliding_window": None, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": None,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": None,
}  # fmt: skip


def test_latent_attention_without_experts(tmp_path: Path) -> None:
    geometry = load(tmp_path, **LATENT)
    assert geometry.elements_per_layer == 20
    assert geometry.head_dim == 12
    assert geometry.active_parameters == geometry.parameters
    query = 64 * 24 + 24 + 24 * 4 * 12
    attention = query + 64 * 20 + 16 + 16 * 4 * 16 + 4 * 8 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert geometry.parameters == 6 * layer + 2 * 100 * 64 + 64


def test_experts(tmp_path: Path) -> None:
    dense = load(tmp_path, **LATENT).parameters
    mixed = {**LATENT, **EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 2}
    sparse = load(tmp_path, **mixed)
    one = 3 * 64 * 32
    assert sparse.expert_parameters == 4 * 8 * one
    assert sparse.parameters == dense + 4 * (9 * one + 8 * 64 - 3 * 64 * 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "does not say which"),
        ({"model_type": 3}, "model_type must be a name"),
        ({"model_type": "unheard_of"}, "as llama' to read it as a family"),
        ({"model_type": "qwen3_mo"}, "the nearest is qwen3_moe"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"layer_types": KINDS}, "names 3 of 6 layers"),
        ({"layer_types": "full"}, "must be a list"),
        ({"layer_types": KINDS * 2, "sliding_window": None}, "lacks sliding_window"),
        ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window must be a whole"),
        ({**QWEN, "max_window_layers": "x"}, "max_window_layers must be"),
        ({"kv_lora_rank": 16}, "latent attention, which llama has not"),
        ({**LATENT, "v_head_dim": None}, "lacks v_head_dim"),
        ({**LATENT, "q_lora_rank": "x"}, "q_lora_rank must be"),
        ({**LATENT, **EXPERTS, "moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ({**LATENT, **EXPERTS, "num_experts_per_tok": 9}, "fewer experts"),
        ({"num_experts": 4}, r"mixture of experts \(num_experts\), which llama has not"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["x"]}, "must be a list of numbers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": "x"}, "decoder_sparse_step must be"),
        ({"model_type": "doge", "is_moe": True}, "experts of its own form"),
        ({"num_attention_heads": 0}, "cannot be computed|positive whole number"),
        ({"hidden_size": -8}, "positive whole number"),
    ],
)
def test_configs_that_cannot_be_counted(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, **changes)


def test_a_trace_keeps_its_geometry() -> None:
    for name in geometry_names():
        info = TraceInfo(load_geometry(name), "m", "t", "s")
        assert TraceInfo.from_json(info.to_json()) == info
    plain = json.loads(TraceInfo(load_geometry("chain"), "m", "t", "s").to_json())["geometry"]
    assert "window" not in plain  # as version 0.1 wrote it
    broken = TraceInfo(load_geometry("gemma-3-1b"), "m", "t", "s").to_json()
    with pytest.raises(TraceError, match="window"):
        TraceInfo.from_json(broken.replace('"window": 512', '"window": -1'))
    with pytest.raises(TraceError, match="window"):
        TraceInfo.from_json(broken.replace('"window_layers": 22', '"window_layers": 27'))


def test_numbers_that_contradict_each_other() -> None:
    chain = load_geometry("chain")
    for changes in (
        {"window": 8}, {"latent_dim": 8}, {"experts": 4}, {"window": 4, "window_layers": 7},
        {"experts": 2, "experts_per_token": 3, "expert_parameters": 5},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"go together|have a window|fewer"):
            replace(chain, **changes)


@pytest.mark.parametrize(
    ("hub_id", "names"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", ["llama-3.1-8b"]),
        ("meta-llama/Meta-Llama-3.1-70B", ["llama-3.1-70b"]),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", ["llama-3.1-8b"]),
        ("mistralai/Mistral-7B-Instruct-v0.3", ["mistral-7b-v0.3"]),
        ("google/gemma-3-12b-it", ["gemma-3-12b"]),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", ["llama-3.1-8b"]),
        ("deepseek-ai/DeepSeek-R1", ["deepseek-v3"]),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", ["qwen3-30b-a3b"]),
        ("EleutherAI/llemma_34b", ["llemma-34b"]),
        ("meta-llama/Llama-3-8B", ["llama-3.1-8b"]),  # the nearest one of that size
        ("meta-llama/Llama-3.2-90B", []),  # nothing of that size
        ("facebook/opt-125m", []),
        ("mistralai/Mixtral-8x7B-v0.1", []),  # Mixtral is no Mistral
    ],
)
def test_hub_ids_have_the_names_of_geometries(hub_id: str, names: list[str]) -> None:
    assert geometries_like(hub_id) == names
    meant = f"did you mean {names[0]}?" if names else "arborsim models lists those shipped"
    with pytest.raises(UsageError, match="not on a hub") as raised:
        load_geometry(hub_id)
    assert meant in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_geometry_is_like_itself() -> None:
    for name in geometry_names():
        assert geometries_like(f"someone/{name.upper()}-Instruct") == [name]


def test_an_unknown_family_is_read_as_another(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "model_type": "unheard_of", "sliding_window": None}))
    known = load(tmp_path / ".", model_type="llama", sliding_window=None)
    path.write_text(json.dumps({**BASE, "model_type": "unheard_of", "sliding_window": None}))
    found = load_geometry(f"{path} as llama")
    assert found.name == f"{tmp_path.name}, read as llama"
    assert replace(found, name=known.name) == known


def test_what_gpus_hold_again() -> None:
    """KV heads where they are fewer than GPUs, and latent vectors on each."""
    copies = {
        ("llama-3.1-8b", 4): 1, ("llama-3.1-8b", 16): 2, ("qwen2.5-7b", 8): 2,
        ("llama-3.1-8b", 3): 9 / 8, ("gemma-3-1b", 4): 4, ("deepseek-v3", 8): 8,
    }  # fmt: skip
    for (name, gpus), number in copies.items():
        assert load_geometry(name).kv_copies(gpus) == number
    deepseek = load_geometry("deepseek-v3")
    assert deepseek.weight_bytes_on(8, False) == deepseek.weight_bytes
    latent = 7168 * (1536 + 576) + 1536 * 24576 + 512 * 32768 + 16384 * 7168
    more = deepseek.weight_bytes_on(8, True) - deepseek.weight_bytes
    assert more == pytest.approx(7 * 61 * latent * (1 + 4 / 128**2), rel=1e-6)


def test_the_pool_of_latent_vectors_on_eight_gpus() -> None:
    options = ServingOptions(tensor_parallel=8)
    cost = CostModel(load_profile("h200"), load_geometry("deepseek-v3"))
    whole = KvPool.of(cost, options, 0)
    rest = whole.hbm_bytes - whole.reserve_bytes - whole.weight_bytes
    assert whole.kv_bytes == rest // 8  # each holds all: about 51.5 GB, 0.73 million tokens
    apart = KvPool.of(cost, replace(options, data_parallel_attention=True), 0)
    assert 4 * whole.kv_bytes < apart.kv_bytes < rest
