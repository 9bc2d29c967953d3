"""Which trees the page of a search shows, and what of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.core.tiers import NUM_TIERS, Budget
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell
from arborsim.policies.registry import build
from arborsim.products.search import trees as search_trees
from arborsim.products.search.run import SearchJob
from arborsim.products.search.trees import MOST_TEXT, chosen_problems, drawn_nodes, fate, take_trees
from arborsim.searches import make_search
from arborsim.searches.arms import Arm, arms_of
from arborsim.searches.bank import open_bank, read_bank
from arborsim.searches.walk import walk
from tests.bank.banks import made_bank
from tests.bank.test_results import result
from tests.cli.test_search_command import write_bank

MACHINE = Machine(load_profile("h200"), load_geometry("llama-3.1-8b"))
FULL = Cell(build("full"), Budget("any", share=1.0))
TIGHT = Cell(build("streaming-llm"), Budget("2", tokens=2))


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bank(tmp_path_factory.mktemp("t") / "bank.parquet", problems=2, width=4, depth=3)


def job_on(bank: Path, *cells: Cell, widths: tuple[int, ...] = (4, 8)) -> SearchJob:
    arms = [arm for name in ("rebase", "beam-sqrt") for arm in arms_of(name, widths, {})]
    return SearchJob(bank, arms, list(cells) or [FULL], MACHINE)


def test_the_first_problem_of_each_outcome() -> None:
    verdicts = {0: (False, True), 1: (True, False), 2: (None, None), 3: (True, True),
                4: (False, False), 5: (True, None)}  # fmt: skip
    results = [
        result(name, episode, correct)
        for episode, both in verdicts.items()
        for name, correct in zip(("rebase", "ets"), both, strict=True)
    ]
    assert chosen_problems(results, []) == {
        3: "problem 3: solved by 2 of 2 searches",
        0: "problem 0: solved by 1 of 2 searches",
        4: "problem 4: solved by 0 of 2 searches",
    }
    assert chosen_problems(results, [5, 2]) == {
        5: "problem 5: solved by 1 of 1 judged searches", 2: "problem 2: not judged"}  # fmt: skip
    assert list(chosen_problems([r for r in results if r.episode == 2], [])) == [2]
    with pytest.raises(UsageError, match="--trees 9"):
        chosen_problems(results, [9])


def test_films_are_in_the_numbers_of_the_layout(bank: Path) -> None:
    job = job_on(bank)
    (trees,) = take_trees(job, {1: "problem 1: x"})
    recorded = read_bank(open_bank(bank), 1)
    layout = trees.layout
    assert layout["number"] == list(range(len(recorded.parent)))
    assert layout["parent"] == recorded.parent
    assert layout["text"][1] == f"thought {recorded_tokens(recorded, 1)}"
    assert [film["cell"] for film in trees.films] == [
        f"{name}, width {width}" for name in ("rebase", "beam-sqrt") for width in (4, 8)
    ]
    for arm, film in zip(job.arms, trees.films, strict=True):
        done = walk(arm.make(), recorded)
        assert film["nodes"] == list(done.bank_node)
        assert film["handed"] == done.bank_node[done.answer]
        assert film["correct"] == done.correct
        tokens = dict.fromkeys(range(len(recorded.parent)), 0)
        for frame in film["frames"]:
            flat = frame["changed"]
            for i in range(0, len(flat), 1 + NUM_TIERS):
                tokens[flat[i]] = sum(flat[i + 1 : i + 1 + NUM_TIERS])
        assert sum(tokens.values()) == done.generated_tokens + done.prompt_tokens
        assert {n for n, t in tokens.items() if t} <= set(done.bank_node)
    assert list(trees.notes()) == []


def recorded_tokens(bank: object, node: int) -> list[int]:
    episode = bank.episode  # type: ignore[attr-defined]
    rows = episode.node[episode.token_rows] == node
    return [int(token) for token in episode.token[rows]]


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_with_a_thought_its_ancestors_are_drawn(seed: int, most: int) -> None:
    bank = made_bank(seed, width=3, depth=3, embeddings=False)
    walks = [walk(make_search(name, width=3), bank) for name in ("rebase", "beam-sqrt")]
    before = search_trees.MOST_NODES
    search_trees.MOST_NODES = most
    try:
        drawn = drawn_nodes(bank, walks)
    finally:
        search_trees.MOST_NODES = before
    assert len(drawn) == min(most, len(bank.parent))
    assert drawn == sorted(set(drawn))
    assert all(bank.parent[n] in drawn for n in drawn if n)
    opened = {n for done in walks for n in done.bank_node}
    assert set(drawn) <= opened or opened <= set(drawn)


def test_what_is_not_drawn_is_said(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_trees, "MOST_NODES", 10)
    monkeypatch.setattr(search_trees, "_ALL_NUMBERS", 200)
    (trees,) = take_trees(job_on(bank), {0: "problem 0: solved by 1 of 4 searches"})
    assert trees.recorded > 10 == len(trees.layout["parent"])
    drawn, cut = trees.notes()
    assert drawn.startswith(f"problem 0: of {trees.recorded} recorded thoughts 10 are drawn")
    assert cut.startswith(f"problem 0: {trees.cut} searches are not shown")
    assert trees.cut + len(trees.films) == 4
    film = trees.films[0]
    assert film["unseen"] > 0
    flat = film["frames"][0]["changed"]
    there = sum(sum(flat[i + 1 : i + 1 + NUM_TIERS]) for i in range(0, len(flat), 1 + NUM_TIERS))
    done = walk(make_search("rebase", width=4), read_bank(open_bank(bank), 0))
    opened = [0, *done.steps[0].opened]
    assert there + sum(film["frames"][0]["hidden"]) == sum(done.tokens[n] for n in opened)
    monkeypatch.undo()
    (trees,) = take_trees(job_on(bank, FULL, TIGHT), {0: "problem 0: x"})
    assert len(trees.films) + trees.infeasible == 8
    assert trees.infeasible > 0
    assert list(trees.notes()) == [
        f"problem 0: budgets are too small for {trees.infeasible} searches."]  # fmt: skip


def test_long_texts_are_cut() -> None:
    assert search_trees._shortened("x" * MOST_TEXT) == "x" * MOST_TEXT
    long = search_trees._shortened("x" * (MOST_TEXT + 400))
    assert long == f"{'x' * MOST_TEXT} … (1,000 characters)"


def test_why_a_thought_could_not_be_continued() -> None:
    bank = made_bank(3, width=3, depth=3, embeddings=False, duplicates=0.6)
    done = walk(make_search("rebase", width=40), bank)
    fates = {n: fate(bank, done, n) for n in range(1, len(done.bank_node))}
    assert set(fates.values()) == {0, 1, 2, 3}
    asked = {parent for parent in done.parent if parent > 0}
    for n, code in fates.items():
        recorded = done.bank_node[n]
        assert (code == 0) == (not done.dead[n])
        assert (code == 2) == (done.dead[n] and bank.end[recorded] == 2)
        if code == 1:
            assert bank.twin[recorded] < recorded
            assert n not in asked
        if code == 3:
            assert n in asked


def test_a_search_and_its_policy_have_a_name() -> None:
    arm = Arm("ets", 16, (), "lambda_b=1.5")
    name = search_trees.cell_name(arm.label, arm.width, "arborkv", "0.25", many=True)
    assert name == "ets lambda_b=1.5, width 16, arborkv at 0.25"
    assert search_trees.cell_name("ets", 4, "full", "any", many=False) == "ets, width 4"
