"""Cutting a run of decode iterations where something else goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from arborsim.core.tiers import Tier
from arborsim.memory.census import Changes, kinds
from arborsim.memory.moves import Moves

_STARTING = kinds(  # changes that start transfers or a recomputation, or end a staged copy
    lambda source, target: source.in_ddr or target.in_ddr or source == Tier.EVICTED
)
_CELLS = 1 << 20  # (group, iteration) pairs of one closed form: bounds its arrays to some 100 MB


def cut(
    steps: int, changes: Changes, groups: int, one_by_one: Callable[[], bool]
) -> Iterator[tuple[int, int, bool]]:
    """Cut a run into closed forms (True) and iterations with something else going on (False).

    An iteration stands alone if transfers run beside it, or if its moves start some.

    Parameters
    ----------
    steps : int
    changes : Changes
        What the moves of the run change.
    groups : int
        Cache groups.
    one_by_one : callable
        Whether iterations must be simulated by themselves from now on; asked before each part.

    Yields
    ------
    first, last : int
        Iterations ``first`` up to, not including, ``last``.
    together : bool
    """
    starting = changes.of(_STARTING)
    alone = np.unique(starting.step) if len(starting) else starting.step
    longest = max(1, _CELLS // groups)
    first = 0
    while first < steps:
        i = int(np.searchsorted(alone, first))
        last = int(alone[i]) if i < len(alone) else steps
        together = last > first and not one_by_one()
        last = min(last, first + longest) if together else first + 1
        yield first, last, together
        first = last


def between_steps(moves: Moves, first: int, last: int) -> Moves:
    """The moves of iterations ``first`` up to, not including, ``last``, counted from 0."""
    if not len(moves):
        return moves
    a, b = np.searchsorted(moves.step, [first, last])
    return Moves(moves.step[a:b] - first, moves.group[a:b], moves.token[a:b], moves.target[a:b])
