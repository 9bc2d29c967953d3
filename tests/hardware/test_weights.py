"""Weights in fewer bits, mixtures of experts, and the matrix products that make up a model."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.geometry import HEAD, KV_B, ROUTER, WEIGHT_BITS, Geometry
from arborsim.machine.config import with_kv_dtype, with_types
from arborsim.machine.lookup import config_of, geometry_names, load_geometry
from arborsim.machine.weights import WEIGHTS, weights_type, with_weights
from arborsim.products.provenance import machine_line
from arborsim.trace.schema import TraceInfo

MODELS = sorted(geometry_names())
#: Layers of Llama-3.1-8B: query and output, keys and values, gate, up and down.
LLAMA_MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
SMALL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def load(folder: Path, base: dict[str, Any], **changes: Any) -> Geometry:
    path = folder / "config.json"
    path.write_text(json.dumps({**base, **changes}), encoding="utf-8")
    return load_geometry(path)


def routed(geometry: Geometry, gpus: int = 1) -> int:
    """Weights of the routed experts on one of `gpus`."""
    one = geometry.experts_product(gpus)
    return 3 * one.hidden * one.expert_dim * one.experts * one.layers if one else 0


# ------------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("fp8", 8.0), ("fp8_block", 8.001953125), ("int4", 4.125), ("nvfp4", 4.5), ("mxfp4", 4.25)],
)
def test_bytes_of_each_type(kind: str, bits: float) -> None:
    plain = load_geometry("llama-3.1-8b")
    quantised = with_weights(plain, kind)
    assert WEIGHT_BITS[kind] == WEIGHTS[kind] == bits
    assert plain.layer_matrices == LLAMA_MATRICES
    rest = plain.parameters - LLAMA_MATRICES  # embeddings, head and norms
    assert quantised.weight_bytes == 2 * rest + math.ceil(LLAMA_MATRICES * bits / 8)
    assert quantised.weight_bytes_read(7) == quantised.weight_bytes
    assert (quantised.name, quantised.weights) == (f"llama-3.1-8b, {kind} weights", kind)
    assert quantised.active_parameters == plain.active_parameters


@pytest.mark.parametrize("name", MODELS)
def test_without_quantisation_weights_have_their_width(name: str) -> None:
    for dtype, width in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        geometry = with_weights(load_geometry(name), dtype)
        assert geometry.weight_bytes == width * geometry.parameters
        assert isinstance(geometry.weight_bytes, int)
        assert geometry.expert_bytes == width * geometry.expert_parameters
        assert geometry.weight_bytes_read(1) == width * geometry.active_parameters
        assert with_weights(geometry, dtype) is geometry
        assert weights_type(geometry) == f"{8 * width}-bit"


def test_weights_as_published() -> None:
    """Sizes of the files of gpt-oss-120b (60.8 GiB), and of DeepSeek-V3 less the extra layer."""
    openai = load_geometry("gpt-oss-120b")
    assert openai.weight_bytes / 2**30 == pytest.approx(60.8, abs=0.05)
    assert (openai.weights, openai.expert_weights, openai.expert_type) == ("", "mxfp4", "mxfp4")
    assert load_geometry("gpt-oss-20b").weight_bytes / 2**30 == pytest.approx(12.8, abs=0.05)
    deepseek = load_geometry("deepseek-r1")
    assert deepseek.weights == deepseek.expert_type == "fp8_block"
    assert deepseek.weight_bytes == pytest.approx(673.2e9, rel=0.001)


def test_weights_that_a_token_uses() -> None:
    active = {"qwen3-235b-a22b": 22e9, "qwen3-30b-a3b": 3.3e9, "deepseek-v3": 37e9}
    for name, published in active.items():
        assert load_geometry(name).active_parameters == pytest.approx(published, rel=0.02)
    for name, published in {"gpt-oss-120b": 5.13e9, "gpt-oss-20b": 3.61e9}.items():
        geometry = load_geometry(name)  # published without the input's embeddings
        used = geometry.active_parameters - geometry.vocab * geometry.hidden
        assert used == pytest.approx(published, rel=0.002)


def test_weights_that_a_pass_reads() -> None:
    geometry = load_geometry("gpt-oss-120b")
    read = geometry.weight_bytes_read(np.array([1, 8, 10_000]))
    rest = geometry.weight_bytes - geometry.expert_bytes
    assert read[0] == pytest.approx(rest + geometry.expert_bytes * 4 / 128)
    assert read[2] == pytest.approx(geometry.weight_bytes)
    assert read[0] < read[1] < read[2]


def test_types_by_name() -> None:
    plain = load_geometry("qwen3-30b-a3b")
    both = with_types(plain, "nvfp4", "fp8")
    assert both.name == "qwen3-30b-a3b, nvfp4 weights, fp8 KV"
    assert both.weight_bytes == pytest.approx(30.5e9 * 4.5 / 8, rel=0.06)
    assert with_types(plain) is plain
    openai = with_weights(load_geometry("gpt-oss-20b"), "bf16")
    assert weights_type(openai) == "16-bit"
    assert weights_type(load_geometry("gpt-oss-20b")) == "16-bit, experts mxfp4"
    assert weights_type(both) == "nvfp4"
    with pytest.raises(UnknownName, match="unknown type of weights 'int3': did you mean int4"):
        with_weights(plain, "int3")


def test_a_line_says_both_types_in_either_order() -> None:
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine

    plain = load_geometry("llama-3.1-8b")
    for geometry in (
        with_types(plain, "int4", "fp8"),
        with_weights(with_kv_dtype(plain, "fp8"), "int4"),
    ):
        line = machine_line(Machine(load_profile("h100"), geometry), [])
        assert "model llama-3.1-8b, int4 weights, 8-bit KV (65,536 B/token)" in line


def test_what_is_stored() -> None:
    for geometry in (
        with_weights(load_geometry("llama-3.1-8b"), "int4"), load_geometry("deepseek-v3"),
        load_geometry("gpt-oss-20b"),
    ):  # fmt: skip
        info = TraceInfo(geometry, "m", "t", "s")
        assert geometry.weight_bytes
        assert TraceInfo.from_json(info.to_json()) == info
        assert pickle.loads(pickle.dumps(geometry)) == geometry
    stored = load_geometry("llama-3.1-8b").to_dict()
    assert not {"weights", "expert_weights", "expert_dim", "query_rank"} & stored.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "int3"}, {"expert_weights": "fp8"}, {"expert_dim": 8, "expert_layers": 1},
        {"shared_dim": 8}, {"query_rank": 8},
    ],
)  # fmt: skip
def test_numbers_that_contradict_each_other(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"none of fp8|no experts|go together"):
        replace(load_geometry("llama-3.1-8b"), **changes)
    mixture = load_geometry("qwen3-30b-a3b")
    for other in (
        {"expert_dim": 0},
        {"expert_layers": 0},
        {"expert_layers": 49},
        {"expert_dim": 769},
    ):
        with pytest.raises(ValueError, match=r"go together|have experts|wider"):
            replace(mixture, **other)


# --------------------------------------------------------------------- products


@pytest.mark.parametrize("name", MODELS)
def test_products_add_up_to_the_model(name: str) -> None:
    geometry = load_geometry(name)
    products = {each.name: each for each in geometry.products()}
    assert len(products) == len(geometry.products())
    embeddings = geometry.vocab * geometry.hidden
    total = sum(each.size for each in products.values()) + routed(geometry)
    tied = config_of(name).get("tie_word_embeddings", False)
    whole = total if tied else total + embeddings
    # Norms and biases are the rest; of the smallest models they are more.
    assert whole == pytest.approx(geometry.parameters, rel=0.005 if geometry.layers > 6 else 0.02)
    assert products[HEAD][1:] == (geometry.vocab, geometry.hidden, 1, "")


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(
    "name", ["llama-3.1-70b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3"]
)
def test_the_parts_of_gpus_cover_the_whole(name: str, gpus: int) -> None:
    geometry = load_geometry(name)
    replicated = {ROUTER, "q_a_kv_a"}
    for whole, part in zip(geometry.products(), geometry.products(gpus), strict=True):
        assert (part.name, part.times, part.weights) == (whole.name, whole.times, whole.weights)
        if whole.name in replicated:
            assert part == whole
        elif whole.name == "qkv":
            kv_heads = max(1, geometry.kv_heads // gpus)
            heads = geometry.heads // gpus + 2 * kv_heads
            assert part.out_features == heads * geometry.head_dim
            assert gpus * part.size >= whole.size
        else:
            assert gpus * part.size == whole.size
    assert gpus * routed(geometry, gpus) == routed(geometry)


def test_products_by_name() -> None:
    found = {each.name: each[1:] for each in load_geometry("deepseek-v3").products(8)}
    assert found == {
        "q_a_kv_a": (1536 + 512 + 64, 7168, 61, "fp8_block"),
        "q_b": (128 // 8 * 192, 1536, 61, "fp8_block"),
        KV_B: (128 // 8 * 256, 512, 61, "fp8_block"),
        "output": (7168, 128 // 8 * 128, 61, "fp8_block"),
        "gate_up": (2 * 18432 // 8, 7168, 3, "fp8_block"),
        "down": (7168, 18432 // 8, 3, "fp8_block"),
        ROUTER: (256, 7168, 58, ""),
        "shared_gate_up": (2 * 2048 // 8, 7168, 58, "fp8_block"),
        "shared_down": (7168, 2048 // 8, 58, "fp8_block"),
        HEAD: (129280 // 8, 7168, 1, ""),
    }
    assert load_geometry("deepseek-v3").experts_product(8) == (7168, 256, 256, 8, 58, "fp8_block")
    names = [each.name for each in load_geometry("gpt-oss-20b").products()]
    assert names == ["qkv", "output", ROUTER, HEAD]  # every layer has experts
    names = [each.name for each in load_geometry("deepseek-v2-lite").products()]
    assert names[:2] == ["query", "kv_a"]
    assert load_geometry("llama-3.1-8b").experts_product() is None


# --------------------------------------------------------------- configurations


def test_mixtral(tmp_path: Path) -> None:
    geometry = load(tmp_path, MIXTRAL)
    assert geometry.parameters == 46_702_792_704
    assert geometry.active_parameters == pytest.approx(12.88e9, rel=0.001)
    assert (geometry.experts, geometry.experts_per_token, geometry.expert_dim) == (8, 2, 14336)
    assert load(tmp_path, MIXTRAL, sliding_window=4096).window_layers == 32


def test_which_layers_have_experts(tmp_path: Path) -> None:
    for changes, layers in (
        ({}, 6), ({"decoder_sparse_step": 2}, 3), ({"mlp_only_layers": [0, 5, 5, 9]}, 4),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 2),
    ):  # fmt: skip
        geometry = load(tmp_path, SMALL, **changes)
        assert geometry.expert_layers == layers
        assert geometry.expert_parameters == layers * 8 * 3 * 64 * 32
    dense = load(tmp_path, SMALL, mlp_only_layers=list(range(6)))
    assert (dense.experts, dense.expert_layers) == (0, 0)


def test_gpt_oss_leaves_out_what_all_of_them_have(tmp_path: Path) -> None:
    base = {**SMALL, "model_type": "gpt_oss", "num_local_experts": 8, "head_dim": None}
    base |= {"num_experts": None, "num_experts_per_tok": None, "experts_per_token": 2}
    geometry = load(tmp_path, {k: v for k, v in base.items() if v}, sliding_window=128)
    assert (geometry.head_dim, geometry.window_layers, geometry.experts_per_token) == (64, 3, 2)
    assert geometry.expert_dim == 128
    assert geometry.expert_parameters == 6 * 8 * (3 * 64 * 128 + 2 * 128 + 64)  # with biases


def compressed(bits: int, kind: str, form: str = "", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, **more}
    return {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("described", "kind"),
    [
        ({}, ""),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, "int4"),
        (compressed(4, "int", "pack-quantized", group_size=128), "int4"),
        (compressed(8, "float", "float-quantized"), "fp8"),
        (compressed(8, "float", "float-quantized", block_structure=[128, 128]), "fp8_block"),
        (compressed(4, "float", "nvfp4-pack-quantized", group_size=16), "nvfp4"),
        (compressed(4, "float", "mxfp4-pack-quantized", group_size=32), "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "fp8"),
        # Single layers that are left out are counted as the others.
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn"]}, "fp8"),
    ],
)
def test_quantised_configurations(tmp_path: Path, described: dict[str, Any], kind: str) -> None:
    geometry = load(tmp_path, SMALL, quantization_config=described)
    assert (geometry.weights, geometry.expert_weights) == (kind, "")
    assert geometry.weight_bytes_per_element == 2


@pytest.mark.parametrize(
    "left_out",
    [
        ["lm_head", "model.layers.*.self_attn"], ["re:.*self_attn.*", "lm_head"],
        [f"model.layers.{layer}.self_attn*" for layer in range(6)],
    ],
)  # fmt: skip
def test_experts_alone_are_quantised(tmp_path: Path, left_out: list[str]) -> None:
    described = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    geometry = load(tmp_path, SMALL, quantization_config=described)
    assert (geometry.weights, geometry.expert_weights) == ("", "mxfp4")
    matrices = geometry.expert_parameters
    assert geometry.weight_bytes == 2 * (geometry.parameters - matrices) + matrices * 17 // 32
    nested = load(tmp_path, {"text_config": SMALL}, quantization_config=described)
    assert nested == geometry
    dense = {**SMALL, "model_type": "qwen3", "num_experts": 0}
    with pytest.raises(UsageError, match="its attention is left out, and there are no experts"):
        load(tmp_path, dense, quantization_config=described)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (3, "an object is expected, found 3"),
        ({"bits": 4}, "quant_method is not supported, found None"),
        ({"quant_method": "bitsandbytes"}, "not supported, found 'bitsandbytes'"),
        ({"quant_method": 3}, "quant_method is not supported, found 3"),
        ({"quant_method": "gptq", "bits": 3}, "gptq is supported in 4 bits only, found '3 bits'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "groups of int4 have 128"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "blocks of fp8 have 128 x 128"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo is none of"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "without a type"),
        (compressed(8, "int"), "of this type are not supported, found '8 int'"),
        (compressed(4, "float"), "of this type are not supported, found '4 float'"),
        ({"quant_method": "fp8", "ignore": "lm_head"}, "ignore must be a list"),
    ],
)
def test_quantised_configurations_that_are_refused(
    tmp_path: Path, described: object, message: str
) -> None:
    with pytest.raises(UsageError, match=f"quantised weights.*{message}.*give --weights"):
        load(tmp_path, SMALL, quantization_config=described)


def test_several_types_in_one_model(tmp_path: Path) -> None:
    described = compressed(8, "float")
    groups = described["config_groups"]
    groups["group_1"] = compressed(4, "int")["config_groups"]["group_0"]
    with pytest.raises(UsageError, match="several types in one model, found 'fp8 and int4'"):
        load(tmp_path, SMALL, quantization_config=described)


# ------------------------------------------------------------------ command line


def test_a_replay_reads_fewer_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    command = ["replay", str(trace), "--episodes", "1", "--json"]
    command += ["--policy", "full", "--no-quality", "--model", "llama-3.1-8b"]
    found = []
    for option in ([], ["--weights", "int4"]):
        assert main([*command, *option]) == 0
        found.append(json.loads(capsys.readouterr().out)["episodes"][0])
    sizes = [each["weight_bytes"] for each in found]
    assert sizes == [16_060_522_496, 5_700_591_616]
    assert found[1]["decode_s"] < 0.5 * found[0]["decode_s"]
    assert main([*command, "--weights", "int3"]) == 2
    error = capsys.readouterr().err
    assert "unknown type of weights 'int3': did you mean int4" in error
    assert error.count("\n") == 1


def test_types_of_several_recorded_models(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "traces"
    traces = [str(folder / f"{name}.parquet") for name in ("chain-linear", "game24-tot")]
    for option in ("--weights", "--kv-dtype"):
        assert main(["replay", *traces, "--policy", "full", option, "fp8"]) == 2
        error = capsys.readouterr().err
        assert f"{option}: the traces were recorded on several models; give --model" in error
