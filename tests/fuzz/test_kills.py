"""Commands that are killed at any moment, twice each; `kills.py` says how it is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.kills import COMMANDS

KILLS = 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="commands are forked, so that they begin soon")
def test_killed_commands_run_again_end_as_undisturbed_ones(tmp_path: Path) -> None:
    """Invariant 20: `kill -9` at any moment, every command that writes."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.kills", "--kills", str(KILLS), "--folder",
         str(tmp_path)],
        cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    said = [json.loads(line) for line in made.stdout.splitlines()]
    assert [each["command"] for each in said] == list(COMMANDS)
    assert all(each["kills"] >= KILLS for each in said)
