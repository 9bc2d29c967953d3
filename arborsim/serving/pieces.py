"""Runs of decode iterations as pieces in which every quantity is linear."""

from __future__ import annotations

import numpy as np

from arborsim.serving.demand import FIXED, LINEAR, PIECE_COLUMNS


def cut(fixed: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The fewest linear pieces that reproduce every iteration exactly, first come, longest first.

    Parameters
    ----------
    fixed : int64 ``[iterations, len(FIXED)]``
        Quantities that must not change within a piece.
    linear : int64 ``[iterations, len(LINEAR)]``
        Quantities that may grow by a constant amount within a piece.

    Returns
    -------
    int64 ``[pieces, len(PIECE_COLUMNS)]``
    """
    count = len(fixed)
    growth = np.diff(linear, axis=0)
    joined = (np.diff(fixed, axis=0) == 0).all(axis=1)
    same = (growth[1:] == growth[:-1]).all(axis=1)
    # Iterations at which a piece has to end if it holds the two before: taken greedily.
    bent = np.flatnonzero(~(same & joined[1:] & joined[:-1])) + 2
    starts = _starts(count, joined, bent)
    stops = np.append(starts[1:], count)
    rows = np.zeros((len(starts), len(PIECE_COLUMNS)), dtype=np.int64)
    rows[:, 0] = stops - starts
    first = 1 + len(FIXED)
    rows[:, 1:first] = fixed[starts]
    rows[:, first : first + len(LINEAR)] = linear[starts]
    grows = rows[:, 0] > 1
    rows[grows, first + len(LINEAR) :] = growth[starts[grows]]
    return rows


def _starts(count: int, joined: np.ndarray, bent: np.ndarray) -> np.ndarray:
    """First iterations of the pieces."""
    starts = []
    bends = bent.tolist()
    at, i = 0, 0
    while at < count:
        starts.append(at)
        if at + 1 < count and not joined[at]:
            at += 1
            continue
        while i < len(bends) and bends[i] < at + 2:
            i += 1
        at = bends[i] if i < len(bends) else count
    return np.array(starts, dtype=np.int64)
