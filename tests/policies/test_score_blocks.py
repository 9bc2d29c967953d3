"""What policies compute in one go against its definition, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.policies.methods import hierarchy as neighbours
from arborsim.policies.methods.rkv import latest_similar, redundancy
from arborsim.policies.methods.thinkv import fill_segments, segment_entropy, segment_sizes, tertiles
from arborsim.signals.scores import sum_in_order

few_ranks = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0])


@given(
    segments=st.lists(
        st.tuples(st.lists(few_ranks, min_size=1, max_size=9), st.integers(0, 10)), max_size=8
    ),
    room=st.integers(0, 60),
)
def test_segments_are_filled_oldest_first_each_with_its_best(
    segments: list[tuple[list[float], int]], room: int
) -> None:
    by_hand, left = [], room
    for ranks, most in segments:
        best = sorted(range(len(ranks)), key=lambda i: (ranks[i], i), reverse=True)
        chosen = best[: min(most, left)]
        left -= len(chosen)
        by_hand += [i in chosen for i in range(len(ranks))]
    sizes = np.array([len(ranks) for ranks, _ in segments], dtype=np.int64)
    keeps = np.array([most for _, most in segments], dtype=np.int64)
    rank = np.array([rank for ranks, _ in segments for rank in ranks])
    assert fill_segments(sizes, keeps, rank, room).tolist() == by_hand


@given(places=st.sets(st.integers(0, 200)), length=st.integers(1, 70))
def test_segments_hold_the_places_in_them(places: set[int], length: int) -> None:
    rising = sorted(places)
    by_hand = [sum(p // length == j for p in rising) for j in range(204)]
    needed = rising[-1] // length + 1 if rising else 0
    for segments in (None, needed, needed + 3):
        found = segment_sizes(np.array(rising, dtype=np.int64), length, segments).tolist()
        assert found == by_hand[: needed if segments is None else segments]


@given(
    row=st.lists(st.sampled_from([0.0, 0.01, 0.25, 1.0]), min_size=12, max_size=12),
    sizes=st.sampled_from([[12], [1, 11], [4, 4, 4], [1, 2, 3, 6], [1] * 12]),
)
def test_entropy_of_each_segment(row: list[float], sizes: list[int]) -> None:
    by_hand = []
    for j, size in enumerate(sizes):
        inside = row[sum(sizes[:j]) :][:size]
        mass = sum(inside)
        shares = [x / mass for x in inside] if mass else [1 / size] * size
        by_hand.append(-sum(p * math.log(p) for p in shares if p))
    found = segment_entropy(np.array(row), np.array(sizes))
    assert found.tolist() == pytest.approx(by_hand, abs=1e-8)


@given(entropy=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 2.5]), max_size=14))
def test_classes_are_by_the_entropies_at_a_third_and_two_thirds(entropy: list[float]) -> None:
    ordered = sorted(entropy)
    by_hand = []
    for e in entropy:
        low, high = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
        by_hand.append("R" if e <= low else "E" if e <= high else "T")
    found = tertiles(np.array(entropy))
    assert ["RET"[k] for k in found] == by_hand


@pytest.mark.parametrize(("number", "classes"), [(1, "R"), (2, "RE"), (3, "RRE"), (4, "RRET")])
def test_few_segments_are_no_equal_thirds(number: int, classes: str) -> None:
    assert ["RET"[k] for k in tertiles(np.arange(float(number)))] == list(classes)


@given(
    number=st.integers(0, 40), reach=st.integers(1, 9), columns=st.sampled_from([3, 8, 8192]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_similarity_to_neighbours_across_pieces(
    number: int, reach: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=(4, 2 * number))
    candidates = np.sort(rng.permutation(2 * number)[:number])
    by_hand = []
    for i, token in enumerate(candidates):
        near = [*candidates[max(0, i - reach) : i], *candidates[i + 1 : i + 1 + reach]]
        cosines = [float(direction[:, token] @ direction[:, other]) for other in near]
        by_hand.append(sum(cosines) / max(1, len(cosines)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_COLUMNS", columns)
        found = neighbours.similarity(direction.T, candidates, reach)
    assert found.tolist() == pytest.approx(by_hand, abs=1e-12)
    # not to rounding, but to the bit: where the pieces end must not decide between equals
    assert np.array_equal(found, neighbours.neighbour_cosine(direction[:, candidates], reach))


@settings(max_examples=40)
@given(
    number=st.integers(1, 80), threshold=st.sampled_from([-1.0, -0.3, 0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000), coarse=st.booleans(),
)  # fmt: skip
def test_redundancy_is_that_of_the_whole_cosine_matrix(
    number: int, threshold: float, seed: int, coarse: bool
) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(-1, 2, size=(number, 3)).astype(float)
    if not coarse:
        keys += rng.normal(size=keys.shape)
    length = np.linalg.norm(keys, axis=1, keepdims=True)
    unit = keys / np.where(length > 0, length, 1.0)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    latest = []
    for row in cosine:
        similar = np.flatnonzero(row.round(9) > threshold)
        if len(similar):
            latest.append(int(similar[-1]))
            row[similar[-1]] = 0.0
    assert sorted(latest_similar(unit, threshold)[0].tolist()) == sorted(latest)
    weight = np.exp(cosine.mean(axis=0))
    assert redundancy(keys, threshold) == pytest.approx(weight / weight.sum(), rel=1e-8)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5,), 0), ((3, 7), -1), ((1000, 7), -1), ((7, 1000), 0), ((7, 1000), -1), ((2, 600, 5), -1),
     ((0, 4), -1)],
)  # fmt: skip
def test_sums_are_added_one_after_the_other(shape: tuple[int, ...], axis: int) -> None:
    values = np.random.default_rng(3).normal(size=shape) * 1e6
    by_hand = np.zeros(np.delete(shape, axis))
    for part in np.moveaxis(values, axis, 0):
        by_hand = by_hand + part
    assert np.array_equal(sum_in_order(values, axis), by_hand)
