"""The statistics of calibrations against scipy, brute force and planted truths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear
from scipy.special import stdtrit
from scipy.stats import fisher_exact, spearmanr

from arborsim.core.statistics import (
    auc,
    bootstrap,
    fisher_p,
    fit_logistic,
    leave_one_out_scores,
    nonnegative_least_squares,
    rows_of,
    spearman,
)
from benchmarks.gpu.intervals import student_reach


@pytest.mark.parametrize("seed", range(5))
def test_spearman_is_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 20, 200).astype(float)  # with ties
    y = rng.random(200) < 1 / (1 + np.exp(x - 10))
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)


def test_spearman_of_a_constant_is_unknown() -> None:
    assert np.isnan(spearman(np.arange(5.0), np.ones(5)))


def test_logistic_fit_recovers_planted_coefficients() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40_000, 3)) * [1.0, 0.5, 0.01]  # the last as small as a share
    theta = np.array([1.5, -2.0, 80.0])
    y = rng.random(len(x)) < 1 / (1 + np.exp(-x @ theta))
    assert fit_logistic(x, y, ridge=1e-6) == pytest.approx(theta, rel=0.1)


def test_ridge_does_not_depend_on_units() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((50, 2))
    y = x[:, 0] + rng.standard_normal(50) > 0
    plain = fit_logistic(x, y, ridge=3.0)
    assert fit_logistic(x * [1000, 1], y, ridge=3.0) == pytest.approx(plain / [1000, 1], rel=1e-4)


def test_ridge_keeps_separable_data_finite() -> None:
    x = np.array([[-1.0], [1.0]])
    y = np.array([False, True])
    weak, strong = fit_logistic(x, y, 1e-3)[0], fit_logistic(x, y, 1.0)[0]
    assert 0 < strong < weak < 20


def test_auc_counts_pairs() -> None:
    rng = np.random.default_rng(3)
    score, positive = rng.integers(0, 5, 60).astype(float), rng.random(60) < 0.4
    good, bad = score[positive], score[~positive]
    pairs = (good[:, None] > bad).sum() + 0.5 * (good[:, None] == bad).sum()
    assert auc(score, positive) == pytest.approx(pairs / (len(good) * len(bad)))
    assert np.isnan(auc(score, np.ones(60, dtype=bool)))


def test_held_out_scores_do_not_see_their_own_trace() -> None:
    rng = np.random.default_rng(4)
    x, trace = rng.standard_normal((60, 2)), np.repeat(np.arange(6), 10)
    y = x[:, 0] > 0
    before = leave_one_out_scores(x, y, trace, 1.0)
    y[trace == 2] = ~y[trace == 2]
    after = leave_one_out_scores(x, y, trace, 1.0)
    assert after[trace == 2] == pytest.approx(before[trace == 2])
    assert not np.allclose(after[trace != 2], before[trace != 2])


def test_bootstrap_resamples_traces_and_repeats() -> None:
    """For the mean of n traces: about two standard errors to each side."""
    values = np.random.default_rng(5).standard_normal(400)
    low, high = bootstrap(lambda chosen: values[chosen].mean(), 400, seed=7)
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.3 * error)
    assert (low, high) == tuple(bootstrap(lambda chosen: values[chosen].mean(), 400, seed=7))
    assert low != bootstrap(lambda chosen: values[chosen].mean(), 400, seed=8)[0]


def test_rows_of_repeats_traces() -> None:
    assert rows_of(np.array([0, 1, 0, 1, 2]), [1, 1, 0]).tolist() == [1, 3, 1, 3, 0, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 400))
def test_fisher_is_that_of_scipy(data: st.DataObject, n: int) -> None:
    good, other = data.draw(st.integers(0, n)), data.draw(st.integers(0, n))
    theirs = fisher_exact([[good, n - good], [other, n - other]])[1]
    assert fisher_p(good, other, n) == pytest.approx(theirs, rel=1e-12)
    assert fisher_p(good, other, n) == fisher_p(other, good, n)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 9, 30, 101])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_student_is_scipys(degrees: int, level: float) -> None:
    expected = stdtrit(degrees, (1 + level) / 2)
    assert student_reach(degrees, level) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=200)
@given(st.integers(0, 1 << 32), st.integers(1, 6), st.integers(1, 30), st.sampled_from("zlc"))
def test_bounded_least_squares_are_scipys(seed: int, unknowns: int, n: int, kind: str) -> None:
    """Also with a column of zeros, with bounds, and with two columns that hardly differ."""
    rng = np.random.default_rng(seed)
    rows = rng.random((n, unknowns)) * rng.choice([1.0, 0.3], unknowns)
    least = np.zeros(unknowns)
    if kind == "z":
        rows[:, rng.integers(unknowns)] = 0.0
    elif kind == "l":
        least = rng.random(unknowns) * 0.2
    else:
        rows[:, -1] = rows[:, 0] * (1 + 1e-9 * rng.random(n))
    target = rng.standard_normal(n)
    x = nonnegative_least_squares(rows, target, least)
    scipys = lsq_linear(rows, target, (least, np.inf), "bvls")
    assert (x >= least).all()
    cost = ((rows @ x - target) ** 2).sum() / 2
    assert cost <= scipys.cost * (1 + 1e-9) + 1e-12
