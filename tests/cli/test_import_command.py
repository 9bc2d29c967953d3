"""`arborsim import`: whole traces or none, damage by name, and traces that other commands take."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.trace.reader import TraceReader
from arborsim.trace.writer import WholeTraceWriter
from tests.trace.import_helpers import (
    deft_tree,
    nested_tree,
    tot_problem,
    tot_samples,
    tot_visits,
)

BROKEN = {"incompleted": True, "prompt": "x", "data": {}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of all formats, good and bad."""
    monkeypatch.chdir(tmp_path)
    request = {"timestamp": 5, "input_length": 20, "output_length": 4}
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,30,4\n"
    files = {
        "tot.json": json.dumps([tot_problem(seed) for seed in range(3)]),
        "dfs.json": json.dumps([tot_visits(seed) for seed in range(3)]),
        "samples.json": json.dumps([tot_samples(seed) for seed in range(3)]),
        "tree.jsonl": "".join(f"{json.dumps(nested_tree(seed))}\n" for seed in range(3)),
        "deft.json": json.dumps([deft_tree(seed) for seed in range(3)]),
        "part.json": json.dumps([deft_tree(0), BROKEN, deft_tree(1), [], deft_tree(2)]),
        "broken.json": json.dumps([BROKEN]),
        "mooncake.jsonl": json.dumps({**request, "hash_ids": [1]}) + "\n",
        "bailian.jsonl": json.dumps({**request, "hash_ids": [1, 2], "turn": 1}) + "\n",
        "azure.csv": azure,
        "object.json": "{}",
        "cut.json": '[{"steps": [\n',
        "empty.jsonl": "\n\n",
        "none.json": "[]",
        "there.parquet": "something else",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("format", "source", "ends"),
    [
        ("tot", "tot.json", True), ("tot", "dfs.json --prompt-tokens 20", False),
        ("tot", "samples.json --prompt-tokens 20 --thought-tokens 9", True),
        ("deft", "deft.json", False), ("mooncake", "mooncake.jsonl", False),
        ("tree", "tree.jsonl --root a.tree --value v --tokens n", False),
        ("tree", "tree.jsonl --root a.tree --order depth-first --thought-tokens 3"
         " --prompt-tokens 9", False),
        ("bailian", "bailian.jsonl", False), ("azure", "azure.csv", False),
        ("requests", "azure.csv --time-unit s", False),
    ],
)  # fmt: skip
def test_every_format_can_be_inspected_and_replayed(
    format: str, source: str, ends: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, *options = source.split()
    assert main(["import", format, source, "out.parquet", *options]) == 0
    assert "wrote out.parquet" in capsys.readouterr().out
    reader = TraceReader(Path("out.parquet"))
    assert reader.info.knows_ends == ends
    assert all((e.end is not None) == ends for e in reader.episodes())
    assert main(["inspect", "out.parquet"]) == 0
    assert f"{source} ({reader.info.extra['source_format']})" in capsys.readouterr().out
    command = "replay out.parquet --policy full,streaming-llm --budget 16 --json"
    assert main(shlex.split(command)) == 0
    assert {"full", "streaming-llm"} <= set(capsys.readouterr().out.replace('"', " ").split())
    assert not list(folder.glob(".*"))


CASES = {
    "no such file": ("tot nowhere.json out.parquet", "nowhere.json: cannot be read"),
    "a folder": ("tot folder out.parquet", "folder: cannot be read"),
    "no JSON": ("deft azure.csv out.parquet", "azure.csv, line 1: this is not JSON"),
    "cut": ("tot cut.json out.parquet", "cut.json, line 2: this is not JSON"),
    "no list": ("deft object.json out.parquet", "expected a JSON list"),
    "Latin-1": ("deft latin.json out.parquet", "byte 2 is not UTF-8"),
    "no lines": ("mooncake empty.jsonl out.parquet", "there is nothing in it"),
    "no items": ("tot none.json out.parquet", "there is nothing in it"),
    "another format": (
        "tot deft.json out.parquet",
        "steps is missing; all 3 items are unreadable",
    ),
    "no CSV of Azure's": ("azure mooncake.jsonl out.parquet", "line 1: ContextTokens is missing"),
    "no known log": ("requests tot.json out.parquet", "no known log of requests (columns steps"),
    "no such role": ("requests azure.csv out.parquet --field when=a", "ROLE=COLUMN"),
    "no such column": (
        "requests azure.csv out.parquet --field prompt=a,output=b",
        "line 1: no column a",
    ),
    "no such unit": ("requests azure.csv out.parquet --time-unit h", "--time-unit is one of"),
    "16-token blocks": ("mooncake bailian.jsonl out.parquet", "line 1: hash_ids names 2 blocks"),
    "damage": ("deft part.json out.parquet", "item 1: the tree is marked incomplete"),
    "nothing left": ("deft broken.json out.parquet --on-damage skip", "is it the right file"),
    "neither": ("deft part.json out.parquet --on-damage ignore", "'ignore' is not one of"),
    "there": ("deft deft.json there.parquet", "there.parquet exists"),
    "onto itself": ("deft deft.json deft.json --overwrite", "the command reads it"),
    "no folder": ("deft deft.json no/out.parquet", "there is no directory no"),
    "into a folder": ("deft deft.json folder", "folder is a directory"),
    "unknown geometry": ("deft deft.json out.parquet --model llama-3.1-8c", "llama-3.1-8b"),
    "no length": ("tot tot.json out.parquet --tokens-per-character 0", "above 0"),
    "length is no number": ("tot tot.json out.parquet --tokens-per-character nan", "above 0"),
    "scale 0": ("tot tot.json out.parquet --value-scale 0", "above 0"),
    "small scale": ("tot tot.json out.parquet --value-scale 1e-4", "more than 0.0001"),
    "no prompt": ("tot dfs.json out.parquet", "the length of the prompt with --prompt-tokens"),
    "samples without a prompt": ("tot samples.json out.parquet", "--prompt-tokens"),
    "no text": ("tree tree.jsonl out.parquet", "line 1: the root: text is missing; all 3 items"),
    "no lengths": ("tree tree.jsonl out.parquet --text ''", "--text, --tokens or --thought-tokens"),
    "no children": ("tree tree.jsonl out.parquet --children ''", "--children names the field"),
    "another order": ("tree tree.jsonl out.parquet --order random", "'random' is not one of"),
    "no tree": ("tree tot.json out.parquet --root a.b", "item 0: the tree: a is missing"),
    "fewer than none": ("tot tot.json out.parquet --limit -1", "--limit"),
    "unknown format": ("burst burst.csv out.parquet", "No such command"),
}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_are_one_line_and_leave_nothing(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, named = CASES[case]
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert main(["import", *shlex.split(command)]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


def test_damage_can_be_left_out_and_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split("import deft part.json out.parquet --on-damage skip")) == 0
    out, error = capsys.readouterr()
    assert "3 searches" in out
    assert "2 of 5 items left out" in out
    assert error.splitlines() == [
        "left out item 1: the tree is marked incomplete and has 0 nodes",
        "left out item 3: expected an object with data, found a list",
    ]
    extra = TraceReader(folder / "out.parquet").info.extra
    assert extra["left_out"] == [line.removeprefix("left out ") for line in error.splitlines()]
    assert extra["source"] == "part.json"


def test_limit_and_overwrite(folder: Path) -> None:
    for limit in (2, 1):
        command = f"import deft part.json there.parquet --limit {limit} --overwrite"
        assert main(shlex.split(f"{command} --on-damage skip")) == 0
        reader = TraceReader(folder / "there.parquet")
        assert (reader.num_episodes, reader.info.extra["source_items"]) == (1, limit)


@pytest.mark.parametrize(
    ("source", "method"),
    [("deft deft.json", "write_episode"), ("bailian two.jsonl", "write_packed")],
)
def test_an_interruption_leaves_the_old_trace(
    source: str, method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "two.jsonl").write_text(2 * (folder / "bailian.jsonl").read_text())
    monkeypatch.setattr("arborsim.trace.importers.requests._GROUP_REQUESTS", 1)
    before = (folder / "there.parquet").read_bytes()
    write = getattr(WholeTraceWriter, method)

    def interrupted(self: WholeTraceWriter, columns: dict[str, object], **options: object) -> None:
        if self.num_episodes == 1:
            raise KeyboardInterrupt
        write(self, columns, **options)

    monkeypatch.setattr(WholeTraceWriter, method, interrupted)
    assert main(["import", *source.split(), "there.parquet", "--overwrite"]) == 130
    assert (folder / "there.parquet").read_bytes() == before
    assert not list(folder.glob(".*"))


def test_a_full_disk_is_one_line_and_leaves_the_old_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "there.parquet").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("arborsim.trace.writer.os.fsync", full)
    assert main(shlex.split("import deft deft.json there.parquet --overwrite")) == 2
    error = capsys.readouterr().err
    assert "cannot write there.parquet: No space left on device" in error
    assert error.count("\n") == 1
    assert (folder / "there.parquet").read_bytes() == before
    assert not list(folder.glob(".*"))
