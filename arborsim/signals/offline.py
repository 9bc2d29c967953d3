"""The offline optimum: when to evict each token, knowing all attention still to come.

Evicting a token without return loses the attention it would have received after that.  Putting an
eviction off never costs more, so tokens go only when the cache is full, and the forced evictions
are slots in time: which token takes which slot is a linear assignment problem, which SciPy solves
exactly.  No policy that only evicts and keeps to the budget keeps more attention, whatever it ranks
by: that is the bound that tables show.

Where layers or heads evict tokens of their own, each token of each group can take a slot, with the
attention of the group's own rows.  The budget is the sum over groups, so the optimum also says how
to share it out.  Where that problem is too large, each group has the same budget and a problem of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.events import Decode, Prefill, Transition
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.rows import GroupRows, Row, group_rows, is_number
from arborsim.trace.episode import Episode, play

#: Slots x tokens up to which an assignment is solved: seconds, and some 300 MB.
EXACT_CELLS = 1 << 24
NEVER_EVICTED = np.inf
_FORBIDDEN = 1e9  # more than all the attention of a search


@dataclass(frozen=True)
class _Iteration:
    """Tokens in the cache after an iteration, and what its queries read: one row per path."""

    held: int
    paths: tuple[np.ndarray, ...] = ()
    source: GroupRows | None = None
    first: int = 0  # number of the first of its rows

    def rows(self) -> Iterator[tuple[np.ndarray, Row]]:
        """Each query's positions, and its row by group, as shares of what it sums to."""
        for number, path in enumerate(self.paths, self.first):
            assert self.source is not None
            row = tuple(map(_of_one, self.source.row(number)))
            yield path[: len(row[0])], row


def _of_one(row: np.ndarray) -> np.ndarray:
    """A row, float64 ``[positions]``, scaled to sum to 1, as the meter does, unless it is 0."""
    whole = row.sum()
    return row / whole if whole > 0 else row


def is_exact(tokens: int, budget_tokens: int, groups: int = 1) -> bool:
    """Whether the optimum of a search of `tokens` is found exactly.

    For several groups: whether they share the budget out as is best.
    """
    return groups**2 * tokens * max(0, tokens - budget_tokens) <= EXACT_CELLS


def with_eviction_times(
    episode: Episode, budget_tokens: int, head: int = 0, recent: int = 0, grouping: str = "shared"
) -> Episode:
    """The episode with the observation `Signal.EVICTION_TIME` for one budget."""
    times = eviction_times(episode, budget_tokens, head, recent, grouping)
    return replace(episode, per_layer={**episode.per_layer, Signal.EVICTION_TIME: times.T})


