"""Files that appear whole or not at all, and are never written over what is read."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.cli.commands import files_named
from arborsim.core.documents import RecordLog
from arborsim.core.errors import UsageError
from arborsim.core.outputs import Lock, check_writable, refuse_inputs, scratch, whole, write_text
from arborsim.trace.schema import TraceInfo
from arborsim.trace.writer import TraceWriter
from tests.helpers.traces import make_info, random_trace_columns

CHAIN = Path("traces/chain-linear.parquet").resolve()
INFO = make_info(layers=2)
COLUMNS = random_trace_columns(np.random.default_rng(0), INFO, prompt=4, nodes=3)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_file_that_fails_is_what_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    write_text(out, "old")

    def fail(error: BaseException) -> None:
        with whole(out) as part:
            part.write_text("half")
            raise error

    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    with pytest.raises(UsageError, match=r"cannot write .*: No space left on device"):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    assert out.read_text() == "old"
    assert names(tmp_path) == ["out.txt"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    out, other = tmp_path / "out.csv", tmp_path / ".out.csv.bak"
    other.touch()
    killed = """
import os, signal, sys
from pathlib import Path
from arborsim.core.outputs import whole
with whole(Path(sys.argv[1])) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with whole(out) as living:
        subprocess.run([sys.executable, "-c", killed, str(out)], check=False)
        stumps = {name for name in names(tmp_path) if name.endswith(".part.csv")}
        assert len(stumps) == 2
        write_text(out, "from elsewhere")
        assert stumps & set(names(tmp_path)) == {living.name}
        living.write_text("whole")
    assert names(tmp_path) == [".out.csv.bak", "out.csv"]
    assert out.read_text() == "whole"


def test_what_a_killed_plan_left_among_temporary_files_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from arborsim.core.outputs import scratch
with scratch("arborsim-plan-") as folder:
    (folder / "generated.parquet").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "arborsim-plan-of-mine").mkdir()
    with scratch("arborsim-plan-") as living:
        (living / "trace").touch()
        for _ in range(2):
            subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
            left = {each.name for each in tmp_path.iterdir() if each.is_dir()}
            assert len(left) == 3, "each removes what the one before it left"
        with scratch("arborsim-plan-") as other:
            left = {each.name for each in tmp_path.iterdir() if each.is_dir()}
            assert left == {living.name, other.name, "arborsim-plan-of-mine"}
        assert (living / "trace").exists()
    assert names(tmp_path) == ["arborsim-plan-of-mine"]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    out, link = tmp_path / "out.txt", tmp_path / "link"
    out.write_text("old")
    out.chmod(0o600)
    link.symlink_to(out)
    write_text(link, "new")
    assert link.is_symlink()
    assert out.read_text() == "new"
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
@pytest.mark.parametrize("name", ["o.csv", "o.json", "o.parquet", "page.html", "t.parquet"])
def test_new_files_are_open_to_whom_the_umask_says(
    tmp_path: Path, umask: int, mode: int, name: str
) -> None:
    out = str(tmp_path / name)
    command = {
        "page.html": ["replay", str(CHAIN), "--episodes", "1", "--no-oracle", "--report", out],
        "t.parquet": ["generate", "--searches", "1", "--out", out],
    }.get(name, ["replay", str(CHAIN), "--episodes", "1", "--no-oracle", "--out", out])
    before = os.umask(umask)
    try:
        assert main(command) == 0
    finally:
        os.umask(before)
    assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_nobody_else_can_read_what_replaces_a_private_file(tmp_path: Path) -> None:
    out = tmp_path / "prompts.txt"
    out.touch(0o600)
    with whole(out) as part:
        assert part.stat().st_mode & 0o077 == 0
        part.write_text("mine")
    assert out.stat().st_mode & 0o777 == 0o600


COMMANDS_THAT_WRITE = [
    "replay {trace} --no-oracle --report {out}",
    "generate --searches 1 --out {out} --overwrite",
    "record --model game24 --out {out} --overwrite",
    "search {games} --algorithm rebase --report {out}",
    "plan {workload} --perfetto {out}",
    "calibrate hardware --out {out}",
    "results {folder} --report {out}",
    "plot {trace} --out {out}",
]


