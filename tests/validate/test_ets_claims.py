"""ETS's claims: cells come out as they are stored, numbers follow from them, and `Freed` frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from arborsim.core.events import Event, Transition
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell, play_episode
from arborsim.products.generate.lengths import fixed
from arborsim.products.generate.synthetic import write_synthetic
from arborsim.searches.arms import Recipe, arms_of
from arborsim.searches.bank import open_bank, read_bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import walk
from benchmarks.claims.ets import SPEC, Freed, searched
from benchmarks.register.claims import Paper, read_papers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reports" / "claims"
FIGURES = ["kv_tokens", "model_calls", "generated_tokens", "selections", "correct"]


@pytest.fixture(scope="module")
def stored() -> pd.DataFrame:
    return pd.read_parquet(FOLDER / "ets.parquet")


@pytest.fixture(scope="module")
def paper() -> Paper:
    return next(each for each in read_papers(FOLDER, ROOT) if each.key == "ets")


@pytest.mark.parametrize(("depth", "width", "problems"), [(3, 16, 3), (10, 16, 1), (6, 64, 1)])
def test_cells_come_out_as_they_are_stored(
    stored: pd.DataFrame, depth: int, width: int, problems: int
) -> None:
    again = pd.DataFrame(searched(replace(SPEC, depth=fixed(depth)), width, range(problems)))
    cell = stored[(stored["experiment"] == "depth") & (stored["depth"] == depth)]
    cell = cell[(cell["width"] == width) & (cell["episode"] < problems)]
    for key in ("episode", "algorithm", "lambda_b", *FIGURES):
        assert again[key].tolist() == cell[key].tolist(), key


def test_a_reduction_is_worked_out_from_the_raw_rows(paper: Paper, stored: pd.DataFrame) -> None:
    rows = stored[(stored["experiment"] == "depth") & (stored["depth"] == 10)]
    rows = rows[rows["width"] == 64].set_index("episode")
    rebase = rows[rows["algorithm"] == "rebase"]["kv_tokens"]
    ets = rows[(rows["algorithm"] == "ets") & (rows["lambda_b"] == 2)]["kv_tokens"]
    (claim,) = (row for row in paper.rows if row.claim.id == "ets-table-1-kv-width-64")
    assert claim.numbers[0].ours == pytest.approx(rebase.sum() / ets.sum())
    assert claim.numbers[0].n == len(ets) == len(rebase)


def test_a_difference_of_answers_is_worked_out_from_the_raw_rows(paper: Paper) -> None:
    rows = pd.read_parquet(ROOT / "reports" / "search" / "results.parquet")
    rows = rows[rows["bank"] == "chain-deep"]
    right = {
        key: int(group["correct"].sum()) for key, group in rows.groupby(["algorithm", "swept"])
    }
    (claim,) = (row for row in paper.rows if row.claim.id == "ets-table-1-accuracy-kept")
    expected = (right["ets", "lambda_b=2"] - right["rebase", ""]) / 60
    assert claim.numbers[2].ours == pytest.approx(expected)


def test_freed_keeps_what_the_search_has_not_given_up(tmp_path: Path) -> None:
    arms = [arm for name in ("rebase", "ets") for arm in arms_of(name, [8], {})]
    path, geometry = tmp_path / "bank.parquet", load_geometry("llama-3.2-1b")
    spec = replace(SPEC, depth=fixed(4), prompt_tokens=fixed(6), thought_tokens=fixed(5))
    write_synthetic(spec, Recipe(arms=tuple(arms), dedupe=False), 1, 0, geometry, path)
    bank = read_bank(open_bank(path), 0, embeddings=True)
    machine = Machine(load_profile("h100"), geometry)
    levels = 0

    def watch(events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        nonlocal levels
        for event in events:
            yield event
            if isinstance(event, Transition):
                tree, tier = controller.tree, controller.view().tier[0]
                given_up = np.array([tree.nodes[n].pruned for n in range(len(tree.nodes))])
                assert ((tier == Tier.EVICTED) == given_up[tree.node_of_token.values]).all()
                levels += bool(given_up.any())

    for arm in arms:
        episode = visited(walk(arm.make(), bank, False), bank.bare)
        executor = SimulatedExecutor.of(machine, Freed(), episode.info)
        play_episode(episode, Cell(Freed(), Budget.parse("1")), executor, watch=watch)
    assert levels >= 3
