"""Estimates and intervals, against SciPy and against their own promise: how often they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from arborsim.products.plan.statistics import (
    Estimate,
    Solved,
    cost_per_search,
    cost_per_solved,
    mean_interval,
    percentile,
    rate_interval,
    relative_error,
    solved_share,
)

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(numbers, st.sampled_from([5.0, 50.0, 90.0, 95.0, 99.0]), st.sampled_from([0.83, 0.95]))
def test_percentiles_are_numpys_and_their_intervals_scipys(
    values: list[float], rank: float, level: float
) -> None:
    # (Levels at which a tail equals a binomial probability would hang on the last bit of either.)
    found = percentile(values, rank, level)
    assert found.value == np.percentile(values, rank)
    assert found.n == len(values)
    scipys = stats.quantile_test(values, q=0, p=rank / 100).confidence_interval(level)
    low, high = (math.nan if math.isinf(end) else end for end in (found.low, found.high))
    assert [low, high] == pytest.approx([scipys.low, scipys.high], nan_ok=True, rel=0, abs=0)


def test_intervals_of_percentiles_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    truth = stats.lognorm(s=1.0).ppf(0.9)
    held = 0
    for _ in range(1000):
        found = percentile(rng.lognormal(0, 1, 120), 90)
        held += found.low <= truth <= found.high
    # At least 95%: between order statistics the coverage comes in steps.
    assert stats.binomtest(held, 1000, 0.95, alternative="less").pvalue > 1e-3
    assert held < 995


def test_few_values_give_a_99th_percentile_no_upper_end() -> None:
    assert percentile(range(367), 99).high == math.inf
    assert percentile(range(368), 99).high == 367
    none = percentile([], 50)
    assert math.isnan(none.value)
    assert (none.low, none.high, none.n) == (-math.inf, math.inf, 0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_the_spread_over_seeds_is_students(values: list[float]) -> None:
    found = mean_interval(values)
    error = stats.sem(values)
    assert found.value == pytest.approx(np.mean(values))
    if error == 0:
        assert found.low == found.high
        return
    expected = stats.t.interval(0.95, len(values) - 1, np.mean(values), error)
    assert [found.low, found.high] == pytest.approx(list(expected), rel=1e-9, abs=1e-9)


def test_one_run_has_no_spread() -> None:
    assert mean_interval([3.0]) == Estimate(3.0, -math.inf, math.inf, 1)


def test_cost_of_a_search() -> None:
    # 3.60 an hour is 0.001 a second; half a search a second.
    assert cost_per_search(3.60, 0.5) == pytest.approx(0.002)
    assert cost_per_search(3.60, 0.0) == math.inf


def test_cost_of_a_solved_search_pays_for_the_others() -> None:
    share = solved_share([1.0], [Solved(30, 40)])
    assert share is not None
    expected = stats.binomtest(30, 40).proportion_ci(0.95, "exact")
    assert [share.value, share.low, share.high] == pytest.approx([0.75, *expected])
    cost = cost_per_solved(0.003, share)
    assert cost.value == pytest.approx(0.004)
    assert [cost.low, cost.high] == pytest.approx([0.003 / share.high, 0.003 / share.low])
    none = solved_share([1.0], [Solved(0, 40)])
    assert none is not None
    assert cost_per_solved(0.003, none).value == math.inf
    assert cost_per_solved(0.003, none).high == math.inf
    assert cost_per_solved(0.003, none).low < math.inf


def test_shares_of_a_mix_are_weighted_and_unknown_if_one_trace_was_not_judged() -> None:
    share = solved_share([3.0, 1.0], [Solved(10, 10), Solved(0, 5)])
    assert share is not None
    assert share.value == 0.75
    first = stats.binomtest(10, 10).proportion_ci(0.975, "exact")
    second = stats.binomtest(0, 5).proportion_ci(0.975, "exact")
    assert share.low == pytest.approx(0.75 * first.low + 0.25 * second.low)
    assert share.high == pytest.approx(0.75 * first.high + 0.25 * second.high)
    assert solved_share([3.0, 1.0], [Solved(10, 10), Solved()]) is None


def test_intervals_of_shares_of_a_mix_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    truth = 0.6 * 0.8 + 0.4 * 0.3
    held = 0
    for _ in range(400):
        kinds = [Solved(int(rng.binomial(30, 0.8)), 30), Solved(int(rng.binomial(20, 0.3)), 20)]
        share = solved_share([6, 4], kinds)
        assert share is not None
        held += share.low <= truth <= share.high
    assert held >= 380


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1)), min_size=1, max_size=5),
    st.integers(1, 60),
    st.data(),
)
def test_stated_shares_are_exact_and_recorded_ones_keep_their_interval(
    stated: list[tuple[float, float]], judged: int, data: st.DataObject
) -> None:
    weights = [weight for weight, _ in stated]
    kinds = [Solved(stated=share) for _, share in stated]
    exact = solved_share(weights, kinds)
    assert exact is not None
    mean = math.fsum(w * s for w, s in stated) / math.fsum(weights)
    assert exact.value == pytest.approx(mean, rel=1e-12, abs=1e-15)
    assert exact.is_stated
    assert cost_per_solved(1.0, exact).low == cost_per_solved(1.0, exact).high
    right = data.draw(st.integers(0, judged))
    mixed = solved_share([*weights, 2.0], [*kinds, Solved(right, judged)])
    assert mixed is not None
    assert mixed.n == judged
    # One recorded kind: its own interval, at the usual level, and the stated ones as they are.
    ends = stats.binomtest(right, judged).proportion_ci(0.95, "exact")
    total = math.fsum(weights) + 2.0
    part = math.fsum(w * s for w, s in stated)
    for found, end in (
        (mixed.low, ends.low),
        (mixed.value, right / judged),
        (mixed.high, ends.high),
    ):
        assert found == pytest.approx((part + 2.0 * end) / total, rel=1e-9, abs=1e-12)


def test_one_stated_share_is_the_number_itself() -> None:
    share = solved_share([7.0], [Solved(stated=0.6)])
    assert share == Estimate(0.6, 0.6, 0.6, 0) == Estimate.stated(0.6)
    assert not Estimate(math.nan, -math.inf, math.inf, 0).is_stated


def test_a_rates_interval_is_cut_at_zero() -> None:
    """1 and 3: the mean is 2, half the interval 12.7 standard errors of 1."""
    assert mean_interval([1.0, 3.0]).low == pytest.approx(2 - 12.7062, abs=1e-3)
    found = rate_interval([1.0, 3.0])
    assert (found.value, found.low, found.n) == (2.0, 0.0, 2)
    assert found.high == pytest.approx(2 + 12.7062, abs=1e-3)
    assert rate_interval([2.0, 2.1, 1.9]) == mean_interval([2.0, 2.1, 1.9]), "nothing to cut"
    assert rate_interval([2.0]).low == -math.inf, "one run does not tell any end"


def test_the_error_of_a_rate() -> None:
    alike, scattered = np.full(50, 7.0), np.array([0.0] * 99 + [1.0])
    assert relative_error(alike, 100) == pytest.approx(0.1)
    assert relative_error(np.zeros(3), 400) == pytest.approx(0.05), "of prompts only"
    assert relative_error(scattered, 100) == pytest.approx(math.sqrt(99) / 10), "1 of 100 has all"
    assert relative_error(alike, 0) == math.inf
