"""The offline optimum: when to evict each token, knowing all attention still to come.

Evicting a token without return loses the attention it would have received after that.  Putting an
eviction off never costs more, so tokens go only when the cache is full, and the forced evictions
are slots in time: which token takes which slot is a linear assignment problem, which SciPy solves
exactly.  No policy that only evicts and keeps to the budget keeps more attention, whatever it ranks
by: that is the bound that tables show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from arborsim.core.events import Decode, Prefill, Transition
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.trace.episode import Episode, play

#: Slots x tokens up to which the assignment is solved: seconds, and some 300 MB.
EXACT_CELLS = 1 << 24
NEVER_EVICTED = np.inf
_FORBIDDEN = 1e9  # more than all the attention of a search


@dataclass(frozen=True)
class _Iteration:
    """Tokens in the cache after an iteration, and the rows its queries read: (path, row) pairs."""

    held: int
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]


def is_exact(tokens: int, budget_tokens: int) -> bool:
    """Whether the optimum of a search of `tokens` is found exactly."""
    return tokens * max(0, tokens - budget_tokens) <= EXACT_CELLS


def with_eviction_times(
    episode: Episode, budget_tokens: int, head: int = 0, recent: int = 0
) -> Episode:
    """The episode with the observation `Signal.EVICTION_TIME` for one budget."""
    times = eviction_times(episode, budget_tokens, head, recent)
    return replace(episode, per_layer={**episode.per_layer, Signal.EVICTION_TIME: times})


def eviction_times(
    episode: Episode, budget_tokens: int, head: int = 0, recent: int = 0
) -> np.ndarray:
    """After which iteration to evict each token so that the least attention is lost.

    `budget_tokens` of the whole tree stay after every iteration; the first `head` and the newest
    `recent` tokens are protected.  Float64 ``[tokens]``: iterations (0 is the prefill), infinite
    for tokens that stay.

    Notes
    -----
    Above `EXACT_CELLS` Belady's greedy rule stands in: of the tokens in the cache, the one with the
    least attention to come goes.  It can lose more than the optimum (by 1.5 percentage points of
    all attention at 30 % of the tokens on the shipped chains), so it is no strict bound.
    """
    iterations = list(_iterations(episode))
    if is_exact(episode.num_tokens, budget_tokens):
        return _assigned(iterations, episode.num_tokens, budget_tokens, head, recent)
    return _greedy(iterations, episode.num_tokens, budget_tokens, head, recent)


def _iterations(episode: Episode) -> Iterator[_Iteration]:
    """Prefill first; the prompt's own rows are over before anything can be evicted."""
    tree = ThoughtTree()
    for event in play(episode):
        match event:
            case Prefill(run):
                tree.open(0, -1)
                tree.append(run.leaves, run.steps)
                yield _Iteration(tree.num_tokens, ())
            case Transition(leaves, opened):
                for node, parent in opened:
                    tree.open(node, parent)
                tree.forget_paths(leaves)
            case Decode(run):
                held, width = tree.num_tokens, len(run.leaves)
                tree.append(run.leaves, run.steps)
                paths = [tree.path(leaf) for leaf in run.leaves]
                assert run.observed.attention is not None
                rows = iter(run.observed.attention)
                for step in range(run.steps):
                    read = tuple((path[: len(row)], row) for path in paths for row in [next(rows)])
                    yield _Iteration(held + (step + 1) * width, read)


def _assigned(
    iterations: list[_Iteration], tokens: int, budget: int, head: int, recent: int
) -> np.ndarray:
    forced = [max(0, iteration.held - budget) for iteration in iterations]
    slot_time = np.repeat(np.arange(len(forced)), np.diff(np.maximum.accumulate(forced), prepend=0))
    loss = np.empty((len(slot_time), tokens))  # of evicting the token in the slot
    later = np.zeros(tokens)  # attention to each token after this iteration
    slot = len(slot_time)
    for time in range(len(iterations) - 1, -1, -1):
        while slot and slot_time[slot - 1] == time:
            slot -= 1
            loss[slot] = later
            loss[slot, :head] = _FORBIDDEN
            loss[slot, max(0, iterations[time].held - recent) :] = _FORBIDDEN
        for path, row in iterations[time].rows:
            later[path] += row
    times = np.full(tokens, NEVER_EVICTED)
    slots, chosen = linear_sum_assignment(loss)
    times[chosen] = slot_time[slots]
    return times


def _greedy(
    iterations: list[_Iteration], tokens: int, budget: int, head: int, recent: int
) -> np.ndarray:
    later = np.zeros(tokens)
    for iteration in iterations:
        for path, row in iteration.rows:
            later[path] += row
    times = np.full(tokens, NEVER_EVICTED)
    gone = 0
    for time, iteration in enumerate(iterations):
        for path, row in iteration.rows:
            later[path] -= row
        while iteration.held - gone > budget:
            free = later[head : max(head, iteration.held - recent)]
            lowest = head + int(free.argmin()) if len(free) else head
            if not len(free) or later[lowest] == np.inf:
                return times  # protected tokens fill the budget: the policy will raise
            later[lowest] = np.inf
            times[lowest] = time
            gone += 1
    return times
