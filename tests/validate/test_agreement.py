"""Kept sets over time, against sets written down by hand and against a slow walk over moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.tiers import Tier
from arborsim.products.validate.compare import Generated, agreement
from arborsim.trace.schema import Kind

GONE, BACK, SMALL, AWAY = Tier.EVICTED, Tier.HBM, Tier.HBM_QUANTISED, Tier.DDR


def course(tokens: list[int], prompt: int = 2) -> Generated:
    """One path: a token per iteration after the prompt."""
    born = np.arange(prompt, len(tokens) + 1)
    return Generated(np.zeros(len(tokens), np.int32), np.array(tokens, np.int32), born)


def moves(*rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def test_a_course_reads_the_rows_of_an_episode() -> None:
    p, t, turn, end = Kind.PREFILL, Kind.TOKEN, Kind.TRANSITION, Kind.BOUNDARY
    found = Generated.of({
        "kind": [p, p, turn, turn, t, t, t, t, end, t, end],
        "iteration": [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3],
        "node": [0, 0, 1, 2, 1, 2, 1, 2, 1, 2, 2],
        "token": [5, 6, -1, -1, 7, 8, 9, 10, -1, 11, -1],
    })  # fmt: skip
    assert found.node.tolist() == [0, 0, 1, 2, 1, 2, 2]
    assert found.token.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert found.born.tolist() == [2, 4, 6, 7]
    assert found.iterations == 3


@pytest.mark.parametrize(
    ("other", "same"),
    [([1, 2, 3, 4, 5], 3), ([1, 2, 3, 4, 9], 2), ([1, 2, 9, 4, 5], 0), ([1, 9, 3, 4, 5], -1),
     ([1, 2, 3], 1), ([1, 2, 3, 4, 5, 6], 3)],
)  # fmt: skip
def test_iterations_that_both_did_alike(other: list[int], same: int) -> None:
    one = course([1, 2, 3, 4, 5])
    assert one.same_iterations(course(other)) == same
    assert course(other).same_iterations(one) == same


def test_jaccard_by_hand() -> None:
    one, other = course([1, 2, 3, 4, 5]), course([1, 2, 3, 4, 9])
    mine = moves((1, -1, 0, GONE), (2, -1, 1, SMALL), (3, -1, 2, AWAY))
    theirs = moves((1, -1, 0, GONE), (2, -1, 1, GONE), (3, -1, 1, BACK))
    found = agreement(one, mine, other, theirs, groups=1)
    # In HBM after 0..3: {0 1}, {1 2}, {1 2 3}, {1 3 4}; of the other: the same, {2 3}, {1 2 3 4}.
    assert found.iteration.tolist() == [0, 1, 2, 3]
    assert found.jaccard.tolist() == pytest.approx([1.0, 1.0, 2 / 3, 3 / 4])
    assert found.same == 2
    assert found.before == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert found.after == pytest.approx(3 / 4)


def test_runs_that_stay_the_same_have_no_after() -> None:
    one = course([1, 2, 3])
    found = agreement(one, moves(), one, moves(), groups=2)
    assert found.before == 1.0
    assert math.isnan(found.after)


_MOVE = st.tuples(st.integers(0, 8), st.integers(-1, 1), st.integers(0, 9), st.sampled_from(Tier))


@given(st.lists(_MOVE, max_size=30), st.lists(_MOVE, max_size=30), st.integers(1, 40))
def test_jaccard_against_a_slow_walk(
    mine: list[tuple[int, int, int, int]], theirs: list[tuple[int, int, int, int]], points: int
) -> None:
    """Tokens arrive one per iteration; moves name tokens that exist."""
    both = []
    for rows in (mine, theirs):
        known = sorted(((i, g, min(t, i + 1), int(x)) for i, g, t, x in rows), key=lambda r: r[0])
        both.append(moves(*known))
    search = course(list(range(10)))
    found = agreement(search, both[0], search, both[1], groups=2, points=points)
    assert len(found.iteration) <= points + 1
    for iteration, value in zip(found.iteration.tolist(), found.jaccard.tolist(), strict=True):
        sets = []
        for rows in both:
            kept = {(g, t) for g in (0, 1) for t in range(2 + iteration)}
            for i, group, token, target in rows.tolist():
                cells = {(g, token) for g in ((0, 1) if group < 0 else (group,))}
                if i <= iteration:
                    kept = kept | cells if Tier(target).in_hbm else kept - cells
            sets.append(kept)
        either = sets[0] | sets[1]
        assert value == pytest.approx(len(sets[0] & sets[1]) / len(either) if either else 1.0)
