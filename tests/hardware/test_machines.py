"""GPUs, hosts and prices: published figures, sources, and files that build on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.lookup import (
    host_names,
    load_host,
    load_prices,
    load_profile,
    profile_names,
)

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("gpu", "memory_bytes", "gbytes_per_s", "tflops", "link_gbytes_per_s"),
    [
        ("rtx4090", 24564 * MIB, 1008, 165, 25),
        ("rtx5080", 16303 * MIB, 960, 113, 50),
        ("rtx6000-ada", 49140 * MIB, 960, 364, 25),
        ("a6000", 49140 * MIB, 768, 154.8, 25),
        ("l40s", 46068 * MIB, 864, 362, 25),
        ("a100-40", 40 * GIB, 1555, 312, 25),
        ("a100-80", 80 * GIB, 2039, 312, 25),
        ("h100", 81559 * MIB, 3350, 989.5, 50),
        ("h100-nvl", 95830 * MIB, 3900, 835, 50),
        ("h200", 143771 * MIB, 4800, 989, 50),
        ("b200", 183359 * MIB, 7672, 2250, 50),
    ],
)
def test_figures_of_the_gpus(
    gpu: str, memory_bytes: int, gbytes_per_s: float, tflops: float, link_gbytes_per_s: float
) -> None:
    profile = load_profile(gpu)
    assert profile.hbm_bytes == memory_bytes
    assert profile.hbm_bytes_per_s == gbytes_per_s * 1e9
    assert profile.flops_per_s == tflops * 1e12
    assert profile.h2d_bytes_per_s == profile.d2h_bytes_per_s == link_gbytes_per_s * 1e9


@pytest.mark.parametrize("gpu", profile_names())
def test_every_shipped_number_says_where_it_is_from(gpu: str) -> None:
    profile = load_profile(gpu)
    for name in profile.numbers():
        source = profile.sources[name]
        assert source.startswith("assumed") or "20" in source, (name, source)  # a year
    assert {"hbm_bytes", "hbm_bytes_per_s"}.isdisjoint(profile.assumed())
    assert "pageable_factor" in profile.assumed()


def test_assumed_peaks_are_marked() -> None:
    assumed = {gpu for gpu in profile_names() if load_profile(gpu).is_assumed("flops_per_s")}
    assert assumed == {"rtx5080", "rtx6000-ada"}


@pytest.mark.parametrize("host", host_names())
def test_hosts(host: str) -> None:
    found = load_host(host)
    assert found.name == host
    assert set(found.sources) == {
        "ddr_bytes", "ddr_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s",
    }  # fmt: skip


def test_a_gpu_in_a_host() -> None:
    plain, host = load_profile("h100"), load_host("ddr5-2tb")
    both = load_profile("h100", "ddr5-2tb")
    assert both.name == "h100+ddr5-2tb"
    assert both.ddr_bytes == 2048 * GIB
    assert both.ddr_bytes_per_s == host.ddr_bytes_per_s
    assert both.source("ddr_bytes").endswith("(host ddr5-2tb)")
    assert both.hbm_bytes == plain.hbm_bytes
    assert both.source("hbm_bytes") == plain.source("hbm_bytes")


def test_the_slower_end_limits_the_link() -> None:
    assert load_profile("h100", "ddr4-256gb").h2d_bytes_per_s == 25e9
    slow_gpu = load_profile("a100", "ddr5-2tb")
    assert slow_gpu.h2d_bytes_per_s == 25e9
    assert slow_gpu.source("h2d_bytes_per_s") == load_profile("a100").source("h2d_bytes_per_s")


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\nname = "mine"\nmfu = 0.5\nmbu = 0.7\noverlap = 0.9\n'
        '[sources]\nmfu = "measured 2026"\noverlap = "measured 2026"\n'
    )
    mine, h100 = load_profile(path), load_profile("h100")
    assert (mine.name, mine.mfu, mine.mbu, mine.overlap) == ("mine", 0.5, 0.7, 0.9)
    assert mine.hbm_bytes == h100.hbm_bytes
    assert mine.source("mfu") == "measured 2026"
    assert mine.source("mbu") == "assumed"
    assert mine.source("hbm_bytes") == h100.source("hbm_bytes")
    assert "overlap" in mine.numbers()
    assert "overlap" not in h100.numbers()


def test_every_number_can_be_changed(tmp_path: Path) -> None:
    h100 = load_profile("h100")
    path = tmp_path / "other.toml"
    for name in h100.numbers():
        if isinstance(getattr(h100, name), tuple):
            continue
        value = getattr(h100, name) / 2
        value = int(value) if isinstance(getattr(h100, name), int) else value
        path.write_text(f'base = "h100"\n{name} = {value}\n')
        assert getattr(load_profile(path), name) == value
    path.write_text('base = "h100"\nblock_bytes = [4096]\nblock_efficiency = [0.5]\n')
    assert load_profile(path).block_bytes == (4096.0,)


def test_links_are_those_of_the_gpu() -> None:
    """NVLink where it was measured; PCIe where there is no other, and no GPU has another's."""
    two, four = (load_profile("l40s").all_reduce_s(gpus, 1e9) for gpus in (2, 4))
    assert (two, four) == pytest.approx((1e9 / 19.2e9, 1.5e9 / 3.7e9), rel=1e-3)
    assert load_profile("rtx4090").all_reduce_s(4, 1e9) == four
    assert load_profile("rtx4090").is_assumed("all_reduce_bytes_per_s")
    nvlink = [load_profile(gpu) for gpu in ("a100-80", "h100", "h200", "b200")]
    assert not any(each.is_assumed("all_reduce_bytes_per_s") for each in nvlink)
    seconds = [each.all_reduce_s(8, 1e9) for each in nvlink]
    assert sorted(seconds, reverse=True) == seconds
    assert 355e9 < 2 * (5 / 6) * 1e12 / load_profile("h100").all_reduce_s(6, 1e12) < 469e9
    assert load_profile("h100").all_reduce_s(4, 0.0) == 4.5e-6


