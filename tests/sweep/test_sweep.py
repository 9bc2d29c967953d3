"""A sweep: figures as a replay's, each cell computed once, whatever goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.outputs import Busy
from arborsim.core.plugins import source_files
from arborsim.core.records import parse_toml
from arborsim.policies.methods.baselines import StreamingLLM
from arborsim.products.schemas import schema_of
from arborsim.products.sweep import ask as api
from arborsim.products.sweep.ask import Sweeping, SweepOptions
from arborsim.products.sweep.cells import Folder, Made, made
from arborsim.products.sweep.grid import example_grid, grid_of
from arborsim.products.sweep.jobs import CODE, Job, jobs_of
from arborsim.products.sweep.run import fill, local
from tests.helpers.traces import make_trace
from tests.sweep.grids import GRID, H2O, files, small

ONE = f'traces = ["a.parquet"]\npolicies = [{H2O}]\nbudgets = [0.5, 0.8]\n'


def names(folder: Path) -> set[str]:
    return {name for name in files(folder) if name.endswith(".parquet")}


def test_cells_have_the_figures_of_a_replay(tmp_path: Path) -> None:
    grid = small(tmp_path)
    found = arborsim.sweep(grid, tmp_path / "out")
    frame = found.to_pandas()
    assert set(frame["status"]) == {"done", "left out"}
    assert not found.failed
    for (trace, gpu), own in frame[frame["recall"] == "stage"].groupby(["trace", "gpu"]):
        for sinks in (2, 4):
            replayed = arborsim.replay(
                tmp_path / str(trace), policies=["h2o", "random", "streaming-llm"],
                budgets=[0.5, 0.01], gpu=str(gpu),
                settings={"streaming-llm.sinks": sinks, "h2o.per": "shared"},
            )  # fmt: skip
            expected = replayed.summary()
            cells = own[own["settings"].isin(["", "per=shared", f"sinks={sinks}"])]
            same = [name for name in expected.columns if name in cells.columns]
            assert len(same) > 40
            key = ["policy", "budget"]
            mine = cells.set_index(key)[[n for n in same if n not in (*key, "trace", "right",
                                                                      "answered")]]  # fmt: skip
            theirs = expected.set_index(key)[list(mine.columns)]
            assert set(mine.index) == set(theirs.index)
            for index, row in theirs.iterrows():
                for name, value in row.items():
                    other = mine.loc[index, name]
                    if name == "left_out":
                        assert str(value) == str(other)
                    elif not (pd.isna(value) and pd.isna(other)) and not row["left_out"]:
                        assert value == other, (index, name)


def test_a_cell_says_what_made_it(tmp_path: Path) -> None:
    """Its command gives the same figures; where its inputs lie does not stand in it."""
    found = arborsim.sweep(small(tmp_path, ONE), tmp_path / "out").to_pandas()
    (row,) = found[found["budget"] == "0.8"].to_dict("records")
    file = Folder(tmp_path / "out").file(row["address"])
    assert str(tmp_path).encode() not in file.read_bytes()
    (raw,) = pq.read_table(file).to_pylist()
    assert raw["output_error"] is None, "not NaN, which is a number to other tools"
    assert not any(value != value for value in raw.values())
    said = json.loads(pq.read_metadata(file).metadata[b"arborsim"])
    assert said["kind"] == "cell"
    assert said["policies"]["h2o"]["sinks"] is not None
    words = shlex.split(said["command"])
    assert words[:3] == ["arborsim", "replay", "a.parquet"]
    words[2] = str(tmp_path / "a.parquet")
    assert main([*words[1:], "--out", str(tmp_path / "r.parquet")]) == 0
    (again,) = arborsim.load_results(tmp_path / "r.parquet").summary().to_dict("records")
    for name in ("peak_hbm_kv_bytes", "total_s", "attention_kept", "decisions"):
        assert again[name] == row[name]


def test_a_second_sweep_computes_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, out = small(tmp_path, ONE), tmp_path / "out"
    assert main(["sweep", str(grid), "--out", str(out)]) == 0
    assert "3 cells of" in (said := capsys.readouterr().out)
    assert ": 3 done" in said
    before = files(out)
    assert main(["sweep", str(grid), "--out", str(out)]) == 0
    assert ": 3 were there" in capsys.readouterr().out
    assert files(out) == before
    grid.write_text(ONE.replace("0.8", "0.8, 0.9"))
    assert main(["sweep", str(grid), "--out", str(out)]) == 0
    assert ": 1 done; 3 were there" in capsys.readouterr().out
    assert before.items() < files(out).items()


def test_a_folder_shows_what_was_swept_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents A, then B under the same name, then A again; of cells, failures, and other grids."""
    grid, out = small(tmp_path, ONE), tmp_path / "out"
    others = tmp_path / "others.toml"
    others.write_text('traces = ["b.parquet"]\npolicies = ["raas"]\n')
    theirs = names_of(arborsim.sweep(others, out))
    trace = tmp_path / "a.parquet"
    contents = {"A": trace.read_bytes()}
    trace.unlink()
    contents["B"] = make_trace(trace, seed=9, episodes=1).read_bytes()
    swept = {}
    for number, name in enumerate("ABAB"):
        trace.write_bytes(contents[name])
        sweeping = Sweeping(SweepOptions(grid, out))
        assert sweeping.run().made == (3 if number < 2 else 0)
        found = sweeping.results()
        assert swept.setdefault(name, names_of(found)) == names_of(found)
        shown = arborsim.results(out)
        assert names_of(shown) == swept[name] | theirs
        assert shown.raw.superseded == (0 if number == 0 else 3)
        # What reads the files themselves sees the same.
        raw = pd.read_parquet(out / "cells")
        assert set(raw["address"]) == swept[name] | theirs
    assert len(swept["A"] | swept["B"]) == 6
    # A cell that fails does not leave the one of other contents in its place.
    monkeypatch.setattr(api, "_replayed", failing)
    trace.unlink()
    make_trace(trace, seed=10, episodes=1)
    assert set(arborsim.sweep(grid, out).failed) == names_of(arborsim.results(out)) - theirs


