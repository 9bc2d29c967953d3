"""`arborsim hardware import`: a profile and its tables, from the package that has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from arborsim.cli.app import main
from arborsim.machine import aiconfigurator
from arborsim.machine.kernels import TABLES, KernelTables, shipped_tables, write_tables
from arborsim.machine.lookup import load_profile

IMPORT = ["hardware", "import", "aiconfigurator"]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _package() -> None:
    pytest.importorskip("aiconfigurator_core")


@pytest.mark.usefixtures("_package")
def test_a_gpu_that_is_not_shipped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*IMPORT, "--gpu", "b60", "--engine", "vllm"]) == 0
    said = capsys.readouterr().out
    tables = KernelTables(tmp_path / "b60-vllm.parquet")
    assert (tables.gpu, tables.engine) == ("b60", "vllm")
    assert "wrote b60-vllm.toml and b60-vllm.parquet (0.13 MB)" in said
    assert "arborsim replay TRACE --gpu b60-vllm.toml --engine vllm" in said
    assert f"{tables.source}, Apache-2.0" in said
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line}
    for table, version in tables.versions.items():
        rows = sum(len(tables.columns(table, kind)[-1]) for kind in tables.types(table))
        assert lines[table][-2:] == [f"{rows:,}", version]
    profile = load_profile("b60-vllm.toml")
    assert Path(profile.kernels) == Path("b60-vllm.parquet")
    assert (profile.hbm_bytes, profile.hbm_bytes_per_s) == (24 * 2**30, 456e9)
    assert profile.all_reduce_bytes_per_s == (28.4e9,), "its own link, and no NVLink"
    assert "systems/b60.yaml" in profile.source("all_reduce_bytes_per_s")
    assert not profile.is_assumed("flops_per_s")
    assert profile.is_assumed("mfu")
    assert profile.source("h2d_bytes_per_s").startswith("assumed: 0.78 of 32 GB/s")
    assert main(["hardware", "b60-vllm.toml"]) == 0


@pytest.mark.usefixtures("_package")
def test_a_gpu_that_is_shipped_gives_what_differs(tmp_path: Path) -> None:
    command = [*IMPORT, "--gpu", "a100_sxm", "--engine", "vllm", "--out", "mine.toml"]
    assert main(command) == 0
    profile, base = load_profile(tmp_path / "mine.toml"), load_profile("a100-80")
    assert profile.kernels == str(tmp_path / "mine.parquet")
    assert profile.per_layer_s == base.per_layer_s
    assert profile.name == "a100-80"
    mine, shipped = (KernelTables(path) for path in
                     (tmp_path / "mine.parquet", shipped_tables()["a100-80", "vllm"]))  # fmt: skip
    for table in ("product", "decode", "prefill", "all-reduce"):
        for kind in shipped.types(table):
            for one, other in zip(
                mine.columns(table, kind), shipped.columns(table, kind), strict=True
            ):
                np.testing.assert_array_equal(one, other)
    kept = [len(each.columns("experts", "bf16")[-1]) for each in (shipped, mine)]
    assert 0 < kept[0] < kept[1]  # the package also has models that few run


@pytest.mark.usefixtures("_package")
def test_nothing_is_replaced_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "b60-vllm.parquet").write_text("mine")
    command = [*IMPORT, "--gpu", "b60", "--engine", "vllm"]
    assert main(command) == 2
    assert "b60-vllm.parquet exists: choose another --out" in capsys.readouterr().err
    assert (tmp_path / "b60-vllm.parquet").read_text() == "mine"
    assert not (tmp_path / "b60-vllm.toml").exists()
    assert main([*command, "--overwrite"]) == 0


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu b201_sxm --engine vllm", "unknown GPU 'b201_sxm': did you mean b200_sxm"),
        ("--gpu b60 --engine vlm", "unknown engine 'vlm': did you mean vllm?"),
        ("--gpu b60 --engine trtllm", "no kernels of b60 under trtllm, but under vllm"),
        ("--gpu l4 --engine vllm", "no kernels of l4 under vllm, nor under any other engine"),
        ("--gpu b60 --engine vllm --out some.yaml", "name it .toml"),
        ("--gpu b60 --engine vllm --out no/some.toml", "there is no directory no"),
        ("--engine vllm", "Missing option '--gpu'"),
    ],
)
def test_what_cannot_work_is_one_line(
    options: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*IMPORT, *options.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_the_package_it_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiconfigurator, "find_spec", lambda name: None)
    assert main([*IMPORT, "--gpu", "b60", "--engine", "vllm"]) == 2
    assert "pip install 'arborsim[kernels]'" in capsys.readouterr().err


def test_help_of_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: arborsim hardware [OPTIONS] [name]" in shown
    assert "import  Import measured kernels of a GPU and an engine" in shown
    assert main(["hardware", "import", "--help"]) == 0
    assert "Usage: arborsim hardware import [OPTIONS]" in capsys.readouterr().out


@pytest.mark.usefixtures("_package")
def test_every_gpu_with_tables_has_a_profile() -> None:
    found = {system: aiconfigurator.engines(system) for system in aiconfigurator.systems()}
    assert {
        *aiconfigurator.selection().systems,
        "b60",
        "gb200",
        "rtx_pro_6000_server",
        "l4",
    } <= set(found)
    assert found["gb200"] == ["sglang", "trtllm", "vllm"]
    assert found["l4"] == []


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one GPU; returns the folder of its tables."""
    systems = tmp_path / "systems"
    systems.mkdir()
    (systems / "g.yaml").write_text("gpu: {}\n")
    (systems / "query_versions.yaml").write_text(
        "defaults: {vllm: {current: '0.3.0'}}\noverrides: {other: {vllm: {current: '0.1.0'}}}\n"
    )
    monkeypatch.setattr(aiconfigurator, "_folder", lambda: systems)
    monkeypatch.setattr(aiconfigurator, "_version", lambda: "0.12.0")
    return systems / "data" / "g"


