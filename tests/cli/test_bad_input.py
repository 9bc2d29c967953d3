"""Whatever a user gets wrong: one line that says what, where and what to do, and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arborsim.cli.app import main
from arborsim.core.outputs import check_writable
from arborsim.core.tables import write_table
from arborsim.trace.schema import METADATA_KEY, VERSION_KEY
from arborsim.trace.writer import TraceWriter, WholeTraceWriter
from tests.bank.banks import bank_columns, bank_info
from tests.helpers.traces import make_trace

NINES = "9" * 5000
GAMES = Path(__file__).parents[2] / "traces" / "game24-tot.parquet"

SEARCHES = """
from dataclasses import dataclass, field
from arborsim.searches import Expansion, Search

def grow(): ...

@dataclass
class Nameless(Search):
    synchronous = True
    slots = 2
    def expand(self, frontier, width): return Expansion(done=True)

class Plain(Search):
    name = "plain"

@dataclass
class Idle(Search):
    name, synchronous, slots = "idle", True, 2

@dataclass
class Odd(Nameless):
    name = "odd"
    seeds: list = field(default_factory=list)

@dataclass
class Wide(Nameless):
    name, width_option = "wide", "lanes"

@dataclass
class Greedy(Nameless):
    name = "greedy"
    case: str = "wide"
    def expand(self, frontier, width):
        if self.case == "silent":
            return Expansion(done=True)
        if len(frontier) == 1:
            return Expansion({0: 3 if self.case == "wide" else 2})
        return Expansion({1: 1}, dropped=(0,) if self.case == "root" else (1,))
    def answers(self, frontier): return ()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good and bad files."""
    folder = tmp_path_factory.mktemp("traces")
    good = make_trace(folder / "good.parquet", kind="linear", prompt=40, nodes=8)
    make_trace(folder / "bare.parquet", kind="linear", prompt=40, capture="tree")
    (folder / "text.parquet").write_text("this is not Parquet\n" * 50)
    (folder / "truncated.parquet").write_bytes(good.read_bytes()[:-200])
    (folder / "empty.parquet").write_bytes(b"")
    pq.write_table(pa.table({"a": [1, 2]}), folder / "other.parquet")
    write_table(pd.DataFrame({"a": [1]}), folder / "results.parquet", {"kind": "replay"})
    table = pq.read_table(good)
    future = table.replace_schema_metadata({**table.schema.metadata, VERSION_KEY: b"99"})
    pq.write_table(future, folder / "future.parquet")
    muddled = table.replace_schema_metadata({**table.schema.metadata, METADATA_KEY: b"{"})
    pq.write_table(muddled, folder / "muddled.parquet")
    (folder / "bad.toml").write_text("hbm_bytes = 'many'")
    (folder / "empty.toml").write_text("")
    (folder / "cut_short.py").write_text("class Mine(:\n")
    (folder / "raising.py").write_text("1 / 0\n")
    (folder / "leaving.py").write_text("raise SystemExit(3)\n")
    (folder / "searches.py").write_text(SEARCHES)
    with TraceWriter(folder / "bank.parquet", bank_info(embeddings=False)) as writer:
        writer.write_episode(bank_columns(0, embeddings=False))
    (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "one"}\n{"prompt": }\n')
    (folder / "folder.parquet").mkdir()
    return folder


CASES = {
    "missing file": ("replay nowhere.parquet", "nowhere.parquet"),
    "not Parquet": ("replay text.parquet", "text.parquet"),
    "empty file": ("replay empty.parquet", "empty.parquet"),
    "truncated": ("replay truncated.parquet", "truncated.parquet"),
    "no trace": ("replay other.parquet", "other.parquet"),
    "future version": ("replay future.parquet", "99"),
    "broken metadata": ("replay muddled.parquet", "metadata"),
    "a folder": ("replay folder.parquet", "folder.parquet"),
    "no attention": ("replay bare.parquet --policy raas", "--capture signals"),
    "no vectors": (
        "replay good.parquet --policy h2o", "record it with --capture qkv --qkv-layers all, or "
        "--set h2o.per=shared: one ranking for all heads, not its authors' form"),
    "unknown policy": ("replay good.parquet --policy epikw", "did you mean epikv"),
    "no policy": ("replay good.parquet --policy ,", "names no policy"),
    "unknown GPU": ("replay good.parquet --gpu h1000", "did you mean h100"),
    "unknown model": ("replay good.parquet --model llama-3.1-8c", "did you mean llama-3.1-8b"),
    "bad profile": ("replay good.parquet --gpu bad.toml", "bad.toml"),
    "budget 0": ("replay good.parquet --policy epikv --budget 0", "must be above 0"),
    "negative budget": ("replay good.parquet --policy epikv --budget -3", "must be above 0"),
    "budget above 1": ("replay good.parquet --policy epikv --budget 1.5", "neither a share"),
    "budget below the floor": ("replay good.parquet --policy epikv --budget 20", "prompt 40"),
    "unknown recall": ("replay good.parquet --recall steam", "did you mean stream"),
    "unknown parameter": ("replay good.parquet --policy h2o --set sink=4", "did you mean sinks"),
    "bad parameter": ("replay good.parquet --policy h2o --set sinks=four", "must be an integer"),
    "parameter of nobody": ("replay good.parquet --policy full --set epikv.x=4", "not among"),
    "parameter out of range": (
        "replay good.parquet --policy hierarchy --set evict_ratio=7", "[0, 1]"),
    "policy given twice": (
        "replay good.parquet --policy h2o,arborsim.policies.methods.attention:H2O",
        "another policy called h2o"),
    "policy file that is not there": ("replay good.parquet --policy no.toml", "no.toml"),
    "policy file that is no TOML": ("replay good.parquet --policy bad.toml", "bad.toml"),
    "policy class that is not there": ("replay good.parquet --policy no.mod:C", "no.mod"),
    "policy class without a module": (
        "replay good.parquet --policy :X", "expected package.module:Class"),
    "results for a trace": ("replay results.parquet", "results, not a trace"),
    "a policy's file without its class": (
        "replay good.parquet --policy mine.py", "name its class, e.g. mine:MyPolicy"),
    "a policy without a score": (
        "replay good.parquet --policy arborsim.policies.stream:StreamPolicy", "does not say"),
    "policy class of a relative module": (
        "replay good.parquet --policy ..a:X", "expected package.module:Class"),
    "policy module with a syntax error": (
        "replay good.parquet --policy cut_short:Mine", "SyntaxError"),
    "policy module that raises": (
        "replay good.parquet --policy raising:Mine", "ZeroDivisionError"),
    "policy module that exits": ("policies leaving:Mine", "SystemExit: 3"),
    "unknown search": ("search bank.parquet --algorithm rebasee", "did you mean rebase"),
    "search class that is not there": (
        "search bank.parquet --algorithm no.mod:C", "search 'no.mod:C' cannot be imported"),
    "search class without a class": (
        "search bank.parquet --algorithm mod:", "search 'mod:': expected package.module:Class"),
    "search module that raises": (
        "search bank.parquet --algorithm raising:Mine", "ZeroDivisionError"),
    "search that is a function": (
        "search bank.parquet --algorithm searches:grow", "not a subclass of arborsim.searches"),
    "search without expand": (
        "search bank.parquet --algorithm searches:Idle", "'searches:Idle' has no expand"),
    "search that is no dataclass": (
        "search bank.parquet --algorithm searches:Plain", "is no dataclass"),
    "search without a name": (
        "search bank.parquet --algorithm searches:Nameless", "does not say its name"),
    "search with an option of no kind": (
        "search bank.parquet --algorithm searches:Odd", "has an option seeds whose default"),
    "search with a width that is no option": (
        "search bank.parquet --algorithm searches:Wide", "has no option lanes, its width"),
    "search that opens too much": (
        "search bank.parquet --algorithm searches:Greedy", "opens 3 thoughts, 2 may be"),
    "search that expands what it gave up": (
        "search bank.parquet --algorithm searches:Greedy --set case=again",
        "opens children of node 1, which is not complete or was given up"),
    "search that gives up the root": (
        "search bank.parquet --algorithm searches:Greedy --set case=root", "gives up node 0"),
    "search that has no answer": (
        "search bank.parquet --algorithm searches:Greedy --set case=silent", "answers with nodes"),
    "unknown option of a search": (
        "search bank.parquet --algorithm searches:Greedy --set greedy.case2=x",
        "did you mean case"),
    "search class on a bank to record": (
        "record --bank --for no.mod:C --out x.parquet", "search 'no.mod:C' cannot be imported"),
    "search class to record": (
        "record --model chain --search no.mod:C --out x.parquet",
        "search 'no.mod:C' cannot be imported"),
    "search class of a live run": (
        "live --search searches:Idle --policy full", "'searches:Idle' has no expand"),
    "unknown view": ("replay good.parquet --view matirx", "did you mean matrix"),
    "no workers": ("replay good.parquet --jobs 0", "--jobs"),
    "unknown calibration": (
        "replay good.parquet --policy epikv --calibration no.toml", "no such calibration"),
    "a calibration that is none": (
        "replay good.parquet --policy epikv --calibration bad.toml", "not a calibration"),
    "bad page size": ("replay good.parquet --page-size 0", "page-size"),
    "page too large": ("replay good.parquet --page-size 32768", "from 1 to 32,767"),
    "page of 31 digits": (f"replay good.parquet --page-size {'1' * 31}", "at most 1,000,000,000"),
    "jobs of 31 digits": (f"replay good.parquet --jobs {'1' * 31}", "at most 1,000,000,000"),
    "seed of 31 digits": (f"generate --seed {'1' * 31} --out x.parquet", "--seed: must be at most"),
    "width of 5,000 digits": (
        f"search bank.parquet --algorithm rebase --width {NINES}", "1,000,000,000, by comma"),
    "chain of 5,000 digits": (
        f"plan --quick --model qwen3-8b --gpu h100 --rate 2/min --p95 9s --chain tokens={NINES}",
        "chain: tokens: it must"),
    "setting of 5,000 digits": (
        f"replay good.parquet --policy h2o --set sinks={NINES}", "an integer up to 1,000,"),
    "states of 5,000 digits": (
        f"search bank.parquet --algorithm tot-bfs --width 8 --set keep={NINES}", "up to 1,000,"),
    "layers of 5,000 digits": (
        f"record --model chain --qkv-layers {NINES} --out x.parquet", "expected numbers, e.g. 2,3"),
    "output nowhere": ("replay good.parquet --out no/where.parquet", "no directory"),
    "output refused": (
        "replay good.parquet --out /dev/null/x.parquet", "there is no directory /dev/null"),
    "page refused": ("replay good.parquet --report /proc/x.html", "cannot write /proc/x.html"),
    "GPU of another ending": ("replay good.parquet --gpu prompts.jsonl", "ends in .toml"),
    "folder as a model": ("replay good.parquet --model folder.parquet", "./folder.parquet"),
    "incomplete profile": ("hardware empty.toml", 'with base = "h100"'),
    "unknown option": ("replay good.parquet --polciy h2o", "--polciy"),
    "unknown command": ("repaly good.parquet", "repaly"),
    "inspect a missing file": ("inspect nowhere.parquet", "nowhere.parquet"),
    "explain an unknown policy": ("policies epikw", "did you mean epikv"),
    "record an unknown task": (
        "record --model chain --task chian --out x.parquet", "did you mean chain"),
    "record an unknown search": (
        "record --model chain --task chain --search tot-bsf --out x.parquet", "tot-bfs"),
    "record too long a program": ("record --model chain --lines 5000 --out x.parquet", "125"),
    "record with another task's option": (
        "record --model game24 --lines 5 --out x.parquet", "no option --lines"),
    "output over the input": ("replay good.parquet --out good.parquet", "another name"),
    "two outputs in one": ("replay good.parquet --out a.csv --report a.csv", "another name"),
    "first episode beyond the last": ("replay good.parquet --first 99", "it holds 3"),
    "window of nothing": ("replay good.parquet --policy epikv --set window=0", "[2, 65536]"),
    "negative seed": ("replay good.parquet --policy random --set seed=-1", "at least 0"),
    "NaN": ("replay good.parquet --policy arborkv --set alpha=nan", "alpha must be"),
    "record from nowhere": (
        "record --model no/such/model --prompts prompts.jsonl --out x.parquet", "no/such/model"),
    "prompts that are no text": (
        "record --model no/such --prompts good.parquet --out x.parquet", "good.parquet"),
    "a prompt that is no JSON": (
        "record --model no/such --prompts broken.jsonl --out x.parquet", "2"),
    "record without CUDA": (
        "record --model chain --task chain --device cuda --out x.parquet", "CUDA"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(
    case: str, traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, says = CASES[case]
    if command.startswith("record"):
        torch = pytest.importorskip("torch")
        if "cuda" in command and torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
    monkeypatch.chdir(traces)
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("arborsim: ")
    assert printed.out == ""
    assert not (traces / "x.parquet").exists()


def test_a_check_of_an_output_leaves_it_as_it_was(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("kept")
    for path in (there, new):
        check_writable(path, "--out")
    assert there.read_text() == "kept"
    assert not new.exists()


def test_a_full_disk_is_one_line(
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The device takes the check of the output, and refuses the first byte."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    monkeypatch.chdir(traces)
    assert main(["replay", "good.parquet", "--episodes", "1", "--report", str(full)]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["repaly", "replay nowhere.parquet"])
def test_errors_keep_their_code_where_none_can_be_printed(command: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        run = [sys.executable, "-m", "arborsim", *command.split()]
        assert subprocess.run(run, stderr=full, check=False).returncode == 2


@pytest.mark.parametrize(
    "error",
    [ImportError("libarrow.so: failed to map segment"), RuntimeError("can't start new thread")],
)
def test_no_memory_for_a_library_is_one_line(
    error: Exception,
    traces: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(name: str) -> None:
        raise error

    monkeypatch.setattr("arborsim.cli.app.import_module", load)
    assert main(["inspect", str(traces / "good.parquet")]) == 2
    assert capsys.readouterr().err.startswith(f"arborsim: out of memory ({error}): ")


@pytest.mark.parametrize("group", [[], ["calibrate"], ["import"]])
@pytest.mark.parametrize("columns", ["80", "160"])
def test_a_group_without_a_command_prints_its_help_uncut(
    group: list[str],
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(group) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    usage, *rest = shown.out.splitlines()
    assert usage.startswith("Usage: arborsim")
    assert rest[-1].startswith("  ")
    assert [line for line in rest if line.endswith("...")] == []


def test_a_closed_pipe_is_no_error(traces: Path) -> None:
    command = f"{sys.executable} -m arborsim.cli.app policies | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_ctrl_c_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def stop_at_the_third(*arguments: object, **options: object) -> None:
        written.append(1)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(WholeTraceWriter, "write_episode", stop_at_the_third)
    out = tmp_path / "g.parquet"
    assert main(["generate", "--out", str(out), "--searches", "9"]) == 130
    assert capsys.readouterr().err == "arborsim: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_commands_are_loaded() -> None:
    """A module search stands in for the moment at which somebody presses it."""
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'arborsim.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from arborsim.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "arborsim: interrupted\n")


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "arborsim", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("arborsim ")


@pytest.mark.parametrize("command", ["policies", "policies h2o --json", f"inspect {GAMES}"])
def test_a_reader_that_has_read_enough_is_no_error(command: str) -> None:
    """As in ``arborsim policies | head -1``, with a reader that is gone before the first byte."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "arborsim", *command.split()],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command", ["replay no\x1b]0;mine\x07file.parquet", "replay {trace} --policy \x1b[31mh2o"]
)
def test_no_error_steers_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    assert main(command.format(trace=trace).split(" ")) == 2
    error = capsys.readouterr().err
    assert "\\x1b" in error
    assert all(c.isprintable() for c in error.removesuffix("\n")), error


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 10**30}, "no model is so large"),
        ({"num_hidden_layers": 10**30}, "no model is so large"),
        ({"vocab_size": 10**30}, "no model is so large"),
        ({"model_type": "deepseek_v2"}, "it lacks num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": None}, "it lacks kv_lora_rank"),
    ],
)
def test_configurations_that_no_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    (config := tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    assert main(["models", str(config)]) == 2
    assert says in capsys.readouterr().err


def _run(command: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sh", "-c", command], capture_output=True, check=False, **options)


def test_output_that_is_closed_or_full_or_knows_few_characters(tmp_path: Path) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    inspect = f"{sys.executable} -m arborsim.cli.app inspect {trace}"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
             "PYTHONIOENCODING": "ascii"}  # fmt: skip
    for command, code, error in (
        (
            f"{inspect} >&-",
            2,
            b"arborsim: standard output is closed: send it to a file, or to /dev/null\n",
        ),
        (f"{inspect}x 2>&-", 2, b""),
        (f"{inspect} >&- 2>&-", 2, b""),
        (f"{inspect} > /dev/full", 2, b"arborsim: No space left on device\n"),
    ):
        done = _run(command)
        assert (done.returncode, done.stderr) == (code, error), command
    done = _run(inspect, env=plain)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"chain-linear" in done.stdout


@pytest.mark.parametrize("options", ["", "--jobs 2"])
def test_too_few_files_may_be_open(tmp_path: Path, options: str) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    command = f"{sys.executable} -m arborsim replay {trace} --episodes 2 --no-oracle {options}"
    done = _run(f"ulimit -n 6; {command}")
    said = done.stderr.decode().splitlines()
    assert done.returncode == 2, said
    assert len(said) == 1, said
    assert "ulimit -n 4096" in said[0]
    assert "damaged" not in said[0]


@pytest.mark.parametrize("options", ["--out x.csv", "--policy mine:Policy", "--gpu ./mine.toml"])
def test_a_working_folder_that_was_deleted(tmp_path: Path, options: str) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    (gone := tmp_path / "gone").mkdir()
    script = (
        "import os, sys; from arborsim.cli.app import main; os.rmdir(os.getcwd()); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "replay", str(trace), "--no-oracle", *options.split()],
        capture_output=True, text=True, check=False, cwd=gone,
    )  # fmt: skip
    said = done.stderr.splitlines()
    assert done.returncode == 2, said
    assert len(said) == 1, said
    assert said[0].endswith("; the working folder was deleted: change to one that exists")


def test_a_name_that_is_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    Path(name).write_bytes(trace.read_bytes())
    assert main(["inspect", name]) == 2
    assert "\\udcff.parquet: this name of a file is not UTF-8" in capsys.readouterr().err


def test_a_footer_with_another_name_for_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Path(__file__).parents[2] / "traces" / "chain-linear.parquet"
    content = bytearray(trace.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    damaged = content[:footer] + content[footer:].replace(b"episode", b"episofe")
    (copy := tmp_path / "t.parquet").write_bytes(damaged)
    assert main(["inspect", str(copy)]) == 2
    assert capsys.readouterr().err.startswith(f"arborsim: {copy}: ")