def failing(job: Job) -> Made:
    raise UsageError("a mistake")


def names_of(found: arborsim.SweepResults) -> set[str]:
    return set(found.to_pandas()["address"])


def test_a_sweep_killed_while_it_arranges_a_folder_goes_on(tmp_path: Path) -> None:
    """After any number of renamings cells are of one version each, and none is lost."""
    jobs = [jobs_in(tmp_path)[:6]]
    (tmp_path / "a.parquet").unlink()
    make_trace(tmp_path / "a.parquet", seed=9, episodes=1)
    jobs.append(Sweeping(SweepOptions(tmp_path / "grid.toml", tmp_path / "out")).jobs[:6])
    folder = Folder(tmp_path / "out")
    for version in jobs:
        fill(folder, version, lambda job: made(job, "left out", reason="a test"), local(0))
    before = {Path(name).name for name in files(tmp_path / "out")}
    for moves in range(12):
        with pytest.MonkeyPatch.context() as patch:
            left = iter(range(moves))

            def move(self: Path, target: Path, replace: Any = Path.replace) -> None:
                next(left)  # noqa: B023 - StopIteration stands for the end of the process
                replace(self, target)

            patch.setattr(Path, "replace", move)
            with contextlib.suppress(StopIteration):
                folder.arrange(jobs[moves % 2])
        shown, _ = folder.rows() if folder.files() else ([], 0)
        assert len({row.address[:16] for row in shown}) == len(shown)
        assert {Path(name).name for name in files(tmp_path / "out")} == before
    folder.arrange(jobs[0])
    assert {path.stem for path in folder.files()} == {job.address for job in jobs[0]}


