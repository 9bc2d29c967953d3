"""Moves: the changes of tier that a decision amounts to, in columns.

A policy answers one event with a `Plan`, a dense table of desired tiers, which becomes `Moves`, or
answers a whole run of decode iterations with `Moves`.  They are all an executor ever sees, and the
log of moves is what two runs are compared by.  Moves may name all groups at once, and do not say
where a token is: `resolve` makes `Changes` of them, checked against what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from arborsim.core.errors import PlanError
from arborsim.core.tiers import MOST_TIERS, RUNGS, Tier, by_tier
from arborsim.core.tree import ThoughtTree

ALL_GROUPS = -1


@dataclass(frozen=True)
class Moves:
    """Changes of tier in the order in which they happen, in arrays of shape ``[m]``."""

    step: np.ndarray  # int64: iteration of the run after which it happens; 0 outside a run
    group: np.ndarray  # int32: cache group (layer, or layer and KV head), or `ALL_GROUPS`
    token: np.ndarray  # int64
    target: np.ndarray  # int8: values of `Tier`

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def none(cls) -> Moves:
        empty = np.empty(0, dtype=np.int64)
        return cls(empty, empty.astype(np.int32), empty, empty.astype(np.int8))

    @classmethod
    def evict(cls, step: list[int], token: list[int]) -> Moves:
        """Evict ``token[i]``, of all groups, after iteration ``step[i]``."""
        group = np.full(len(step), ALL_GROUPS, dtype=np.int32)
        target = np.full(len(step), Tier.EVICTED, dtype=np.int8)
        return cls(np.asarray(step, np.int64), group, np.asarray(token, np.int64), target)

    @classmethod
    def evict_one(cls, token: int) -> Moves:
        """Evict a token, of all groups, after the first iteration.  `token` must not be written.

        At every step of a live chain.
        """
        return cls(_FIRST, _EVERY, np.array([token]), _OUT)

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
        """The moves of iterations ``first`` up to, not including, ``last``, counted from 0."""
        if not len(self):
            return self
        a, b = np.searchsorted(self.step, [first, last])
        return Moves(self.step[a:b] - first, self.group[a:b], self.token[a:b], self.target[a:b])


_FIRST, _EVERY = np.zeros(1, dtype=np.int64), np.full(1, ALL_GROUPS, dtype=np.int32)
_OUT = np.full(1, Tier.EVICTED, dtype=np.int8)
for _shared in (_FIRST, _EVERY, _OUT):
    _shared.setflags(write=False)


def in_whole_groups(
    moves: Moves, together: np.ndarray, tree: ThoughtTree, leaves: tuple[int, ...]
) -> Moves:
    """The moves, with tokens that are quantised together one group after the other.

    `together`, int64 ``[tiers]``, is how many tokens share the scales of their keys in each tier.
    Groups are cut from each active path in turn, oldest token first.  It is a `PlanError` if a path
    has tokens left over, or a group would lie in DDR, where tokens are moved one by one.
    """
    grouped = together[moves.target] > 1
    if not grouped.any():
        return moves
    if (grouped & (moves.target >= Tier.DDR)).any():
        raise PlanError("keys in groups of tokens cannot go to DDR: use groups of channels there")
    order = [np.flatnonzero(~grouped)]
    for group, target in sorted(set(zip(moves.group[grouped], moves.target[grouped], strict=True))):
        own = np.flatnonzero((moves.group == group) & (moves.target == target))
        own = own[np.argsort(moves.token[own], kind="stable")]  # ids rise along a path
        size, left = int(together[target]), own
        for leaf in leaves:
            path, token = tree.path(leaf), moves.token[left]
            at = np.searchsorted(path, token)
            on_path = np.flatnonzero(path.take(at, mode="clip") == token)
            on_path = on_path[: len(on_path) - len(on_path) % size]
            order.append(left[on_path])
            left = np.delete(left, on_path)
        if len(left):
            raise PlanError(
                f"a plan quantises {len(own)} tokens, of which {len(left)} fill no group of {size} "
                "on an active path"
            )
    at = np.concatenate(order)
    return Moves(moves.step[at], moves.group[at], moves.token[at], moves.target[at])


@dataclass(frozen=True)
class Plan:
    """Desired tier of every (group, token), and which of them the next steps read."""

    #: int8 [groups, tokens], values of `Tier`; groups are 1 (shared), layers, or layers x KV heads
    tiers: np.ndarray
    #: Evicted tokens that the plan wants readable are recomputed (rehydration).  Without it, such a
    #: wish is an error: what was destroyed stays destroyed.
    recover: bool = False
    #: Bool [groups, tokens]: the readable tokens that attention reads until the next plan; None for
    #: all.  Tokens born after the plan are read.  What is not read stays where it is.
    reads: np.ndarray | None = None
    #: Places of tokens among the slots of their group, for policies whose authors' code depends on
    #: them: int64 [groups, tokens]; what comes later follows in order of age.  None: as before.
    slots: np.ndarray | None = None


def kinds(rule: Callable[[Tier, Tier], bool]) -> np.ndarray:
    """The changes (source, target) that obey `rule`, to be counted or selected by.

    Int64 ``[MOST_TIERS * MOST_TIERS]`` of 0 or 1, never 1 where source and target are the same.
    """
    found = np.zeros((MOST_TIERS, MOST_TIERS), dtype=np.int64)
    for source in Tier:
        for target in Tier:
            found[source, target] = source != target and rule(source, target)
    return found.ravel()


@dataclass(frozen=True)
class Changes:
    """Moves with every group spelled out and with the tier that each token comes from.

    Arrays have shape ``[m]``.  Tiers are int8 values of `Tier` and never equal, the others int64.
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
        """The index into `kinds`, int64 ``[m]``."""
        return np.asarray(self.source * np.int64(MOST_TIERS) + self.target)

    @cached_property
    def flow(self) -> np.ndarray:
        """Number of changes from each tier to each, int64 ``[tiers * tiers]``."""
        return np.bincount(self.kind, minlength=MOST_TIERS * MOST_TIERS)

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
        columns = self.step, self.group, self.token, self.source, self.target
        return Changes(*(column[mask] for column in columns))


