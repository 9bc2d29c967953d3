"""Shares of the width, votes, and what options are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.searches import ROOT, Leaf, make_search
from arborsim.searches.base import best_first
from arborsim.searches.levels import rebase_weights
from arborsim.searches.ranking import elected
from tests.search.bank import Bank, drive
from tests.search.literal import printed

SEEDS = range(25)


@pytest.mark.parametrize("name", ["beam-4", "dvts-4", "rebase", "ets", "ets-kv"])
def test_depth_ends_a_search(name: str) -> None:
    run = drive(make_search(name, width=8, depth=2), Bank(2, depth=9))
    assert max(map(len, run.path.values())) == 2


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


def test_votes() -> None:
    def leaf(node: int, score: float, answer: str | None, finished: bool = True) -> Leaf:
        return Leaf(node, 0, 1, score, finished, answer=answer)

    majority, weighted_majority = (
        lambda leaves, how=how: elected(leaves, how)[:1] for how in ("vote", "weighted")
    )
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
        ("best-of-n", {"n": 0}, "best-of-n: n must be at least 1"),
        ("beam-4", {"keep": 0}, "beam-4: keep must be at least 1"),
        ("beam-sqrt", {"width": 0}, "beam-sqrt: width must be at least 1, not 0"),
        ("dvts-4", {"width": 3}, r"subtrees must be 1 to width \(3\)"),
        ("rebase", {"temperature": 0}, r"temperature must be in \[1e-06, 1e\+06\]"),
        ("rebase", {"temperature": "nan"}, "temperature must be in"),
        ("ets-kv", {"cost": "byte"}, "cost must be one of node, token, not 'byte'"),
        ("ets-kv", {"lambda_b": -1}, "lambda_b must be in"),
        ("ets", {"lambda_d": -1}, "lambda_d must be in"),
        ("mcts", {"score": "max"}, "score must be one of last, min, prod, mean, not 'max'"),
        ("linear", {"score": "min"}, "unknown option of linear"),
        ("tot-bfs", {"answer": "first"}, "answer must be one of best, vote, weighted"),
        ("beam-4", {"refill": 1}, "refill must be true or false"),
        ("ets", {"cut": 3}, "cut must be in"),
    ],
)
def test_options_are_checked(name: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_search(name, **options)