def test_what_a_cell_depends_on_is_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents count, not where files lie; so does every parameter, and the code."""

    def addresses(folder: Path, text: str = ONE) -> set[str]:
        (folder / "grid.toml").write_text(text)
        options = SweepOptions(folder / "grid.toml", folder / "out")
        return {job.address for job in Sweeping(options).jobs}

    gpu = 'base = "h100"\nname = "mine"\n'
    text = ONE + 'gpus = ["my.toml"]\n'
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        small(tmp_path / name)
        (tmp_path / name / "my.toml").write_text(gpu)
    assert addresses(tmp_path / "one", text) == addresses(tmp_path / "two", text)
    (tmp_path / "two" / "my.toml").write_text(gpu + "hbm_bytes = 50e9\n")
    seen = addresses(tmp_path / "one", text)
    others = [
        addresses(tmp_path / "two", text),
        addresses(tmp_path / "one", ONE + 'gpus = ["h200"]\n'),
        addresses(tmp_path / "one", text + "page_sizes = 16\n"),
        addresses(tmp_path / "one", text + 'recalls = "near"\n'),
        addresses(tmp_path / "one", text + "quality = false\n"),
        addresses(tmp_path / "one", text + 'kv_dtypes = "fp8"\n'),
    ]
    monkeypatch.setattr("arborsim.products.sweep.jobs.sources", lambda *places: "another version")
    others.append(addresses(tmp_path / "one", text))
    for other in others:
        assert len(other) == len(seen) == 3
        assert not seen & other


MINE = """
from dataclasses import dataclass
from arborsim.policies.methods.baselines import StreamingLLM
from arborsim.searches.levels import Beam4
@dataclass(frozen=True)
class Mine(StreamingLLM):
    name = "mine"
    def decide(self, view, event):
        from my_package.parts import more
        import numpy, my_missing_module
@dataclass
class MySearch(Beam4):
    name = "my-search"
"""


def test_an_address_covers_every_package_that_a_replay_runs_through() -> None:
    root = Path(arborsim.__file__).parent
    packages = {each.parent.name for each in root.glob("*/__init__.py")}
    below = packages - {"cli", "report", "products"}
    assert below
    assert {f"arborsim/{each}" for each in below} <= {*CODE["replay"]}
    assert all((root.parent / each).exists() for each in CODE["replay"])


def test_what_users_code_imports_is_part_of_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever import statements stand; nothing is imported to find it, nor is numpy part of it."""
    monkeypatch.syspath_prepend(tmp_path)
    small(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "my_package").mkdir()
    files = {name: tmp_path / "my_package" / f"{name}.py" for name in ("__init__", "parts", "deep")}
    files |= {"unused": tmp_path / "unused.py"}
    for name, file in files.items():
        file.write_text("from .deep import *\n" if name == "parts" else "")
    grids = [
        {"traces": "a.parquet", "policies": "mine:Mine"},
        {"live": [{"policies": "h2o", "search": "mine:MySearch"}]},
    ]

    def addresses() -> list[tuple[str, ...]]:
        found = [jobs_of(grid, tmp_path, lambda given: None) for grid in grids]
        return [tuple(job.address for job in jobs if job.name[:4] != "full") for jobs in found]

    seen = addresses()
    for name, file in files.items():
        file.write_text(file.read_text() + "changed = 1\n")
        now = addresses()
        assert [len(each) for each in now] == [1, 1]
        assert all((a != b) == (name != "unused") for a, b in zip(seen, now, strict=True)), name
        seen = now
    assert "my_package" not in sys.modules
    found = source_files(sys.modules["mine"].Mine)
    assert sorted(found) == ["mine", "my_package", "my_package.deep", "my_package.parts"]
    assert not source_files(StreamingLLM)
    del sys.modules["mine"]


def test_what_live_cells_name_is_part_of_their_addresses(tmp_path: Path) -> None:
    """A shadow's GPU and the geometry of random weights, by paths from the folder of the grid."""
    geometry = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 128,
    }  # fmt: skip
    gpu, model = tmp_path / "my.toml", tmp_path / "my.json"
    seen = set()
    for memory in ("40e9", "50e9"):
        for layers in (2, 3):
            gpu.write_text(f'base = "h100"\nname = "mine"\nhbm_bytes = {memory}\n')
            model.write_text(json.dumps({**geometry, "num_hidden_layers": layers}))
            table = {"policies": "h2o", "shadow": True, "gpu": "my.toml",
                     "model": "config:my.json"}  # fmt: skip
            job = jobs_of({"live": [table]}, tmp_path, lambda given: None)[1]
            assert job.given["gpu"] == str(gpu)
            assert job.given["model"] == f"config:{model}"
            assert str(tmp_path) not in str(job.head)
            seen.add(job.address)
    assert len(seen) == 4


