"""Searches against their literal re-implementations, on random banks and with random options."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.searches import make_search
from tests.search import literal
from tests.search.bank import Bank, Run, drive

banks = st.builds(
    Bank, st.integers(0, 10_000), depth=st.integers(1, 5), digits=st.sampled_from([1, 2])
)
widths = st.integers(1, 20)
some = settings(max_examples=60, deadline=None)


def thoughts(run: Run) -> list[tuple[int, ...]]:
    return sorted(run.path[n] for n in run.order)


def in_order(run: Run) -> list[tuple[int, ...]]:
    return [run.path[n] for n in run.order]


def answer(run: Run) -> tuple[int, ...]:
    return run.path[run.answer[0]]


@pytest.mark.parametrize("name", ["best-of-n", "self-consistency", "weighted-vote"])
@some
@given(bank=banks, n=widths)
def test_samplers(name: str, bank: Bank, n: int) -> None:
    run = drive(make_search(name, n=n), bank)
    made, finished = literal.literal_samples(bank, n)
    assert in_order(run) == made
    assert run.dropped == []
    votes = {
        "best-of-n": None,
        "self-consistency": lambda s: 1,
        "weighted-vote": lambda s: bank.child(s)[0],
    }
    assert answer(run) == literal.elected(bank, made, finished, votes[name])


def by_reward(bank: Bank, made: list, finished: list, run: Run) -> tuple[int, ...]:
    """The vote of the level-wise searches; without a finished thought, the best one kept."""
    kept = [s for s in made if s in {run.path[n] for n in run.seen}]
    return literal.elected(bank, kept or [()], finished, lambda s: bank.child(s)[0])


@pytest.mark.parametrize("name", ["beam-4", "beam-sqrt"])
@some
@given(bank=banks, width=widths, keep=st.integers(1, 6), depth=st.integers(1, 6))
def test_beam(name: str, bank: Bank, width: int, keep: int, depth: int) -> None:
    options = {"keep": keep} if name == "beam-4" else {}
    if name == "beam-sqrt":
        keep = next(k for k in range(1, 21) if k * k >= width)

    def share(ranked: list, left: int) -> list:
        kept = ranked[:keep]
        counts = [0] * len(kept)
        for i in range(left):  # one at a time, in turns
            counts[i % len(kept)] += 1
        return list(zip(kept, counts, strict=True))

    run = drive(make_search(name, width=width, depth=depth, **options), bank)
    made, finished = literal.literal_levels(bank, width, depth, share)
    assert in_order(run) == made
    assert answer(run) == by_reward(bank, made, finished, run)


@some
@given(banks, widths, st.sampled_from(["0.05", "0.2", "1.5"]), st.integers(1, 6))
def test_rebase(bank: Bank, width: int, temperature: str, depth: int) -> None:
    def share(ranked: list, left: int) -> list:
        scores = [bank.child(s)[0] for s in ranked]
        return list(zip(ranked, literal.printed(scores, left, temperature), strict=True))

    run = drive(make_search("rebase", width=width, depth=depth, temperature=temperature), bank)
    made, finished = literal.literal_levels(bank, width, depth, share)
    assert in_order(run) == made
    assert answer(run) == by_reward(bank, made, finished, run)


@pytest.mark.parametrize("name", ["dvts-4", "dvts-sqrt"])
@some
@given(bank=banks, width=widths, subtrees=st.integers(1, 6), depth=st.integers(1, 6))
def test_dvts(name: str, bank: Bank, width: int, subtrees: int, depth: int) -> None:
    subtrees = min(subtrees, width)
    options = {"subtrees": subtrees} if name == "dvts-4" else {}
    if name == "dvts-sqrt":
        subtrees = next(k for k in range(1, 21) if k * k >= width)
    run = drive(make_search(name, width=width, depth=depth, **options), bank)
    made, finished = literal.literal_dvts(bank, width, subtrees, depth)
    assert in_order(run) == made
    assert answer(run) == by_reward(bank, made, finished, run)


@some
@given(banks, st.integers(1, 5), st.integers(1, 5), st.integers(0, 4), st.integers(1, 5))
def test_tot_bfs(bank: Bank, keep: int, children: int, levels: int, any_of: int) -> None:
    search = make_search("tot-bfs", keep=keep, children=children, levels=levels, any_of=any_of)
    run = drive(search, bank)
    made, states = literal.literal_bfs(bank, keep, children, levels)
    assert in_order(run) == made
    ancestors = {s[:i] for s in states for i in range(len(s) + 1)}
    assert {run.path[n] for n in run.dropped} == set(made) - ancestors
    finished = [s for s in states if bank.child(s)[1]]  # best first
    best = max(ancestors - {()}, key=lambda s: (bank.child(s)[0], -made.index(s)), default=())
    assert [run.path[n] for n in run.answer] == (finished[:any_of] or [best])


@some
@given(
    bank=banks,
    threshold=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    relative=st.sampled_from([0.0, 0.5, 0.9]),
    children=st.integers(1, 4),
    steps=st.integers(1, 60),
    propose=st.integers(1, 5),
)
def test_tot_dfs(bank: Bank, **options: float) -> None:
    run = drive(make_search("tot-dfs", **options), bank)
    made = literal.literal_dfs(bank, **options)
    assert in_order(run) == made
    assert run.most_running <= 1
    assert answer(run) == best_of(bank, run)


@some
@given(
    bank=banks,
    width=st.integers(1, 6),
    steps=st.integers(1, 50),
    children=st.integers(1, 4),
    early_stop=st.sampled_from([0.0, 0.8, 1.2]),
    deep_seek=st.sampled_from([0.5, 0.8, 1.2]),
    warm_up=st.integers(1, 6),
)
def test_dpts(
    bank: Bank, width: int, steps: int, children: int, early_stop: float, deep_seek: float,
    warm_up: int,
) -> None:  # fmt: skip
    search = make_search(
        "dpts", width=width, steps=steps, children=children, early_stop=early_stop,
        deep_seek=deep_seek, warm_up=warm_up,
    )  # fmt: skip
    run = drive(search, bank)
    made = literal.literal_dpts(bank, width, steps, children, early_stop, deep_seek, warm_up)
    assert in_order(run) == made
    assert run.most_running <= width
    assert answer(run) == best_of(bank, run)


@some
@given(
    banks, st.integers(1, 5), st.integers(1, 4), st.integers(1, 40),
    st.sampled_from([0.0, 0.3, 1.0, 1 / math.sqrt(2)]),
)  # fmt: skip
def test_mcts(bank: Bank, width: int, children: int, steps: int, w: float) -> None:
    search = make_search("mcts", width=width, children=children, steps=steps, exploration=w)
    run = drive(search, bank)
    assert in_order(run) == literal.literal_mcts(bank, width, children, steps, w)
    assert run.most_running <= width
    assert answer(run) == best_of(bank, run)


def best_of(bank: Bank, run: Run) -> tuple[int, ...]:
    """The best finished thought that is complete, or else the best one that was kept."""
    seen = [run.path[n] for n in sorted(run.seen) if n != 0]
    finished = [s for s in seen if bank.child(s)[1]]
    return max(finished or seen, key=lambda s: bank.child(s)[0], default=())
