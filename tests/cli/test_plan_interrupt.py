"""Ctrl-C during `arborsim plan`, as the system sends it, and going on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arborsim.cli.app import main
from tests.plan.make import SMALL

#: Long enough that candidates are left when the first one has ended.
LENGTHS = ["--searches", "400", "--warm-up", "40", "--runs", "1"]
_PATIENCE_S = 120  # on a machine that has other things to do


def _finished(log: Path) -> int:
    """Candidates on the disk; the first line says which plan it is."""
    return max(0, log.read_text().count("\n") - 1) if log.exists() else 0


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_finished_candidates_are_on_the_disk_and_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, out = tmp_path / "small.toml", tmp_path / "plan.json"
    workload.write_text(SMALL)
    arguments = ["plan", str(workload), "--out", str(out), *LENGTHS]
    log = tmp_path / "plan.json.partial.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "arborsim.cli.app", *arguments, "--jobs", "2"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + _PATIENCE_S
    while not _finished(log) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    before = _finished(log)
    assert before >= 1, "a candidate is on the disk while others are still worked on"
    process.send_signal(signal.SIGINT)  # to this process only: its workers hear nothing
    assert process.wait(timeout=_PATIENCE_S) == 130
    assert process.stderr is not None
    said = process.stderr.read()
    kept = _finished(log)
    assert before <= kept < 4
    assert f"{kept} of 4 candidates are in {log}; --resume goes on" in said
    assert "Traceback" not in said
    assert not out.exists()
    assert main([*arguments, "--resume"]) == 0
    assert not log.exists()
    document = json.loads(out.read_text())
    assert [each["number"] for each in document["candidates"]] == [0, 1, 2, 3]
    assert document["complete"]
