"""`arborsim live` as a user runs it, on the shipped models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.core.statistics import fisher_p, least_visible
from arborsim.play.backends import LiveResult
from arborsim.play.live_log import LiveLog
from arborsim.trace.reader import TraceReader

torch = pytest.importorskip("torch")

CHAIN = ["live", "--task", "chain", "--lines", "10", "--episodes", "2"]
GAME = ["live", "--task", "game24", "--set", "keep=2", "--set", "children=3", "--episodes", "2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_json(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    assert main([*command, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


CASES = {
    "unknown policy": ("--policy epikw", "did you mean epikv"),
    "unknown search": ("--search tot-bsf", "tot-bfs"),
    "unknown task": ("--task chian", "did you mean chain"),
    "unknown model": ("--model no/such/model", "no such folder"),
    "another task's model": ("--model chain --task game24", "vocabularies differ"),
    "budget 0": ("--budget 0", "must be above 0"),
    "no budget": ("--budget ,", "names no budget"),
    "the oracle": ("--policy h2o,oracle", "replay a trace"),
    "unknown recall": ("--recall steam", "did you mean stream"),
    "resume without a log": ("--resume", "needs --out"),
    "resume and overwrite": ("--out x --resume --overwrite", "one of them"),
    "trace without shadow": ("--trace x.parquet", "needs --shadow"),
    "a GPU without shadow": ("--gpu h100", "--device cuda"),
    "shadow without overlap": ("--shadow --no-overlap", "leave out --shadow"),
    "an unknown GPU": ("--shadow --gpu h1000", "did you mean h100"),
    "an existing log": ("--out notes", "--resume goes on"),
    "a file that is no log": ("--out notes --resume", "not a log"),
    "two outputs in one": ("--out x --report x", "--out names the same file"),
    "output nowhere": ("--out no/where", "no directory"),
    "an unknown setting": ("--policy h2o --set sink=4", "did you mean sinks"),
    "a setting without a value": ("--policy h2o --set sinks", "expected name=value"),
    "an unknown option of the search": ("--search tot-bfs --set search.kep=4", "did you mean keep"),
    "another task's option": ("--task game24 --lines 9", "no option --lines"),
    "prompts that are not there": ("--prompts nowhere.jsonl", "nowhere.jsonl"),
    "prompt tokens of a trained model": ("--task chain --prompt-tokens 9", "random weights"),
    "no searches at a time": ("--batch 0", "batch"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, says = CASES[case]
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("mine\n")
    assert main(["live", *command.split()]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1, printed.err
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert Path("notes").read_text() == "mine\n"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run with everything it can write; its tables at two widths."""
    folder = tmp_path_factory.mktemp("live")
    command = [*CHAIN, "--policy", "h2o,epikv,hierarchy", "--budget", "0.6,0.02", "--set",
               "hierarchy.recent=16"]  # fmt: skip
    done = {"folder": folder}
    torch.set_num_threads(1)
    for columns in ("80", "160"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", columns)
            files = ["--out", str(folder / "log"), "--report", str(folder / "page.html")]
            # The second time, all results are in the log: only the width differs.
            again = ["--resume"] if columns == "160" else []
            with (folder / columns).open("w") as out, pytest.MonkeyPatch.context() as stdout:
                stdout.setattr(sys, "stdout", out)
                assert main([*command, *files, *again]) == 0
        done[columns] = (folder / columns).read_text().splitlines()
    return done


@pytest.mark.parametrize("columns", [80, 160])
def test_tables_fit_the_terminal(shown: dict[str, Any], columns: int) -> None:
    lines = shown[str(columns)]
    assert max(len(line.rstrip()) for line in lines if not line.startswith("wrote")) <= columns
    text = "\n".join(lines)
    assert "…" not in text
    for word in ("full", "h2o", "epikv", "hierarchy", "interval", "Fisher", "speed"):
        assert word in text
    assert text.startswith("Full retention solves 2/2")
    assert len([line for line in lines if line.startswith(" policy ")]) == 1, "one table"


def test_what_does_not_depend_on_the_clock(shown: dict[str, Any]) -> None:
    """What the models answer, and how much they hold, is the same on every machine."""
    lines = [line.split() for line in shown["80"]]
    full = next(line for line in lines if line[:2] == ["full", "all"])
    assert full[2:4] == ["2/2", "15.8-100.0"]
    assert full[5] == "100.0", "of full"
    h2o = next(line for line in lines if line[:2] == ["h2o", "0.6"])
    assert h2o[2].endswith("/2")
    assert 40 < float(h2o[7]) < 90, "right, interval, difference and Fisher's p come before"


def test_budgets_that_hold_nothing_are_told_with_their_reason(shown: dict[str, Any]) -> None:
    text = " ".join(" ".join(shown["80"]).split())
    assert "epikv at budget 0.02 could not hold 2 searches, e.g. prompt" in text
    assert "epikv, budget 0.02: prompt" in (shown["folder"] / "page.html").read_text()


def test_the_page_stands_alone(shown: dict[str, Any]) -> None:
    page = (shown["folder"] / "page.html").read_text()
    assert "Content-Security-Policy" in page
    assert "<script src" not in page
    assert "<link" not in page
    assert "{{" not in page.split('<script type="application/json"')[0]
    assert "Full retention solves 2/2 (100.0%, 95% interval 15.8 to 100.0)" in page
    assert "2 problems are too few to tell any setting from it" in page
    assert f"torch {torch.__version__}" in page


def without_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clock = ("_s", "_seconds")
    return [{key: value for key, value in row.items() if not key.endswith(clock)} for row in rows]


def test_a_resumed_run_adds_what_is_missing_and_takes_no_other_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "log"
    command = [*CHAIN, "--policy", "h2o", "--budget", "0.7"]
    alone = run_json(capsys, *command, "--out", str(out))
    before = out.read_bytes().splitlines(True)
    out.write_bytes(b"".join(before[:4]) + before[4][:50])  # the head, three results, half of one
    resumed = run_json(capsys, *command, "--out", str(out), "--resume")
    assert out.read_bytes().splitlines(True)[:4] == before[:4]
    assert without_clock(resumed["results"]) == without_clock(alone["results"])
    assert main([*command, "--seed", "1", "--out", str(out), "--resume"]) == 2
    assert "seed 0 there, 1 here" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = LiveLog.add

    def interrupted(self: LiveLog, result: Any) -> None:
        if isinstance(result, LiveResult) and result.policy != "full":
            raise KeyboardInterrupt
        add(self, result)

    monkeypatch.setattr(LiveLog, "add", interrupted)
    out = tmp_path / "log"
    assert main([*CHAIN, "--policy", "h2o", "--budget", "0.6", "--out", str(out)]) == 130
    printed = capsys.readouterr()
    assert printed.err == f"arborsim: interrupted: {out} holds 1 of 4 searches; --resume goes on\n"
    assert "full" in printed.out
    assert len(out.read_bytes().splitlines()) == 2


def test_nothing_that_was_asked_for_could_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAIN[:-1], "1", "--policy", "epikv", "--budget", "9"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("arborsim: nothing could run: budget infeasible for epikv")
    assert printed.err.count("\n") == 1
    assert "full" in printed.out


def test_game24_is_searched_as_a_tree_and_settings_find_their_owner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run_json(capsys, *GAME, "--policy", "h2o", "--budget", "0.6", "--set", "sinks=2")
    request = done["request"]
    assert (request["search"], request["temperature"]) == ("tot-bfs", 0.7)
    assert request["search_options"] == {"keep": "2", "children": "3"}
    assert request["cells"][1]["settings"]["sinks"] == 2
    assert [(row["policy"], row["budget"]) for row in done["rows"]] == [
        ("full", "any"), ("h2o", "0.6")]  # fmt: skip
    assert [result["episode"] for result in done["results"]] == [0, 0, 1, 1]
    h2o = done["rows"][1]
    parts = ("prefill_s", "decode_s", "policy_s", "exposed_transfer_s", "rehydration_s")
    spent = sum(h2o["time"][part] for part in parts)
    assert h2o["total_s"] == pytest.approx(spent + h2o["other_s"])
    assert h2o["tokens_per_s"] == pytest.approx(h2o["generated_tokens"] / h2o["total_s"])


def test_a_shadow_run_says_so_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.parquet"
    command = [*GAME, "--policy", "h2o", "--budget", "0.6", "--shadow", "--trace", str(trace)]
    page = tmp_path / "page.html"
    assert main([*command, "--report", str(page)]) == 0
    assert "h2o at budget 0.6 needs the least HBM" in page.read_text()
    text = " ".join(capsys.readouterr().out.split())
    assert "nothing was removed. Bytes and seconds are simulated on h100" in text
    assert TraceReader(trace).num_episodes == 2
    assert main(command) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    done = run_json(capsys, *command, "--overwrite")
    full, h2o = done["rows"]
    assert (full["judged"], h2o["judged"]) == (2, 0)
    assert [result["correct"] for result in done["results"]].count(None) == 0
    assert h2o["peak_hbm_kv_bytes"] < full["peak_hbm_kv_bytes"]
    assert h2o["wall_s"] == 0


def test_random_weights_have_no_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 50,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "torch_dtype": "float32",
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shape))
    command = ["live", "--model", f"config:{config}", "--policy", "streaming-llm", "--budget",
               "0.5", "--prompt-tokens", "40", "--max-tokens", "20", "--episodes", "1"]  # fmt: skip
    page = tmp_path / "page.html"
    assert main([*command, "--report", str(page)]) == 0
    text = capsys.readouterr().out
    assert "text and answers mean nothing" in " ".join(text.split())
    assert "interval" not in text
    assert "text and answers mean nothing" in page.read_text()


def test_fishers_test_and_what_few_problems_can_show() -> None:
    # All tables with margins (8, 8) that are as unlikely: 2 (8 x 8 + 1) of 12,870.
    assert fisher_p(1, 7, 8) == pytest.approx(130 / 12_870)
    assert fisher_p(5, 5, 8) == 1.0
    assert least_visible(7, 8) == 2
    assert least_visible(2, 2) is None


def test_the_budget_of_a_policy_that_only_reads_less_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "The budget of quest is how many tokens a step reads of each KV head."
    command = [*CHAIN[:-1], "1", "--budget", "0.9", "--policy"]
    assert said in run_json(capsys, *command, "quest,h2o")["notes"]
    assert said not in run_json(capsys, *command, "h2o")["notes"]
