"""`arborsim tune`, from the command line to files that a replay takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import arborsim
from arborsim.cli.app import main
from arborsim.products.schemas import schema_of
from tests.helpers.traces import make_trace

pytest.importorskip("optuna")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_trace(tmp_path / "t.parquet", episodes=3, layers=2, prompt=30, nodes=3, block=(20, 30))
    return tmp_path


def test_a_front_its_files_and_its_page(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "tune t.parquet --policy staircase --vary recent=2:16 --budget 0.3:0.9 --trials 3"
    files = "--out o.parquet --front front --report page.html"
    monkeypatch.setattr(sys, "argv", ["arborsim", *command.split()])
    assert main([*command.split(), *files.split()]) == 0
    printed = capsys.readouterr().out
    assert "held out" in printed
    assert re.match(r"staircase: \d of 3 trials are on the front, ", printed)
    assert "\nThe least memory: trial " in printed
    assert "tuned" not in printed.partition("Figures are of")[0], "only what no trial has seen"
    found = arborsim.load_results(here / "o.parquet")
    assert found.metadata["command"] == (
        "arborsim tune t.parquet --policy staircase --vary recent=2:16 --budget 0.3:0.9 --trials 3"
    )
    front = found.summary()
    assert {path.stem for path in (here / "front").iterdir()} == {
        f"staircase-{number}" for number in front["trial"]
    }
    assert all(f"wrote front/staircase-{number}.toml" in printed for number in front["trial"])
    page = (here / "page.html").read_text()
    assert "KV-cache policies compared" in page
    assert "arborsim live --policy FILE" in page
    assert "(trial 0)'" not in page  # no command with the names of its rows
    first = f"front/staircase-{front['trial'][0]}.toml"
    assert main(["replay", "t.parquet", "--policy", first, "--no-oracle"]) == 0
    capsys.readouterr()
    # The study goes on: nothing is tried again, and the same comes out.
    before = (here / "o.parquet").read_bytes()
    assert main([*command.split(), *files.split()]) == 0
    assert (here / "o.parquet").read_bytes() == before


def test_interruption_keeps_the_study(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from arborsim.products.tune import run as tune

    real, calls = tune._Measuring.figures, []

    def impatient(self: object, values: object) -> object:
        calls.append(values)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, values)  # type: ignore[arg-type]

    monkeypatch.setattr(tune._Measuring, "figures", impatient)
    command = [
        "tune",
        "t.parquet",
        "--policy",
        "h2o",
        "--trials",
        "4",
        "--out",
        "o.parquet",
        "--set",
        "per=shared",
    ]
    assert main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (here / "o.parquet").exists()
    assert main(command) == 0
    assert len(calls) == 3 + 2  # two had ended


def test_json_follows_its_schema(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "tune",
        "t.parquet",
        "--policy",
        "h2o",
        "--budget",
        "0.001,0.5",
        "--trials",
        "4",
        "--set",
        "per=shared",
    ]
    assert main([*command, "--json", "--out", "o.json"]) == 0
    document = json.loads(capsys.readouterr().out)  # nothing else is printed
    schema = schema_of("tune")
    follows = Draft202012Validator(schema).is_valid
    assert follows(document)
    assert document == json.loads((here / "o.json").read_text())
    assert any(trial["front"] for trial in document["trials"])
    assert any(trial["reason"] and trial["tuned_time"] is None for trial in document["trials"])
    known = schema["properties"]
    for part, about in ((document, schema), (document["metadata"], known["metadata"]),
                        (document["trials"][0], known["trials"]["items"])):  # fmt: skip
        for key in about["properties"]:
            before = part.pop(key)
            assert not follows(document), key
            part[key] = [] if isinstance(before, dict) else {"no": []}
            assert not follows(document), key
            part[key] = before


ERRORS = {
    "tune t.parquet": "--policy",
    "tune no.parquet --policy h2o": "no.parquet",
    "tune t.parquet --policy h3o": "h2o",
    "tune t.parquet --policy raas --trials 0": "--trials",
    "tune t.parquet --policy h2o --vary sinks": "give a range",
    "tune t.parquet --policy raas --budget 512": "give shares",
    "tune t.parquet --policy raas --storage nonsense": "--storage nonsense",
    "tune t.parquet --policy raas --out o.txt": ".txt",
    "tune t.parquet --policy raas --report t.parquet": "t.parquet",
    "tune t.parquet --policy raas --gpu h900": "h900",
    "tune t.parquet --policy raas --front t.parquet": "--front t.parquet is a file",
    "tune t.parquet --policy full": "full has nothing to tune: it knows no budget, and it has no",
    "tune t.parquet --policy kivi": "--vary names no settings, of bits",
    "tune t.parquet --policy kivi --vary residual=32": "kivi has nothing to tune",
    "tune t.parquet --policy streaming-llm --budget 0.5": "--budget names one, and --vary names no",
    "tune t.parquet --policy staircase --report page.pdf": "the name must end in .html",
}


@pytest.mark.parametrize("command", ERRORS)
def test_bad_input_is_one_line_and_code_2(
    here: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert ERRORS[command] in said[0]
