"""``kill -9`` at any moment: running the command again ends as if nothing had happened.

``python -m tests.fuzz.kills --kills 50`` kills every command as often, by a seed: before one of the
operations with which it changes files, at a change that is seen from outside, or at any time.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from arborsim.core.tables import holds_key
from arborsim.products.validate.files import read_results
from arborsim.products.validate.report import report_of
from arborsim.report.report import write
from arborsim.trace.reader import TraceReader
from arborsim.trace.writer import TraceWriter
from tests.bank.banks import bank_columns, bank_info
from tests.helpers.traces import make_trace
from tests.plan.make import SMALL
from tests.sweep.grids import files, small

#: What the commands import, once for all of them.
LOADED = [
    "pandas", "pyarrow.dataset", "scipy.stats", "rich.console", "plotly", "arborsim.cli.app",
    "arborsim_torch.backend", "arborsim_torch.live.run", "arborsim_torch.recording",
    "arborsim_torch.models", "arborsim_torch.episodes", "arborsim_torch.decoder",
    "arborsim_torch.reference.chain", "arborsim_torch.rewards.load",
    "arborsim_torch.live.validate", "optuna", "sqlalchemy", "tests.plan.make",
    "tests.sweep.grids", "tests.bank.banks",
]  # fmt: skip
LOADED += [f"arborsim.products.{name}" for name in [
    "live.command", "record.command", "replay.command", "search.command", "sweep.command",
    "plan.command", "live.ask", "record.ask", "replay.ask", "search.ask", "sweep.ask", "plan.ask",
    "live.tables", "replay.report", "replay.run", "search.run", "plan.plan", "plan.files",
    "sweep.run", "tune.ask", "tune.run", "tune.command", "validate.command", "validate.report",
]]  # fmt: skip
#: Python's audit events of changing files, apart from writing into those that are open.
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MOST_S = 600.0  # that a command may take on a busy machine
OLD = b"what was there before"
PROCESSES = get_context("forkserver")
GRID = """
traces = ["a.parquet", "b.parquet"]
policies = ["raas", { use = "streaming-llm", set = { sinks = [1, 2] } }]
budgets = [0.3, 0.7, 0.01]
"""


def _lines(path: Path) -> list[Any]:
    return path.read_bytes().splitlines(True)


@dataclass(frozen=True)
class Command:
    """A command line, and what it writes into the folder in which it runs."""

    line: tuple[str, ...]
    out: str = ""  #: the file that appears whole, over an older one
    told: Callable[[Path], Any] = Path.read_bytes  #: of a file, without seconds that were measured
    log: str = ""  #: the file that grows by records, which stay when the command goes on
    records: Callable[[Path], list[Any]] = _lines
    partial: str = ""  #: the file whose presence asks for --resume
    workers: bool = False

    def now(self, folder: Path) -> tuple[str, ...]:
        """What to run in a folder, in which an earlier run may have ended at any moment."""
        resume = self.partial and (folder / self.partial).exists()
        return (*self.line, "--resume") if resume else self.line


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clock(each) for key, each in value.items()
                if not key.endswith(("_s", "_seconds"))}  # fmt: skip
    return list(map(_without_clock, value)) if isinstance(value, list) else value


def _logged(path: Path) -> list[Any]:
    return [_without_clock(json.loads(line)) for line in _lines(path)]


def _recorded(path: Path) -> Any:
    """Searches, and what is said of them, but for times."""
    file, made = pq.ParquetFile(path), io.BytesIO()
    said = {key: json.loads(value) for key, value in (file.schema_arrow.metadata or {}).items()}
    for each in said.values():
        if isinstance(each, dict):
            each.pop("timing", None)
    pq.write_table(file.read().drop(["time_s"]).replace_schema_metadata(None), made)
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    return said, groups, made.getvalue()


def _checked(path: Path) -> list[Any]:
    """Every search of a validation."""
    return [*map(repr, read_results(path)[0].checks)]  # NaN is not equal to itself


def _validated(path: Path) -> Any:
    """Searches but for times; of the page, whether it is that of the results beside it."""
    found, _ = read_results(path.with_name("results.parquet"))
    if path.suffix == ".html":
        with tempfile.TemporaryDirectory() as scratch:
            write(report_of(found), again := Path(scratch) / "again.html")
            return again.read_bytes() == path.read_bytes()
    return [repr(replace(check, live_s=(), thread_s=0.0)) for check in found.checks]


def _trials(path: Path) -> list[Any]:
    """Trials that have ended, of the study in a database.

    It is read with its journal, as the next process would, but where that changes nothing.
    """
    from optuna import load_study

    with tempfile.TemporaryDirectory() as scratch:
        for each in path.parent.glob(f"{path.name}*"):
            shutil.copy(each, scratch)
        url = f"sqlite:///{scratch}/{path.name}"
        try:
            trials = load_study(study_name="killed", storage=url).trials
        except KeyError:  # killed before there was a study
            return []
    return [(t.params, t.values, t.user_attrs) for t in trials if t.state.is_finished()]


def _tuned(path: Path) -> Any:
    return _trials(path) if path.suffix == ".sqlite" else path.read_bytes()


SHORT = ("--task", "chain", "--lines", "6", "--lines-per-thought", "2", "--max-tokens", "12")
COMMANDS = {
    "replay": Command(
        ("replay", "../inputs/trace.parquet", "--policy", "thinkv,epikv", "--budget", "0.6,0.9",
         "--out", "out.parquet", "--report", "page.html"), "out.parquet", workers=True,
    ),
    "search": Command(
        ("search", "../inputs/bank.parquet", "--algorithm", "rebase,ets", "--width", "4",
         "--out", "out.csv"), "out.csv", workers=True,
    ),
    "record": Command(
        ("record", *SHORT, "--episodes", "4", "--out", "out.parquet", "--resume"),
        told=_recorded,
    ),
    "live": Command(
        ("live", *SHORT, "--episodes", "2", "--policy", "h2o,streaming-llm", "--budget", "0.7",
         "--out", "log", "--resume"), log="log", told=_logged,
    ),
    "sweep": Command(("sweep", "../inputs/grid.toml", "--out", "cells"), workers=True),
    "plan": Command(
        ("plan", "../inputs/small.toml", "--searches", "12", "--warm-up", "2", "--runs", "1",
         "--out", "plan.json"), "plan.json", partial="plan.json.partial.jsonl",
    ),
    "validate": Command(
        ("validate", "--gpu", "h100", "--task", "chain", "--lines", "6", "--max-tokens", "12",
         "--episodes", "3", "--policy", "h2o,streaming-llm", "--budget", "0.7", "--out", "checks",
         "--resume"), told=_validated, log="checks/results.parquet", records=_checked,
    ),
    "tune": Command(
        ("tune", "../inputs/trace.parquet", "--policy", "staircase", "--vary", "recent=2:16",
         "--trials", "4", "--study", "killed", "--out", "out.parquet", "--front", "front",
         "--report", "page.html"), "out.parquet", _tuned, "tune.sqlite", _trials,
    ),
}  # fmt: skip


def make_inputs(folder: Path) -> None:
    """The files that the commands read."""
    folder.mkdir()
    small(folder, GRID)
    make_trace(folder / "trace.parquet", episodes=2, nodes=8)
    (folder / "small.toml").write_text(SMALL)
    with TraceWriter(folder / "bank.parquet", bank_info()) as writer:
        for seed in range(2):
            writer.write_episode(bank_columns(seed, width=3, depth=2))


def _run(line: tuple[str, ...], folder: str, at: int, counted: Any) -> None:
    """A command in this process, which dies before its change number `at` of files; 0: never."""
    if not line:
        return
    os.chdir(folder)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def change(*_: Any) -> None:
        counted.value += 1
        if counted.value == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def notice(event: str, given: tuple[Any, ...]) -> None:
        if event not in CHANGES or not isinstance(given[0], str | bytes | os.PathLike):
            return
        if event == "open" and not given[2] & WRITING:
            return
        if os.path.abspath(os.fsdecode(given[0])).startswith(folder + os.sep):
            change()

    from sqlalchemy import Engine, event

    from arborsim.cli.app import main

    sys.addaudithook(notice)
    for each in ("before_cursor_execute", "commit"):
        event.listen(Engine, each, change)
    sys.exit(main(list(line)))


@dataclass
class Ran:
    """A run of a command: how it ended, and when what happened."""

    code: int
    seconds: float
    operations: int  #: changes of files, as the process counts them
    changes: int  #: as they are seen from outside


def run(line: tuple[str, ...], folder: Path, operation: int = 0, change: int = 0,
        seconds: float = MOST_S) -> Ran:  # fmt: skip
    """Run it, and kill it at one of these moments, whichever comes first."""
    counted = PROCESSES.Value("i", 0, lock=False)
    given = (line, str(folder.resolve()), operation, counted)
    process = PROCESSES.Process(target=_run, args=given)
    began = time.monotonic()
    process.start()
    changes, before = 0, _sizes(folder)
    while process.is_alive() and time.monotonic() - began < seconds:
        now = _sizes(folder)
        changes, before = changes + (now != before), now
        if change and changes >= change:
            break
        time.sleep(0.004)
    took = time.monotonic() - began
    assert took < MOST_S, f"{line} hangs"
    if process.is_alive():
        process.kill()
    process.join()
    assert process.exitcode is not None
    return Ran(process.exitcode, took, counted.value, changes)


def _sizes(folder: Path) -> list[tuple[str, int]]:
    found = []
    for name, _, inside in os.walk(folder):
        for each in inside:
            try:
                found.append((f"{name}/{each}", os.stat(f"{name}/{each}").st_size))
            except FileNotFoundError:  # meanwhile
                continue
    return sorted(found)


def moments(whole: Ran, rng: random.Random) -> Iterator[dict[str, Any]]:
    """When to kill: each kind of moment in turn, spread over the run."""
    while True:
        order = rng.sample(range(1, whole.operations + 1), whole.operations)
        for number in order:
            yield {"operation": number}
            yield {"change": rng.randint(1, max(whole.changes, 1))}
            yield {"seconds": rng.uniform(0, whole.seconds)}


def check(name: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a command as often, run it again each time, and compare with an undisturbed run.

    Every third run that goes on after a kill is killed, too.
    """
    command, rng = COMMANDS[name], random.Random(f"{name} {seed}")

    def place(which: str) -> Path:
        shutil.rmtree(folder / which, ignore_errors=True)
        (folder / which).mkdir()
        return folder / which

    undisturbed = place("undisturbed")
    whole = run(command.line, undisturbed)
    assert whole.code == 0, (name, whole)
    expected = {each: command.told(undisturbed / each) for each in files(undisturbed)}
    when, done, ended = moments(whole, rng), 0, 0
    while done < kills:
        at = place("killed")
        kept: list[Any] = []
        recorded = 0
        if command.out and rng.random() < 0.5:
            (at / command.out).write_bytes(OLD)
        more = ("--jobs", "2") if command.workers and done % 5 == 4 else ()
        while True:
            moment = next(when)
            ran = run((*command.now(at), *more), at, **moment)
            if ran.code != -signal.SIGKILL:  # it was faster
                assert ran.code == 0, (name, moment, ran)
                ended += 1
                break
            done += 1
            _whole_or_not(command, at, expected, (name, seed, done, moment))
            recorded, before = _episodes(at), recorded
            assert recorded >= before, "an episode that was there is lost"
            if command.log:
                there = at / command.log
                records = command.records(there) if there.exists() else []
                assert records[: len(kept)] == kept, "a record that was there is lost"
                kept = records
            if rng.random() > 1 / 3:
                break
        again = run(command.now(at), at)
        assert again.code == 0, (name, seed, done, moment, again)
        found = files(at)
        assert found.keys() == expected.keys(), (name, seed, done, moment, sorted(found))
        for each in found:
            assert command.told(at / each) == expected[each], (name, seed, done, moment, each)
        if command.log:
            records = command.records(at / command.log)
            assert records[: len(kept)] == kept, "records were made again"
    return {"command": name, "kills": done, "too late": ended, "seconds": round(whole.seconds, 2),
            "operations": whole.operations, "changes": whole.changes}  # fmt: skip


def _episodes(folder: Path) -> int:
    """Whole episodes of the recordings here, all of which can be read."""
    found = 0
    for path in [*folder.glob("*.parquet.parts"), *folder.glob("out.parquet")]:
        if path.is_dir() and not any(path.glob("*.parquet")):
            continue  # killed within the first one
        if path.is_file() and not holds_key(path, b"arborsim.trace"):
            continue
        found = max(found, len(list(TraceReader(path).episodes())))
    return found


def _whole_or_not(command: Command, folder: Path, expected: dict[str, Any], what: object) -> None:
    """A killed command has left what was there before, or what it was to write; logs grow."""
    for each, made in files(folder).items():
        if each not in expected or made == OLD:
            continue
        told = command.told(folder / each)
        if each == command.log:
            assert told == expected[each][: len(told)], (what, each)
        else:
            assert told == expected[each], (what, each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", default=",".join(COMMANDS), help="commands, by comma")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    PROCESSES.set_forkserver_preload(LOADED)
    run((), Path())  # loads them
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        make_inputs(folder / "inputs")
        for name in given.only.split(","):
            print(json.dumps(check(name, folder, given.kills, given.seed)), flush=True)


if __name__ == "__main__":
    main()
