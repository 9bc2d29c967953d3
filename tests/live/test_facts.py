"""What results say about the software and the device that made them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from arborsim.core import installed

torch = pytest.importorskip("torch")
from arborsim_torch import probe  # noqa: E402
from arborsim_torch.hardware.facts import all_facts, conditions, software  # noqa: E402
from arborsim_torch.kernels.packages import PACKAGES  # noqa: E402
from arborsim_torch.models import load_model  # noqa: E402

from .pretended.arming import pretend  # noqa: E402

SMI = """#!/bin/sh
case "$*" in *clocks.sm*) ;; *) exit 1 ;; esac
echo "570.86.15, 1755 MHz, 1980 MHz, 2619 MHz, 700.00 W"
"""


def test_facts_name_versions_the_attention_and_the_revision() -> None:
    model = load_model("chain").model
    found = all_facts(model)
    assert found["torch"] == torch.__version__
    assert {"arborsim", "python", "transformers", "numpy"} <= found.keys()
    assert found["attention"] == "torch-cpu"
    assert found.get("revision", "") == installed.revision()
    assert "attention" not in software()
    assert not {"driver", "SM clock"} & found.keys()  # a CPU has none


def test_no_name_of_a_host_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(all_facts(load_model("chain").model).values())
    assert os.uname().nodename not in text.split()
    assert "/" not in text


def test_revision_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*options: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *author, *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    module = tmp_path / "arborsim" / "core" / "installed.py"
    module.parent.mkdir(parents=True)
    module.write_text("one")
    monkeypatch.setattr(installed, "__file__", str(module))
    uncached = installed.revision.__wrapped__
    assert uncached() == ""  # installed from a wheel
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    head = git("rev-parse", "--short=12", "HEAD")
    assert uncached() == head
    (tmp_path / "new").write_text("a result")
    assert uncached() == head
    module.write_text("two")
    assert uncached() == f"{head}, dirty"


def test_state_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.gpu_state("0") == {} or torch.cuda.is_available()
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if torch.cuda.is_available():
        pytest.skip("there is a real device")
    with pretend():
        found = conditions(torch.device("cuda", 0))
        assert {"torch", "transformers"} <= software().keys()
    assert found["driver"] == "570.86.15"
    assert found["SM clock"] == "1755 MHz"
    assert found["highest SM clock"] == "1980 MHz"
    assert found["power limit"] == "700.00 W"


def test_the_probe_says_what_computes_attention_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package.module, None)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pretend():
        found = probe._attention()
    assert found == {
        "prompts": "torch-flash (PyTorch's FlashAttention: flash_attn has no flash_attn_func)",
        "decode steps": "triton (Triton's kernels: flash_attn has no flash_attn_with_kvcache)",
    }
