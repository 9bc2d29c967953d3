"""Where every token lives at every moment of one search: a picture of at most 400 x 400 cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.tiers import NUM_TIERS
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import ALL_GROUPS, Moves

MOST_CELLS = 400
#: What a cell holds besides the values of `Tier`.
NOT_BORN = NUM_TIERS


@dataclass(frozen=True, eq=False)
class TokenMap:
    """A search under a policy, as a picture.

    Attributes
    ----------
    policy, budget, trace : str
    episode : int
    first_tokens : int64 ``[columns]``
        First token of each column; tokens are numbered in the order of their birth.
    iterations : int64 ``[rows]``
        The decode iteration after whose decisions a row was taken.
    cells : uint8 ``[rows, columns]``
        The tier of most of a column's tokens, or `NOT_BORN`.
    """

    policy: str
    budget: str
    trace: str
    episode: int
    first_tokens: np.ndarray
    iterations: np.ndarray
    cells: np.ndarray


class TokenMapper:
    """A meter that takes the rows of a `TokenMap` while a search runs.

    With several cache groups a token counts as being where the median group has it.

    Parameters
    ----------
    tokens, iterations : int
        Of the whole search.
    """

    def __init__(self, tokens: int, iterations: int) -> None:
        columns = min(tokens, MOST_CELLS)
        self._column = np.arange(tokens) * columns // tokens
        self.first_tokens = np.flatnonzero(np.diff(self._column, prepend=-1))
        rows = min(iterations, MOST_CELLS)
        self.iterations = np.linspace(1, iterations, rows).round().astype(np.int64)
        self._now = 0
        self._cells: list[np.ndarray] = []

    def prefilled(self, run: TokenRun) -> None:
        pass

    def moved(self, moves: Moves, tier: np.ndarray) -> None:
        pass  # what the last iteration decided is seen when the next one begins, or at the end

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self._catch_up(tier)
        last = self._now + run.steps
        fresh = np.zeros((len(tier), run.num_tokens), dtype=tier.dtype)
        tier = np.concatenate([tier, fresh], axis=1)
        born, done = tier.shape[1] - run.num_tokens, 0
        while self._due < last:
            step = self._due - self._now  # iterations of this run that the row has seen
            stop = int(np.searchsorted(moves.step, step))
            _carry_out(moves, done, stop, tier)
            self._take(tier[:, : born + step * len(run.leaves)])
            done = stop
        self._now = last

    def finish(self, tier: np.ndarray) -> np.ndarray:
        """The cells, uint8 ``[rows, columns]``, given the tiers at the end of the search."""
        self._catch_up(tier)
        return np.array(self._cells).reshape(-1, len(self.first_tokens))

    @property
    def _due(self) -> int:
        """The iteration that the next row is of."""
        taken = len(self._cells)
        return int(self.iterations[taken]) if taken < len(self.iterations) else 1 << 60

    def _catch_up(self, tier: np.ndarray) -> None:
        while self._due <= self._now:
            self._take(tier)

    def _take(self, tier: np.ndarray) -> None:
        known = tier[0] if len(tier) == 1 else np.sort(tier, axis=0)[(len(tier) - 1) // 2]
        state = np.full(len(self._column), NOT_BORN, dtype=np.int64)
        state[: len(known)] = known
        kinds = NOT_BORN + 1
        counts = np.bincount(
            self._column * kinds + state, minlength=len(self.first_tokens) * kinds
        ).reshape(-1, kinds)
        self._cells.append(counts.argmax(axis=1).astype(np.uint8))


def _carry_out(moves: Moves, first: int, stop: int, tier: np.ndarray) -> None:
    """Write the targets of moves ``first`` to ``stop`` into `tier`, in order."""
    part = slice(first, stop)
    group, token, target = moves.group[part], moves.token[part], moves.target[part]
    shared = group == ALL_GROUPS
    tier[:, token[shared]] = target[shared]
    tier[group[~shared], token[~shared]] = target[~shared]


def packed_runs(cells: np.ndarray) -> np.ndarray:
    """Cells column by column as runs; uint16 ``[runs]``: 8 times the length, plus the cell.

    A token seldom changes its tier, so that a column is a handful of runs.
    """
    columns = np.ascontiguousarray(cells.T)
    starts = np.diff(columns, axis=1, prepend=np.uint8(255)) != 0
    starts[:, 0] = True
    first = np.flatnonzero(starts)
    lengths = np.diff(first, append=columns.size)
    return np.asarray(8 * lengths + columns.ravel()[first], dtype=np.uint16)
