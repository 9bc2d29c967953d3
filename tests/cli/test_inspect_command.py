"""`arborsim inspect` as a user runs it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.core.errors import MissingSignal
from arborsim.core.observations import Signal
from arborsim.products.traces.describe import describe
from arborsim.trace.reader import TraceReader
from tests.helpers.traces import make_info, make_trace
from tests.trace.import_helpers import deft_tree

TRACES = Path(__file__).parents[2] / "traces"


@pytest.mark.parametrize("columns", [80, 160])
def test_the_command_of_a_recording_is_shown_whole(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is what makes the trace again; 300 characters are no rarity."""
    monkeypatch.setenv("COLUMNS", str(columns))
    command = " ".join(["arborsim record", *(f"--set option{i}={i}" for i in range(20)), "--last"])
    info = replace(make_info(), command=command, timing={"decode_s": 236.77354550100063})
    path = make_trace(tmp_path / "t.parquet", info=info)
    assert main(["inspect", str(path), "--all", "--episodes", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    text = " ".join(" ".join(lines).split())
    for part in ("--set option19=19", "--last", "decode_s=236.774"):
        assert part in text
    assert "..." not in text


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("trace", sorted(TRACES.glob("*.parquet")), ids=lambda path: path.stem)
def test_the_short_form_fits_a_screen(
    trace: Path, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model, the search, the sizes, every policy and a tree in less than 40 lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["inspect", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert max(len(line.rstrip()) for line in lines) <= columns
    text = " ".join(" ".join(lines).split())
    for fit in describe(TraceReader(trace)).policies:
        assert re.search(rf"(: |, ){fit.name}(,| |$)", text), fit.name
        assert fit.remedy in text
    for part in (str(trace), "arborsim-", "search", "generated tokens", "Episode 0", "--all"):
        assert part in text
    assert lines[-1] == "How it was made, sizes per column, all signals: --all"


def test_the_short_form_draws_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_trace(tmp_path / "t.parquet", episodes=3, nodes=30)
    every = ["--episodes", "3", "--nodes", "31"]
    for options, trees, cut in (
        ([], 1, True), (["--episodes", "0"], 0, False), (every, 3, False), (["--all"], 2, True),
    ):  # fmt: skip
        assert main(["inspect", str(path), *options]) == 0
        shown = capsys.readouterr().out
        assert shown.count("Episode ") == trees
        assert ("... " in shown) is cut
        assert ("Size per column" in shown) is ("--all" in options)


def test_thoughts_are_cut_in_the_short_form_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trace = str(TRACES / "chain-vectors.parquet")
    shown = []
    for options in ([], ["--all"]):
        assert main(["inspect", trace, "--episodes", "1", *options]) == 0
        shown.append(" ".join(capsys.readouterr().out.split()))
    assert ["M67 v66 0 v67 0 \u2193" in text for text in shown] == [False, True]


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", str(path), "--all", "--episodes", "0"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_an_import_does_not_ask_for_a_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can record a log of another system again; what it lacks stays unknown."""
    log, out = tmp_path / "trees.json", tmp_path / "trees.parquet"
    log.write_text(json.dumps([deft_tree(seed) for seed in range(2)]))
    assert main(["import", "deft", str(log), str(out)]) == 0
    capsys.readouterr()
    text = inspected(out, capsys)
    assert "raas no attention: the source of this import lacks it" in text
    assert "record with" not in text
    assert "unknown token ids, times, which thoughts ended" in text
    assert "duration, s unknown" in text
    assert "finished thoughts unknown" in text
    assert main(["inspect", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [episode["duration_s"] for episode in found["episodes"]] == [None, None]
    with pytest.raises(MissingSignal, match=r"import lacks it; take a trace recorded with --capt"):
        TraceReader(out).require({Signal.ATTENTION}, "policy raas")


def test_drawn_searches_have_neither_times_nor_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn.parquet"
    assert main(["generate", "--out", str(out), "--searches", "2"]) == 0
    capsys.readouterr()
    text = inspected(out, capsys)
    assert "raas no attention: drawn searches have none" in text
    assert "duration, s unknown" in text


def test_a_recording_says_how_to_record_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = inspected(make_trace(tmp_path / "t.parquet", capture="tree"), capsys)
    assert "raas no attention: record with --capture signals" in text
    assert "duration, s unknown" not in text
