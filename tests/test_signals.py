"""Scores: rolling statistics and accumulated attention."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.observations import DenseRows, SparseRows
from arborsim.signals.rolling import rolling_mean_std, rolling_z

numbers = st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=60)


@given(values=numbers, window=st.integers(2, 9), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_cutting_a_sequence_changes_no_bit(
    values: list[float], window: int, cuts: list[int]
) -> None:
    sequence = np.array(values)
    whole = rolling_mean_std(sequence[:0], sequence, window)
    bounds = sorted({0, len(values), *(min(c, len(values)) for c in cuts)})
    parts = [rolling_mean_std(sequence[:a], sequence[a:b], window) for a, b in pairwise(bounds)]
    for i, expected in enumerate(whole):
        assert np.array_equal(np.concatenate([part[i] for part in parts]), expected)


@given(seed=st.integers(0, 10_000), length=st.integers(1, 400), window=st.integers(2, 70))
def test_one_by_one_equals_at_once_to_the_last_bit(seed: int, length: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=length) * 10.0 ** rng.integers(-3, 4, size=length)
    at_once = rolling_z(values[:0], values, window, 1e-6)
    last = length - 1
    assert rolling_z(values[:last], values[last:], window, 1e-6)[0] == at_once[last]


@given(values=numbers, window=st.integers(2, 9))
def test_rolling_equals_numpy_on_each_window(values: list[float], window: int) -> None:
    mean, std, count = rolling_mean_std(np.array([]), np.array(values), window)
    for i in range(len(values)):
        inside = np.array(values[max(0, i - window + 1) : i + 1])
        assert count[i] == len(inside)
        assert mean[i] == pytest.approx(inside.mean(), abs=1e-9)
        assert std[i] == pytest.approx(inside.std(), rel=1e-9, abs=1e-9)


def test_sparse_rows_spread_the_rest_evenly() -> None:
    rows = SparseRows(
        index=np.array([0, 2, 0], dtype=np.int32),
        value=np.array([0.5, 0.25, 1.0], dtype=np.float16),
        offsets=np.array([0, 2, 3]),
        rest=np.array([0.25, 0.0], dtype=np.float32),
        lengths=np.array([4, 1]),
    )
    assert [row.tolist() for row in rows] == [[0.5, 0.125, 0.25, 0.125], [1.0]]
    assert [rows.row(i).tolist() for i in range(2)] == [row.tolist() for row in rows]
    assert [row.tolist() for row in rows[1:2]] == [[1.0]]


def test_dense_rows_in_slices_and_blocks() -> None:
    lengths = np.arange(1, 40)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.random.default_rng(0).random(offsets[-1]).astype(np.float16)
    rows = DenseRows(values, offsets)
    for variant in (rows, rows.widened()):
        for start, part in ((0, variant), (7, variant[7:20])):
            for i, row in enumerate(part):
                expected = values[offsets[start + i] : offsets[start + i + 1]]
                assert row.dtype == np.float64
                assert row.tolist() == expected.astype(float).tolist()
