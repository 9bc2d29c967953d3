"""A log of moves and reads, by which two runs of a policy are compared."""

from __future__ import annotations

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.tiers import NUM_TIERS
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import Moves
from arborsim.play.controller import Meter

#: What stands in the place of a tier in `MoveLog.rows` for a token that is read again, or not.
READ, UNREAD = NUM_TIERS, NUM_TIERS + 1


class MoveLog(Meter):
    """Every move, and every change of what is read: what two runs of a policy are compared by."""

    def __init__(self) -> None:
        self._iteration = 0
        self._parts: list[np.ndarray] = []
        self._reads: np.ndarray | None = None

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self._note(moves, self._iteration + 1 + moves.step)
        self._iteration += run.steps

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        self._note(moves, np.full(len(moves), self._iteration))
        if reads is None and self._reads is None:
            return
        before, now = (_as_wide(each, tier.shape) for each in (self._reads, reads))
        group, token = np.nonzero(before != now)
        target = np.where(now[group, token], READ, UNREAD)
        self._note(Moves(token, group, token, target), np.full(len(token), self._iteration))
        self._reads = reads

    def _note(self, moves: Moves, iteration: np.ndarray) -> None:
        self._parts.append(np.stack([iteration, moves.group, moves.token, moves.target], axis=1))

    @property
    def rows(self) -> np.ndarray:
        """Int64 ``[moves, 4]``: iteration, group, token, target tier (or `READ`, `UNREAD`).

        In order of token within an iteration, so that logs of run-wise and step-wise decisions
        compare equal.
        """
        if not self._parts:
            return np.empty((0, 4), dtype=np.int64)
        rows = np.concatenate(self._parts).astype(np.int64)
        return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]


def _as_wide(reads: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """The tokens that are read, bool ``[groups, tokens]``: those born later are."""
    wide = np.ones(shape, dtype=bool)
    if reads is not None:
        wide[:, : reads.shape[1]] = reads
    return wide
