"""Building blocks of the policies that decide per layer and KV head."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy, kurtosis

from arborsim.core.errors import UsageError
from arborsim.policies.methods.rkv import max_pool, redundancy
from arborsim.policies.methods.thinkv_paper import (
    ThinKVPaper,
    reached_rungs,
    representatives,
    row_sparsity,
)
from arborsim.policies.registry import build
from arborsim.signals.rows import grouped_row
from arborsim.signals.spread import LayerSensitivity, Spread, layer_statistics


def test_a_groups_row_is_the_mean_over_its_query_heads() -> None:
    row = np.random.default_rng(0).random((3, 4, 7)).astype(np.float32)
    by_head = row.astype(np.float64).reshape(3, 2, 2, 7).mean(axis=2).reshape(6, 7)
    assert np.allclose(grouped_row(row, 2, "head"), by_head, rtol=1e-15)
    assert np.allclose(grouped_row(row, 2, "layer"), row.mean(axis=1, dtype=np.float64), rtol=1e-15)


def test_a_head_that_overflowed_is_left_out_of_its_group() -> None:
    row = np.full((1, 4, 2), np.nan, dtype=np.float32)
    row[0, 1] = [0.25, 0.75]
    assert grouped_row(row, 2, "head").tolist() == [[0.25, 0.75], [0.0, 0.0]]
    assert grouped_row(row, 2, "layer").tolist() == [[0.25, 0.75]]


@given(seed=st.integers(0, 1000), queries=st.integers(2, 20))
def test_spread_is_mean_and_unbiased_variance(seed: int, queries: int) -> None:
    rows = np.random.default_rng(seed).random((queries, 4, 3))
    spread = Spread()
    spread.extend(4, 5)
    tokens = np.array([0, 2, 4])
    for row in rows:
        spread.add(tokens, row)
    expected = rows.mean(axis=0) + 7.0 * rows.var(axis=0, ddof=1)
    heavy = spread.heaviness(tokens, groups=2, gamma=7.0)
    assert np.allclose(heavy, expected.reshape(2, 2, 3).mean(axis=1))


@given(seed=st.integers(0, 1000))
def test_layer_statistics_are_those_of_scipy(seed: int) -> None:
    rows = np.random.default_rng(seed).dirichlet(np.ones(6), size=(3, 8))  # heads, queries, keys
    found = layer_statistics(rows)
    assert found[0] == pytest.approx(entropy(rows, axis=-1).sum(), abs=1e-6)
    assert found[1] == pytest.approx(rows.var(axis=1, ddof=1).sum())
    assert found[2] == pytest.approx(kurtosis(rows, axis=1, fisher=False).sum())
    broken = np.concatenate([rows, np.full((1, 8, 6), np.nan)])
    assert np.array_equal(layer_statistics(broken), found)


def test_a_layer_that_looks_at_nothing_has_no_sensitivity() -> None:
    of_layers = np.array([[2.0, 0.5, 9.0], [-1e-12, 0.5, 9.0], [0.0, 0.0, 0.0]])
    found = LayerSensitivity(tau1=1.0, tau2=1.0, tau3=2.0).combine(of_layers)
    assert found.tolist() == [3.0, 0.0, 0.0]


def test_of_near_duplicates_the_latest_survives() -> None:
    keys = np.array([[1.0, 0], [0, 1], [1, 0.1], [1, 0.05]])
    repeated = redundancy(keys, 0.5)
    assert repeated.sum() == pytest.approx(1.0)
    assert repeated[3] < repeated[2] < repeated[0]
    assert redundancy(np.array([[0.0, 0.0], [1, 0]]), 0.5).tolist() == [0.5, 0.5]


def test_max_pool_has_fewer_neighbours_at_the_ends() -> None:
    assert max_pool(np.array([3.0, 1, 0, 2]), 3).tolist() == [3, 3, 2, 2]


@given(seed=st.integers(0, 1000), members=st.integers(1, 30), data=st.data())
def test_representatives_are_distinct_members(seed: int, members: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, members))
    vectors = np.random.default_rng(seed).normal(size=(members, 4)).round(1)
    chosen = representatives(vectors, count)
    assert len(chosen) == len(set(chosen.tolist())) == count
    assert (np.diff(chosen) > 0).all()


def test_representatives_come_from_every_cluster() -> None:
    rng = np.random.default_rng(1)
    centre = np.repeat(np.eye(4) * 100, 10, axis=0)
    chosen = representatives(centre + rng.normal(size=centre.shape), 4)
    assert (chosen // 10).tolist() == [0, 1, 2, 3]


def test_rungs_halve_and_every_transition_takes_earlier_segments_one_down() -> None:
    assert ThinKVPaper().rungs() == [64, 32, 16, 8, 4]
    transition = np.array([True, False, True, True])
    assert reached_rungs(transition, 5).tolist() == [1, 1, 0, -1]
    assert reached_rungs(np.ones(9, dtype=bool), 3).tolist() == [2] * 6 + [1, 0, -1]


def test_sparsity_counts_entries_under_a_hundredth_of_the_maximum() -> None:
    row = np.array([[[0.9, 0.1, 0.001, 0.0], [0.25, 0.25, 0.25, 0.25]]], dtype=np.float32)
    assert row_sparsity(row, 0.01) == 2 / 8
    row[0, 1] = np.nan
    assert row_sparsity(row, 0.01) == 2 / 4


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("rkv", {"kernel": "4"}, "rkv: kernel must be odd, not 4"),
        ("thinkv-paper", {"low": "0.9"}, r"thinkv-paper: low \(0.9\) is above high \(0.828\)"),
        ("thinkv-paper", {"most": "2"}, r"thinkv-paper: least \(4\) is above most \(2\)"),
    ],
)
def test_settings_that_contradict_are_refused(name: str, values: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build(name, values)


def test_sparsity_is_judged_head_by_head() -> None:
    row = np.array([[[0.9, 0.005, 0.1], [0.05, 0.0004, 0.0006]]], dtype=np.float32)
    assert row_sparsity(row, 0.01) == 2 / 6
