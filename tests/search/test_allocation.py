"""Samplers, beam, DVTS and REBASE against literal re-implementations."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal, localcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.errors import UsageError
from arborsim.search import ROOT, Leaf, make_search
from arborsim.search.base import best_first
from arborsim.search.rebase import rebase_weights
from arborsim.search.vote import majority, weighted_majority
from tests.search.bank import Bank, Run, drive

SEEDS = range(25)


def thoughts(run: Run) -> list[tuple[int, ...]]:
    return sorted(run.path[n] for n in run.order)


def literal_levels(bank: Bank, width: int, depth: int, share) -> tuple[list, list]:
    """Level by level; `share` maps scored states and a width to [(state, children)].

    Returns all thoughts, and the finished ones.
    """
    level, made, finished = [()], [], []
    for step in range(depth):
        width -= sum(s != () and bank.child(s)[1] for s in level)
        finished += [s for s in level if s != () and bank.child(s)[1]]
        open_ = [s for s in level if s == () or not any(bank.child(s)[1:])]
        if width <= 0 or not open_:
            return made, finished
        if step == 0:
            level = [(k,) for k in range(width)]
        else:
            ranked = sorted(open_, key=lambda s: (-bank.child(s)[0], made.index(s)))
            level = [(*s, k) for s, count in share(ranked, width) for k in range(count)]
        made += level
    return made, finished + [s for s in level if bank.child(s)[1]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "width", "keep"), [("beam-4", 18, 4), ("beam-sqrt", 10, 4)])
def test_beam(name: str, width: int, keep: int, seed: int) -> None:
    def share(ranked: list, left: int) -> list:
        kept = ranked[:keep]
        counts = [0] * len(kept)
        for i in range(left):  # one at a time, in turns
            counts[i % len(kept)] += 1
        return list(zip(kept, counts, strict=True))

    bank = Bank(seed, depth=4)
    run = drive(make_search(name, width=width), bank)
    made, finished = literal_levels(bank, width, 25, share)
    assert thoughts(run) == sorted(made)
    assert_elected(run, bank, finished)


@pytest.mark.parametrize("seed", SEEDS)
def test_rebase(seed: int) -> None:
    def share(ranked: list, left: int) -> list:
        return list(zip(ranked, printed([bank.child(s)[0] for s in ranked], left), strict=True))

    bank = Bank(seed, depth=4)
    run = drive(make_search("rebase", width=12), bank)
    made, finished = literal_levels(bank, 12, 25, share)
    assert thoughts(run) == sorted(made)
    assert_elected(run, bank, finished)


def assert_elected(run: Run, bank: Bank, finished: list) -> None:
    """The answer has the highest sum of rewards, and is the best leaf that gives it."""
    if not finished:
        return
    votes = Counter[str]()
    for s in finished:
        votes[bank.text(s)] += bank.child(s)[0]
    answer = run.path[run.answer[0]]
    assert votes[bank.text(answer)] == pytest.approx(max(votes.values()))
    mine = [bank.child(s)[0] for s in finished if bank.text(s) == bank.text(answer)]
    assert bank.child(answer)[0] == max(mine)


def literal_dvts(bank: Bank, width: int, subtrees: int, depth: int) -> list:
    """Every subtree on its own: its part of the first level, then always the best child."""
    size, larger = divmod(width, subtrees)
    made, start = [], 0
    for i in range(subtrees):
        left = size + (i < larger)
        level = [(start + k,) for k in range(left)]
        start += left
        for _ in range(depth):
            made += level
            left -= sum(bank.child(s)[1] for s in level)
            open_ = [s for s in level if not any(bank.child(s)[1:])]
            if not open_ or left <= 0:
                break
            best = max(open_, key=lambda s: (bank.child(s)[0], -s[-1]))
            level = [(*best, k) for k in range(left)]
    return made


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "width", "trees"), [("dvts-4", 14, 4), ("dvts-sqrt", 17, 5)])
def test_dvts(name: str, width: int, trees: int, seed: int) -> None:
    bank = Bank(seed, depth=4)
    run = drive(make_search(name, width=width), bank)
    assert thoughts(run) == sorted(literal_dvts(bank, width, trees, 25))


@pytest.mark.parametrize("name", ["beam-4", "dvts-4", "rebase", "ets", "ets-kv"])
def test_depth_ends_a_search(name: str) -> None:
    run = drive(make_search(name, width=8, depth=2), Bank(2, depth=9))
    assert max(map(len, run.path.values())) == 2


def printed(scores: list[float], width: int) -> list[int]:
    """The loop of REBASE in 50 digits, scores descending."""
    counts = []
    with localcontext(prec=50):
        weights = [(Decimal(str(score)) / Decimal("0.2")).exp() for score in scores]
        for i, weight in enumerate(weights):
            share = width * weight / sum(weights[i:])
            near = share.to_integral_value()
            exact = near if abs(share - near) < Decimal("1e-30") else share  # its own rounding
            counts.append(math.ceil(exact))
            width -= counts[-1]
    return counts


def leaves_of(scores: list[float]) -> list[Leaf]:
    return best_first(Leaf(n, 0, 1, score) for n, score in enumerate(scores, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20).map(lambda x: x / 20), min_size=1, max_size=40),
    st.integers(1, 256),
)
def test_rebase_weights_are_those_of_the_printed_loop(scores: list[float], width: int) -> None:
    found = rebase_weights(leaves_of(scores), width, 0.2)
    assert found == printed(sorted(scores, reverse=True), width)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60),
    st.integers(1, 300),
    st.sampled_from([1e-6, 0.2, 5.0]),
)
def test_rebase_weights_sum_to_the_width(
    scores: list[float], width: int, temperature: float
) -> None:
    counts = rebase_weights(leaves_of(scores), width, temperature)
    assert len(counts) == len(scores)
    assert sum(counts) == width
    assert min(counts) >= 0


def test_rebase_weights_by_hand() -> None:
    # e^0 = 1 each: 7 -> ceil(7/3) = 3, ceil(4/2) = 2, 2
    assert rebase_weights(leaves_of([0.4] * 3), 7, 0.2) == [3, 2, 2]
    # at a third of the best weight the share is 8 * 3/4 = 6 exactly: a little less, a little more
    assert rebase_weights(leaves_of([1.0, 1.0 - 0.2 * math.log(3.001)]), 8, 0.2) == [7, 1]
    assert rebase_weights(leaves_of([1.0, 1.0 - 0.2 * math.log(2.999)]), 8, 0.2) == [6, 2]
    assert rebase_weights(leaves_of([math.nan, math.nan]), 3, 0.2) == [2, 1]


@pytest.mark.parametrize("name", ["best-of-n", "self-consistency", "weighted-vote"])
@pytest.mark.parametrize("seed", range(10))
def test_samples_never_branch(name: str, seed: int) -> None:
    bank = Bank(seed)
    run = drive(make_search(name, n=6), bank)
    below = Counter(run.leaves[n].parent for n in run.order)
    assert below.pop(ROOT) == 6
    assert set(below.values()) <= {1}
    ends = [n for n in run.order if n not in below]
    assert not any(run.leaves[n].expandable for n in ends)
    assert run.dropped == []
    finished = [run.leaves[n] for n in ends if run.leaves[n].finished]
    answer = run.leaves[run.answer[0]]
    if name == "best-of-n" and finished:
        assert answer.score == max(leaf.score for leaf in finished)
    if name == "self-consistency" and finished:
        votes = Counter(leaf.answer for leaf in finished)
        assert votes[answer.answer] == max(votes.values())


def test_votes() -> None:
    def leaf(node: int, score: float, answer: str | None, finished: bool = True) -> Leaf:
        return Leaf(node, 0, 1, score, finished, answer=answer)

    root = Leaf(ROOT, -1, 0, math.nan)
    three = [root, leaf(1, 0.9, "x"), leaf(2, 0.3, "y"), leaf(3, 0.4, "y")]
    assert majority(three) == (3,)
    assert weighted_majority(three) == (1,)
    four = [*three, leaf(4, 0.3, "y"), leaf(5, math.nan, "y"), leaf(6, 5.0, "y", finished=False)]
    assert weighted_majority(four) == (3,)
    # a tie: the answer that was given first
    assert majority([root, leaf(2, 0.1, "x"), leaf(1, 0.9, "y")]) == (2,)
    # no texts: each leaf is an answer of its own
    assert weighted_majority([root, leaf(1, 0.5, None), leaf(2, 0.6, None)]) == (2,)
    assert majority([root, leaf(1, 0.5, None, finished=False)]) == (1,)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("best-of-n", {"n": 0}, "best-of-n: n must be 1 or more"),
        ("beam-4", {"keep": 0}, "beam-4: keep must be 1 or more"),
        ("beam-sqrt", {"width": 0}, "beam-sqrt: width and depth must be 1 or more"),
        ("dvts-4", {"width": 3}, r"subtrees must be 1 to width \(3\)"),
        ("rebase", {"temperature": 0}, "temperature must be more than 0"),
        ("rebase", {"temperature": "nan"}, "temperature must be more than 0"),
        ("ets-kv", {"cost": "byte"}, "cost must be node or token, not 'byte'"),
        ("ets-kv", {"lambda_b": -1}, "lambda_b must be 0 or more"),
        ("ets", {"lambda_d": -1}, "lambda_d must be 0 or more"),
        ("ets", {"cut": 3}, "cut is a cosine distance"),
    ],
)
def test_options_are_checked(name: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_search(name, **options)
