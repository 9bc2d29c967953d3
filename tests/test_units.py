"""Numbers with units, as people paste them into options, calls and files."""

from __future__ import annotations

from pathlib import Path

import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.tiers import Budget
from arborsim.core.units import measured, read
from arborsim.machine.lookup import load_profile
from arborsim.products.choices import whole_numbers
from arborsim.products.declare import written
from arborsim.products.plan.quick import QuickOptions
from arborsim.products.replay.ask import ReplayOptions


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("tokens", "8k", 8_000), ("tokens", "8K", 8_000), ("tokens", "8Ki", 8_192),
        ("tokens", "1.5M", 1_500_000), ("share", "50%", 0.5), ("share", "12.5 %", 0.125),
        ("hbm_bytes", "24GiB", 24 * 2**30), ("hbm_bytes", "24 GB", 24e9), ("bytes", "80g", 80e9),
        ("hbm_bytes", "81559MiB", 81_559 * 2**20), ("hbm_bytes_per_s", "3.35TB/s", 3.35e12),
        ("flops_per_s", "989.5 TFLOP/s", 989.5e12), ("wait_s", "1m30s", 90),
        ("wait_s", "40ms", 0.04),
        ("wait_s", "2 min", 120), ("wait_s", "1h 5m", 3_900), ("wait_s", "10us", 1e-5),
        ("rate_per_s", "20rps", 20), ("load", "20/min", 1 / 3), ("load", "1200 per hour", 1 / 3),
        ("load", "0.5 searches/s", 0.5), ("load", "2k req/s", 2_000),
    ],
)  # fmt: skip
def test_units(name: str, text: str, number: float) -> None:
    assert read(measured(name), text) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokens", "40ms"), ("tokens", "8 kk"), ("tokens", "k"), ("tokens", ""), ("share", "5%%"),
        ("bytes", "8 s"), ("bytes", "1GB2MB"), ("wait_s", "90"), ("wait_s", "1m30"),
        ("load", "20/fortnight"), ("load", "rps"), ("tokens", "1e999k"), ("wait_s", "-"),
    ],
)  # fmt: skip
def test_what_is_no_number_with_such_a_unit(name: str, text: str) -> None:
    if text == "1e999k":
        with pytest.raises(UsageError, match="whole number"):
            written(name, text, int)
        return
    with pytest.raises(ValueError, match=r"no number|is none of"):
        read(measured(name), text)


def test_budgets_with_units() -> None:
    assert Budget.parse("8k") == Budget("8000", tokens=8_000)
    assert Budget.parse("50%") == Budget.parse("0.5") == Budget("0.5", share=0.5)
    assert Budget.parse("100%") == Budget("1", share=1.0)
    for text in ("150%", "8 s", "0%"):
        with pytest.raises(UsageError, match="budget"):
            Budget.parse(text)
    assert whole_numbers("1k,2Ki", "--width") == [1_000, 2_048]


def test_a_call_and_a_command_read_them_alike(capsys: pytest.CaptureFixture[str]) -> None:
    made = ReplayOptions("t.parquet", page_size="16", episodes="1k")  # type: ignore[arg-type]
    assert (made.page_size, made.episodes) == (16, 1_000)
    with pytest.raises(UsageError, match="page_size must be a whole number, such as 8k or 50%"):
        ReplayOptions("t.parquet", page_size="40ms")  # type: ignore[arg-type]
    trace = "traces/chain-tree.parquet"
    command = ["replay", trace, "--budget", "50%", "--episodes", "0.001k", "--json"]
    assert main(command) == 0
    called = arborsim.replay(trace, budgets="0.5", episodes=1)
    assert capsys.readouterr().out == called.to_json() + "\n"


def test_files_read_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\nname = "mine"\nhbm_bytes = "64GiB"\nhbm_bytes_per_s = "2 TB/s"\n'
        'mfu = "70%"\npcie_latency_s = "15us"\nall_reduce_bytes_per_s = ["1GB/s", "2GB/s", 3e9]\n'
    )
    mine = load_profile(path)
    assert (mine.hbm_bytes, mine.hbm_bytes_per_s, mine.mfu) == (64 * 2**30, 2e12, 0.7)
    assert mine.pcie_latency_s == pytest.approx(15e-6)
    assert mine.all_reduce_bytes_per_s == (1e9, 2e9, 3e9)
    path.write_text('base = "h100"\nhbm_bytes = "64 s"\n')
    with pytest.raises(UsageError, match="hbm_bytes must be a whole number, not '64 s'"):
        load_profile(path)


def test_quick_questions_read_them() -> None:
    asked = QuickOptions(
        model="llama-3.1-8b", rate="20rps", p95="1m30s", prompt="2k", chain="tokens=4k..8k",
    ).tables("h100")  # fmt: skip
    assert asked["arrivals"]["rate_per_s"] == 20
    assert asked["target"] == {"percentile": {"search": 95}, "search": "1m30s"}
    made = asked["mix"][0]["generated"]
    assert made["prompt_tokens"] == 2_000
    assert made["thought_tokens"] == "uniform:low=4000,high=8000"