def eviction_times(
    episode: Episode, budget_tokens: int, head: int = 0, recent: int = 0, grouping: str = "shared"
) -> np.ndarray:
    """After which iteration to evict each token so that the least attention is lost.

    `budget_tokens` of the whole tree stay after every iteration, on average over the groups.  The
    first `head` and the newest `recent` tokens are protected.  Rows are those of `grouping`: the
    mean row of the model, or those of captured layers or KV heads.  Float64 ``[groups, tokens]``:
    iterations (0 is the prefill), infinite for tokens that stay.

    Notes
    -----
    Above `EXACT_CELLS` groups do not share the budget: each has the same.  That is the optimum for
    equal budgets only.  Where one group alone is above it, Belady's greedy rule stands in: of the
    tokens in the cache, the one with the least attention to come goes.  It can lose more than the
    optimum (by 1.5 percentage points of all attention at 30 % of the tokens on the shipped chains),
    so it is no strict bound.
    """
    iterations, groups = _iterations(episode, grouping)
    tokens = episode.num_tokens
    limits = tokens, budget_tokens, head, recent
    if not is_exact(tokens, budget_tokens):
        return _greedy(iterations, groups, *limits)
    shared_budget = is_exact(tokens, budget_tokens, groups)
    # Else as many groups at once as have room for their problems.
    most = max(1, EXACT_CELLS // (tokens * max(1, tokens - budget_tokens)))
    parts = [range(first, min(first + most, groups)) for first in range(0, groups, most)]
    return np.concatenate([_assigned(iterations, part, shared_budget, *limits) for part in parts])


def _iterations(episode: Episode, grouping: str) -> tuple[list[_Iteration], int]:
    """Prefill first, as the prompt's own rows are over before anything can be evicted.

    With the number of groups.
    """
    tree, found, groups = ThoughtTree(), [], 1
    for event in play(episode):
        match event:
            case Prefill(run):
                tree.open(0, -1)
                tree.append(run.leaves, run.steps)
                found.append(_Iteration(tree.num_tokens))
                groups = group_rows(run.observed, grouping).groups
            case Transition(leaves, opened):
                for node, parent in opened:
                    tree.open(node, parent)
                tree.forget_paths(leaves)
            case Decode(run):
                held, width = tree.num_tokens, len(run.leaves)
                tree.append(run.leaves, run.steps)
                paths = tuple(tree.path(leaf) for leaf in run.leaves)
                rows = group_rows(run.observed, grouping)
                found += [
                    _Iteration(held + (step + 1) * width, paths, rows, step * width)
                    for step in range(run.steps)
                ]
    return found, groups


def _assigned(
    iterations: list[_Iteration],
    groups: range,
    shared_budget: bool,
    tokens: int,
    budget: int,
    head: int,
    recent: int,
) -> np.ndarray:
    """Times of some groups, which may share the budget: float64 ``[groups, tokens]``."""
    each = len(groups) if shared_budget else 1
    forced = [each * max(0, iteration.held - budget) for iteration in iterations]
    slot_time = np.repeat(np.arange(len(forced)), np.diff(np.maximum.accumulate(forced), prepend=0))
    # Of evicting the token in the slot, and attention to each token after this iteration.
    loss = np.empty((len(slot_time), len(groups), tokens))
    later = np.zeros((len(groups), tokens))
    slot = len(slot_time)
    for time in range(len(iterations) - 1, -1, -1):
        while slot and slot_time[slot - 1] == time:
            slot -= 1
            loss[slot] = later
            loss[slot, :, :head] = _FORBIDDEN
            loss[slot, :, max(0, iterations[time].held - recent) :] = _FORBIDDEN
        for path, row in iterations[time].rows():
            for own, group in zip(later, groups, strict=True):
                if is_number(row[group]):
                    own[path] += row[group]
    assign = _assignment_solver()
    times = np.full((len(groups) // each, each * tokens), NEVER_EVICTED)
    for own, lost in zip(times, np.split(loss, len(times), axis=1), strict=True):
        slots, chosen = assign(lost.reshape(len(slot_time), own.size))
        own[chosen] = slot_time[slots]
    return times.reshape(len(groups), tokens)


@cache
def _assignment_solver() -> Any:
    """SciPy's `linear_sum_assignment`, if possible without the rest of `scipy.optimize`.

    Importing all of that takes longer than a small replay.
    """
    found = find_spec("scipy")
    assert found is not None
    folder = Path(found.origin or "").parent / "optimize"
    own = PathFinder.find_spec("_lsap", [str(folder)])
    if own is not None and own.loader is not None:
        module = module_from_spec(own)
        own.loader.exec_module(module)
        if hasattr(module, "linear_sum_assignment"):
            return module.linear_sum_assignment
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment


def _greedy(
    iterations: list[_Iteration], groups: int, tokens: int, budget: int, head: int, recent: int
) -> np.ndarray:
    later = np.zeros((groups, tokens))

    def pay(iteration: _Iteration, sign: float) -> None:
        for path, row in iteration.rows():
            for own, values in zip(later, row, strict=True):
                if is_number(values):
                    own[path] += sign * values

    for iteration in iterations:
        pay(iteration, 1.0)
    times = np.full((groups, tokens), NEVER_EVICTED)
    each = np.arange(groups)
    evicted = 0
    for time, iteration in enumerate(iterations):
        pay(iteration, -1.0)
        while iteration.held - evicted > budget:
            free = later[:, head : max(head, iteration.held - recent)]
            # As many are left in every group.  If none is, protected tokens fill the budget, and
            # the policy will raise.
            if not free.shape[1] or free[0].min() == np.inf:
                return times
            lowest = head + free.argmin(axis=1)
            later[each, lowest] = np.inf
            times[each, lowest] = time
            evicted += 1
    return times
