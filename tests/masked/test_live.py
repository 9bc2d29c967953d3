"""`arborsim live --masked`: what it says, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arborsim.cli.app import main

LIVE = ["live", "--task", "chain", "--lines", "6", "--episodes", "1", "--masked"]


def test_a_masked_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    log = tmp_path / "log.jsonl"
    options = ["--policy", "h2o,kivi", "--budget", "0.6", "--out", str(log), "--overwrite"]
    assert main([*LIVE, *options]) == 0
    assert "Masked run" in " ".join(capsys.readouterr().out.split())
    head, *results = map(json.loads, log.read_text().splitlines())
    assert head["request"]["masked"]
    assert {each["policy"] for each in results} == {"full", "h2o", "kivi"}
    assert all(isinstance(each["correct"], bool) for each in results)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "arborkv", "--budget", "0.6"], "arborkv recomputes lost tokens"),
        (["--policy", "h2o", "--budget", "0.6", "--search", "tot-bfs"], "linear and greedy"),
        (["--policy", "h2o", "--budget", "0.6", "--shadow"], "give one of them"),
    ],
)
def test_what_masks_cannot_do_is_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LIVE, *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
