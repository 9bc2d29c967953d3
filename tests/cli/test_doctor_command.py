"""`arborsim doctor` says what works, whatever is missing or broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.core import installed

NEEDED = "replay, search, plan, reports"


@pytest.mark.parametrize(
    ("version", "wanted", "met"),
    [
        ("1.0", "~=2.0", False),
        ("2.1", "~=2.0", True),
        ("3.0", "~=2.0", False),
        ("2.13.0+cpu", ">=2.7", True),
        ("6.0.0", ">=5.4,<6", False),
        ("2.0rc1", ">=2.0", False),  # comes before 2.0
        ("2.14.0.dev20261101+cu130", ">=2.7", True),
        ("2.0.post1", "==2.0", False),
        ("1.10", ">=1.9", True),
        ("1.5", "==1.*", True),
        ("1!1.0", ">=2.0", True),
        ("1.5", "!=1.5.*", False),
        ("of my own", ">=1.0", False),
        ("of my own", "", True),
    ],
)
def test_versions_compare_as_pip_compares_them(version: str, wanted: str, met: bool) -> None:
    assert installed.meets(version, wanted) is met


def test_packages_are_those_that_the_project_declares() -> None:
    found = installed.packages([
        "numpy>=2.0", 'torch>=99; extra == "torch"', "triton>=3.3; sys_platform == 'linux' and "
        'extra == "cuda"', 'optuna[redis] (~=1.0) ; extra == "tune"',
        'pytest>=8; extra == "test"', 'arborsim[torch]; extra == "dev"',
    ])  # fmt: skip
    assert [(each.name, each.extra) for each in found] == [
        ("numpy", ""), ("torch", "torch"), ("triton", "cuda"), ("optuna", "tune"),
    ]  # fmt: skip
    assert found[0].usable
    assert found[3].wanted == "~=1.0"
    assert found[3].problem == (found[3].version and f"version {found[3].version} is not ~=1.0")
    if found[1].version:
        assert found[1].problem == f"version {found[1].version} is not >=99"


def test_it_shows_what_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    works = [line for line in lines if line.startswith("works")]
    assert any(NEEDED in line for line in works)
    assert any("record, live, validate" in line for line in works)


def nothing_but(*names: str):
    """`importlib.metadata.version` where only these are installed."""
    known = installed._version

    def version(name: str) -> str:
        return known(name) if name in names else ""

    return version


def test_without_the_extras_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = [each.name for each in installed.packages() if not each.extra]
    monkeypatch.setattr(installed, "_version", nothing_but(*core))
    monkeypatch.setattr(installed, "_probe", lambda: pytest.fail("nothing is there to import"))
    assert main(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["abilities"]}
    assert found[NEEDED]["works"]
    live = found["record, live, validate"]
    assert not live["works"]
    assert "torch" in live["about"]
    assert live["remedy"] == "pip install 'arborsim[torch]'"
    assert found["sweeps on several machines"]["remedy"] == "pip install 'arborsim[ray]'"
    assert found["plots as SVG and PNG"]["remedy"] == "pip install 'arborsim[images]'"


def test_a_core_package_that_is_too_old_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = ["numpy>=99", "pandas>=2"]
    monkeypatch.setattr(installed, "requires", lambda name: declared)
    monkeypatch.setattr(installed, "_probe", dict)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "is not >=99" in out
    assert "-> pip install --upgrade arborsim" in out


def test_run_from_a_folder_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "requires", missing)
    assert installed.packages() == ()


def test_a_package_that_breaks_when_imported_is_named(tmp_path: Path) -> None:
    """flash-attn built for another torch: an error from the dynamic linker."""
    pytest.importorskip("torch", reason="torch is not installed")
    about = tmp_path / "flash_attn-2.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.9\n")
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol: _ZN3c10')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", installed.PROBE], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert "undefined symbol" in found["broken"]["flash-attn"]
    assert found["backend"] == ""


@pytest.mark.parametrize(
    ("printed", "code", "said"), [("not JSON", 0, "ended with code 0"), ("", -11, "code -11")]
)
def test_a_probe_that_crashes_is_one_line(
    printed: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, stdout=printed, stderr="")
    monkeypatch.setattr(installed.subprocess, "run", lambda *given, **more: done)
    assert said in installed._probe()["failed"]


def test_a_gpu_that_torch_cannot_use_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = installed.Package("torch", ">=2.7", "torch", "2.13.0")
    gpus = (installed.Gpu("NVIDIA H100", 80 << 30, "550.1"),)
    for probe, said in (
        ({"cuda": True, "cuda_version": "12.9"}, "CUDA 12.9, NVIDIA H100"),
        ({"cuda_version": ""}, "built without CUDA"),
        ({"cuda_version": "12.9"}, "torch sees no GPU, but the driver does"),
        ({"cuda_version": "12.9", "cuda_failed": "too old"}, "cannot use the GPU: too old"),
    ):
        found = installed._cuda({"torch": torch}, probe, gpus)
        assert said in found.about
        assert found.works == bool(probe.get("cuda"))
        assert bool(found.remedy) != found.works


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-such"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_computes_attention_is_shown_with_its_reason() -> None:
    known = {"triton": installed.Package("triton", ">=3.3", "cuda", "3.6.0")}
    said = "torch-flash (PyTorch's FlashAttention: flash_attn has no flash_attn_func)"
    probe = {"cuda": True, "attention": {"prompts": said, "decode steps": "triton (and why)"}}
    found = installed._kernels(known, probe)
    assert found.works
    assert f"prompts: {said}; decode steps: triton (and why)" in found.about
