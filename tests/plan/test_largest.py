"""The search for the largest load, apart from what it searches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.products.plan.largest import below, clients, largest, rates


@given(st.integers(-500, 500), st.integers(1, 400), st.data())
def test_the_border_is_found_wherever_the_search_starts(
    low: int, width: int, data: st.DataObject
) -> None:
    high = low + width
    border = data.draw(st.integers(low, high - 1))
    start = data.draw(st.integers(low - 50, high + 50))
    asked: list[int] = []

    def meets(k: int) -> bool:
        asked.append(k)
        return k <= border

    assert largest(meets, low, high, start) == (border, border + 1)
    assert len(asked) == len(set(asked)), "a load was tried twice"
    assert all(low < k < high for k in asked), "outside of what is open"


def test_a_good_guess_needs_few_questions() -> None:
    asked: list[int] = []

    def meets(k: int) -> bool:
        asked.append(k)
        return k <= 100

    assert largest(meets, -400, 400, 99) == (100, 101)
    assert len(asked) <= 4


@given(st.floats(1e-6, 1e6), st.sampled_from([0.02, 0.06, 0.5]))
def test_rates_lie_as_far_apart_as_is_said(load: float, resolution: float) -> None:
    grid = rates(resolution)
    k = below(grid, load)
    assert grid[k] <= load < grid[k + 1]
    assert grid[k + 1] / grid[k] == pytest.approx(1 + resolution)
    assert 1.0 in grid


def test_clients_are_whole_and_at_most_two_percent_apart() -> None:
    loads = list(clients(0.02)[:300])
    assert loads[:60] == [float(n) for n in range(1, 61)]
    assert all(load == int(load) for load in loads)
    steps = itertools.pairwise(loads)
    assert all(b - a == 1 or b / a <= 1.02 for a, b in steps)
    assert [below(loads, load) for load in (0.5, 1, 1.5, 2)] == [-1, 0, 0, 1]