@pytest.mark.parametrize("command", COMMANDS_THAT_WRITE)
def test_links_to_themselves_named_pipes_and_names_of_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ending = ".html" if "--report" in command or "plot" in command else ".parquet"
    loop, pipe = Path(f"loop{ending}"), Path(f"pipe{ending}")
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    traces = CHAIN.parent
    inputs = {
        "trace": CHAIN, "games": traces / "game24-bank.parquet", "folder": tmp_path,
        "workload": traces.parent / "tests" / "golden" / "workload.toml",
    }  # fmt: skip
    for out, says in (
        (loop, "a symbolic link that leads to itself"),
        (pipe, "a named pipe: name a file, or /dev/stdout"),
        (f"new{ending}/", "this is the name of a folder: name a file"),
    ):
        assert main(command.format(out=out, **inputs).split()) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
    assert names(tmp_path) == [loop.name, pipe.name]


@pytest.mark.parametrize(
    "command",
    ["inspect {}", "replay {}", "search {}", "compare {} {}", "plot {}", "replay {trace} --gpu {}",
     "plan {}", "sweep {} --out cells", "models {}"],
)  # fmt: skip
def test_what_leads_to_itself_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert main(command.format(*2 * [loop], trace=CHAIN).split()) == 2
    assert capsys.readouterr().err.startswith(f"arborsim: {loop}: ")


@pytest.mark.parametrize("command", ["inspect", "replay", "search", "compare", "plot"])
def test_no_command_waits_for_who_writes_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    again = [str(pipe)] if command == "compare" else []
    assert main([command, str(pipe), *again]) == 2
    assert "it is a pipe: write it to a file first" in capsys.readouterr().err


def test_names_of_folders_are_no_files_in_python(tmp_path: Path) -> None:
    found = arborsim.replay(CHAIN, episodes=1, oracle=False)
    for write in (found.save, found.report):
        with pytest.raises(UsageError, match="this is the name of a folder"):
            write(f"{tmp_path}/new.csv/")
    assert names(tmp_path) == []


def test_devices_are_written_in_place() -> None:
    null = Path(os.devnull)
    check_writable(null, "--out")
    write_text(null, "gone")
    assert null.is_char_device()
    with pytest.raises(UsageError, match=r"cannot write /dev/full: No space left on device"):
        write_text(Path("/dev/full"), "more than fits")
    assert Path("/dev/full").is_char_device()


def test_what_is_read_is_found_under_every_name(tmp_path: Path) -> None:
    given = tmp_path / "given.parquet"
    given.write_text("x")
    hard, soft = tmp_path / "hard", tmp_path / "soft"
    hard.hardlink_to(given)
    soft.symlink_to(given)
    for name in (given, hard, soft, tmp_path / "." / "given.parquet"):
        with pytest.raises(UsageError, match="the command reads it"):
            refuse_inputs({"--out": name}, [given])
    refuse_inputs({"--out": tmp_path / "new", "--report": tmp_path / "page"}, [given])
    with pytest.raises(UsageError, match="--out names the same file"):
        refuse_inputs({"--out": tmp_path / "new", "--report": tmp_path / "new"}, [])
    with pytest.raises(UsageError, match="--out names the same file"):
        refuse_inputs({"--out": hard, "--report": soft}, [])
    refuse_inputs({"--out": Path(os.devnull), "--report": Path(os.devnull)}, [])


def test_files_that_arguments_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.parquet", "b.toml", "c.toml", "d.parquet", "e"):
        (tmp_path / name).write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "w.toml").write_text('own = "w.toml"\n[[mix]]\ntrace = "deep.parquet"\ngpu = "g"\n')
    (folder / "deep.parquet").write_text("")
    (tmp_path / "c.toml").write_text("not = TOML = at all")
    given = [Path("a.parquet"), ["x=b.toml", "h2o,c.toml"], "no", "", "\0", 3, "folder/w.toml",
             "e" * 5000, "e/f"]  # fmt: skip
    found = {str(path) for path in files_named(given)}
    assert found == {"a.parquet", "b.toml", "c.toml", "folder/w.toml", "folder/deep.parquet"}


