"""Moves: the changes of tier that a decision amounts to, in columns.

A policy answers one event with a `Plan`, a dense table of desired tiers, or answers a whole run of
decode iterations with a `RunPlan`.  Both become `Moves`, which is all an executor ever sees, and
the log of moves is what two runs are compared by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.tiers import Tier

ALL_GROUPS = -1


@dataclass(frozen=True)
class Moves:
    """Changes of tier, in the order in which they happen.

    Attributes
    ----------
    step : int64 ``[m]``
        Iteration of the run after which the move happens, non-decreasing; 0 outside a run.
    group : int32 ``[m]``
        Cache group (layer, or layer and KV head), or `ALL_GROUPS`.
    token : int64 ``[m]``
    target : int8 ``[m]``
        Values of `Tier`.
    """

    step: np.ndarray
    group: np.ndarray
    token: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def none(cls) -> Moves:
        empty = np.empty(0, dtype=np.int64)
        return cls(empty, empty.astype(np.int32), empty, empty.astype(np.int8))

    @classmethod
    def between(cls, current: np.ndarray, desired: np.ndarray) -> Moves:
        """Moves that turn `current` into `desired`, both int8 ``[groups, tokens]``."""
        if len(current) == 1:
            token = np.flatnonzero(current[0] != desired[0])
            group, target = np.full(len(token), ALL_GROUPS), desired[0, token]
        else:
            group, token = np.nonzero(current != desired)
            target = desired[group, token]
        return cls(np.zeros(len(token), np.int64), group.astype(np.int32), token, target)

    def at(self, step: int) -> Moves:
        """The moves of one iteration, renumbered to step 0."""
        a, b = np.searchsorted(self.step, [step, step + 1])
        return Moves(np.zeros(b - a, np.int64), self.group[a:b], self.token[a:b], self.target[a:b])


@dataclass(frozen=True)
class Plan:
    """Desired tier of every (group, token).

    Attributes
    ----------
    tiers : int8 ``[groups, tokens]``
        Values of `Tier`; groups are 1 (shared), layers, or layers x KV heads.
    recover : bool
        Evicted tokens that the plan wants readable are recomputed (rehydration).  Without it,
        such a wish is an error: what was destroyed stays destroyed.
    """

    tiers: np.ndarray
    recover: bool = False


@dataclass(frozen=True)
class RunPlan:
    """The plans of a run of iterations, as the moves from one to the next (all groups alike).

    Attributes
    ----------
    step : int64 ``[m]``
        Iteration of the run after which the move happens, non-decreasing.
    token : int64 ``[m]``
    target : int8 ``[m]``
    """

    step: np.ndarray
    token: np.ndarray
    target: np.ndarray

    @classmethod
    def evict(cls, step: list[int], token: list[int]) -> RunPlan:
        """Evict ``token[i]`` after iteration ``step[i]``."""
        return cls(
            np.asarray(step, dtype=np.int64),
            np.asarray(token, dtype=np.int64),
            np.full(len(step), Tier.EVICTED, dtype=np.int8),
        )

    def moves(self) -> Moves:
        group = np.full(len(self.step), ALL_GROUPS, dtype=np.int32)
        return Moves(self.step, group, self.token, self.target)
