"""What ArborKV computes for all blocks of a tree at once: MSVE and token-extractive retention.

Pure functions on arrays with one entry per block (thought, node of the tree).  arXiv:2605.22106.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arborsim.core.tiers import Tier
from arborsim.policies.base import CacheView

_TAIL = np.finfo(np.float64).max
"""Key of a block's tail: above every score, below what is protected (infinity)."""
_TABLE_TOKENS = 1 << 15
"""Tokens that are sorted together: larger tables only wait for memory."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def certainty(entropy: np.ndarray, vocabulary: int) -> np.ndarray:
    """``u = 1 - H / ln|V|`` (Eq. 1); 0 where the entropy is not known (NaN)."""
    return np.asarray(np.nan_to_num(1.0 - entropy / np.log(vocabulary)))


def attention_share(received: np.ndarray, owner: np.ndarray, closed: np.ndarray) -> np.ndarray:
    """Share of the attention to closed blocks that each of them received; the prompt is none.

    Parameters
    ----------
    received : float64 ``[tokens]``
        Attention each token received from later blocks.
    owner : int ``[tokens]``
        Block of each token.
    closed : bool ``[blocks]``

    Returns
    -------
    float64 ``[blocks]``
    """
    total = np.bincount(owner, weights=received, minlength=len(closed))
    total[~closed] = 0.0
    total[0] = 0.0
    return np.asarray(total / max(float(total.sum()), 1e-12))


def given_up(view: CacheView, on_path: np.ndarray) -> np.ndarray:
    """Bool ``[blocks]``: pruned by the search, and not on an active path."""
    pruned = np.array([node.pruned for node in view.tree.nodes], dtype=bool)
    return np.asarray(pruned & ~on_path)


def tokens_that_leave(
    view: CacheView,
    nodes: np.ndarray,
    keep: np.ndarray,
    score: np.ndarray | None,
    protected: np.ndarray,
    tail: int,
) -> np.ndarray:
    """Tokens that blocks give up to shrink to `keep` (Algorithm 1, Evict).

    A block keeps protected tokens first, then its tail, then its highest-scored tokens; of equals
    the newest.  Blocks of similar size are sorted together, as the rows of one table.

    Parameters
    ----------
    view : CacheView
    nodes, keep : int64 ``[blocks]``
        Blocks, and how many tokens to keep of each: at most what it has in HBM.
    score : float64 ``[tokens]`` or None
        None ranks by age: the earliest tokens leave first.
    protected : bool ``[tokens]``
    tail : int

    Returns
    -------
    int64 ``[tokens that leave]``
        In no order to rely on.
    """
    leaving = [np.empty(0, dtype=np.int64)]
    lengths = view.tree.sizes[nodes]
    # One look tells both: 0 for a token that may leave, above for a protected one, below for one
    # that is not in HBM.
    state = protected.astype(np.int8)
    state[view.tier[0] > Tier.HBM_QUANTISED] = -1
    for rows in _similar(lengths):
        ids = np.concatenate(list(map(view.tree.tokens, nodes[rows].tolist())))
        key = np.zeros(len(ids)) if score is None else score.take(ids)
        of_each = state.take(ids)
        held = of_each >= 0
        if of_each.any():
            key[of_each > 0] = np.inf
            key[~held] = -np.inf
        _lift_tails(key, lengths[rows], tail)
        kept = keep_highest(key, lengths[rows], keep[rows])
        leaving.append(ids.take(np.flatnonzero(held & ~kept)))
    return np.concatenate(leaving)


def _similar(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of blocks of similar length, few enough at a time for the CPU cache."""
    order = np.argsort(lengths, kind="stable")
    rising = lengths[order]
    first = 0
    while first < len(order):
        table = np.arange(1, len(order) - first + 1) * rising[first:]
        last = first + max(1, int(np.searchsorted(table, _TABLE_TOKENS, side="right")))
        yield order[first:last]
        first = last


def _lift_tails(key: np.ndarray, lengths: np.ndarray, tail: int) -> None:
    """Rank the last `tail` tokens of each block above all scores."""
    ends = np.cumsum(lengths)
    for back in range(1, min(tail, int(lengths.max())) + 1):
        at = ends[lengths >= back] - back
        key[at] = np.where(np.isfinite(key[at]), _TAIL, key[at])


def keep_highest(key: np.ndarray, lengths: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Which entries are among the highest of their block; the newer of equals.

    Parameters
    ----------
    key : float64 ``[tokens]``
        Block after block, each from its oldest token to its newest.
    lengths, keep : int64 ``[blocks]``
        Tokens of each block, and how many are wanted of it: at most as many.

    Returns
    -------
    bool ``[tokens]``
    """
    width = int(lengths.max())
    inside = np.arange(width) < lengths[:, None]
    table = np.full(inside.shape, -np.inf)
    table[inside] = key
    rank = np.clip(width - keep, 0, width - 1)
    threshold = np.take_along_axis(np.sort(table, axis=1), rank[:, None], axis=1)
    kept = table >= threshold
    crowded = np.flatnonzero(kept.sum(axis=1) > keep)
    if len(crowded):  # equals at the threshold: the newest stay
        higher = table[crowded] > threshold[crowded]
        ties = kept[crowded] & ~higher
        wanted = keep[crowded] - higher.sum(axis=1)
        newer = np.cumsum(ties[:, ::-1], axis=1)[:, ::-1]
        kept[crowded] = higher | (ties & (newer <= wanted[:, None]))
    return np.asarray(kept[inside])