def products(folder: Path, version: str, rows: list[tuple[int, int, int, str, str, float]]) -> None:
    path = folder / "gemm" / "vllm" / version / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    columns = ["m", "n", "k", "gemm_dtype", "kernel_source", "latency"]
    pd.DataFrame(rows, columns=columns).assign(version=version).to_parquet(path)


def test_the_newest_version_up_to_the_current_one_counts(made: Path) -> None:
    for version, latency in (("0.9.0", 1.0), ("0.10.0rc1", 2.0), ("0.2.0", 3.0), ("0.10.0", 4.0)):
        products(made, version, [(1, 128, 256, "bfloat16", "one", latency)])
    read = aiconfigurator.read("g", "vllm")
    assert read.versions == {"product": "0.2.0"}
    assert read.tables["product", "bf16"]["seconds"].tolist() == [3e-3]


def test_the_fastest_kernel_counts_and_the_median_of_its_times(made: Path) -> None:
    rows = [
        (1, 128, 256, "fp8", "slow", 5.0), (1, 128, 256, "fp8", "fast", 1.0),
        (1, 128, 256, "fp8", "fast", 4.0), (1, 128, 256, "fp8", "fast", 2.0),
        (1, 64, 256, "fp8", "fast", 1.0), (1, 128, 128, "fp8", "fast", 1.0),
        (2, 128, 256, "int4_wo", "fast", 1.0), (2, 128, 256, "sq", "fast", 1.0),
    ]  # fmt: skip
    products(made, "0.3.0", rows)
    read = aiconfigurator.read("g", "vllm")
    assert list(read.tables) == [("product", "fp8"), ("product", "int4")]
    fp8 = read.tables["product", "fp8"]
    assert fp8[[*TABLES["product"], "seconds"]].to_numpy().tolist() == [[128, 256, 1, 2e-3]]
    write_tables(made / "t.parquet", read.tables, read.header)
    assert KernelTables(made / "t.parquet").types("product") == ["fp8", "int4"]


@pytest.mark.usefixtures("_package")
def test_the_header_says_what_latent_attention_covers() -> None:
    """With weights in fp8, half of the bytes of all projections, and their time, is gone."""
    covers = {key: KernelTables(path).latent_covers for key, path in shipped_tables().items()}
    assert covers["h100", "vllm"] == covers["b200", "trtllm"] == "module"
    assert covers["h100", "sglang"] == covers["l40s", "trtllm"] == "kernel"
    assert covers["a100-80", "vllm"] == ""
    path = aiconfigurator._folder() / "data/h100_sxm/mla/vllm/0.24.0"
    rows = pd.read_parquet(path / "mla_generation_module_perf.parquet")
    rows = rows[(rows["num_heads"] == 128) & (rows["batch_size"] == 1) & (rows["step"] == 128)]
    by_weights = rows.groupby("gemm_type")["latency"].min()
    q_rank, kv_rank, rope, heads, head, hidden = 1536, 512, 64, 128, 128, 7168
    projections = (
        hidden * (q_rank + kv_rank + rope) + q_rank * heads * (head + rope)
        + kv_rank * heads * 2 * head + heads * head * hidden
    )  # fmt: skip
    saved_s = (by_weights["bfloat16"] - by_weights["fp8_block"]) / 1e3
    without_output = projections - heads * head * hidden
    assert saved_s == pytest.approx(projections / 3.35e12, rel=0.25)
    assert saved_s > 2 * without_output / 3.35e12