@dataclass
class MostMoved:
    """The most that moves have asked for at once, of what a device must have room for meanwhile."""

    #: Int64 [2, rungs, rungs]: tokens of one group that the first decision, or a later one, turned
    #: from one rung to another (`Tier.rung`), or brought back from DDR as they are
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((2, RUNGS, RUNGS), dtype=np.int64))
    #: Tokens at full precision in HBM after the first decision, mean of the groups, rounded up
    kept_tokens: int | None = None
    most_tokens: int = (
        0  # the most from then on, or without a decision, less those on their way out
    )
    link_bytes: int = 0  # of tokens on their way to DDR or back, as they are stored there
    #: Bool [tiers]: where any token was moved to
    reached: np.ndarray = field(default_factory=lambda: np.zeros(MOST_TIERS, dtype=np.bool_))

    def note(self, changes: Changes, first: bool) -> None:
        """Changes of the first decision, of a later one, or of several with a step each."""
        flow, tokens = changes.flow.reshape(MOST_TIERS, MOST_TIERS), self.tokens[0 if first else 1]
        self.reached |= flow.any(0)
        for source, target in np.argwhere(_CONVERTED & (flow > tokens[_RUNG][:, _RUNG])):
            own = changes.kind == source * MOST_TIERS + target
            cell = changes.step[own] * (1 + int(changes.group.max())) + changes.group[own]
            _, count = np.unique(cell, return_counts=True)
            at = _RUNG[source], _RUNG[target]
            tokens[at] = max(tokens[at], int(count.max()))


_RUNG = by_tier(lambda tier: tier.rung)
#: Changes that are noted, bool ``[tiers, tiers]``.
_CONVERTED = kinds(
    lambda source, target: (
        Tier.EVICTED not in (source, target)
        and (source.rung != target.rung or (source.offloaded and target.in_hbm))
    )
)
_CONVERTED = _CONVERTED.reshape(MOST_TIERS, MOST_TIERS) > 0
_NONE = np.empty(0, dtype=np.int64)
_NO_CHANGES = Changes(_NONE, _NONE, _NONE, _NONE.astype(np.int8), _NONE.astype(np.int8))


def resolve(moves: Moves, tier: np.ndarray, arriving: int = 0) -> Changes:
    """The changes that `moves` make, without tokens that stay where they are.

    `tier`, int8 ``[groups, tokens]``, is where tokens are.  The next `arriving` tokens may be among
    those that move, coming from HBM.  It is a `PlanError` if a move names a token or group that
    does not exist, or the same twice.
    """
    if not len(moves):
        return _NO_CHANGES
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
