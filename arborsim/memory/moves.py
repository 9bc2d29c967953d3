"""Moves: the changes of tier that a decision amounts to, in columns.

A policy answers one event with a `Plan`, a dense table of desired tiers, or answers a whole run of
decode iterations with a `RunPlan`.  Both become `Moves`, which is all an executor ever sees, and
the log of moves is what two runs are compared by.  Moves may name all groups at once, and do not
say where a token is: `resolve` makes `Changes` of them, checked against what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.errors import PlanError
from arborsim.core.tiers import NUM_TIERS, Tier

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

    def carry_out(self, tier: np.ndarray) -> None:
        """Write the targets into `tier`, int8 ``[groups, tokens]``, in order."""
        shared = self.group == ALL_GROUPS
        tier[:, self.token[shared]] = self.target[shared]
        tier[self.group[~shared], self.token[~shared]] = self.target[~shared]

    def between_steps(self, first: int, last: int) -> Moves:
        """The moves of iterations ``first`` to ``last``, exclusive, as they are numbered."""
        a, b = np.searchsorted(self.step, [first, last])
        return Moves(self.step[a:b], self.group[a:b], self.token[a:b], self.target[a:b])

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

    Columns are those of `Moves`: `step` is the iteration after which the move happens.
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


def kinds(rule: Callable[[Tier, Tier], bool]) -> np.ndarray:
    """The changes (source, target) that obey `rule`, to be counted or selected by.

    Int64 ``[tiers * tiers]`` of 0 or 1; never 1 where source and target are the same.
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


_NONE = np.empty(0, dtype=np.int64)
_NO_CHANGES = Changes(_NONE, _NONE, _NONE, _NONE.astype(np.int8), _NONE.astype(np.int8))


def resolve(moves: Moves, tier: np.ndarray, arriving: int = 0) -> Changes:
    """The changes that `moves`, at least one, make; what stays where it is, is left out.

    `tier`, int8 ``[groups, tokens]``, is where tokens are; the next `arriving` tokens may be among
    those that move, coming from HBM.

    Raises
    ------
    PlanError
        A move names a token or group that does not exist, or the same twice.
    """
    groups, tokens = tier.shape
    step, group, token, target = moves.step, moves.group, moves.token, moves.target
    if groups == 1:
        group = np.where(group == ALL_GROUPS, 0, group)
    elif (group == ALL_GROUPS).any():
        times = np.where(group == ALL_GROUPS, groups, 1)
        rank = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        group = np.where(np.repeat(group, times) == ALL_GROUPS, rank, np.repeat(group, times))
        step, token, target = (np.repeat(a, times) for a in (step, token, target))
    group = group.astype(np.int64)
    _check_names(group, token, groups, tokens + arriving)
    if arriving:
        old = token < tokens
        source = np.full(len(token), int(Tier.HBM), dtype=np.int8)
        source[old] = tier[group[old], token[old]]
    else:
        source = tier[group, token]
    changes = Changes(step, group, token, source, target)
    same = source == target
    return changes.where(~same) if same.any() else changes


def _check_names(group: np.ndarray, token: np.ndarray, groups: int, tokens: int) -> None:
    if token.min() < 0 or token.max() >= tokens:
        raise PlanError(f"a plan moves a token outside 0 .. {tokens - 1}")
    if group.min() < 0 or group.max() >= groups:
        raise PlanError(f"a plan moves tokens of a group outside 0 .. {groups - 1}")
    named = np.sort(group * tokens + token)
    twice = named[1:] == named[:-1]
    if twice.any():
        raise PlanError(f"a plan moves token {int(named[1:][twice][0]) % tokens} twice at once")
