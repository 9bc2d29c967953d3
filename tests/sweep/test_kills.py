"""``kill -9`` at any moment of a sweep loses only the cells that are being computed.

``python -m tests.sweep.test_kills 50`` kills as often.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import arborsim
from tests.sweep.grids import files, small

GRID = """
traces = ["a.parquet", "b.parquet"]
policies = ["h2o", { use = "streaming-llm", set = { sinks = [1, 2, 3, 4] } }, "random"]
budgets = [0.3, 0.5, 0.7, 0.9, 0.01]
"""


def killed(grid: Path, out: Path, workers: int, moments: random.Random) -> int:
    """Start a sweep and kill it within a second of its first new cell; its cells afterwards."""
    before = len(list(out.rglob("*.parquet")))
    run = subprocess.Popen(
        [sys.executable, "-m", "arborsim", "sweep", str(grid), "--out", str(out), "--jobs",
         str(workers)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while run.poll() is None and len(list(out.rglob("*.parquet"))) == before:
        time.sleep(0.005)
    time.sleep(moments.uniform(0, 0.3))
    run.kill()
    run.wait()
    return len(list(out.rglob("*.parquet")))


def check(folder: Path, kills: int, seed: int) -> list[int]:
    """Kill sweeps until they are done, begin anew as often as it takes; compare each time."""
    grid, moments = small(folder, GRID), random.Random(seed)
    arborsim.sweep(grid, folder / "undisturbed")
    expected, held = files(folder / "undisturbed"), []
    out, number = folder / "out-0", 0
    while len(held) < kills:
        held.append(killed(grid, out, 1 + len(held) % 2, moments))
        there = {name: content for name, content in files(out).items() if "/." not in name}
        assert there.items() <= expected.items(), "a cell is whole, or not there"
        if len(there) == len(expected):
            number += 1
            out = folder / f"out-{number}"
    for each in sorted(folder.glob("out-*")):
        arborsim.sweep(grid, each)
        assert files(each) == expected
    return held


@pytest.mark.slow
def test_killed_sweeps_end_as_undisturbed_ones(tmp_path: Path) -> None:
    held = check(tmp_path, 10, seed=0)
    assert len(held) == 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = check(Path(place), int(sys.argv[1]), seed=1)
        print(f"{len(found)} kills, cells after each: {found}")
