"""`arborsim.plan`: the same results as the command's, and what they offer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError
from arborsim.core.tables import read_table
from arborsim.products.plan.ask import PlanResults
from arborsim.products.plan.costs import ranked
from arborsim.products.plan.workload_file import read_workload
from tests.cli.test_plan import SMALL


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("w") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def results(workload: Path) -> PlanResults:
    return arborsim.plan(workload, load=0.2)


def test_the_call_and_the_command_write_the_same_bytes(
    results: PlanResults, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(workload), "--load", "0.2"]
    out = tmp_path / "plan.parquet"
    assert main([*command, "--json", "--out", str(out), "--jobs", "2"]) == 0
    assert capsys.readouterr().out == f"{results.to_json()}\n"
    assert results.save(tmp_path / "mine.parquet").read_bytes() == out.read_bytes()
    assert results.metadata["command"] == f"arborsim {' '.join(command)}"


def test_results_from_a_file_offer_what_the_file_holds(
    results: PlanResults, tmp_path: Path
) -> None:
    again = arborsim.load_results(results.save(tmp_path / "p.parquet"))
    assert isinstance(again, PlanResults)
    pd.testing.assert_frame_equal(again.to_pandas(), results.to_pandas())
    pd.testing.assert_frame_equal(again.summary(), results.summary())
    assert (str(again), again.to_json()) == (str(results), results.to_json())
    assert again.recommendation == results.recommendation
    assert again._repr_html_() == results._repr_html_()
    assert again.metadata == results.metadata
    assert "h100" in again.report(tmp_path / "page.html").read_text()
    _, metadata = read_table(tmp_path / "p.parquet")
    json.dumps(metadata, allow_nan=False)


def test_the_recommended_candidate_comes_first(results: PlanResults) -> None:
    summary = results.summary()
    assert summary["recommended"].tolist() == [True] + [False] * (len(summary) - 1)
    assert set(summary["policy"]) == set(results.to_pandas()["policy"])
    assert summary["number"].tolist()[: len(results.raw.met())] == [
        row.number for row in ranked(results.raw)
    ]
    assert results.recommendation in results._repr_html_()


def test_a_workload_made_in_python_is_the_file_s(results: PlanResults, workload: Path) -> None:
    made = read_workload(workload).with_load(0.2)
    mine = arborsim.plan(made)
    assert mine.to_json() == results.to_json()
    assert mine.metadata["command"] == f"arborsim.plan(<{made.name}>)"


def test_a_question_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keywords: dict[str, Any] = {
        "model": "llama-3.1-8b", "gpus": ["h100"], "rate": "20/min", "p95": "60s",
        "tree": {"depth": 2, "width": 4, "thought": 20}, "policies": "full", "searches": 40,
        "runs": 1,
    }  # fmt: skip
    results = arborsim.plan(**keywords)
    said = results.metadata["command"]
    assert "--tree depth=2,width=4,thought=20" in said
    assert main([*said.split()[1:], "--json"]) == 0
    assert capsys.readouterr().out == f"{results.to_json()}\n"


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({}, "model and gpus must be given"),
        ({"model": "llama-3.1-8b"}, "gpus must be given"),
        ({"model": "llama-3.1-8b", "gpus": "h100", "p95": 60}, "what is searched is missing"),
        ({"workload": "none.toml"}, "none.toml"),
        ({"workload": "none.toml", "chain": "9"}, "chain asks without a workload: none.toml"),
        ({"workload": "small", "min_accuracy": 0.5}, "--min-accuracy needs --answers"),
        ({"min_attention_kept": 2}, "min_attention_kept must be a share"),
        ({"searches": 0}, "searches must be a whole number of 1 or more"),
    ],
)
def test_what_cannot_work_is_one_line(keywords: dict[str, Any], said: str, workload: Path) -> None:
    if keywords.get("workload") == "small":
        keywords = {**keywords, "workload": workload}
    with pytest.raises(ArborsimError) as caught:
        arborsim.plan(**keywords)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
