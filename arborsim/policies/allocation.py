"""How many tokens each block may keep."""

from __future__ import annotations

import heapq

import numpy as np


def trim_by_weight(
    keep: np.ndarray, scale: np.ndarray, least: np.ndarray, excess: int
) -> np.ndarray:
    """Take `excess` tokens from blocks, always from the one that values its last token least.

    The optimum of ArborKV's convex program keeps ``k_i = alpha * scale_i`` (KKT, with caps and
    floors), so the block with the largest ``k_i / scale_i`` gives the next token; among equals the
    older block.  Instead of token by token, alpha is found by bisection, and only the last few
    tokens, where blocks tie, are taken one at a time.  The result is the same, in
    ``O(blocks log(precision))`` instead of ``O(excess log(blocks))``.

    Parameters
    ----------
    keep, least : int64 ``[blocks]``
        What each block holds, and what it cannot go below.
    scale : float64 ``[blocks]``
        Weight of each block times its size; 0 gives its tokens first.
    excess : int
        Tokens to take; fewer are taken if every block is at its least.

    Returns
    -------
    int64 ``[blocks]``
    """
    least = np.minimum(least, keep)
    goal = int(keep.sum()) - excess
    if excess <= 0:
        return keep.copy()
    if goal <= least.sum():
        return least.copy()
    scale = np.maximum(scale, 1e-300)

    def kept(alpha: float) -> np.ndarray:
        ideal = np.minimum(np.floor(alpha * scale), keep)
        return np.asarray(np.maximum(ideal.astype(np.int64), least))

    low, high = 0.0, float((keep / scale).max()) * 2.0
    for _ in range(128):
        middle = 0.5 * (low + high)
        if kept(middle).sum() >= goal:
            high = middle
        else:
            low = middle
    result = kept(high * (1 + 1e-9))
    left = int(result.sum()) - goal
    heap = [(-result[i] / scale[i], i) for i in np.flatnonzero(result > least).tolist()]
    heapq.heapify(heap)
    for _ in range(left):
        _, block = heapq.heappop(heap)
        result[block] -= 1
        if result[block] > least[block]:
            heapq.heappush(heap, (-result[block] / scale[block], block))
    return result


def tighten_distance(
    keep: np.ndarray, scale: np.ndarray, distance: np.ndarray, least: np.ndarray, goal: int
) -> np.ndarray:
    """Raise ArborKV's lambda_Delta just until the blocks fit; it is found by bisection.

    Block ``i`` keeps ``clip(floor(scale_i exp(-x distance_i)), least_i, keep_i)`` tokens, ``x`` the
    least increase with which no more than `goal` are kept in all.  Tokens of several blocks whose
    turn comes at the same ``x`` go together, so fewer than `goal` can be left.

    Parameters
    ----------
    keep, least : int64 ``[blocks]``
        What each block holds, and what it cannot go below.
    scale : float64 ``[blocks]``
        Tokens each block would keep with the present lambda_Delta (Eq. 2 times its size).
    distance : int64 ``[blocks]``
        Edges to the nearest active leaf; a block at distance 0 is not affected.
    goal : int

    Returns
    -------
    int64 ``[blocks]``
        Everything at `least` (but for distance 0) if `goal` cannot be reached.
    """
    least = np.minimum(least, keep)

    def kept(x: float) -> np.ndarray:
        ideal = np.floor(np.minimum(scale * np.exp(-x * distance), keep))
        return np.where(distance > 0, np.maximum(ideal.astype(np.int64), least), keep)

    if keep.sum() <= goal:
        return keep.copy()
    low, high = 0.0, max(1.0, float(np.log(np.maximum(scale, 1.0)).max()) + 1.0)
    for _ in range(64):
        middle = 0.5 * (low + high)
        if kept(middle).sum() > goal:
            low = middle
        else:
            high = middle
    return kept(high + 1e-9)  # blocks that tie give their tokens together, whatever the rounding
