"""`arborsim.replay`: the same results as the command's, to the byte, and what they offer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError
from arborsim.core.tiers import Budget
from arborsim.policies.registry import build
from arborsim.products import choices
from arborsim.products.replay.ask import ReplayResults

TREE, CHAIN = Path("traces/game24-tot.parquet"), Path("traces/chain-vectors.parquet")


@pytest.fixture(scope="module")
def results() -> ReplayResults:
    return arborsim.replay(
        TREE,
        policies=["h2o", "hierarchy"],
        budgets=[0.5, 0.8],
        settings={"h2o.per": "shared"},
        episodes=2,
        model="llama-3.1-8b",
    )


def test_the_call_and_the_command_write_the_same_bytes(
    results: ReplayResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = tmp_path / "mine.parquet", tmp_path / "theirs.parquet"
    results.save(mine)
    command = [
        "replay",
        str(TREE),
        "--policy",
        "h2o,hierarchy",
        "--budget",
        "0.5,0.8",
        "--set",
        "h2o.per=shared",
    ]
    command += ["--episodes", "2", "--model", "llama-3.1-8b"]
    assert main([*command, "--jobs", "2", "--json", "--out", str(theirs)]) == 0
    assert mine.read_bytes() == theirs.read_bytes()
    assert capsys.readouterr().out == f"{results.to_json()}\n"
    assert results.metadata["command"] == f"arborsim {' '.join(command)}"


def test_the_command_in_the_metadata_gives_the_same_results(tmp_path: Path) -> None:
    results = arborsim.replay(
        CHAIN, policies="h2o,snapkv", budgets=512, settings={"h2o.per": "layer", "sinks": 2},
        episodes=1, gpu="l40s", oracle=False, page_size=16, recall="near", tree_attention=False,
        first=1,
    )  # fmt: skip
    said = results.metadata["command"]
    assert "--set h2o.per=layer --set sinks=2" in said
    assert "--no-oracle" in said
    assert "--no-tree-attention" in said
    assert main([*said.split()[1:], "--out", str(tmp_path / "r.parquet")]) == 0
    again = arborsim.load_results(tmp_path / "r.parquet")
    assert again.metadata == results.metadata
    pd.testing.assert_frame_equal(again.to_pandas(), results.to_pandas())


def test_results_from_a_file_offer_what_the_file_holds(
    results: ReplayResults, tmp_path: Path
) -> None:
    again = arborsim.load_results(results.save(tmp_path / "r.parquet"))
    assert isinstance(again, ReplayResults)
    pd.testing.assert_frame_equal(again.to_pandas(), results.to_pandas())
    pd.testing.assert_frame_equal(again.summary(), results.summary())
    assert str(again) == str(results)
    assert again.to_json() == results.to_json()
    assert again._repr_html_() == results._repr_html_()
    again.save(tmp_path / "2.parquet")
    assert (tmp_path / "2.parquet").read_bytes() == (tmp_path / "r.parquet").read_bytes()
    with pytest.raises(ArborsimError, match=r"replay again: arborsim replay .* --report page.html"):
        again.report("page.html")


def test_the_report_is_the_command_s(results: ReplayResults, tmp_path: Path) -> None:
    """Also where its pictures are taken afterwards, and other episodes follow the pictured one."""
    page = results.report(tmp_path / "mine.html")
    command = [
        "replay",
        str(TREE),
        "--policy",
        "h2o,hierarchy",
        "--budget",
        "0.5,0.8",
        "--set",
        "h2o.per=shared",
    ]
    command += ["--episodes", "2", "--model", "llama-3.1-8b", "--report"]
    assert main([*command, str(tmp_path / "theirs.html")]) == 0
    assert page.read_bytes() == (tmp_path / "theirs.html").read_bytes()


def test_frames_json_and_html_tell_the_same(results: ReplayResults, tmp_path: Path) -> None:
    frame, summary = results.to_pandas(), results.summary()
    assert len(frame) == 2 * (1 + 3 * 2)  # full retention, and the oracle with both policies
    assert summary.groupby("policy")["generated_tokens"].first().nunique() == 1
    kept = summary.set_index(["policy", "budget"])["attention_kept"]
    assert kept["full", "any"] == 1.0
    assert kept["h2o", "0.8"] >= kept["h2o", "0.5"]
    data = json.loads(results.save(tmp_path / "r.json").read_text())
    assert len(data["rows"]) == len(summary)
    assert pd.read_csv(results.save(tmp_path / "r.csv"))["total_s"].tolist() == pytest.approx(
        frame["total_s"].tolist()
    )
    html = results._repr_html_()
    assert html.count("<tr>") == 1 + len(summary)
    assert "hierarchy" in html
    for colour in ("color:", "background"):
        assert colour not in html.replace("border-color", "")
    assert "h2o" in str(results)
    assert "game24-tot" in repr(results)


def test_policies_may_be_objects_classes_and_names() -> None:
    mine = build("h2o", {"per": "shared", "sinks": "2"})
    kind = type(build("streaming-llm"))
    results = arborsim.replay(
        arborsim.open_trace(TREE), policies=[mine, "epikv", kind], budgets=Budget.parse("0.7"),
        episodes=1, oracle=False,
    )  # fmt: skip
    assert set(results.to_pandas()["policy"]) == {"full", "h2o", "epikv", "streaming-llm"}
    by_name = arborsim.replay(
        TREE, policies="h2o,epikv,streaming-llm", budgets=0.7, episodes=1, oracle=False,
        settings=["h2o.sinks=2", "h2o.per=shared"],
    )  # fmt: skip
    order = ["policy", "episode"]
    pd.testing.assert_frame_equal(
        results.to_pandas().sort_values(order, ignore_index=True),
        by_name.to_pandas().sort_values(order, ignore_index=True),
    )
    assert results.metadata["command"].startswith("arborsim.replay('traces/game24-tot.parquet', ")


@given(st.floats(0.001, 1.0))
def test_a_float_is_a_share(share: float) -> None:
    (budget,) = choices.budgets(share)
    assert budget.share == pytest.approx(share)
    assert budget.tokens is None


@given(st.integers(1, 10**9), st.booleans())
def test_an_int_is_a_number_of_tokens(tokens: int, numpy: bool) -> None:
    (budget,) = choices.budgets(np.int64(tokens) if numpy else tokens)
    assert (budget.tokens, budget.share) == (tokens, None)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"policies": "h20"}, "unknown policy 'h20': did you mean h2o"),
        ({"policies": [3]}, "policy 3: give its name"),
        ({"policies": []}, "--policy names no policy"),
        ({"budgets": 0}, "budget '0' must be above 0"),
        ({"budgets": 1.5}, "neither a share up to 1 nor a whole number"),
        ({"budgets": True}, "budget True is not a number"),
        ({"budgets": []}, "--budget names no budget"),
        ({"budgets": None}, "budget None is not a number"),
        ({"settings": {"sink": 3}, "policies": "h2o"}, "did you mean sinks"),
        ({"settings": {"h2o.sinks": "x"}, "policies": "h2o"}, "sinks must be an integer"),
        ({"gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"recall": "stages"}, "unknown recall mode 'stages': did you mean stage"),
        ({"episodes": -1}, "episodes must be a whole number of 0 or more"),
        ({"first": 10_000}, "no episode 10000"),
        ({"workers": 0}, "workers must be a whole number of 1 or more"),
        ({"page_size": 2.5}, "page_size must be a whole number of 1 or more"),
        ({"traces": []}, "no trace was given"),
        ({"traces": "none.parquet"}, "none.parquet: no such file"),
    ],
)
def test_what_cannot_work_is_one_line(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ArborsimError) as caught:
        arborsim.replay(**{"traces": TREE, "episodes": 1, **keywords})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_results_of_another_kind_are_refused(results: ReplayResults, tmp_path: Path) -> None:
    other = arborsim.core.tables  # type: ignore[attr-defined]
    other.write_table(results.to_pandas(), tmp_path / "r.parquet", other.made_by("dance", "x"))
    with pytest.raises(ArborsimError, match="unknown kind of results"):
        arborsim.load_results(tmp_path / "r.parquet")
    with pytest.raises(ArborsimError, match="holds a trace, not results"):
        arborsim.load_results(TREE)