@pytest.mark.parametrize(
    "command",
    [
        "replay {trace} --out gpu.toml --gpu gpu.toml",
        "replay {trace} --report answers.jsonl --answers answers.jsonl",
        "replay {trace} --policy own.toml --out own.toml",
        "replay {trace} --calibration own.toml --report own.toml",
        "plan plan.toml --report mine.parquet",
        "plan plan.toml --perfetto plan.toml",
        "generate --out model.json --model model.json --overwrite",
        "import bailian requests.jsonl requests.jsonl --overwrite",
        "plot {trace} --out same.parquet",
        "generate --searches 2 --prompt-tokens file:lens.txt --out lens.txt --overwrite",
        "plan lens.toml --perfetto lens.txt",
    ],
)
def test_no_input_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("gpu.toml", "answers.jsonl", "own.toml", "model.json", "requests.jsonl"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "mine.parquet").write_text("mine")
    (tmp_path / "plan.toml").write_text('[[mix]]\ntrace = "mine.parquet"\n')
    (tmp_path / "lens.txt").write_text("120\n130\n")
    (tmp_path / "lens.toml").write_text('[[mix]]\nprompt_tokens = "file:lens.txt"\n')
    (tmp_path / "trace.parquet").write_bytes(CHAIN.read_bytes())
    (tmp_path / "same.parquet").hardlink_to(tmp_path / "trace.parquet")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(command.format(trace="trace.parquet").split()) == 2
    assert "the command reads it" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_keeps_the_old_results(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    out = tmp_path / "results.csv"
    out.write_text("old results\n")
    command = ["replay", str(CHAIN), "--episodes", "1", "--no-oracle", "--out", str(out)]
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (200, {resource.RLIM_INFINITY})); "
        "from arborsim.cli.app import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"arborsim: cannot write {out}: File too large\n"
    assert out.read_text() == "old results\n"
    assert names(tmp_path) == ["results.csv"]


def test_a_name_that_is_not_utf_8_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(CHAIN), "--out", f"{tmp_path}/\udcff.parquet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"arborsim: --out {tmp_path}/")
    assert said.endswith("udcff.parquet: the name is not UTF-8: choose another name\n")
    assert names(tmp_path) == []


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    held = Lock(tmp_path / "a")
    with pytest.raises(UsageError, match="another arborsim is writing it"):
        Lock(tmp_path / "a")
    Lock(tmp_path / "b").release()
    held.release()
    held.release()
    Lock(tmp_path / "a").release()
    # One that an error forgot is released with what held it.
    forgotten = Lock(tmp_path / "a")
    del forgotten
    assert names(tmp_path) == []


def test_a_link_has_the_lock_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a")
    for one, other in (("link", "there/a"), ("there/a", "link")):
        held = Lock(tmp_path / one)
        with pytest.raises(UsageError, match="another arborsim is writing it"):
            Lock(tmp_path / other)
        held.release()
    assert names(tmp_path) == ["link", "there"]


def test_two_recordings_into_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, INFO) as first:
        first.write_episode(COLUMNS)
        for how in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(UsageError, match="another arborsim is writing it"):
                TraceWriter(path, INFO, **how)
    with TraceWriter(path, INFO, resume=True) as again:
        assert again.num_episodes == 1
    assert names(tmp_path) == ["t.parquet"]


def test_two_runs_into_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = RecordLog(path, TraceInfo, "x", 1)
    first.open({})
    with pytest.raises(UsageError, match="another arborsim is writing it"):
        RecordLog(path, TraceInfo, "x", 1).open({})
    first.close()


def test_a_log_on_a_full_disk_names_itself(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    log = RecordLog(tmp_path / "log", TraceInfo, "x", 1)
    log.open({})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        for write in (lambda: log.add({"a": 1}), log.close):  # which tries again
            with pytest.raises(UsageError, match="log: cannot write: File too large"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["log"]


def test_a_log_that_cannot_be_begun_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("results of last week\n")

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match="No space left"):
        RecordLog(path, TraceInfo, "x", 1).open({})
    assert path.read_text() == "results of last week\n"
    assert names(tmp_path) == ["log"], "no lock"


WORKERS = """
import sys, time
from arborsim.core.workers import in_order
def work(i):
    sys.stdout.write(f"{i}\\n")  # in one piece: two workers write into this pipe
    sys.stdout.flush()
    time.sleep(600)
if __name__ == "__main__":
    list(in_order(work, [1, 2], 2))
"""


def until(happened: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "work.py"
    script.write_text(WORKERS)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert {parent.stdout.readline(), parent.stdout.readline()} == {"1\n", "2\n"}
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) >= 2
    parent.send_signal(how)
    parent.wait(60)
    until(lambda: not any(alive(int(child)) for child in children))
    parent.stdout.close()
