"""`arborsim calibrate hardware` as a user runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.machine.lookup import load_profile
from arborsim.products.calibrate import backend
from tests.helpers.traces import make_trace

COMMAND = "calibrate hardware --quick --out m.toml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same measurements on smaller things, one thread."""
    torch = pytest.importorskip("torch")
    from arborsim.products.calibrate import policy_cost
    from arborsim_torch.hardware import measure, searches, transfers
    from arborsim_torch.hardware.passes import Design

    design = Design((16, 64, 96), frozenset({64}), (1, 3), frozenset({3}), True, 1, 1, 4, 30.0)
    monkeypatch.setattr(measure, "make_design", lambda on_gpu, quick: design)
    monkeypatch.setattr(transfers, "QUICK_BLOCKS", (4096, 65536, 1 << 20))
    names = ["h2o", "epikv", "snapkv"]
    monkeypatch.setattr(searches, "_QUICK", ("h2o", "random"))
    monkeypatch.setattr(policy_cost, "available", lambda: names)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["arborsim", *command.split()])
    return main(command.split())


def test_the_policies_that_are_asked_for_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Asked:
        def measure_hardware(self, request: Any, on_progress: Any) -> None:
            asked.append(request.policies)
            raise KeyboardInterrupt

    monkeypatch.setattr(backend, "get_measuring_backend", Asked)
    assert run(COMMAND, monkeypatch) == 130
    assert run(f"{COMMAND} --policy snapkv,full", monkeypatch) == 130
    assert asked == [(), ("snapkv",)]  # full is timed with any of them
    capsys.readouterr()
    assert run(f"{COMMAND} --policy snapkvv", monkeypatch) == 2
    assert "unknown policy 'snapkvv': did you mean snapkv" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_profile_that_a_replay_takes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = f"{COMMAND} --policy snapkv,full"
    assert run(command, monkeypatch) == 0
    printed = capsys.readouterr().out
    for shown in ("per_layer_s", "decode held out", "prefill fitted", "wrote m.toml"):
        assert shown in printed
    profile = load_profile("m.toml")
    assert profile.name == "m"
    assert set(profile.policies) == {"full", "snapkv"}
    assert profile.evidence["command"] == f"arborsim {command}"
    assert profile.assumed() == ["reserve_share"]
    assert "1 thread, torch " in profile.source("mfu")
    assert [each.name for each in here.iterdir()] == ["m.toml"]
    make_trace(here / "t.parquet", kind="tree", prompt=20, nodes=14)
    command = "replay t.parquet --gpu m.toml --policy streaming-llm --budget 0.8 --episodes 1"
    assert main([*command.split(), "--notes"]) == 0
    assert "1 number of the hardware profile is assumed" in capsys.readouterr().out
    assert main(COMMAND.split()) == 2
    assert "m.toml exists: choose another --out, or --overwrite" in capsys.readouterr().err


def test_interruption_is_one_line_and_leaves_the_old_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient:
        def measure_hardware(self, request: Any, on_progress: Any) -> None:
            on_progress("measuring", 1, 2)
            raise KeyboardInterrupt

    monkeypatch.setattr(backend, "get_measuring_backend", Impatient)
    (here / "m.toml").write_text("before")
    assert main([*COMMAND.split(), "--overwrite"]) == 130
    assert capsys.readouterr().err == "arborsim: interrupted; nothing was written\n"
    assert [each.read_text() for each in here.iterdir()] == ["before"]


ERRORS = {
    "calibrate hardware --out no/where.toml": "no directory no",
    "calibrate hardware --out machine": "name it .toml",
    "calibrate hardware --device tpu": "--device tpu: use cpu or cuda",
    "calibrate hardware --model chian": "unknown model 'chian'",
    "calibrate hardware --model config:llama-3.1-9b": "llama-3.1-8b",
    "calibrate hardware --model ./such": "no such folder",
    "calibrate hardware --qiuck": "--qiuck",
}


@pytest.mark.parametrize("command", ERRORS)
def test_errors_are_one_line(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert ERRORS[command] in printed.err
    assert printed.err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_no_gpu_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["calibrate", "hardware", "--device", "cuda"]) == 2
    assert "finds no CUDA here" in capsys.readouterr().err
