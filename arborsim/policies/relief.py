"""Relief of a cache over budget: which blocks of a tree give up how many tokens (ArborKV)."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np


def _least(fits: Callable[[float], bool], low: float, high: float, rounds: int) -> float:
    """The least number in a range that fits, as all above it do, found by bisection."""
    for _ in range(rounds):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def trim_by_weight(
    keep: np.ndarray, scale: np.ndarray, least: np.ndarray, excess: int
) -> np.ndarray:
    """Take `excess` tokens from blocks, always from the one that values its last token least.

    The optimum of a convex program with ``psi_i(k) = -scale_i log k`` (ArborKV's, section 4) keeps
    ``k_i = alpha * scale_i`` (KKT, with caps and floors), so the block with the largest ``k_i /
    scale_i`` gives the next token, the older block among equals.  Instead of token by token, alpha
    is found by bisection, and only the last few tokens, where blocks tie, are taken one at a time.
    The result is the same, in ``O(blocks log(precision))`` instead of ``O(excess log(blocks))``.

    `keep` and `least`, int64 ``[blocks]``, are what each block holds and what it cannot go below.
    Fewer than `excess` are taken if all are at their least.  Of `scale`, float64 ``[blocks]``, 0
    gives its tokens first.
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

    most = float((keep / scale).max()) * 2.0
    alpha = _least(lambda alpha: bool(kept(alpha).sum() >= goal), 0.0, most, rounds=128)
    result = kept(alpha * (1 + 1e-9))
    left = int(result.sum()) - goal
    heap = [(-result[i] / scale[i], i) for i in np.flatnonzero(result > least).tolist()]
    heapq.heapify(heap)
    for _ in range(left):
        _, block = heapq.heappop(heap)
        result[block] -= 1
        if result[block] > least[block]:
            heapq.heappush(heap, (-result[block] / scale[block], block))
    return result


def empty_lowest(
    keep: np.ndarray, weight: np.ndarray, least: np.ndarray, excess: int
) -> np.ndarray:
    """Take `excess` tokens from the block of the lowest weight, then from the next.

    Each gives all down to its least, the older block first among equals.  See `trim_by_weight`.
    """
    order = np.argsort(weight, kind="stable")
    headroom = np.maximum(keep - least, 0)[order]
    given = np.clip(excess - (np.cumsum(headroom) - headroom), 0, headroom)
    result = keep.copy()
    result[order] -= given
    return result


def tighten_distance(
    keep: np.ndarray, scale: np.ndarray, distance: np.ndarray, least: np.ndarray, goal: int
) -> np.ndarray:
    """Raise ArborKV's lambda_Delta, by bisection, just until the blocks fit.

    Block ``i`` keeps ``clip(floor(scale_i exp(-x distance_i)), least_i, keep_i)`` tokens, ``x`` the
    least increase with which no more than `goal` are kept in all.  Tokens of several blocks whose
    turn comes at the same ``x`` go together, so fewer than `goal` can be left.

    Parameters are those of `trim_by_weight`, but `scale` is the tokens each block would keep with
    the present lambda_Delta (Eq. 2 times its size), and `distance`, int64 ``[blocks]``, counts
    edges to the nearest active leaf.  A block at distance 0 is not affected.  If `goal` cannot be
    reached, all others are at `least`.
    """
    least = np.minimum(least, keep)

    def kept(x: float) -> np.ndarray:
        ideal = np.floor(np.minimum(scale * np.exp(-x * distance), keep))
        return np.where(distance > 0, np.maximum(ideal.astype(np.int64), least), keep)

    if keep.sum() <= goal:
        return keep.copy()
    most = max(1.0, float(np.log(np.maximum(scale, 1.0)).max()) + 1.0)
    x = _least(lambda x: bool(kept(x).sum() <= goal), 0.0, most, rounds=64)
    return kept(x + 1e-9)  # blocks that tie give their tokens together, whatever the rounding
