"""`arborsim calibrate`, from the command line to a file that a replay takes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.products.calibrate import backend
from arborsim.products.calibrate.documents import read_calibration
from arborsim.report import progress
from tests.helpers.traces import make_trace

BANDS = "calibrate bands --traces 2 --lines 5 --window 9 --stride 9 --regenerate rest --out b.toml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["arborsim", *command.split()])
    return main(command.split())


def test_bands_makes_a_file_a_page_and_a_table(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert run(BANDS, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "effective n" in printed
    assert "<pad>" in printed
    assert len([line for line in printed.splitlines() if line[:1].isdigit()]) == 6 + 1
    found = read_calibration(here / "b.toml")
    assert found.command == f"arborsim {BANDS}"
    assert (found.layers, found.traces, found.model) == (6, 2, "arborsim-chain")
    page = (here / "b.html").read_text()
    assert "Spearman rho" in page
    assert "<script src" not in page  # self-contained


def test_interruption_is_one_line_and_code_130(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient:
        def occlude(self, request: Any, on_progress: Any) -> None:
            on_progress("solving problems", 1, 2)
            raise KeyboardInterrupt

    monkeypatch.setattr(backend, "get_calibrating_backend", Impatient)
    assert main(BANDS.split()) == 130
    assert capsys.readouterr().err == "arborsim: interrupted; nothing was written\n"
    assert list(here.iterdir()) == []


ERRORS = {
    "calibrate bands --out no/where.toml": "no directory no",
    "calibrate bands --out b.html": "name it .toml",
    "calibrate bands --out b.toml --window 8 --stride 9": "leaves tokens between windows",
    "calibrate bands --out b.toml --traces 1": "--traces",
    "calibrate bnads": "bnads",
    "calibrate msve nowhere.parquet --out m.toml": "nowhere.parquet",
    "calibrate msve bare.parquet --out m.toml": "--capture signals",
    "calibrate msve t.parquet --out m.toml": "--model chain is arborsim-chain",
    "calibrate bands --model game24 --out b.toml": "game24",
}


@pytest.mark.parametrize("command", ERRORS)
def test_errors_are_one_line(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    make_trace(here / "t.parquet", kind="tree", prompt=20, nodes=14)
    make_trace(here / "bare.parquet", capture="tree")
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert ERRORS[command] in printed.err
    assert printed.err.count("\n") == 1
    assert not list(here.glob("*.toml"))


def test_a_bar_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int]]] = []

    class Bar:
        def __init__(self, total: int) -> None:
            seen.append((total, []))

        def advance(self, what: str, units: int) -> None:
            seen[-1][1].append(units)

        def __exit__(self, *_: object) -> None:
            seen[-1][1].append(-1)

    monkeypatch.setattr(progress, "PatientProgress", Bar)
    with progress.Stages() as stages:
        for done in (1, 4):
            stages("solving", done, 5)
        stages("occluding", 3, 9)
    assert seen == [(5, [1, 3, -1]), (9, [3, -1])]


def test_shipped_calibrations_say_what_they_are() -> None:
    from arborsim.products.calibrate.documents import shipped

    for path in shipped().values():
        head = tomllib.loads(path.read_text())["calibration"]
        assert head["finding"]
        assert head["command"].startswith("arborsim calibrate ")
        assert ("torch" in head["versions"]) == (head["kind"] != "arkv")  # which needs no model
