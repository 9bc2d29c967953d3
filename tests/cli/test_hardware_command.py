"""`arborsim hardware` and `arborsim models`: what is listed adds up and says where it is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.machine.lookup import geometry_names, host_names, load_profile, profile_names


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_the_list_marks_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "hardware").splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert set(profile_names()) | set(host_names()) <= set(rows)
    assert rows["h100"][1:5] == ["85.5", "3350", "990", "50"]
    assert rows["rtx5080"][1:5] == ["17.1", "960", "113?", "50?"]
    assert rows["h100"][-1] == "2.69-4.76"
    assert rows["rtx5080"][-1] == "-"
    assert rows["h100"][5] == str(len(load_profile("h100").assumed()))


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_lists_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (
        ["hardware"], ["models"], ["hardware", "h100"], ["models", "gemma-3-12b"],
        ["hardware", "--host", "ddr4-256gb"], ["models", "--gpu", "rtx6000-ada"],
    ):  # fmt: skip
        text = run(capsys, *arguments)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= columns, arguments
        assert "…" not in text


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_no_column_vanishes_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = run(capsys, "hardware", "--host", "ddr4-256gb")
    for fact in ("Each GPU in host ddr4-256gb", "rtx6000-ada", "5.98-10.57", "2250", "192.3"):
        assert fact in text
    assert "ddr5-2tb" not in text
    text = run(capsys, "models", "--gpu", "l40s")
    facts = ("gemma-3-12b", "48", "11.77", "393,216", "window 1,024 in 40", "layers")
    row = text[text.index("gemma-3-12b") :].split("gemma-3-1b")[0]
    assert [fact for fact in facts[:-1] if fact not in row] == []
    assert "layers" in text


def test_one_gpu_number_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "hardware", "h100", "--host", "ddr5-2tb")
    assert "3350 GB/s" in text
    assert "NVIDIA driver (nvidia-smi), read 2026-11: 81,559 MiB" in text
    assert "(host ddr5-2tb)" in text
    assert "2.69-4.76 USD per hour" in text


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    h100 = as_json(capsys, "hardware", "h100")
    numbers = {number["name"]: number for number in h100["numbers"]}
    assert numbers["hbm_bytes_per_s"]["value"] == 3350
    assert numbers["hbm_bytes_per_s"]["unit"] == "GB/s"
    assert numbers["hbm_bytes_per_s"]["date"] == "2026-11"
    assert not numbers["hbm_bytes_per_s"]["assumed"]
    assert numbers["mfu"]["assumed"]
    assert h100["price_per_hour"]["low"] == 2.69
    assert [one["name"] for one in as_json(capsys, "hardware")] == profile_names()


def test_prices_say_their_source_before_their_date(capsys: pytest.CaptureFixture[str]) -> None:
    said = "lowest and highest list prices of clouds, 2026-03"
    assert f"Prices: {said}; --prices FILE" in " ".join(run(capsys, "hardware").split())
    assert f"2.69-4.76 USD per hour: {said}" in " ".join(run(capsys, "hardware", "h100").split())


def test_own_prices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\ndate = "2026-11"\nsource = "us"\n[per_hour]\nh100 = 2.5\n')
    assert "2.50 EUR per hour: us, 2026-11" in run(
        capsys, "hardware", "h100", "--prices", str(path)
    )


def test_the_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {line.split()[0]: line for line in run(capsys, "models").splitlines() if line}
    assert set(geometry_names()) <= set(rows)
    assert "131,072" in rows["llama-3.1-8b"]
    assert "window 1,024 in 40" in rows["gemma-3-12b"]
    assert "latent" in rows["deepseek-v2-lite"]
    assert rows["mistral-7b-v0.1"].endswith("any number")
    assert rows["llama-3.1-70b"].split()[-1] == "0"
    assert rows["gpt-oss-120b"].split()[1:3] == ["116.83", "65.25"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama-3.1-8b", ["32 layers x 2 (K, V) x 8 KV heads x 128 x 2 B = 131,072 B per token"]),
        ("deepseek-v2-lite", [
            "27 layers x (512 latent + 64 rotary) x 2 B = 31,104 B per token",
            "2.66e9 of them (6 of 64 experts)",
        ]),
        ("gpt-oss-120b", [
            "116,829,156,672 weights, 65.25 GB; a token uses 5.71e9",
            "114,701,598,720 in experts x 4.25 bits (mxfp4, scales included) = 60.99 GB",
            "2,127,557,952 not quantised x 2 B = 4.26 GB",
        ]),
        ("gemma-3-1b", [
            "2 (K, V) x 1 KV heads x 256 x 2 B = 1,024 B per token and layer",
            "4 layers keep every token: 4,096 B per token",
            "22 layers keep the newest 512: 22,528 B per token of these, 11.5 MB per sequence",
        ]),
    ],
)  # fmt: skip
def test_how_the_bytes_of_a_token_come_about(
    capsys: pytest.CaptureFixture[str], name: str, parts: list[str]
) -> None:
    text = " ".join(run(capsys, "models", name).split())
    for part in parts:
        assert part in text


def test_the_parts_of_the_memory_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "models", "llama-3.1-8b", "--gpu", "h100")
    sizes = {
        line.split("  ")[0].strip(): float(line.split(" GB")[0].split()[-1])
        for line in text.splitlines()
        if " GB  " in line and not line.startswith("8,030")
    }
    parts = ("- reserve", "- weights", "- workspace", "- context")
    rest = sizes["memory"] - sum(sizes[part] for part in parts)
    assert sizes["= pool"] == pytest.approx(rest, abs=0.03)
    assert sizes["- weights"] == pytest.approx(16.06)


def test_the_workspace_says_which_pass_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["models", "llama-3.1-8b", "--gpu", "l40s", "--prefill-tokens", "1000"]
    text = " ".join(run(capsys, *command).split())
    assert "in a pass over 1,000 prompt tokens (--prefill-tokens); `arborsim plan` takes" in text
    every = " ".join(run(capsys, "models").split())
    assert "the workspace of a pass over 8,192 prompt tokens" in every


def test_tokens_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    plain = as_json(capsys, "models", "llama-3.1-8b")["pool"]
    fp8 = as_json(capsys, "models", "llama-3.1-8b", "--kv-dtype", "fp8")
    assert fp8["kv_bytes_per_token"] == 65_536
    assert fp8["pool"]["tokens"] // 2 == plain["tokens"]
    assert as_json(capsys, "models", "mistral-7b-v0.1")["pool"]["tokens"] is None
    long_pass = as_json(capsys, "models", "llama-3.1-8b", "--prefill-tokens", "65536")["pool"]
    assert long_pass["tokens"] < plain["tokens"]


def test_weights_in_fewer_bits(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = as_json(capsys, "models", "llama-3.1-8b", "--weights", "fp8", "--kv-dtype", "fp8")
    assert fp8["name"] == "llama-3.1-8b, fp8 weights, fp8 KV"
    assert fp8["weight_bytes"] == 2 * 8_030_261_248 - 6_979_321_856
    assert fp8["pool"]["weight_bytes"] == fp8["weight_bytes"]
    text = run(capsys, "models", "deepseek-v3", "--weights", "nvfp4")
    assert "15,156,838,400 in other matrices of the layers x 4.5 bits (nvfp4" in text
    assert "671,026,419,200 weights x 2 B" in run(
        capsys, "models", "deepseek-v3", "--weights", "bf16"
    )


def test_own_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100,
    }))  # fmt: skip
    assert "2 layers x 2 (K, V) x 4 KV heads x 16 x 2 B = 512 B" in run(capsys, "models", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware", "h1000"], "unknown GPU 'h1000': did you mean"),
        (["hardware", "h100", "--host", "ddr"], "unknown host 'ddr'"),
        (["hardware", "--prices", "none.toml"], "none.toml: cannot be read"),
        (["models", "llama-9"], "unknown model 'llama-9'"),
        (["models", "--gpu", "h10"], "unknown GPU"),
        (["models", "llama-3.1-8b", "--kv-dtype", "fp4"], "unknown type of a KV cache 'fp4'"),
        (["models", "--weights", "fp3"], "unknown type of weights 'fp3': did you mean fp32 or fp8"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
