"""Members of a set of vectors that stand for the others: k-means, then the nearest of each mean."""

from __future__ import annotations

import numpy as np

# Distances and means are rounded, so that ties do not depend on the order of summation.
_DECIMALS = 9


def representatives(vectors: np.ndarray, count: int, iterations: int = 10) -> np.ndarray:
    """Indices of `count` members, rising.

    Lloyd's algorithm from evenly spaced members, with a fixed number of iterations at most.  Each
    mean in turn takes the nearest member that none before it took; the newer among equals.

    Parameters
    ----------
    vectors : float64 ``[members, size]``
        Oldest first.
    count : int
        From 0 to the number of members.
    iterations : int

    Returns
    -------
    int64 ``[count]``
    """
    members = len(vectors)
    if count >= members:
        return np.arange(members)
    means = vectors[np.arange(count) * members // max(1, count)]
    owner = np.full(members, -1)
    for _ in range(iterations):
        nearest = squared_distances(vectors, means).argmin(axis=1) if count else owner
        if (nearest == owner).all():
            break
        owner = nearest
        for cluster in np.unique(owner):  # a mean that lost all its members stays where it is
            mine = vectors[owner == cluster]
            means[cluster] = np.round(np.add.accumulate(mine)[-1] / len(mine), _DECIMALS)
    chosen = np.zeros(members, dtype=bool)
    for distance in squared_distances(vectors, means).T:
        free = np.flatnonzero(~chosen)
        chosen[free[len(free) - 1 - distance[free][::-1].argmin()]] = True
    return np.flatnonzero(chosen)


def squared_distances(vectors: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances, float64 ``[members, means]``."""
    squares = (vectors[:, None] - means[None]) ** 2
    return np.asarray(np.round(squares.sum(axis=-1), _DECIMALS))
