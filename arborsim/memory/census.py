"""Counting tokens by tier through a whole run of decode iterations at once.

The moves inside a run become increments per iteration, and their cumulative sums are the counts of
every iteration: no loop over tokens or iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.tiers import NUM_TIERS, Tier

_NONE = np.empty(0, dtype=np.int64)
_HBM = int(Tier.HBM)  # looking up a member of an enum takes longer than adding two small arrays


def kinds(rule: Callable[[Tier, Tier], bool]) -> np.ndarray:
    """The changes (source, target) that obey `rule`, to be counted or selected by.

    Returns
    -------
    int64 ``[tiers * tiers]``
        0 or 1; never 1 where source and target are the same.
    """
    return np.array([int(a != b and rule(a, b)) for a in Tier for b in Tier])


@dataclass(frozen=True)
class Changes:
    """Moves with every group spelled out and with the tier that each token comes from.

    Attributes
    ----------
    step, group, token : int64 ``[m]``
    source, target : int8 ``[m]``
        Values of `Tier`; never equal.
    """

    step: np.ndarray
    group: np.ndarray
    token: np.ndarray
    source: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def none(cls) -> Changes:
        return _NO_CHANGES

    @cached_property
    def kind(self) -> np.ndarray:
        """What `kinds` is indexed by; int64 ``[m]``."""
        return np.asarray(self.source * np.int64(NUM_TIERS) + self.target)

    @cached_property
    def flow(self) -> np.ndarray:
        """Number of changes from each tier to each; int64 ``[tiers * tiers]``."""
        return np.bincount(self.kind, minlength=NUM_TIERS * NUM_TIERS)

    def count(self, chosen: np.ndarray) -> int:
        """Number of changes that are of the `kinds` chosen, or their sum weighted by kind."""
        return int(self.flow @ chosen) if len(self.token) else 0

    def of(self, chosen: np.ndarray) -> Changes:
        """The changes that are of the `kinds` chosen."""
        count = self.count(chosen)
        if count == len(self.token):
            return self
        return self.where(chosen[self.kind] > 0) if count else _NO_CHANGES

    def where(self, mask: np.ndarray) -> Changes:
        """The changes that `mask`, bool ``[m]``, selects."""
        return Changes(
            self.step[mask], self.group[mask], self.token[mask], self.source[mask],
            self.target[mask],
        )  # fmt: skip


_NO_TIER = _NONE.astype(np.int8)
_NO_CHANGES = Changes(_NONE, _NONE, _NONE, _NO_TIER, _NO_TIER)


class Census:
    """Tokens by tier, per row (a cache group, or all groups together), kept up to date.

    Attributes
    ----------
    now : int64 ``[rows, tiers]``
    """

    def __init__(self, rows: int) -> None:
        self.now = np.zeros((rows, NUM_TIERS), dtype=np.int64)

    def advance(
        self,
        steps: int,
        born: int,
        row: np.ndarray,
        changes: Changes,
        weight: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let `born` tokens (a weighted count per row) enter HBM per iteration, then `changes`.

        Parameters
        ----------
        steps, born : int
        row : int64 ``[m]``
            The row that each change belongs to.
        changes : Changes
        weight : float64 ``[m]``, optional
            How often each change counts (whole numbers).

        Returns
        -------
        before, after : int64 ``[rows, tiers, steps]``
            The counts of each iteration once its tokens are in HBM, and once its moves are done.
        """
        after = np.repeat(self.now[:, :, None], steps, axis=2)
        after[:, _HBM] += born * np.arange(1, steps + 1)
        if not len(changes):
            self.now = after[:, :, -1].copy()
            return after, after
        before = after.copy()
        size = len(self.now) * steps
        cell = row * steps + changes.step
        for tier in _tiers_of(changes):  # seldom more than two: cheaper than a table of all
            net = _tally(cell, changes.target == tier, weight, size)
            net -= _tally(cell, changes.source == tier, weight, size)
            moved = net.reshape(-1, steps)
            total = np.cumsum(moved, axis=1)
            after[:, tier] += total
            before[:, tier] += total - moved
        self.now = after[:, :, -1].copy()
        return before, after

    def grow(self, born: int) -> None:
        """Let `born` tokens (a weighted count per row) enter HBM."""
        self.now[:, _HBM] += born

    def change(self, row: np.ndarray, changes: Changes, weight: np.ndarray | None = None) -> None:
        """Let `changes` happen at once; the parameters are those of `advance`."""
        if len(self.now) == 1 and weight is None:
            flow = changes.flow.reshape(NUM_TIERS, NUM_TIERS)
            self.now[0] += flow.sum(axis=0) - flow.sum(axis=1)
            return
        first, size = row * NUM_TIERS, self.now.size
        gained = np.bincount(first + changes.target, weight, size)
        gained -= np.bincount(first + changes.source, weight, size)
        self.now += gained.astype(np.int64).reshape(self.now.shape)


def _tiers_of(changes: Changes) -> list[int]:
    """The tiers that tokens come from or go to."""
    counts = np.bincount(changes.source, minlength=NUM_TIERS)
    counts += np.bincount(changes.target, minlength=NUM_TIERS)
    return np.flatnonzero(counts).tolist()


def _tally(cell: np.ndarray, mask: np.ndarray, weight: np.ndarray | None, size: int) -> np.ndarray:
    """Weighted number of changes per cell, int64 ``[size]``, among those that `mask` selects."""
    weights = None if weight is None else weight[mask]
    return np.bincount(cell[mask], weights, size).astype(np.int64)
