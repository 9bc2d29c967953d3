"""`arborsim plan` as a user runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from arborsim.cli.app import main
from arborsim.products.plan import command as plan_command
from arborsim.products.plan import workload_file
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.results import CandidateResult, PlanResult
from arborsim.products.plan.sensitivity import share_of_plan
from arborsim.products.plan.workload_file import parse_workload
from tests.plan.make import SMALL, small_plan, small_workload


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small workload, in an empty working directory; its plan is computed once."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates of the small plan need not be computed again."""
    plan = small_plan()  # by the real planner

    def run(
        self: Planner,
        advance: Callable[[str, int], None],
        done: Callable[[CandidateResult], None],
    ) -> PlanResult:
        for each in plan.candidates:
            self.finished[each.number] = each
            done(each)
        return self.result()

    monkeypatch.setattr(Planner, "run", run)


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.usefixtures("known")
def test_tables_fit_the_terminal(
    columns: int,
    workload: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", str(workload), "--explain", "--notes"]) == 0
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    assert "…" not in text, "a cell was cut"
    names = [line.split()[:5] for line in text.splitlines() if re.match(r" [* ]\d ", line)]
    assert names[0] == ["*0", "6", "RTX", "4090", "full"], "the recommended one is first"
    for name in ("streaming-llm", "H100", "solved", "offered"):
        assert any(name in line.split() for line in text.splitlines()), "no word is split"
    for words in ("full on RTX 4090 is the", "streaming-llm", "6 RTX 4090", "H100", "per 1000",
                  "reading weights", "HBM speed", "GPUs"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.usefixtures("known")
def test_a_screen_is_an_answer_a_table_and_three_notes(
    columns: int,
    workload: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", str(workload)]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) <= 32
    assert max(map(len, lines)) <= columns
    rules = [number for number, line in enumerate(lines) if line.startswith(" ───")]
    assert len(rules) == 1, "one table"
    table = lines[rules[0] + 1 : lines.index("", rules[0])]
    costs = [float(re.search(r"([\d.]+)-[\d.]+", row)[1]) for row in table if "full" in row]
    assert costs == sorted(costs)
    assert re.fullmatch(r"\d+ more notes: --notes", lines[-1])
    wide = {"per GPU", "per user", "input", "output"}
    shown = {word for word in wide if any(word in line for line in lines[: rules[0]])}
    assert shown == (wide if columns == 160 else set())


@pytest.mark.usefixtures("known")
def test_the_answer_comes_first_and_the_legend_is_short_lines(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(workload), "--load", "0.340119", "--notes"]) == 0
    text = capsys.readouterr().out
    first, *_ = text.splitlines()
    assert re.fullmatch(r"Rent 1 RTX 4090, full retention: [\d.]+ to [\d.]+ USD per 1,000 solved "
                        r"searches at", first.rstrip())  # fmt: skip
    marks = (
        re.escape(first),
        " an hour",
        r"\*0 +1 RTX 4090 +full",
        r"\*  recommended",
        "full on RTX 4090 is the ",
    )
    order = [found.start() for mark in marks if (found := re.search(mark, text))]
    assert len(order) == len(marks)
    assert order == sorted(order)
    lines = [line.rstrip() for line in text.splitlines()]
    assert "GPUs, per hour: of the machines for 0.34 searches/s" in lines
    assert "USD: at 0.34 searches/s, idle time included;" in lines
    assert "  per offered search (in the long run all are served)" in lines
    assert "0.340119" not in text
    assert "Tokens of shared prompts" in text


@pytest.mark.usefixtures("known")
def test_json_and_tables_on_disk(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(workload), "--json", "--out", "plan.parquet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unit"] == "searches/s"
    assert len(document["candidates"]) == len(pd.read_parquet("plan.parquet")) == 4
    assert not list(Path().glob("*.partial.jsonl"))


def test_the_example_is_a_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--example"]) == 0
    text = capsys.readouterr().out
    assert "[candidates]" in text
    assert "[target]" in text


def test_the_example_is_planned_where_something_is_written(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload_file, "example_workload", lambda: SMALL)
    monkeypatch.setattr(plan_command, "_LONG_S", 0.0)
    run = ["--searches", "20", "--runs", "1", "--jobs", "1"]
    assert main(["plan", "--example", "--out", "plan.json", *run]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Rent ")
    assert re.search(
        r"^arborsim: 1 of 4 candidates took 0:\d\d: about 0:\d\d for the others$", shown.err, re.M
    )
    document = json.loads(Path("plan.json").read_text())
    assert (document["workload"], document["searches"]) == ("small", 20)
    for more, said in (
        (["small.toml"], "leave small.toml out"),
        (["--chain", "99"], "--chain asks without a file"),
    ):
        assert main(["plan", "--example", "--json", *more]) == 2
        assert said in capsys.readouterr().err


def test_the_example_itself_can_be_planned() -> None:
    """It is small enough for a first try: the longest of its figures are 400 searches' runs."""
    found = parse_workload(workload_file.example_workload(), Path())
    assert found.runs * found.searches <= 1200
    assert 0 < share_of_plan(found) < 10
    assert share_of_plan(small_workload()) > share_of_plan(found), "short plans, same page"


def test_with_nothing_to_go_on_with_resume_begins(workload: Path) -> None:
    arguments = ["plan", str(workload), "--searches", "20", "--warm-up", "2", "--runs", "1"]
    assert main([*arguments, "--out", "begun.json", "--resume"]) == 0
    assert main([*arguments, "--out", "plain.json"]) == 0
    begun, plain = (json.loads(Path(f"{name}.json").read_text()) for name in ("begun", "plain"))
    assert begun["candidates"] == plain["candidates"]
    assert not Path("begun.json.partial.jsonl").exists()


def test_ctrl_c_leaves_what_is_done_and_resume_goes_on(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *others = small_plan().candidates

    def interrupted(
        self: Planner,
        advance: Callable[[str, int], None],
        done: Callable[[CandidateResult], None],
    ) -> PlanResult:
        for each in (first, second):
            self.finished[each.number] = each
            done(each)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Planner, "run", interrupted)
        assert main(["plan", str(workload), "--out", "plan.json"]) == 130
    said = capsys.readouterr().err
    assert "2 of 4 candidates are in plan.json.partial.jsonl; --resume goes on" in said
    assert main(["plan", str(workload), "--out", "plan.json"]) == 2
    assert "holds an interrupted plan" in capsys.readouterr().err

    def rest(
        self: Planner,
        advance: Callable[[str, int], None],
        done: Callable[[CandidateResult], None],
    ) -> PlanResult:
        assert sorted(self.finished) == [0, 1]
        self.finished.update({each.number: each for each in others})
        return self.result()

    monkeypatch.setattr(Planner, "run", rest)
    assert main(["plan", str(workload), "--out", "plan.json", "--resume"]) == 0
    document = json.loads(Path("plan.json").read_text())
    assert [each["largest"] for each in document["candidates"]] == [
        each.largest for each in small_plan().candidates
    ]
    assert not Path("plan.json.partial.jsonl").exists()


def test_profiles_in_files_are_candidates(
    workload: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nbase = "h100"\nhbm_bytes = 40_000_000_000\n'
    )
    arguments = ["--gpu", "mine.toml", "--searches", "20", "--runs", "1", "--load", "3", "--json"]
    assert main(["plan", str(workload), *arguments, "--perfetto", "line.json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {each["hardware"] for each in document["candidates"]} == {"mine"}
    assert (document["stated_load"], document["searches"], document["warm_up"]) == (3.0, 20, 2)
    assert json.loads(Path("line.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "name a workload in TOML; arborsim plan --example prints one"),
        (["plan", "nothing.toml"], "nothing.toml: cannot be read"),
        (["plan", "small.toml", "--gpu", "h10"], "unknown GPU"),
        (["plan", "small.toml", "--gpu", "no.toml"], "no.toml"),
        (["plan", "small.toml", "--calibration", "no.toml"], "no such calibration file"),
        (["plan", "small.toml", "--calibration", "chain-arkv"], "made for 6 layers"),
        (["plan", "small.toml", "--load", "-1"], "a load must be above 0"),
        (["plan", "small.toml", "--out", "plan.xlsx"], "format of --out"),
        (["plan", "small.toml", "--out", "no/plan.csv"], "there is no directory"),
        (["plan", "small.toml", "--min-accuracy", "0.5"], "needs --answers"),
        (["plan", "small.toml", "--answers", "small.toml"], "not a log of format arborsim-live"),
        (["plan", "small.toml", "--candidate", "9"], "there are 4, counted from 0"),
        (["plan", "small.toml", "--searches", "5", "--warm-up", "5"], "leaves none"),
        (["plan", "small.toml", "--explain", "--json"], "leave --json out"),
        (["plan", "small.toml", "--out", "x.json", "--perfetto", "x.json"], "names the same file"),
    ],
)
def test_what_is_wrong_is_one_line(
    workload: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_target_that_nobody_meets_fails_after_its_tables(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = tuple(
        replace(each, status="missed", reason="too slow", largest=None, at_largest=None)
        for each in small_plan().candidates
    )
    workload.write_text(SMALL.replace('search = "20 s"', 'search = "1 s"'))
    monkeypatch.setattr(
        Planner, "run",
        lambda self, *_: (self.finished.update({c.number: c for c in missed}), self.result())[1],
    )  # fmt: skip
    assert main(["plan", str(workload)]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("missed (90% of the searches take up to, alone): ") == 1
    for each in missed:
        assert each.name in " ".join(shown.out.split())
    assert shown.err.startswith("arborsim: No candidate meets the target: answer within 1 s")
    assert re.search(r"alone [\d.]+ s per search \([\d.]+x\)\. Relax to", shown.err)
    assert shown.err.count("\n") == 1
    assert len(shown.err) <= 3 * 80
