"""Profiles and geometries: facts, names and bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.config import KV_DTYPES, with_kv_dtype
from arborsim.machine.lookup import (
    geometry_names,
    load_geometry,
    load_host,
    load_profile,
    profile_name,
    profile_names,
)
from arborsim.machine.names import aliases, plain, type_name
from arborsim.machine.weights import WEIGHTS, with_weights

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes_per_token"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("qwen2.5-7b", 7_615_616_512, 57_344),
        ("r1-distill-qwen-7b", 7_615_616_512, 57_344),
        ("chain", 1_316_480, 2 * 6 * 2 * 64 * 4),
        ("game24", 1_235_584, 2 * 6 * 2 * 64 * 4),
    ],
)
def test_published_sizes(name: str, parameters: int, kv_bytes_per_token: int) -> None:
    geometry = load_geometry(name)
    assert geometry.parameters == parameters
    assert geometry.kv_bytes_per_token == kv_bytes_per_token
    assert geometry.name == name


def test_everything_shipped_loads() -> None:
    assert profile_names() == [
        "a100-40", "a100-80", "a6000", "b200", "h100", "h100-nvl", "h200", "l40s", "rtx4090",
        "rtx5080", "rtx6000-ada",
    ]  # fmt: skip
    assert [load_profile(name).name for name in profile_names()] == profile_names()
    assert [load_geometry(name).name for name in geometry_names()] == geometry_names()


def test_every_number_has_a_source_or_is_assumed() -> None:
    h200 = load_profile("H200")
    assert "datasheet" in h200.source("hbm_bytes_per_s")
    assert h200.source("pageable_factor").startswith("assumed")
    assert "pageable_factor" in h200.assumed()
    assert "hbm_bytes" not in h200.assumed()
    assert load_profile("a100").name == "a100-80"


def test_unknown_names_carry_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean .*h100"):
        load_profile("h1000")
    with pytest.raises(UnknownName, match=r"llama-3\.1-8b"):
        load_geometry("llama-3-8b")


@pytest.mark.parametrize(
    ("pasted", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"),
        ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA L40S", "l40s"), ("H100-80GB", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 5080", "rtx5080"),
        ("NVIDIA RTX A6000", "a6000"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("h100_sxm", "h100"), ("a100_sxm", "a100-80"), ("RTX6000Ada-48GB", "rtx6000-ada"),
    ],
)  # fmt: skip
def test_gpus_as_drivers_and_engines_call_them(pasted: str, profile: str) -> None:
    assert load_profile(pasted).name == profile
    assert profile_name(pasted) == profile


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40",
    ],
)  # fmt: skip
def test_another_card_with_the_same_chip_is_not_it(other: str) -> None:
    assert profile_name(other) is None
    with pytest.raises(
        UnknownName, match=r'(did you mean|known:) .* base = "h100" and what differs'
    ):
        load_profile(other)


@pytest.mark.parametrize(
    ("pasted", "weights", "cache"),
    [
        ("bfloat16", "bf16", "bf16"), ("half", "fp16", "fp16"), ("float32", "fp32", "fp32"),
        ("FP8_E4M3", "fp8", "fp8"), ("float8_e4m3fn", "fp8", "fp8"), ("auto", "", ""),
        ("INT4", "int4", None), ("awq", "int4", None), ("w4a16", "int4", None),
        ("modelopt_fp4", "nvfp4", None), ("fp8_e5m2", None, "fp8"),
        ("fp8_block", "fp8_block", None),
    ],
)  # fmt: skip
def test_types_as_engines_and_files_call_them(
    pasted: str, weights: str | None, cache: str | None
) -> None:
    llama = load_geometry("llama-3.1-8b")
    for what, known, meant, made in (
        ("weights", WEIGHTS, weights, with_weights), ("a KV cache", KV_DTYPES, cache, with_kv_dtype)
    ):  # fmt: skip
        if meant is None:
            with pytest.raises(UnknownName, match=f"unknown type of {what} '{pasted}'"):
                made(llama, pasted)
            continue
        assert type_name(what, known, pasted) == meant
        assert made(llama, pasted) == (made(llama, meant) if meant else llama)


def test_every_other_name_means_what_is_shipped() -> None:
    assert set(aliases("profiles").values()) <= set(profile_names())
    assert set(aliases("geometries").values()) <= set(geometry_names())
    assert set(aliases("types of weights").values()) <= {*WEIGHTS, ""}
    assert set(aliases("types of a KV cache").values()) <= {*KV_DTYPES, ""}
    for kind in ("profiles", "geometries", "types of weights", "types of a KV cache"):
        assert [name for name in aliases(kind) if plain(name) != name] == []


def write(folder: Path, text: str, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def config(folder: Path, **changes: Any) -> Path:
    return write(folder, json.dumps({**CONFIG, **changes}))


def test_config_defaults(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    geometry = load_geometry(config(tmp_path / "my-model"))
    assert geometry.name == "my-model"
    assert (geometry.kv_heads, geometry.head_dim) == (4, 16)
    assert geometry.kv_bytes_per_element == 2
    assert load_geometry(str(tmp_path / "my-model") + "/") == geometry


def test_config_head_dim_and_types(tmp_path: Path) -> None:
    path = config(tmp_path, head_dim=32, num_key_value_heads=1, torch_dtype="float32")
    geometry = load_geometry(path)
    assert (geometry.kv_heads, geometry.head_dim) == (1, 32)
    assert geometry.kv_bytes_per_token == 2 * 2 * 1 * 32 * 4
    tied = load_geometry(config(tmp_path, tie_word_embeddings=True))
    assert load_geometry(config(tmp_path)).parameters - tied.parameters == 100 * 64
    nested = write(tmp_path, json.dumps({"text_config": CONFIG, "dtype": "float16"}))
    assert load_geometry(nested).layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": True}, "positive whole number"),
        ({"num_attention_heads": 5}, "no multiple of 5"),
        ({"torch_dtype": "int3"}, "none of float32"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_experts": 64}, "mixture of experts"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_configs_that_cannot_be_counted(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_geometry(config(tmp_path, **changes))


def test_unused_sliding_window_is_fine(tmp_path: Path) -> None:
    plain = load_geometry(config(tmp_path))
    assert load_geometry(config(tmp_path, sliding_window=131072, use_sliding_window=False)) == plain


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(No such file"):
        load_profile(tmp_path / "none.toml")
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory"):
        load_profile(tmp_path)
    with pytest.raises(UsageError, match="not valid JSON"):
        load_geometry(write(tmp_path, "{"))
    with pytest.raises(UsageError, match="holds no JSON object"):
        load_geometry(write(tmp_path, "[]"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_profile(tmp_path / "binary.toml")


def profile_text(**changes: str) -> str:
    """The H100 profile with lines replaced; an empty value leaves a line out."""
    from importlib import resources

    text = resources.files("arborsim.machine").joinpath("profiles/h100.toml").read_text()
    lines = []
    for line in text.splitlines():
        key = line.split(" = ")[0]
        if key in changes and "[sources]" not in lines:
            line = f"{key} = {changes[key]}" if changes[key] else ""
        lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mfu": ""}, "mfu missing; with base"),
        ({"mfu": "1.5"}, "mfu must be at most 1, not 1.5"),
        ({"mfu": '"high"'}, "mine.toml: mfu must be a number, not 'high'"),
        ({"hbm_bytes": "1.5"}, "hbm_bytes must be a whole number"),
        ({"hbm_bytes_per_s": "0"}, "hbm_bytes_per_s must be above 0"),
        ({"per_layer_s": "-1e-6"}, "per_layer_s must be at least 0"),
        ({"reserve_share": "1.0"}, "reserve_share must be below 1"),
        ({"block_bytes": "[8192, 4096, 1, 2]"}, "must rise"),
        ({"name": '"x"\nhbm_byte = 3'}, "did you mean .*hbm_bytes"),
        ({"name": '"x"\noverlap = 1.5'}, "overlap must be at most 1"),
        ({"name": '"x"\nevidence = 3'}, r"\[evidence\] must be a table"),
        ({"name": "'"}, "not valid TOML"),
    ],
)
def test_bad_profiles(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_profile(write(tmp_path, profile_text(**changes), "mine.toml"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mbu = 1.5", "mine.toml: mbu must be at most 1, not 1.5"),
        ("hbm_bytes_per_s = inf", "mine.toml: hbm_bytes_per_s must be a finite number, not inf"),
        ("hbm_bytes = nan", "mine.toml: hbm_bytes must be a whole number, not nan"),
        (
            "[policies.h2o]\niteration_s = inf",
            "mine.toml: [policies.h2o] iteration_s must be a finite number, not inf",
        ),
    ],
)
def test_the_file_is_blamed_and_not_its_base(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, f'base = "h100"\n{line}\n', "mine.toml")
    with pytest.raises(UsageError) as error:
        load_profile(path)
    assert message in str(error.value)
    assert "h100" not in str(error.value)


def test_a_host_that_is_wrong_is_blamed_by_its_file(tmp_path: Path) -> None:
    numbers = "ddr_bytes = 1\nddr_bytes_per_s = -2.5\nh2d_bytes_per_s = 1\nd2h_bytes_per_s = 1\n"
    path = write(tmp_path, f'name = "x"\n{numbers}', "host.toml")
    with pytest.raises(UsageError, match=r"host\.toml: ddr_bytes_per_s must be above 0"):
        load_host(path)


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_profile, "ddr4-256gb", "is a host, not a GPU: give it as --host ddr4-256gb"),
        (load_profile, "Llama-3.1-8B", "is a model, not a GPU: give it as --model Llama-3.1-8B"),
        (load_host, "4090", "is a GPU, not a host: give it as --gpu 4090"),
        (load_geometry, "h200", "is a GPU, not a model: give it as --gpu h200"),
        (load_geometry, "ddr5-2tb", "is a host, not a model: give it as --host ddr5-2tb"),
    ],
)
def test_a_name_of_another_kind_says_where_it_goes(
    load: Callable[[str], object], name: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        load(name)
    assert message in str(error.value)


def test_users_profile(tmp_path: Path) -> None:
    path = write(tmp_path, profile_text(name='"mine"', mfu="0.5"), "mine.toml")
    assert load_profile(path).name == "mine"
    assert load_profile(str(path)).mfu == 0.5
