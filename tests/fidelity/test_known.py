"""Fidelity that was measured, next to replays, cells of sweeps and in trials of settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arborsim
from arborsim.core.errors import UsageError
from arborsim.products.fidelity.known import known_fidelity

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.smollm2 import smollm2

TRACE = Path("traces/chain-linear.parquet").resolve()
NAMES = ["streaming-llm", "epikv"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two documents under one policy."""
    folder = tmp_path_factory.mktemp("known")
    rng = np.random.default_rng(5)
    lines = [
        {"prompt": rng.integers(3, 40, 12).tolist(), "tokens": rng.integers(3, 40, 40).tolist()}
        for _ in range(2)
    ]
    (folder / "ids.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arborsim.fidelity(
        model="chain", prompts=folder / "ids.jsonl", policies=NAMES[0], budgets=[0.6, 0.8],
        masked=True, out=folder / "run.jsonl",
    )  # fmt: skip
    return folder / "run.jsonl"


def test_replays_show_what_was_measured_and_keep_it_in_files(log: Path, tmp_path: Path) -> None:
    measured = arborsim.load_results(log).summary().set_index(["policy", "budget"])["kl"]
    found = arborsim.replay(
        TRACE, policies=NAMES, budgets=[0.6, 0.8], fidelity=log, episodes=1, oracle=False
    )
    found.save(tmp_path / "r.parquet")
    for results in (found, arborsim.load_results(tmp_path / "r.parquet")):
        kl = results.summary().set_index(["policy", "budget"])["kl"]
        own = kl.xs(NAMES[0])
        np.testing.assert_allclose(own, measured.xs(NAMES[0])[own.index])
        assert kl["full"].tolist() == [0.0]
        assert kl.xs("epikv").isna().all()
        assert f"KL {own['0.6']:.3f} to full retention" in str(results)
    titles = [plot.title for plot in arborsim_plots(found)]
    assert titles == ["What memory buys: chain-linear.parquet, Divergence"]


def arborsim_plots(results: arborsim.ReplayResults) -> list:
    from arborsim.products.plot.plots import plots_of

    return plots_of(results.describe())


def test_budgets_are_matched_to_the_nearest_and_settings_exactly(log: Path) -> None:
    known = known_fidelity(log)
    near = known.of(NAMES[0], {}, "0.66")
    assert near is not None
    assert near.budget == "0.6"
    assert known.of(NAMES[0], {}, "0.4") is None
    assert known.of(NAMES[0], {"sinks": 5}, "0.6") is None


def test_cells_of_a_sweep_take_it(log: Path, tmp_path: Path) -> None:
    grid = {"traces": [str(TRACE)], "policies": NAMES, "budgets": [0.6], "episodes": 1}
    arborsim.sweep({**grid, "gpus": ["h100"]}, tmp_path / "cells")
    frame = arborsim.results(tmp_path / "cells", fidelity=log).to_pandas().set_index("policy")
    assert frame["kl"]["streaming-llm"] == known_fidelity(log).of(NAMES[0], {}, "0.6").kl
    assert frame["kl"].isna()["epikv"]


def test_settings_are_chosen_by_it(log: Path) -> None:
    pytest.importorskip("optuna")
    asked = {"policy": NAMES[0], "quality": "fidelity", "fidelity": log, "trials": 4}
    found = arborsim.tune(TRACE, budget="0.6,0.7,0.8", **asked).to_pandas()
    tried = found[found["reason"] == ""].set_index("budget")["tuned_quality"]
    for budget in set(tried.index):
        wanted = known_fidelity(log).of(NAMES[0], {}, f"{budget:g}")
        assert (tried[budget] == wanted.kl).all()
    assert found[found["budget"] == 0.7]["reason"].str.contains("no file of --fidelity").all()
    with pytest.raises(UsageError, match=r"--budget 0\.6,0\.8"):
        arborsim.tune(TRACE, budget="0.6:0.8", **asked)


def test_problems_of_a_benchmark_are_posed_as_live_runs_pose_them(tmp_path: Path) -> None:
    from arborsim.play.fidelity import FidelityRequest
    from arborsim_torch.documents import documents_of

    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "What is 2 + 3?", "answer": "5 #### 5"}))
    asked = fidelity_request(prompts=path, recipe="gsm8k", generate=4)
    assert isinstance(asked, FidelityRequest)
    loaded = smollm2()
    (document,), _ = documents_of(asked, loaded)
    assert "What is 2 + 3?" in loaded.tokenizer.decode(document.prompt)
    assert document.tokens == ()
    with pytest.raises(UsageError, match="give --prompts"):
        fidelity_request(recipe="gsm8k")


def fidelity_request(**given: Any) -> Any:
    """What `arborsim.fidelity` asks a backend for."""
    from arborsim.products.fidelity.ask import FidelityOptions
    from arborsim.products.fidelity.run import Reading

    options = {"model": "smollm2", "policies": "h2o", "budgets": [0.5]}
    return Reading(FidelityOptions(**options, **given)).request


def test_other_results_are_refused(tmp_path: Path) -> None:
    arborsim.replay(TRACE, policies="full", episodes=1, quality=False).save(tmp_path / "r.parquet")
    with pytest.raises(UsageError, match="these are results of replay"):
        known_fidelity(tmp_path / "r.parquet")
