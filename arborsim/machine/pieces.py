"""Runs of decode iterations as pieces in which every quantity is linear."""

from __future__ import annotations

import numpy as np

#: Columns of pieces; a name that ends in "_growth" is the increment per iteration.
LINEAR = (
    "read_bytes", "quantised_bytes", "attended", "rows", "examined", "hbm_bytes", "prefix_bytes",
)  # fmt: skip
FIXED = ("sequences", "decided", "streamed_bytes", "remote_bytes")
PIECE_COLUMNS = ("iterations", *FIXED, *LINEAR, *(f"{name}_growth" for name in LINEAR))


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


def iterations(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every iteration of pieces, int64 ``[pieces, len(PIECE_COLUMNS)]``: what `cut` was given."""
    rows = np.repeat(pieces, pieces[:, 0], axis=0)
    began = np.cumsum(pieces[:, 0]) - pieces[:, 0]
    i = np.arange(len(rows)) - np.repeat(began, pieces[:, 0])
    fixed, linear, growth = np.split(rows[:, 1:], (len(FIXED), len(FIXED) + len(LINEAR)), axis=1)
    return fixed, linear + i[:, None] * growth


def joined(pieces: np.ndarray) -> np.ndarray:
    """Pieces that follow one another, as few as can be; int64 ``[pieces, len(PIECE_COLUMNS)]``."""
    return cut(*iterations(pieces)) if len(pieces) > 1 else pieces


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
