"""Rotary positions: rotation, its inverse and its mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.shape import Rope

ropes = st.builds(
    Rope,
    st.lists(st.floats(1e-6, 3.0), min_size=1, max_size=4).map(tuple),
    st.sampled_from([1.0, 1.2]),
)


@given(rope=ropes, seed=st.integers(0, 2**32), rest=st.integers(0, 3))
def test_unrotate_undoes_rotate(rope, seed, rest):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(2, 5, rope.rotary_dim + rest)).astype(np.float16).astype(float)
    positions = rng.integers(0, 100_000, 5)
    turned = rope.rotate(vectors, positions)
    assert turned.dtype == np.float64
    np.testing.assert_array_equal(turned[..., rope.rotary_dim :], vectors[..., rope.rotary_dim :])
    np.testing.assert_allclose(rope.unrotate(turned, positions), vectors, atol=1e-12)


@given(rope=ropes, seed=st.integers(0, 2**32), shift=st.integers(0, 500))
def test_products_depend_on_the_distance_alone(rope, seed, shift):
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(2, rope.rotary_dim))

    def product(at: int, other: int) -> float:
        return float(rope.rotate(query, np.array(at)) @ rope.rotate(key, np.array(other)))

    # Angles are rounded to float32.
    assert product(7 + shift, 3 + shift) == pytest.approx(product(7, 3), abs=2e-2)


@given(rope=ropes, seed=st.integers(0, 2**32), first=st.integers(0, 900), count=st.integers(1, 40))
def test_mean_rotation_is_the_mean_of_rotations(rope, seed, first, count):
    size = rope.rotary_dim + 2
    vector = np.random.default_rng(seed).normal(size=size)
    each = [rope.rotate(vector, np.array(at)) for at in range(first, first + count)]
    matrix = rope.mean_rotation(first, count, size)
    np.testing.assert_allclose(matrix @ vector, np.mean(each, axis=0), atol=1e-12)


@pytest.mark.parametrize("numbers", [(), (0.0,), (-1.0,), (float("nan"),), (float("inf"),)])
def test_impossible_frequencies(numbers):
    with pytest.raises(ValueError, match="RoPE needs frequencies"):
        Rope(numbers)
    with pytest.raises(ValueError, match="RoPE needs frequencies"):
        Rope((1.0,), 0.0)