BAD = {
    "": "grid.toml: traces names nothing: give at least one",
    ONE.replace("budgets", "budget"): "unknown key or table 'budget': did you mean budgets",
    ONE.replace("h2o", "h3o"): "policies: unknown policy 'h3o': did you mean h2o",
    ONE.replace("a.parquet", "c.parquet"): "c.parquet",
    ONE.replace("a.parquet", "c*.parquet"): "traces: no file is called c*.parquet",
    ONE.replace("0.5", "1.5"): "budget '1.5' is neither a share up to 1 nor a whole number",
    ONE + 'gpus = ["h1000"]': "unknown GPU 'h1000': did you mean",
    ONE + 'recalls = ["strem"]': "unknown recall mode 'strem': did you mean stream",
    ONE + "page_sizes = 0": "page_size must be a whole number of 1 or more, not 0",
    ONE + "gpus = []": "gpus is empty",
    ONE + "first = 5": "no episode 5; it has 1",
    ONE.replace(H2O, '{ use = "h2o", set = { sink = 4 } }'): "unknown parameter of h2o 'sink'",
    ONE.replace(H2O, '{ use = "h2o", set = { sinks = [] } }'): "set.sinks is empty",
    ONE + "[[cells]]\npolicy = 3": "unknown key of [[cells]] 1 'policy': did you mean policies",
    ONE + "[cells]": "cells must be blocks: [[cells]]",
    ONE.replace(H2O, '"h2o"'): "record it with --capture qkv --qkv-layers all, or set = { per = "
    '"shared" }: one ranking for all heads, not its authors\' form',
    "[[live]]\n": "[[live]] 1: policies names nothing",
    '[[live]]\npolicies = "h2o"\ntsk = "chain"': "unknown key 'tsk': did you mean task",
    '[[live]]\npolicies = "h2o"\nout = "x"': "unknown key 'out'",
    '[[live]]\npolicies = "h2o"\nrecall = "x"': "unknown recall mode 'x'",
    "traces = [": "is not valid TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_grid_is_one_line_before_anything_runs(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, out = small(tmp_path, text), tmp_path / "out"
    assert main(["sweep", str(grid), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert BAD[text] in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_failing_cell_is_a_record_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ONE.replace(H2O, '"tests.sweep.grids:Fails"')
    grid, out = small(tmp_path, text), tmp_path / "out"
    monkeypatch.setenv("FAILS", "1")
    assert main(["sweep", str(grid), "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "1 done, 2 failed" in said.out
    assert (
        "failed: fails at budget 0.5 on a.parquet, h100: ValueError: a mistake in two" in said.err
    )
    found = arborsim.results(out)
    assert sorted(found.failed.values()) == ["ValueError: a mistake in two lines"] * 2
    assert main(["results", str(out)]) == 0
    assert "2 cells failed: arborsim sweep tries them again" in capsys.readouterr().out
    monkeypatch.delenv("FAILS")
    assert main(["sweep", str(grid), "--out", str(out)]) == 0
    assert "2 done; 1 were there" in capsys.readouterr().out
    assert not arborsim.results(out).failed
    assert {name.split("/")[0] for name in files(out)} == {"cells"}


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_process_that_dies_costs_its_cell_alone(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = small(tmp_path, ONE.replace(H2O, f'"tests.sweep.grids:Dies", {H2O}'))
    out = tmp_path / "out"
    assert main(["sweep", str(grid), "--out", str(out), "--jobs", jobs]) == 1
    said = capsys.readouterr()
    assert "3 done, 2 failed" in said.out
    assert said.err.count("its process died, perhaps for lack of memory") == 2
    assert len(files(out)) == 5


def test_more_processes_than_can_be_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = small(tmp_path, ONE)
    assert main(["sweep", str(grid), "--out", str(tmp_path / "out"), "--jobs", "100000"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1:] == ["arborsim: 100,000 worker processes are too many: take at most 10,000"]
    assert not any(files(tmp_path / "out"))


def test_the_example_is_a_grid_of_the_shipped_traces() -> None:
    jobs = jobs_of(parse_toml(example_grid(), "example"), Path(), api._check_live)
    replays = Counter(job.head["policy"] for job in jobs)
    traces = len(list(Path("traces").glob("*.parquet")))
    # Two GPUs and budgets; the block of the hierarchy has two more ways to recall.
    assert replays == {
        "full": traces * 2 * 3, "epikv": traces * 4, "arborkv": traces * 4,
        "streaming-llm": traces * 4 * 2, "hierarchy": traces * 4 * 3,
    }  # fmt: skip


def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Invariant 6: the files of a sweep."""
    grid = small(tmp_path)
    arborsim.sweep(grid, tmp_path / "one")
    arborsim.sweep(grid, tmp_path / "two", workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    each = (1 + 4 * 2) + (1 + 2 * 2)  # full retention with recall stage is asked for twice
    assert len(files(tmp_path / "one")) == 2 * 2 * each


def test_live_cells_are_those_of_a_live_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    problems = {"task": "chain", "lines": 10, "episodes": 2}
    policy = {"use": "h2o", "set": {"sinks": [2]}}
    grid = {"live": [{**problems, "policies": policy, "budgets": [0.6, 0.02], "seed": [0]}]}
    found = arborsim.sweep(grid, tmp_path / "out").to_pandas().set_index(["policy", "budget"])
    live = arborsim.live(**problems, policies="h2o", budgets=[0.6], settings={"sinks": 2})
    for _, row in live.summary().iterrows():
        cell = found.loc[row["policy"], row["budget"]]
        assert (cell["right"], cell["answered"]) == (row["correct"], row["judged"])
        for name in ("generated_tokens", "peak_hbm_kv_bytes", "evicted_tokens", "decisions"):
            assert cell[name] == row[name]
        assert cell["hbm_vs_full"] == row["hbm_vs_full"] or cell["policy"] == "full"
        assert cell["total_s"] == cell["wall_s"] > 0
    small_budget = found.loc["h2o", "0.02"]
    assert small_budget["status"] == "left out"
    assert "budget" in small_budget["left_out"]
    assert set(found["more"]) == {"lines=10 seed=0"}
    assert main(["results", str(tmp_path / "out")]) == 0


def jobs_in(tmp_path: Path) -> list[Job]:
    return Sweeping(SweepOptions(small(tmp_path), tmp_path / "out")).jobs


def test_two_sweeps_share_a_folder(tmp_path: Path) -> None:
    """Cells of the other are waited for, or taken over if it ends without them."""
    jobs = jobs_in(tmp_path)[:4]
    folder, seen = Folder(tmp_path / "out"), []
    theirs = folder.lock(jobs[0])
    with pytest.raises(Busy):
        folder.lock(jobs[0])

    def compute(job: Job) -> Made:
        seen.append(job.address)
        if len(seen) == 1:  # another sweep is faster
            folder.write(jobs[3], api.compute(jobs[3]))
        if len(seen) == 2:  # the one with the lock ends, without its cell
            theirs.release()
        return api.compute(job)

    tally = fill(folder, jobs, compute, local(0))
    assert (tally.made, tally.there) == (3, 1)
    assert sorted(seen) == sorted(job.address for job in (jobs[0], jobs[1], jobs[2]))
    assert len(files(tmp_path / "out")) == 4, "no lock, no stump"


SWEEP = [sys.executable, "-m", "arborsim", "sweep"]


def test_two_processes_compute_each_cell_once(tmp_path: Path) -> None:
    grid = small(tmp_path)
    runs = [
        subprocess.Popen([*SWEEP, str(grid), "--out", str(tmp_path / "out")],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    arborsim.sweep(grid, tmp_path / "alone")
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def test_a_full_disk_leaves_whole_cells(tmp_path: Path) -> None:
    """A file-size limit of 2 kB stands for it: no cell fits."""
    grid, out = small(tmp_path, ONE), tmp_path / "out"
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "from arborsim.cli.app import main; sys.exit(main(sys.argv[1:]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", limited, "sweep", str(grid), "--out", str(out)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 2
    assert "cannot write" in found.stderr
    assert "Traceback" not in found.stderr
    assert not files(out)
    arborsim.sweep(grid, out)
    assert len(files(out)) == 3


@pytest.mark.parametrize("folder", ["/proc/cells", "grid.toml", "grid.toml/cells"])
def test_a_folder_that_cannot_be_written_is_one_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = small(tmp_path, ONE)
    assert main(["sweep", str(grid), "--out", str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "grid.toml" in said or "/proc" in said


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_the_cells_that_are_done(tmp_path: Path, number: int) -> None:
    grid, out = small(tmp_path, ONE), tmp_path / "out"
    waiting = (
        "import signal, sys, threading; from arborsim.products.sweep.cells import Folder\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def write(self, job, found, write=Folder.write):\n"
        "    write(self, job, found); print('on the disk', flush=True)\n"
        "    threading.Event().wait()\n"
        "Folder.write = write\n"
        "from arborsim.cli.app import main; sys.exit(main(sys.argv[1:]))\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", waiting, "sweep", str(grid), "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "on the disk\n"
    run.send_signal(number)
    _, said = run.communicate()
    assert run.returncode == 130
    assert f"{out} holds 1 of 3 cells; the same command goes on" in said
    assert "Traceback" not in said
    assert len(files(out)) == 1, "no lock, no stump"


def test_a_call_of_another_version_is_refused(tmp_path: Path) -> None:
    job = jobs_in(tmp_path)[0]
    vars(job)["code"] = "another"
    with pytest.raises(UsageError, match="a worker has another arborsim"):
        api.compute(job)


@pytest.mark.parametrize(
    "grid",
    [
        ONE.replace(H2O, '"named_in_a_grid:Mine"'),
        ONE + '[[cells]]\npolicies = ["tova", {use = "named_in_a_grid:Mine"}]\n',
        ONE + '[[live]]\npolicies = "h2o"\nbudgets = 0.5\nsearch = "named_in_a_grid:Mine"\n',
    ],
)
def test_a_grid_imports_code_only_if_that_is_allowed(
    grid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    make_trace(Path("a.parquet"), episodes=1)
    Path("named_in_a_grid.py").write_text("open('imported', 'w')\n")
    Path("grid.toml").write_text(grid)
    assert main(["sweep", "grid.toml", "--out", "out"]) == 2
    assert "named_in_a_grid:Mine' is code that a file names" in capsys.readouterr().err
    assert not Path("imported").exists()
    assert main(["sweep", "grid.toml", "--out", "out", "--allow-code"]) == 2  # it holds no Mine
    assert Path("imported").exists()
    sys.modules.pop("named_in_a_grid", None)


def test_a_grid_runs_no_code_that_comes_with_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text('[[live]]\nmodel = "./m"\ntrust_remote_code = true\npolicies = ["h2o"]\n')
    assert main(["sweep", str(grid), "--out", str(tmp_path / "out")]) == 2
    assert "trust_remote_code runs code that comes with a model" in capsys.readouterr().err


def test_a_huge_grid_says_what_it_comes_to_before_any_cell_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = """
traces = ["*.parquet"]
policies = ["h2o", "kivi", { use = "streaming-llm", set = { sinks = [%s] } }]
budgets = [%s]
page_sizes = [1, 16]
"""
    numbers = ", ".join(map(str, range(1, 201)))
    grid = small(tmp_path, huge % (numbers, numbers))

    def none(self: object, group: object) -> object:
        raise UsageError("no cell is made here")

    monkeypatch.setattr("arborsim.products.sweep.jobs._Replays.jobs", none)
    assert main(["sweep", str(grid), "--out", "cells"]) == 2
    said, error = capsys.readouterr().err.splitlines()
    cells = 2 * 2 * (200 * (1 + 200) + 2)  # kivi and full retention know no budget
    assert said == f"arborsim: {grid} has {cells:,} cells: about 1.98 GB in cells"
    assert "no cell is made here" in error
    # A grid that is not huge says nothing.
    grid.write_text(GRID)
    assert main(["sweep", str(grid), "--out", "cells"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("grid", [GRID, example_grid().replace('"traces/*', '"*')])
def test_as_many_cells_are_foretold_as_there_are(tmp_path: Path, grid: str) -> None:
    told: list[int] = []
    raw = parse_toml(grid, "grid")
    raw.pop("live", None)
    small(tmp_path)
    jobs = jobs_of(raw, tmp_path, api._check_live, told.append)
    once = [group for _, group in grid_of(raw).groups[1:]]
    traces = len(list(tmp_path.glob("*.parquet")))
    # Full retention is there once, but every block has it.
    again = sum(traces * len(group.gpus) for group in once if "stage" in group.recalls)
    assert told == [len(jobs) + again]


def test_json_follows_the_schema_and_is_that_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "1")
    grid = small(tmp_path, ONE.replace(H2O, f'{H2O}, "tests.sweep.grids:Fails"'))
    out = tmp_path / "out"
    assert main(["sweep", str(grid), "--out", str(out), "--allow-code", "--json"]) == 1
    said = capsys.readouterr()
    assert "a mistake in two lines" in said.err
    document = json.loads(said.out)
    assert list(Draft202012Validator(schema_of("sweep")).iter_errors(document)) == []
    assert {"done", "failed"} == {row["status"] for row in document["rows"]}
    assert main(["results", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
