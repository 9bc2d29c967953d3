"""Synthetic banks: thoughts are as stated, and searches find on file what they found when drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.machine.lookup import load_geometry
from arborsim.products.generate.lengths import Counts, Uniform, fixed
from arborsim.products.generate.synthetic import (
    BankSpec,
    Dense,
    SyntheticBank,
    grow,
    write_synthetic,
)
from arborsim.searches.arms import arms_of, recipe_for
from arborsim.searches.bank import open_bank, read_bank
from arborsim.searches.ets import similar
from arborsim.searches.walk import walk
from arborsim.trace.schema import End

GEOMETRY = load_geometry("llama-3.1-8b")
SMALL = BankSpec(fixed(5), Uniform(1, 9), fixed(4))


def dense(
    spec: BankSpec, first: int, branching: int, seed: int = 0, number: int = 0
) -> SyntheticBank:
    bank = SyntheticBank.of(spec, seed, number)
    grow(bank, Dense(fixed(first), fixed(branching)))
    return bank


def children(bank: SyntheticBank, node: int) -> list[int]:
    return list(bank.below(node, 0, bank.asked[node]))


def nodes(bank: SyntheticBank) -> list[int]:
    """Those that were asked for, without the prompt."""
    found, level = [], [0]
    while level:
        level = [child for node in level for child in children(bank, node)]
        found += level
    return found


def test_a_bank_has_the_stated_depth_branching_and_lengths() -> None:
    bank = dense(replace(SMALL, depth=fixed(5)), first=6, branching=3)
    found = nodes(bank)
    assert np.bincount([bank.depth[n] for n in found])[1:].tolist() == [6, 18, 54, 162, 486]
    assert {len(children(bank, n)) for n in found if bank.depth[n] < 5} == {3}
    assert {bank.end[n] for n in found if bank.depth[n] < 5} == {End.NONE}
    assert {bank.end[n] for n in found if bank.depth[n] == 5} == {End.FINISHED}
    tokens = np.array([bank.tokens[n] for n in found])
    assert (tokens.min(), tokens.max(), bank.prompt_tokens) == (1, 9, 5)
    assert tokens.mean() == pytest.approx(5, abs=4 * math.sqrt(60 / 9 / len(tokens)))


def test_depth_is_drawn_per_problem_and_thoughts_finish_early_as_stated() -> None:
    spec = replace(SMALL, depth=Uniform(2, 4), finished=(0.25, 0.0))
    banks = [dense(spec, 20, 2, number=number) for number in range(30)]
    assert {bank.levels for bank in banks} == {2, 3, 4}
    first = [bank.end[n] for bank in banks for n in children(bank, 0)]
    assert stats.binomtest(first.count(End.FINISHED), len(first), 0.25).pvalue > 1e-3
    second = [
        bank.end[n] for bank in banks if bank.levels > 2 for n in nodes(bank) if bank.depth[n] == 2
    ]
    assert set(second) == {End.NONE}


@pytest.mark.parametrize(
    ("stated", "spread"), [(0.0, 1.0), (0.4, 0.3), (0.8, 1.0), (0.95, 1.0), (1.0, 0.3)]
)
def test_rewards_of_parent_and_child_have_the_stated_correlation(
    stated: float, spread: float
) -> None:
    spec = replace(SMALL, depth=fixed(2), reward_correlation=stated, reward_spread=spread)
    bank = dense(spec, first=1600, branching=1)
    below = [n for n in nodes(bank) if bank.depth[n] == 2]
    pairs = np.array([(bank.score[bank.parent[n]], bank.score[n]) for n in below])
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(stated, abs=0.06)
    for rewards in pairs.T:
        assert rewards.min() >= 0.5 - spread / 2
        assert rewards.max() <= 0.5 + spread / 2
        assert stats.kstest((rewards - 0.5) / spread + 0.5, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("truth", "right"), [(0.0, 0.5), (0.5, 0.2), (0.8, 0.5), (1.0, 0.3)])
def test_last_rewards_tell_right_answers_as_well_as_stated(truth: float, right: float) -> None:
    spec = replace(SMALL, depth=fixed(1), truth=truth, difficulty=0.0, right=right)
    bank = dense(spec, first=4000, branching=1)
    found = nodes(bank)
    verdict = np.array([bool(bank.verdict[n]) for n in found])
    assert verdict.mean() == pytest.approx(right, abs=0.03)
    normal = stats.norm.ppf(np.array([bank.score[n] for n in found], dtype=np.float64))
    gap = normal[verdict].mean() - normal[~verdict].mean()
    biserial = gap * right * (1 - right) / stats.norm.pdf(stats.norm.ppf(right))
    assert biserial == pytest.approx(truth, abs=0.06)
    assert {bank.answer[n] == "right" for n in np.array(found)[verdict]} == {True}


def test_difficulty_is_what_a_problems_answers_have_in_common() -> None:
    def spread_of_shares(difficulty: float) -> float:
        spec = replace(SMALL, depth=fixed(1), truth=0.0, difficulty=difficulty)
        banks = [dense(spec, 64, 1, number=number) for number in range(60)]
        return float(np.std([np.mean([bool(b.verdict[n]) for n in nodes(b)]) for b in banks]))

    assert spread_of_shares(0.0) < 0.1  # what 64 throws of a coin leave: 0.0625
    assert 0.2 < spread_of_shares(0.5) < spread_of_shares(1.0)
    assert spread_of_shares(1.0) == pytest.approx(0.5, abs=0.05)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_siblings_say_no_more_than_the_stated_number_of_things(
    seed: int, meanings: int, common: float
) -> None:
    spec = replace(SMALL, depth=fixed(2), meanings=meanings, common=common)
    bank = dense(spec, first=12, branching=12, seed=seed)
    for parent in [0, *children(bank, 0)]:
        vectors = np.array([bank.embedding[n] for n in children(bank, parent)], dtype=np.float64)
        assert len(set(similar(vectors, 0.05))) <= meanings
    level = [n for n in nodes(bank) if bank.depth[n] == 2]
    vectors = np.array([bank.embedding[n] for n in level], dtype=np.float64)
    said = len(set(similar(vectors, 0.05)))
    # Twelve parents: what is common is said by all of them, what is not by one.
    assert said <= meanings if common == 1 else said <= 12 * meanings
    assert common or said > meanings


def test_every_thought_can_have_a_meaning_of_its_own() -> None:
    bank = dense(replace(SMALL, depth=fixed(1), meanings=0), first=100, branching=1)
    vectors = np.array([bank.embedding[n] for n in nodes(bank)], dtype=np.float64)
    assert len(set(similar(vectors, 0.05))) == 100


@pytest.mark.parametrize("repeated", [0.0, 0.3, 1.0])
def test_as_many_thoughts_repeat_a_sibling_as_stated(repeated: float) -> None:
    bank = dense(replace(SMALL, depth=fixed(3), repeated=repeated), first=30, branching=10)
    found = nodes(bank)
    later = [n for n in found if n != children(bank, bank.parent[n])[0]]
    repeats = [n for n in later if bank.twin[n] != n]
    assert stats.binomtest(len(repeats), len(later), repeated).pvalue > 1e-3
    for n in repeats:
        twin = bank.twin[n]
        assert twin < n
        assert bank.parent[twin] == bank.parent[n]
        assert bank.text[twin] == bank.text[n]
        assert (bank.tokens[twin], bank.score[twin]) == (bank.tokens[n], bank.score[n])
        assert (bank.embedding[twin] == bank.embedding[n]).all()
    said = [(bank.parent[n], bank.text[n]) for n in found if bank.twin[n] == n]
    assert len(said) == len(set(said))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.permutations(["rebase", "ets", "beam-4"]))
def test_a_thought_is_the_same_whichever_search_asks_first(seed: int, order: list[str]) -> None:
    """Nodes are numbered as they are drawn; what a search sees of them does not depend on that."""
    shared, found = SyntheticBank.of(SMALL, seed, 1), {}
    for name in order:
        (arm,) = arms_of(name, [8], {})
        found[name] = walk(arm.make(), shared)
    for name, together in found.items():
        (arm,) = arms_of(name, [8], {})
        alone = walk(arm.make(), SyntheticBank.of(SMALL, seed, 1))
        assert alone.score[1:] == together.score[1:]  # the prompt has none
        for what in ("parent", "depth", "tokens", "finished", "kv_tokens", "correct"):
            assert getattr(alone, what) == getattr(together, what), what


@pytest.mark.parametrize("dedupe", [True, False])
def test_searches_walk_a_written_bank_as_they_walked_it_when_it_was_drawn(
    tmp_path: Path, dedupe: bool
) -> None:
    spec = replace(SMALL, depth=fixed(5), finished=(0.0, 0.2), repeated=0.2)
    recipe = recipe_for(["rebase", "ets", "beam-4", "mcts"], [8, 16], ["lambda_b=1.5"], dedupe)
    out = tmp_path / "bank.parquet"
    write_synthetic(spec, recipe, 3, 7, GEOMETRY, out)
    reader = open_bank(out)
    for number in range(3):
        bank = read_bank(reader, number, embeddings=True)
        for arm in recipe.arms:
            on_file = walk(arm.make(), bank, dedupe)
            drawn = walk(arm.make(), SyntheticBank.of(spec, 7, number), dedupe)
            assert on_file.bank_misses == 0
            for what in ("parent", "tokens", "steps", "candidates", "correct"):
                assert getattr(on_file, what) == getattr(drawn, what), (arm.label, what)


def test_generate_makes_a_bank_that_search_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "bank.parquet")
    drawn = ["--searches", "2", "--depth", "3", "--thought-tokens", "4", "--prompt-tokens", "9"]
    assert main(["generate", "--out", out, *drawn, "--bank", "--for", "rebase,ets"]) == 0
    assert main(["search", out, "--algorithm", "rebase,ets"]) == 0
    said = capsys.readouterr().out
    assert "2 problems" in said
    dense_bank = ["--bank", "--first", "4", "--branching", "2", "--overwrite"]
    assert main(["generate", "--out", out, *drawn, *dense_bank]) == 0
    assert main(["search", out, "--algorithm", "beam-4", "--width", "4"]) == 0


def asked(**given: Any) -> Callable[[], BankSpec]:
    return lambda: replace(SMALL, **given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (asked(reward_correlation=1.2), "reward_correlation must be in [0, 1], not 1.2"),
        (asked(truth=0.9, difficulty=0.5), "lower one of them"),
        (asked(right=0.0), "right must be a share between 0 and 1"),
        (asked(finished=()), "finished must be shares"),
        (asked(meanings=-1), "meanings 0 or more"),
        (asked(depth=fixed(0)), "depth must be in [1, 4096], not 0"),
        (lambda: dense(replace(SMALL, depth=fixed(20)), 4, 4), "more than 1000000"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        make()


@pytest.mark.parametrize(
    ("branching", "finished"), [(fixed(4), (0.0,)), (Uniform(1, 7), (0.1,)), (fixed(6), (0.5,))]
)
def test_a_tree_that_is_too_large_is_refused_before_it_is_drawn(
    branching: Counts, finished: tuple[float, ...]
) -> None:
    bank = SyntheticBank.of(replace(SMALL, depth=fixed(20), finished=finished), 0, 0)
    with pytest.raises(UsageError, match="or more, more than 1000000: lower branching"):
        grow(bank, Dense(fixed(4), branching))
    assert len(bank.parent) < 50_000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--bank", "--pruned", "0.5"], "--pruned is what one search does"),
        (["--bank", "--for", "ets", "--branching", "3"], "leave out --branching"),
        (["--bank", "--width", "16"], "--width needs --for"),
        (["--truth", "0.3"], "--truth needs --bank"),
        (["--bank", "--keep-duplicates"], "--keep-duplicates needs --for"),
    ],
)
def test_options_that_do_not_go_together(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--out", str(tmp_path / "x.parquet"), *given]) == 2
    assert said in capsys.readouterr().err


def test_counts_are_distributions() -> None:
    recipe: Counts = Uniform(1, 3)
    bank = SyntheticBank.of(SMALL, 0, 0)
    grow(bank, Dense(fixed(2), recipe))
    assert {len(children(bank, n)) for n in nodes(bank) if bank.depth[n] < 4} == {1, 2, 3}
