"""`arborsim.search`: the same results as the command's, and what they offer."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError
from arborsim.products.search.ask import Searching, SearchOptions, SearchResults
from tests.cli.test_search_command import write_bank


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bank(tmp_path_factory.mktemp("b") / "bank.parquet", width=5, depth=3)


@pytest.fixture(scope="module")
def results(bank: Path) -> SearchResults:
    return arborsim.search(
        bank, algorithms=["rebase", "ets", "mcts"], widths=[4, 8], policies="full,streaming-llm",
        budgets=0.9, settings={"ets.lambda_b": 1.5},
    )  # fmt: skip


def test_the_call_and_the_command_write_the_same_bytes(
    results: SearchResults, bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["search", str(bank), "--algorithm", "rebase,ets,mcts", "--width", "4,8"]
    command += ["--policy", "full,streaming-llm", "--budget", "0.9", "--set", "ets.lambda_b=1.5"]
    out, page = tmp_path / "r.parquet", tmp_path / "theirs.html"
    assert main([*command, "--json", "--out", str(out), "--report", str(page)]) == 0
    assert capsys.readouterr().out == f"{results.to_json()}\n"
    assert results.save(tmp_path / "mine.parquet").read_bytes() == out.read_bytes()
    assert results.report(tmp_path / "mine.html").read_bytes() == page.read_bytes()
    assert results.metadata["command"] == f"arborsim {' '.join(command)}"


def test_results_from_a_file_offer_what_the_file_holds(
    results: SearchResults, tmp_path: Path
) -> None:
    again = arborsim.load_results(results.save(tmp_path / "r.parquet"))
    assert isinstance(again, SearchResults)
    pd.testing.assert_frame_equal(again.to_pandas(), results.to_pandas())
    pd.testing.assert_frame_equal(again.summary(), results.summary())
    assert (str(again), again.to_json()) == (str(results), results.to_json())
    assert again._repr_html_() == results._repr_html_()
    assert "holds no trees" in again.report(tmp_path / "page.html").read_text()


def test_summary_and_json_agree(results: SearchResults) -> None:
    summary, data = results.summary(), json.loads(results.to_json())
    keys = ["label", "width", "policy", "budget"]
    assert not summary[keys].duplicated().any()
    assert [row["right"] for row in data["rows"]] == summary["right"].tolist()
    rebase = summary[summary["label"] == "rebase"]
    assert (rebase["kv_tokens_vs_rebase"] == 1.0).all()
    assert len(data["searches"]) == len(results.to_pandas())


def test_what_is_done_survives_an_interruption(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searching = Searching(SearchOptions(bank, algorithms="rebase", widths=4))
    done = []

    def stop(what: str, units: int) -> None:
        done.append(units)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searching.job.run(stop)
    kept = searching.results()
    assert not kept.complete
    assert len(kept.to_pandas()) == 2


def test_what_cannot_work_is_one_line(bank: Path) -> None:
    for keywords, said in (
        ({"algorithms": "rebas"}, "did you mean rebase"),
        ({"widths": 0}, "--width 0: expected whole numbers"),
        ({"settings": {"lambda_c": 1}}, "unknown setting of the chosen searches and policies"),
        ({"model": "llama-3.1-70b"}, "its weights are"),
    ):
        with pytest.raises(ArborsimError, match=said) as caught:
            arborsim.search(bank, **keywords)
        assert "\n" not in str(caught.value)
