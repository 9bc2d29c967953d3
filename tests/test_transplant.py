"""Replays as if on models whose caches have other forms: right in bytes, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.tiers import Budget
from arborsim.machine.config import with_kv_dtype
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.results import ReplayResult
from arborsim.policies.registry import build
from arborsim.products.replay.run import Replay
from arborsim.products.replay.words import left_out
from tests.helpers.traces import make_trace


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One chain of 1,240 tokens with the vectors of all layers."""
    return make_trace(
        tmp_path_factory.mktemp("t") / "linear.parquet", kind="linear", prompt=40, nodes=6,
        block=(200, 200), episodes=1, capture="qkv", layers=2, qkv_layers=(0, 1),
    )  # fmt: skip


def play(path: Path, geometry: Geometry, *names: str, **options: Any) -> ReplayResult:
    settings = {"hierarchy": {"interval": "8", "recent": "16"}}
    policies = [build(name, settings.get(name)) for name in names]
    machine = Machine(load_profile("h100"), geometry)
    return Replay([path], policies, [Budget.parse("0.5")], machine, quality=False, **options).run()


@pytest.mark.parametrize(
    "name", ["gemma-3-1b", "mistral-7b-v0.1", "deepseek-v2-lite", "llama-3.1-8b"]
)
def test_full_retention_holds_the_bytes_of_a_sequence(linear: Path, name: str) -> None:
    geometry = load_geometry(name)
    (full,) = play(linear, geometry, "full").episodes
    tokens = full.measured.prompt_tokens + full.measured.generated_tokens
    assert full.measured.peak_hbm_kv_bytes == geometry.path_bytes(tokens)
    assert tokens > 1_200


def test_a_budget_leaves_the_windows(linear: Path) -> None:
    geometry = load_geometry("gemma-3-1b")
    full, random = play(linear, geometry, "full", "random").episodes
    # The budget is held but for the newest token; windows of 512 are full in both.
    held = random.measured.peak_hbm_kv_tokens
    windows = geometry.window_bytes_per_token * geometry.window
    assert random.measured.peak_hbm_kv_bytes == held * geometry.full_bytes_per_token + windows
    assert held < 0.51 * full.measured.peak_hbm_kv_tokens


def test_half_the_bytes_with_a_cache_in_8_bits(linear: Path) -> None:
    plain = load_geometry("llama-3.1-8b")
    whole, half = (
        play(linear, geometry, "random").episodes[0].measured
        for geometry in (plain, with_kv_dtype(plain, "fp8"))
    )
    assert whole.peak_hbm_kv_bytes == 2 * half.peak_hbm_kv_bytes
    assert whole.weight_bytes == half.weight_bytes
    assert whole.time.decode_s > half.time.decode_s


@pytest.mark.parametrize(
    ("model", "dtype", "policy", "message"),
    [
        ("mistral-7b-v0.1", "bf16", "random", "every layer of mistral-7b-v0.1 forgets"),
        ("deepseek-v2-lite", "bf16", "h2o", "one latent vector of a token for all heads"),
        ("llama-3.1-8b", "fp8", "arkv", "in 8 bits already"),
    ],
)
def test_what_has_no_meaning_is_refused_or_named(
    linear: Path, model: str, dtype: str, policy: str, message: str
) -> None:
    geometry = with_kv_dtype(load_geometry(model), dtype)
    with pytest.raises(UsageError, match=message):
        play(linear, geometry, policy)
    result = play(linear, geometry, "full", policy)
    assert {episode.policy for episode in result.episodes} == {"full"}
    (line,) = left_out(result.left_out)
    assert message in line
    assert line.startswith("Left out: ")


def test_a_setting_that_quantises_a_cache_in_8_bits(linear: Path) -> None:
    geometry = with_kv_dtype(load_geometry("llama-3.1-8b"), "fp8")
    assert play(linear, geometry, "hierarchy").episodes  # the default does not
    policy = build("hierarchy", {"interval": "8", "recent": "16", "quantised_ratio": "0.5"})
    job = Replay(
        [linear], [policy], [Budget.parse("0.5")], Machine(load_profile("h100"), geometry),
        quality=False,
    )  # fmt: skip
    with pytest.raises(UsageError, match="in 8 bits already"):
        job.run()


def test_on_the_command_line(linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["replay", str(linear), "--policy", "random", "--no-quality", "--no-oracle"]
    assert main([*common, "--gpu", "a100", "--host", "ddr5-2tb", "--kv-dtype", "fp16"]) == 0
    assert "random" in capsys.readouterr().out
    assert main([*common, "--model", "mistral-7b-v0.1"]) == 2
    assert "forgets" in capsys.readouterr().err
    assert main([*common, "--kv-dtype", "int4"]) == 2
    assert "unknown type of a KV cache" in capsys.readouterr().err
