"""Ctrl-C during `arborsim plan`, as the system sends it, and going on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arborsim.cli.app import main
from tests.plan.make import SMALL

LENGTHS = ["--searches", "20", "--warm-up", "2", "--runs", "1"]
#: The command, but that it says when the first candidate is on the disk, and then waits for Ctrl-C
#: while its workers go on: nothing here depends on how fast the machine is.
WAITING = """
import signal, sys, threading
from arborsim.products.plan.files import PlanLog
from arborsim.products.plan.results import CandidateResult

waited = []

def add_and_wait(self, record, add=PlanLog.add):
    add(self, record)
    if isinstance(record, CandidateResult) and not waited:
        waited.append(record)
        print("on the disk", flush=True)
        threading.Event().wait()

PlanLog.add = add_and_wait
# Tests that run in the background inherit that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from arborsim.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_finished_candidates_are_on_the_disk_and_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, out = tmp_path / "small.toml", tmp_path / "plan.json"
    workload.write_text(SMALL)
    arguments = ["plan", str(workload), "--out", str(out), *LENGTHS]
    log = tmp_path / "plan.json.partial.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments, "--jobs", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "on the disk\n"
    lines = log.read_text().splitlines()
    assert len(lines) == 2, "the head, and a candidate while others are still to come"
    process.send_signal(signal.SIGINT)  # to this process only: its workers hear nothing
    _, said = process.communicate()
    assert process.returncode == 130
    assert f"1 of 4 candidates are in {log}; --resume goes on" in said
    assert "Traceback" not in said
    assert log.read_text().splitlines() == lines
    assert not out.exists()
    assert main([*arguments, "--resume"]) == 0
    assert not log.exists()
    document = json.loads(out.read_text())
    assert [each["number"] for each in document["candidates"]] == [0, 1, 2, 3]
    assert document["complete"]
