"""Differential prefetch against a dictionary that is moved by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim_torch.tiers.differential import FREE, Restaging, restage

steps = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=25), min_size=1, max_size=12)


def literal(held: list[int], needed: list[int]) -> tuple[list[int], dict[int, int], set[int]]:
    """The buffer afterwards, what is copied into which slot, and what is released."""
    after = [token if token in needed else FREE for token in held]
    copied: dict[int, int] = {}
    for token in sorted(set(needed) - set(held)):
        if FREE not in after:
            after.append(FREE)
        slot = after.index(FREE)
        after[slot] = token
        copied[slot] = token
    return after, copied, {token for token in held if token != FREE} - set(needed)


@given(steps)
def test_equals_the_literal_version_step_by_step(sequence: list[list[int]]) -> None:
    held, buffer = np.empty(0, dtype=np.int64), np.empty(0)
    for needed in sequence:
        found = restage(held, np.array(needed, dtype=np.int64))
        after, copied, released = literal(held.tolist(), needed)
        assert found.held.tolist() == after
        assert dict(zip(found.into.tolist(), found.fetch.tolist(), strict=True)) == copied
        assert set(found.released.tolist()) == released
        # Doing what it says gives a buffer in which every needed token is where it is said to be.
        grown = np.full(len(found.held), np.nan)
        grown[: len(buffer)] = buffer
        grown[found.into] = found.fetch * 10.0
        assert (grown[found.slots] == np.array(needed, dtype=float) * 10).all()
        held, buffer = found.held, grown


@given(steps)
def test_only_the_difference_is_fetched_and_nothing_that_stays_moves(
    sequence: list[list[int]],
) -> None:
    held = np.empty(0, dtype=np.int64)
    most = 0
    for needed in sequence:
        found = restage(held, np.array(needed, dtype=np.int64))
        most = max(most, len(needed))
        assert len(found.held) == most  # no more slots than were ever needed at once
        stay = np.flatnonzero(np.isin(held, needed))
        assert (found.held[stay] == held[stay]).all()
        assert len(found.fetch) == len(needed) - len(stay)
        held = found.held


def test_the_same_again_fetches_nothing() -> None:
    first = restage(np.empty(0, dtype=np.int64), np.array([9, 3, 5]))
    again = restage(first.held, np.array([5, 9, 3]))
    assert first.fetch.tolist() == [3, 5, 9]
    assert first.slots.tolist() == [2, 0, 1]
    assert again.fetch.tolist() == again.into.tolist() == again.released.tolist() == []
    assert again.slots.tolist() == [1, 2, 0]


def test_a_changed_token_is_fetched_anew() -> None:
    """Given as free, because its copy in DDR is not what was staged."""
    found = restage(np.array([3, FREE, 9]), np.array([3, 5, 9]))
    assert found.fetch.tolist() == [5]
    assert found.into.tolist() == [1]


def test_nothing_needed_releases_everything() -> None:
    found: Restaging = restage(np.array([7, FREE, 2]), np.empty(0, dtype=np.int64))
    assert found.held.tolist() == [FREE] * 3
    assert found.released.tolist() == [2, 7]
    assert len(found.slots) == len(found.fetch) == 0


@pytest.mark.parametrize(
    ("held", "needed", "message"),
    [
        ([1, 1], [1], "a token is staged twice"),
        ([1], [2, 2], "a token is needed twice"),
        ([1], [-1], "needed token -1"),
        ([-2], [1], "staged token -2"),
    ],
)
def test_impossible_arguments(held: list[int], needed: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        restage(np.array(held), np.array(needed))
