"""`arborsim inspect` as a user runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arborsim.cli.app import main
from tests.helpers.traces import make_info, make_trace


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
    assert main(["inspect", str(path), "--episodes", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    text = " ".join(" ".join(lines).split())
    for part in ("--set option19=19", "--last", "decode_s=236.774"):
        assert part in text
    assert "..." not in text