def test_unknown_links_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    links = "".join(f"{name} = []\n" for name in ("all_reduce_gpus", "all_reduce_bytes_per_s"))
    path.write_text(f'base = "h100"\nname = "mine"\n{links}all_reduce_latency_s = []\n')
    with pytest.raises(UsageError, match="mine says nothing of the links between GPUs"):
        load_profile(path).all_reduce_s(2, 1.0)
    path.write_text('base = "h100"\nall_reduce_gpus = [2, 8]\n')
    with pytest.raises(UsageError, match="all_reduce_gpus must rise from 2"):
        load_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = 3\n", "base must be the name"),
        ('base = "h1000"\n', "did you mean .*h100"),
        ('base = "h100"\nmfuu = 0.5\n', "did you mean mfu"),
        ('base = "h100"\nmfu = 2.0\n', "mfu must be at most 1, not 2"),
        ('base = "h100"\n[sources]\nmffu = "me"\n', "unknown source of"),
        ('base = "h100', "not valid TOML"),
    ],
)
def test_bad_files_that_build_on_others(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_profile(path)


def test_a_profile_is_not_its_own_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{path}"\n')
    with pytest.raises(UsageError, match="is its own base"):
        load_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\n', "ddr_bytes, ddr_bytes_per_s.* are missing"),
        ('name = "x"\nddr_bytes = 0\nddr_bytes_per_s = 1\nh2d_bytes_per_s = 1\n'
         "d2h_bytes_per_s = 1\n", "ddr_bytes must be above 0"),
        ('name = "x"\nddr_size = 3\n', "unknown key or table"),
    ],
)  # fmt: skip
def test_bad_hosts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "host.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_host(path)
    with pytest.raises(UnknownName, match="ddr5-2tb"):
        load_host("ddr5-3tb")


def test_shipped_prices() -> None:
    prices = load_prices()
    assert (prices.currency, prices.date) == ("USD", "2026-03")
    assert prices.of("h100") == (2.69, 4.76)
    assert prices.of("h100+ddr5-2tb") == (2.69, 4.76)
    assert prices.of("rtx5080") is None
    assert set(prices.per_hour) <= set(profile_names())


def test_own_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    head = 'currency = "EUR"\ndate = "2026-11"\nsource = "our contract"\n[per_hour]\n'
    path.write_text(head + "h100 = 2.0\n")
    assert load_prices(path).of("h100") == (2.0, 2.0)
    for line in ("h100 = [3, 2]", "h100 = true", 'h100 = "cheap"', "h100 = [1]", "h100 = -1"):
        path.write_text(head + line)
        with pytest.raises(UsageError, match=r"\[per_hour\] h100 must be a price"):
            load_prices(path)
    path.write_text('currency = "EUR"\n')
    with pytest.raises(UsageError, match="date, source, per_hour are missing"):
        load_prices(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_prices(tmp_path / "none.toml")
