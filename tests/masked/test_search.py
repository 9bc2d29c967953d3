"""Masked searches (`arborsim_torch.masked`) end as the live ones that are stored."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from arborsim.core.errors import UsageError  # noqa: E402
from arborsim.policies.registry import build  # noqa: E402
from arborsim_torch import reference  # noqa: E402
from arborsim_torch.masked.drafts import search  # noqa: E402
from arborsim_torch.masked.follower import check  # noqa: E402
from arborsim_torch.sources import TaskSource  # noqa: E402
from benchmarks.greedy import said_with_all  # noqa: E402
from benchmarks.quality import run  # noqa: E402
from benchmarks.quality_arms import EXPERIMENTS  # noqa: E402
from benchmarks.quality_page import read  # noqa: E402

REPORT = ROOT / "reports" / "quality"
PROBLEMS = 2


@pytest.fixture(scope="module")
def stored() -> pd.DataFrame:
    rows = pd.read_parquet(REPORT / "results.parquet")
    return rows[~rows["masked"] & (rows["episode"] < PROBLEMS)].sort_values("episode")


@pytest.fixture(scope="module")
def chain() -> tuple[Any, Any]:
    model, task = reference.load("chain", lines=32)
    model.requires_grad_(False)
    return model, task


@pytest.mark.parametrize(
    ("experiment", "label", "budget"),
    [
        ("cliff", "streaming", "0.69"),
        ("cliff", "random", "0.56"),
        ("cliff", "h2o, shared", "0.87"),
        ("cliff", "epikv", "0.95"),
        ("cliff", "raas, median", "0.95"),
        ("cliff", "hierarchy r=0.1", "1"),
        ("cliff", "rkv", "0.95"),
        ("cliff", "needed", "0.5"),
        ("family", "kv-key", "0.87"),
        ("family", "kv-value", "0.87"),
        ("arkv", "arkv", "0.9"),
        ("arkv", "arkv-origin", "0.97"),
        ("hierarchy", "8 bit in DDR r=0.05", "1"),
        ("hierarchy", "redundancy, whole keys", "1"),
    ],
)
def test_masked_searches_end_as_live_ones(
    experiment: str, label: str, budget: str, stored: pd.DataFrame, chain: tuple[Any, Any]
) -> None:
    (arm,) = (
        each for each in EXPERIMENTS[experiment]().arms
        if (each.label, each.budget) == (label, budget)
    )  # fmt: skip
    live = stored[
        (stored.experiment == experiment) & (stored.label == label) & (stored.budget == budget)
    ]
    problems = [chain[1].problem("test", i) for i in range(PROBLEMS)]
    model, task = chain
    source, cell, most = TaskSource(task), arm.cell(), task.max_tokens
    said = said_with_all(model, task, problems)
    found = [
        search(model, source, each, cell, most, own).result
        for each, own in zip(problems, said, strict=True)
    ]
    assert [each.correct for each in found] == live.correct.tolist()
    assert [each.tokens for each in found] == live.tokens.tolist()
    assert [each.steps_right for each in found if each.correct] == [
        each.steps for each in found if each.correct
    ]
    for own, row in zip(found, live.itertuples(), strict=True):
        # A live search decides once more, after its last token.
        assert own.measured.evicted_tokens <= row.evicted
        assert row.peak_tokens - own.measured.peak_hbm_kv_tokens in (0, 1)


def test_what_masks_cannot_stand_in_for_is_refused() -> None:
    for policy, said in {
        "arborkv": "needs lost tokens recomputed, which masked runs lack: run it live",
        "oracle": "needs eviction_time",
    }.items():
        with pytest.raises(UsageError, match=said):
            check(build(policy, {}))


def test_the_command_goes_on_where_live_runs_stopped(tmp_path: Path) -> None:
    """Problems that are stored are not searched again; what is new says how it was made."""
    shutil.copy(REPORT / "results.parquet", tmp_path)
    arm = "tova@0.81"
    run("cliff", 2, 2, tmp_path, [arm], masked=True)
    head, *lines = (tmp_path / "cliff.jsonl").read_text().splitlines()
    arms = [f"{each['label']}@{each['budget']}" for each in json.loads(head)["arms"]]
    rows = [json.loads(line) for line in lines]
    new = [row for row in rows if arms[row["arm"]] == arm and row["masked"]]
    assert [row["episode"] for row in new] == [0, 1]
    run("cliff", 2, 2, tmp_path, [arm], masked=True)
    assert len((tmp_path / "cliff.jsonl").read_text().splitlines()) == len(rows) + 1
    with pytest.raises(UsageError, match="masked searches are greedy"):
        run("game24", 2, 2, tmp_path, ["random@0.7"], masked=True)


def test_an_experiment_may_begin_masked(tmp_path: Path) -> None:
    """What it was run with comes first in its file; H2O per head, whose prompt is kept or not."""
    arms = ["full@1", "h2o@0.85", "h2o, prompt kept@0.85"]
    for _ in range(2):  # what is finished is not searched again
        run("published-12", 2, 2, tmp_path, arms, masked=True)
    (stored,) = read(tmp_path)
    assert stored.head["facts"]["model"] == "arborsim-chain"
    assert len(stored.rows) == 6
    assert {row["masked"] for row in stored.rows} == {True}
    assert stored.head["arms"][stored.rows[-1]["arm"]]["label"] == "h2o, prompt kept"
