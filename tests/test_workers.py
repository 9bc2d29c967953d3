"""Work that brings forth more work."""

from __future__ import annotations

import os
from collections import deque

import pytest

from arborsim.core.errors import UsageError
from arborsim.core.workers import unfold


def halves(number: int) -> list[int]:
    """A number above 1 brings forth two others."""
    return [number // 2, number - number // 2] if number > 1 else []


def _unfolded(processes: int) -> list[int]:
    waiting = deque([5, 8])
    seen = []
    for number, more in unfold(halves, waiting.popleft, processes):
        seen.append(number)
        waiting.extendleft(more)
    return seen


def test_what_comes_out_goes_in_again() -> None:
    alone = _unfolded(0)
    assert sum(number == 1 for number in alone) == 5 + 8
    assert len(alone) == 2 * 13 - 2
    assert sorted(_unfolded(2)) == sorted(_unfolded(1)) == sorted(alone)


def die(number: int) -> int:
    os._exit(number)


def test_a_process_that_dies_is_one_line() -> None:
    with pytest.raises(UsageError, match="one of 2 worker processes died"):
        list(unfold(die, deque([1, 2]).popleft, 2))
