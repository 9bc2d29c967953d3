"""Films of searches on a bank: every step, every node, every token where it is at that moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.tiers import Budget, Tier
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell
from arborsim.policies.registry import build
from arborsim.products.search.run import simulate
from arborsim.products.search.trees import NEVER, SearchFilm, moments_of
from arborsim.searches import make_search
from arborsim.searches.visited import visited
from arborsim.searches.walk import Walk, walk
from tests.bank.banks import made_bank, random_bank

MACHINE = Machine(load_profile("h200"), load_geometry("llama-3.1-8b"))
FULL = Cell(build("full"), Budget("any", share=1.0))
NAMES = ("rebase", "ets", "beam-4", "tot-bfs", "tot-dfs", "dpts", "mcts", "best-of-n")


def filmed(name: str, seed: int, most: int = 1 << 30, **options: object) -> tuple[Walk, SearchFilm]:
    bank = random_bank(seed, nodes=30) if seed % 2 else made_bank(seed, width=4, depth=3)
    done = walk(make_search(name, **options), bank)
    film = SearchFilm(done, most)
    simulate(visited(done, bank.episode), FULL, MACHINE, watch=film.watch)
    return done, film


def literal(done: Walk) -> list[tuple[dict[int, int], set[int], set[int], set[int]]]:
    """Tokens of each node, and what was opened, complete and given up, where decoding pauses.

    Steps before which nothing was decoded belong to the one before.
    """
    tokens, opened, closed, dropped = {0: done.prompt_tokens}, {0}, {0}, set()
    found: list[tuple[dict[int, int], set[int], set[int], set[int]]] = []
    for number, step in enumerate(done.steps):
        dropped |= set(step.dropped)
        opened |= set(step.opened)
        for run in step.runs:
            for leaf in run.leaves:
                tokens[leaf] = tokens.get(leaf, 0) + run.iterations
            closed |= set(run.ended)
        decoded = sum(run.iterations for run in step.runs)
        if decoded or number == len(done.steps) - 1:
            found.append((dict(tokens), set(opened), set(closed), set(dropped)))
    return found


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.integers(0, 10_000))
def test_every_moment_against_the_walk(name: str, seed: int) -> None:
    done, film = filmed(name, seed)
    expected = literal(done)
    assert len(film.frames) == len(expected)
    times = film.times()
    for at, (frame, (tokens, opened, closed, dropped)) in enumerate(
        zip(film.frames, expected, strict=True)
    ):
        held = {n: t for n, t in enumerate(frame.tokens_by_tier[:, Tier.HBM].tolist()) if t}
        assert held == {n: t for n, t in tokens.items() if t}  # full retention: all in HBM
        assert not frame.tokens_by_tier[:, 1:].any()
        for key, nodes in (("opened", opened), ("closed", closed), ("dropped", dropped)):
            assert {n for n, t in enumerate(times[key]) if NEVER < t <= at} == nodes
    assert [f.time_s for f in film.frames] == sorted(f.time_s for f in film.frames)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_long_search_is_shown_at_some_of_its_moments(most: int) -> None:
    _, whole = filmed("tot-dfs", 3)
    _, film = filmed("tot-dfs", 3, most)
    assert len(whole.frames) > 8
    assert len(film.frames) == most
    if most > 1:
        assert (film.frames[0].tokens_by_tier == whole.frames[0].tokens_by_tier).all()
        assert (film.frames[-1].tokens_by_tier == whole.frames[-1].tokens_by_tier).all()
        assert film.frames[-1].time_s == whole.frames[-1].time_s
    for key, at in film.times().items():
        exact = whole.times()[key]
        assert [t == NEVER for t in at] == [t == NEVER for t in exact]
        # What happened between two frames is seen in the later one.
        assert at == [
            NEVER if t == NEVER else int(np.searchsorted(film.picked, t)) for t in exact
        ]  # fmt: skip


def test_moments_in_words() -> None:
    done, _ = filmed("rebase", 0, width=4)
    first, second, *_, last = (moment.label for moment in moments_of(done))
    assert first == "step 1: 4 opened"
    assert second.startswith("step 2: ")
    assert "to choose among" in second
    assert last.endswith(": the end") or "given up" in last


def test_tiers_of_a_policy_that_moves_tokens() -> None:
    bank = made_bank(6, width=4, depth=3, block=(10, 20))
    done = walk(make_search("rebase", width=8), bank)
    film = SearchFilm(done)
    cell = Cell(build("streaming-llm"), Budget("0.6", share=0.6))
    simulate(visited(done, bank.episode), cell, MACHINE, watch=film.watch)
    last = film.frames[-1].tokens_by_tier
    assert last.sum() == done.generated_tokens + done.prompt_tokens
    assert last[:, Tier.EVICTED].sum() > 0
