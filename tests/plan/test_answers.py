"""Answers counted live on problems that a workload names, and the demo that rests on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.statistics import clopper_pearson
from arborsim.products.plan import words
from arborsim.products.plan.answers import counted, read_answers
from arborsim.products.plan.evaluate import evaluate
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.tables import tables
from arborsim.products.plan.workload_file import read_workload
from arborsim.products.replay.answers import shipped
from tests.plan.make import small_workload

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "traces" / "demo.toml"
NAMED = """
[answers]
task = "chain"
search = "linear"
model = "arborsim-chain"
options = { lines = 32 }
[prices]"""


def test_the_demos_answers_are_those_that_were_counted() -> None:
    workload = read_workload(DEMO)
    found = counted(workload)
    assert {name for name, _ in found} == {each.name for each in workload.policies}
    rows = {
        (row.policy, row.settings.get("bits"), row.settings.get("sinks"), row.budget): row
        for row in shipped().rows
        if row.searched.search == "linear" and row.searched.options == {"lines": 32}
    }
    for key, row in {
        ("full", "-"): rows["full", None, None, "any"],
        ("kivi-8bit", "-"): rows["kivi", 8, None, "any"],
        ("kivi-4bit", "-"): rows["kivi", 4, None, "any"],
        ("kivi-2bit", "-"): rows["kivi", 2, None, "any"],
        ("streaming-llm", "0.69"): rows["streaming-llm", None, 164, "0.69"],
    }.items():
        n = row.n + row.infeasible
        assert found[key] == Estimate(row.right / n, *clopper_pearson(row.right, n), n), key


def test_only_the_same_settings_and_budget_count() -> None:
    workload = small_workload(("[prices]", NAMED))
    assert workload.answers is not None
    found = counted(workload)
    assert found["full", "-"] is not None
    assert found["streaming-llm", "0.5"] is None, "counted with other sinks and budgets only"
    assert counted(small_workload()) == {}


def test_logs_of_ones_own_come_first() -> None:
    workload = small_workload(("[prices]", NAMED))
    own = Estimate(0.25, 0.1, 0.4, 8)
    assert Planner(workload, accuracies={("full", "-"): own}).accuracies["full", "-"] == own
    assert Planner(workload).accuracies["full", "-"].n == 200


@pytest.mark.parametrize("change", [('"chain"', '"chess"'), ("lines = 32", "lines = 33")])
def test_problems_that_nobody_counted_are_refused(change: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=r"\[answers\]: no live answers are known of ch"):
        small_workload(("[prices]", NAMED.replace(*change)))


def test_a_plan_says_where_its_answers_are_from() -> None:
    workload = small_workload(("[prices]", NAMED)).with_run_length(12, 2, 1)
    plan = Planner(workload).run()
    said = "Answers were counted live on other problems (chain, lines 32, searched by linear on"
    assert any(said in note for note in plan.notes)
    full = next(each for each in plan.candidates if each.policy == "full")
    assert full.quality is not None
    assert full.quality.accuracy is not None
    assert full.quality.accuracy.value == 0.97


def test_the_sample_logs_are_those_of_their_program(tmp_path: Path) -> None:
    logs = ROOT / "traces" / "logs"
    subprocess.run([sys.executable, logs / "make.py", tmp_path], check=True)
    made = sorted(tmp_path.iterdir())
    assert [each.name for each in made] == sorted(
        each.name for each in logs.iterdir() if each.suffix != ".py" and each.is_file()
    )
    assert all(each.read_bytes() == (logs / each.name).read_bytes() for each in made)


@pytest.mark.parametrize(
    ("log", "options"),
    [
        ("mooncake.jsonl", ""), ("bailian.jsonl", ""), ("azure.csv", ""), ("tot.json", ""),
        ("tot-dfs.json", "--prompt-tokens 40"), ("tot-samples.json", "--prompt-tokens 40"),
        ("deft.json", ""),
        ("tree.jsonl", "--root steps --value mc_value --tokens-per-character prose"),
    ],
)  # fmt: skip
def test_every_sample_log_is_imported_and_replayed(log: str, options: str, tmp_path: Path) -> None:
    out = tmp_path / "made.parquet"
    path = ROOT / "traces" / "logs" / log
    format = path.stem.partition("-")[0]
    assert main(["import", format, str(path), str(out), *options.split()]) == 0
    assert main(["replay", str(out), "--policy", "full,streaming-llm", "--budget", "0.9",
                 "--episodes", "2", "--set", "streaming-llm.pin_prompt=false"]) == 0  # fmt: skip


TABLE = """model,dataset,policy,budget_tokens,n,right_percent,mean_output_tokens
qwen,aime24,full,,30,53.3,13872.7
qwen,aime24,rkv,512,30,6.7,20418.1
qwen,aime24,streaming-llm,0.5,30,40.0,17280.8
"""


def test_a_table_of_answers_tells_right_ones_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    path.write_text(TABLE)
    found = read_answers([path])
    assert found["rkv", "512"].right == Estimate.share(2, 30)
    assert found["rkv", "512"].growth == pytest.approx(20418.1 / 13872.7)
    assert found["full", "-"].growth == 1


def test_answers_that_were_cut_off_are_columns_of_their_own(tmp_path: Path) -> None:
    """Where they were counted; with them stands how much longer answers are."""
    path = tmp_path / "answers.csv"
    head, full, _, other = TABLE.splitlines()
    rows = [f"{head},unfinished_percent", f"{full},", f"{other},30.0"]
    path.write_text("\n".join(rows) + "\n")
    found = read_answers([path])
    key = "streaming-llm", "0.5"
    assert found["full", "-"].unfinished is None
    assert found[key].unfinished == Estimate.share(9, 30)
    workload = small_workload().with_run_length(12, 2, 1)
    plan = Planner(
        workload, accuracies={each: found[each].right for each in found},
        growth={key: found[key].growth}, unfinished={key: found[key].unfinished},
    ).run()  # fmt: skip
    row = next(each for each in plan.candidates if (each.policy, each.budget) == key)
    assert words.unfinished(row) == pytest.approx(0.3)
    assert words.growth(row) == pytest.approx(17280.8 / 13872.7 - 1)
    shown = {column.key for column in tables(plan)[0].columns}
    assert shown >= {"accuracy", "unfinished", "growth"}
    path.write_text("\n".join([*rows[:2], f"{other},70.0"]) + "\n")
    with pytest.raises(UsageError, match="what is unfinished is not right"):
        read_answers([path])


@pytest.mark.parametrize(("change", "message"), [
    (("qwen,aime24,rkv", "qwen,math500,rkv"), "holds answers of 2 models and data sets"),
    (("aime24,full", "aime24,tova"), "no row of policy full"),
    (("6.7", "106.7"), "row 2: expected a count"),
    (("rkv,512", "streaming-llm,0.5"), "streaming-llm at 0.5 is there twice"),
    (("right_percent", "percent"), "column right_percent is missing"),
])  # fmt: skip
def test_a_wrong_table_of_answers_is_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "answers.csv"
    path.write_text(TABLE.replace(*change))
    with pytest.raises(UsageError, match=message):
        read_answers([path])


def test_longer_answers_cost_more_and_the_memory_stays() -> None:
    """A policy that rambles serves fewer searches with the same pool."""
    workload = small_workload()
    plain = Planner(workload)
    policy = next(each for each in plain.candidates if each.policy.name == "streaming-llm")
    key = policy.policy.name, policy.budget_text
    longer = Planner(workload, growth={key: 1.5})
    before, after = (each.demands_of(policy.number) for each in (plain, longer))
    tokens = [sum(d.generated_tokens for d in found.demands) for found in (before, after)]
    assert tokens[1] / tokens[0] == pytest.approx(1.5, rel=0.02)
    held = [
        max(int(d.column("hbm_bytes").max()) for d in found.demands) for found in (before, after)
    ]
    assert held[0] == held[1]
    served = [evaluate(workload, policy, found) for found in (before, after)]
    alone = [each.alone.at_percentile_s for each in served if each.alone is not None]
    assert alone[1] > 1.3 * alone[0]
