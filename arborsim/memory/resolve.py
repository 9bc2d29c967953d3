"""Resolving plans: every group by itself, and the tier that each token comes from.

Plans may name all groups at once, and do not say where a token is.  What they name is checked
against what there is.
"""

from __future__ import annotations

import numpy as np

from arborsim.core.errors import PlanError
from arborsim.core.tiers import Tier
from arborsim.memory.census import Changes
from arborsim.memory.moves import ALL_GROUPS, Moves

_HBM = int(Tier.HBM)


def resolve(moves: Moves, tier: np.ndarray, arriving: int = 0) -> Changes:
    """The changes that `moves` make; what stays where it is, is left out.

    Parameters
    ----------
    moves : Moves
        At least one.
    tier : int8 ``[groups, tokens]``
        Where tokens are.
    arriving : int
        The next so many tokens may be among those that move, coming from HBM.

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
        source = np.full(len(token), _HBM, dtype=np.int8)
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
