"""Judged problems of one's own, through records and live runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.play.judges import judge_named
from arborsim.play.live_log import LiveRecords
from arborsim.play.problem_sets import ProblemSet, Recipe
from arborsim.trace.reader import TraceReader
from arborsim_torch.text_task import TextTask
from tests.helpers.errors import without_size
from tests.helpers.smollm2 import smollm2
from tests.live.test_prompts import byte_tokenizer
from tests.live.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plain"))


def said_by(folder: Path, tmp_path: Path) -> list[str]:
    """The texts that the model goes on with, greedily."""
    path, out = tmp_path / "plain.jsonl", tmp_path / "plain.parquet"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("w3 w4", "w5 w6 w7", "w8")))
    assert main(["record", "--model", str(folder), "--prompts", str(path), "--max-tokens", "6",
                 "--capture", "tree", "--out", str(out)]) == 0  # fmt: skip
    texts = []
    for episode in TraceReader(out).episodes():
        assert (episode.correct == -1).all()
        ids = [int(each) for each in episode.token[-6:]]
        texts.append(" ".join(f"w{i}" for i in ids if i < 60))
    return texts


def test_answers_are_judged_in_records_and_live_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [text.split()[-1] for text in said_by(folder, tmp_path)]
    answers[1] = "no such word"
    problems = tmp_path / "mine.jsonl"
    entries = zip(("w3 w4", "w5 w6 w7", "w8"), answers, strict=True)
    problems.write_text("".join(json.dumps({"q": p, "a": a}) + "\n" for p, a in entries))
    options = ["--model", str(folder), "--prompts", str(problems), "--field", "prompt=q,answer=a",
               "--judge", "contains", "--max-tokens", "6"]  # fmt: skip
    out, log = tmp_path / "judged.parquet", tmp_path / "log.jsonl"
    assert main(["record", *options, "--capture", "tree", "--out", str(out)]) == 0
    assert "2/3 correct" in capsys.readouterr().out
    reader = TraceReader(out)
    assert reader.info.task == "mine"
    assert reader.info.search_parameters["judge"] == "contains"
    assert [int(each.correct[-1]) for each in reader.episodes()] == [1, 0, 1]
    live = ["live", *options, "--policy", "streaming-llm", "--budget", "4", "--set", "sinks=1",
            "--set", "pin_prompt=false", "--out", str(log)]  # fmt: skip
    assert main(live) == 0
    assert "2/3" in capsys.readouterr().out
    records = LiveRecords(log)
    assert records.read()["facts"]["task"] == "mine"
    full = [each.correct for each in records.records if each.policy == "full"]
    assert full == [True, False, True]


REFUSED = {
    "without prompts": (["--model", "chain", "--judge", "exact"], "are about prompts"),
    "no answer": (["--judge", "exact"], 'line 1: no "answer" to judge by'),
    "raises": (["--judge", "tests.live.test_problems:raising", "--field", "answer=prompt"],
               "raising raised KeyError: 'always'"),
}  # fmt: skip


def raising(text: str, answer: str) -> bool:
    raise KeyError("always")


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_a_line(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, expected = REFUSED[name]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w3 w4"}\n')
    if "--model" not in options:
        options = [*options, "--model", str(folder), "--prompts", str(path), "--max-tokens", "3"]
    assert main(["record", *options, "--out", str(tmp_path / "no.parquet")]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(without_size(error)) == 1
    assert not (tmp_path / "no.parquet").exists()


def task_of(text: str, judge: str, answer: str, **recipe: Any) -> tuple[TextTask, list[int]]:
    problems = ProblemSet("t", ("p",), (answer,), judge_named(judge), Recipe(**recipe))
    tokenizer = byte_tokenizer()
    return TextTask(problems, tokenizer, [], 1000, 1000), list(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("text", ["The answer is 42.", "ü = 7\n\nso 42", "42"])
def test_an_answer_begins_at_its_token(text: str) -> None:
    task, ids = task_of(text, "number", "42")
    found = task.reading(ids)
    assert found is not None
    answer, start = found
    assert answer == "42"
    assert task.text(ids[start:]) == text[text.rindex("42") :]
    verdict = task.judge(task.problem("", 0), ids)
    assert (verdict.correct, verdict.finished, verdict.dead) == (True, False, False)


def test_a_text_that_ends_a_reasoning() -> None:
    task, ids = task_of("\n first\nand more", "exact", "first", ends=("\n",))
    problem = task.problem("", 0)
    finished = [task.is_finished(problem, ids[: n + 1]) for n in range(len(ids))]
    assert finished.index(True) == len("\n first\n") - 1  # not at the first line, which is empty
    assert task.judge(problem, ids[: finished.index(True) + 1]).correct


def test_smollm2_copies_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smollm2()  # or skipped
    out = str(tmp_path / "m.parquet")
    assert main(["record", "--model", "smollm2", "--prompts", "made:mapping-4", "--episodes", "2",
                 "--capture", "tree", "--out", out]) == 0  # fmt: skip
    assert "2/2 correct" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policies", "capture", "layers"),
    [("streaming-llm,epikv", "signals", 0), ("epikv,snapkv", "qkv", 6)],
)
def test_what_policies_read_is_recorded(
    policies: str, capture: str, layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "for.parquet"
    command = ["record", "--model", "chain", "--lines", "4", "--episodes", "1", "--out", str(out)]
    assert main([*command, "--for", policies]) == 0
    error = capsys.readouterr().err
    info = TraceReader(out).info
    assert (str(info.capture), len(info.qkv_layers)) == (capture, layers)
    assert main(["replay", str(out), "--policy", policies, "--budget", "0.5"]) == 0
    assert "lacks" not in capsys.readouterr().out
    said = re.search(r"recording about (\S+) kB per token before compression", error)
    assert said is not None
    tokens = sum(len(each.token) for each in TraceReader(out).episodes())
    assert 0.3 < out.stat().st_size / tokens / float(said[1]) / 1e3 < 3  # of a short trace


def test_a_file_that_is_there_is_refused_before_pytorch_is_imported(tmp_path: Path) -> None:
    out = tmp_path / "there.parquet"
    out.touch()
    code = (
        "import sys; from arborsim.cli.app import main; "
        f"found = main(['record', '--out', {str(out)!r}]); "
        "sys.exit(found if 'torch' not in sys.modules else 9)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "exists: choose another --out" in run.stderr
