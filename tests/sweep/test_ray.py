"""A sweep on Ray: the same cells, to the byte."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.products.sweep import on_ray as module
from tests.sweep.grids import files, small

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Workers leave others the processor by default, and on a busy machine get none themselves.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        module._start(ray, 2, "")
    yield
    ray.shutdown()


def test_cells_are_the_same_to_the_byte(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Done, left out and failed ones; workers are given names and paths, no tables."""
    grid = small(tmp_path)
    text = grid.read_text().replace('["random"]', '["random", "tests.sweep.grids:Fails"]')
    grid.write_text(text.replace(', "l40s"', "").replace(', "b.parquet"', ""))
    sent: list[int] = []
    remote = ray.remote

    def measured(*given: Any, **options: Any) -> Any:
        task = remote(*given, **options)

        def made(function: Any) -> Any:
            from ray.cloudpickle import dumps

            inner = task(function)

            class Task:
                @staticmethod
                def remote(job: Any) -> Any:
                    sent.append(len(dumps(job)))
                    return inner.remote(job)

            return Task

        return made

    monkeypatch.setattr(ray, "remote", measured)
    arborsim.sweep(grid, tmp_path / "ray", on="ray")
    arborsim.sweep(grid, tmp_path / "local")
    found = files(tmp_path / "ray")
    assert found == files(tmp_path / "local")
    assert len(sent) == len(found) == 18
    assert max(sent) < 4000


def test_a_worker_that_dies_is_a_cell_that_failed(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = small(tmp_path, 'traces = ["a.parquet"]\npolicies = ["tests.sweep.grids:Dies"]\n')
    assert main(["sweep", str(grid), "--out", str(tmp_path / "out"), "--on", "ray"]) == 1
    said = capsys.readouterr()
    assert "1 done, 1 failed" in said.out
    assert "its process died, perhaps for lack of memory" in said.err


def test_sigterm_keeps_the_cells_that_are_done(tmp_path: Path) -> None:
    """As without Ray, whose own answer is to abort."""
    grid, out = small(tmp_path), tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, "-m", "arborsim", "sweep", str(grid), "--out", str(out), "--on", "ray"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "RAY_worker_niceness": "0"},
    )  # fmt: skip
    while run.poll() is None and not list(out.rglob("*.parquet")):
        time.sleep(0.05)
    run.terminate()
    _, said = run.communicate()
    assert run.returncode == 130, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert {Path(name).suffix for name in files(out)} == {".parquet"}, "no lock, no stump"


def test_no_cluster_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = small(tmp_path, 'traces = ["a.parquet"]\npolicies = ["streaming-llm"]\n')
    command = ["sweep", str(grid), "--out", str(tmp_path / "out")]
    assert main([*command, "--address", "127.0.0.1:1"]) == 2
    assert "on must be ray" in capsys.readouterr().err
    assert main([*command, "--on", "rai"]) == 2
    assert "did you mean ray" in capsys.readouterr().err
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999999999"):
        assert main([*command, "--on", "ray", "--address", address]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"--address {address}: no Ray cluster answers there (" in error
