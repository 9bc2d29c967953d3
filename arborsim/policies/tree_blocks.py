"""The allocation over a tree: ArborKV's numbers of tokens per block, and which tokens those are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arborsim.core.tiers import Tier
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import Allocation, Decision
from arborsim.policies.selection import keep_highest
from arborsim.policies.tree_rule import Blocks, TreeRule
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score

_TAIL = np.finfo(np.float64).max
"""Key of a block's tail: above every score, below what is protected (infinity)."""
_TABLE_TOKENS = 1 << 15
"""Tokens that are sorted together: larger tables only wait for memory."""


@dataclass(frozen=True)
class Tree(TreeRule, Allocation):
    """ArborKV's numbers per block (TAE); inside a block the tail and the highest-scored stay."""

    about: ClassVar[str] = "per block of the tree, by value and distance (ArborKV's TAE)"
    granularity: ClassVar[str] = "thought block, then token"
    adaptation: ClassVar[str] = "flat"
    trims_path: ClassVar[bool] = False
    """Whether `Boundary` trims the closed block on the active path too."""

    def scores(self) -> Mapping[str, Score]:
        if not self.reads_attention:
            return {}
        return {"block-attention": CumulativeAttention(from_later_blocks=True)}

    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        if not protection.prompt:  # sinks are the prompt's
            protection = replace(protection, sinks=min(protection.sinks, view.prompt_tokens))
        mask = protection.mask(view)
        for node in self._pinned(view):
            if node != 0:  # of the prompt, what `protect` says
                mask[view.tree.tokens(node)] = True
        return mask

    def _pinned(self, view: CacheView) -> list[int]:
        """Nodes that no decision may trim: open leaves, or the whole path."""
        nodes = set(view.leaves)
        if self.path_floor == 1:
            nodes = set(np.flatnonzero(view.tree.on_path(view.leaves)).tolist())
        if self.trims_path:
            nodes -= {leaf for leaf in view.leaves if view.tree.nodes[leaf].closed}
        return sorted(nodes)

    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        view, tree, tier = at.view, at.view.tree, tiers[0]
        blocks = self._blocks(at, tier)
        keep = self.numbers(at, blocks, self.trims_path)
        for node in np.flatnonzero(keep > blocks.held).tolist():
            tokens = tree.tokens(node)
            away = (tier[tokens] > Tier.HBM_QUANTISED) & (tier[tokens] <= at.lowest_reachable)
            tier[tokens[away]] = Tier.HBM
        shrunk = np.flatnonzero(keep < blocks.held)
        if len(shrunk):
            rank, protected = at.rank[0], at.protected
            leaving = tokens_that_leave(view, shrunk, keep[shrunk], rank, protected, self.tail)
            tier[leaving] = Tier.EVICTED

    def _blocks(self, at: Decision, tier: np.ndarray) -> Blocks:
        tree, count = at.view.tree, len(at.view.tree)
        owner = tree.node_of_token.values
        fixed = np.zeros(count, dtype=bool)
        fixed[list(at.view.leaves)] = True
        fixed[0] |= at.policy.protect.prompt
        on_path = tree.on_path(at.view.leaves)
        held = np.bincount(owner[tier <= Tier.HBM_QUANTISED], minlength=count)
        reachable = held
        if at.lowest_reachable is Tier.EVICTED:
            reachable = tree.sizes
        elif at.lowest_reachable > Tier.HBM_QUANTISED:
            reachable = np.bincount(owner[tier <= at.lowest_reachable], minlength=count)
        return Blocks(
            sizes=tree.sizes,
            held=held,
            reachable=reachable,
            pinned=np.bincount(owner[at.protected], minlength=count),
            pruned=np.array([node.pruned for node in tree.nodes], dtype=bool) & ~on_path,
            fixed=fixed,
            on_path=on_path,
        )


def tokens_that_leave(
    view: CacheView,
    nodes: np.ndarray,
    keep: np.ndarray,
    score: np.ndarray,
    protected: np.ndarray,
    tail: int,
) -> np.ndarray:
    """Tokens that blocks give up to shrink to `keep` (Algorithm 1, Evict).

    A block keeps protected tokens first, then its tail, then its highest-scored tokens; of equals
    the newest.  Blocks of similar size are sorted together, as the rows of one table.

    Of the blocks `nodes`, int64 ``[blocks]``, each keeps at most what it has in HBM; `score` is
    float64 ``[tokens]``, `protected` bool ``[tokens]``.  Int64 ``[tokens that leave]``, in no
    order to rely on.
    """
    leaving = [np.empty(0, dtype=np.int64)]
    lengths = view.tree.sizes[nodes]
    # 0 for a token that may leave, above for a protected one, below for one that is not in HBM.
    state = protected.astype(np.int8)
    state[view.tier[0] > Tier.HBM_QUANTISED] = -1
    for rows in _similar(lengths):
        ids = np.concatenate(list(map(view.tree.tokens, nodes[rows].tolist())))
        key = score.take(ids)
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
