"""Selection and allocation blocks against their one-line definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.policies.placement import highest, lowest
from arborsim.policies.relief import trim_by_weight
from arborsim.policies.stream import ChangingPool, HeapPool, Stream

few_values = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), min_size=1, max_size=40)


@given(scores=few_values, count=st.integers(-1, 45))
def test_lowest_takes_the_oldest_of_equals(scores: list[float], count: int) -> None:
    by_hand = sorted(range(len(scores)), key=lambda i: (scores[i], i))[: max(0, count)]
    assert lowest(np.array(scores), count).tolist() == sorted(by_hand)


@given(scores=few_values, count=st.integers(-1, 45))
def test_highest_keeps_the_newest_of_equals(scores: list[float], count: int) -> None:
    by_hand = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    assert highest(np.array(scores), count).tolist() == sorted(by_hand[: max(0, count)])


@given(scores=few_values, data=st.data())
def test_pools_hand_out_the_lowest_alive_candidate(
    scores: list[float], data: st.DataObject
) -> None:
    n = len(scores)
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    start = data.draw(st.integers(0, n))
    stops = sorted(data.draw(st.lists(st.integers(0, n), min_size=1, max_size=6)))
    array = np.array(scores)
    stream = Stream(np.arange(n), alive, start, stops[0])
    pools = HeapPool(array, stream), ChangingPool(array, stream)
    candidates = {i for i in range(start, n) if alive[i]}
    for stop in stops:
        inside = [i for i in candidates if i < stop]
        expected = min(inside, key=lambda i: (scores[i], i), default=None)
        for pool in pools:
            pool.admit(stop)
            assert pool.pop(1) == ([] if expected is None else [expected])
        candidates.discard(expected)  # type: ignore[arg-type]


@settings(max_examples=300)
@given(data=st.data())
def test_bisection_equals_trimming_one_token_at_a_time(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 8))
    some = st.lists(st.integers(0, 30), min_size=blocks, max_size=blocks)
    keep = np.array(data.draw(some))
    least = np.minimum(np.array(data.draw(some)) // 3, keep)
    # repeated weights make blocks tie, which is where a bisection goes wrong
    weights = st.sampled_from([1e-9, 0.25, 0.5, 1.0, 3.0, 7.7])
    scale = np.array(data.draw(st.lists(weights, min_size=blocks, max_size=blocks)))
    excess = data.draw(st.integers(-2, int(keep.sum()) + 2))

    by_hand = keep.copy()
    for _ in range(max(0, excess)):
        free = [i for i in range(blocks) if by_hand[i] > least[i]]
        if not free:
            break
        by_hand[max(free, key=lambda i: (by_hand[i] / scale[i], -i))] -= 1
    assert trim_by_weight(keep, scale, least, excess).tolist() == by_hand.tolist()
