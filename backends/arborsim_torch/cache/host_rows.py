"""Rows of tokens in the host's memory, and lists of runs of rows that cross the link together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim_torch.cache.slots import NOWHERE, SlotTable


@dataclass(frozen=True, eq=False)
class BlockList:
    """Runs of rows, and where their tokens lie in a buffer that holds them one after the other."""

    #: int64 s ``[runs]``
    lane: np.ndarray
    first: np.ndarray
    count: np.ndarray
    start: np.ndarray  #: int64 ``[runs]``: of each run in the buffer
    #: int64 ``[lanes, tokens]``: rows of tokens in the buffer; one lane if each has rows in one
    at: np.ndarray
    rows: int  #: of the buffer


class RowTable(SlotTable):
    """The row of every token, per group; groups of one *space* share rows.

    Tokens that come together get rows that follow one another, as far as there are.  A gap of
    `least` rows is worth a copy of its own.  `space` is that of each group, int64 ``[groups]``.
    """

    def __init__(self, space: np.ndarray, least: int) -> None:
        super().__init__(len(space))
        self._space, self._least = space, least
        spaces = int(space.max()) + 1
        self._taken = np.zeros((spaces, 0), dtype=np.bool_)
        self._end = np.zeros(spaces, dtype=np.int64)  # rows below this have been taken
        self._held = np.zeros(spaces, dtype=np.int64)

    @property
    def rows(self) -> int:
        """Rows that are needed in the longest space."""
        return int(self._end.max())

    def taken(self, space: int, page: np.ndarray, size: int) -> np.ndarray:
        """Rows taken of each of some pages of `size` rows."""
        rows = page[:, None] * size + np.arange(size)
        inside = np.minimum(rows, self._taken.shape[1] - 1)
        counts: np.ndarray = (self._taken[space, inside] & (rows == inside)).sum(axis=1)
        return counts

    def take(self, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Give rows to pairs; those of a space get rising ones in their order."""
        space = self._space[group]
        row = np.empty(len(token), dtype=np.int64)
        for each in np.unique(space).tolist():
            own = space == each
            row[own] = self._find(each, int(own.sum()))
        self.total += len(token)
        self.used += np.bincount(group, minlength=len(self.used))
        self._slot.values[group, token] = row
        np.maximum(self.high, self._end[self._space], out=self.high)
        self._note(group, token)
        return row

    def take_shared(self, token: np.ndarray) -> np.ndarray:
        return self.take(np.zeros(len(token), dtype=np.int64), token)

    def give_back(self, group: np.ndarray, token: np.ndarray) -> None:
        space, row = self._space[group], self._slot.values[group, token]
        self._taken[space, row] = False
        self._held -= np.bincount(space, minlength=len(self._held))
        self._end[self._held == 0] = 0
        self._slot.values[group, token] = NOWHERE
        self.used -= np.bincount(group, minlength=len(self.used))
        self.total -= len(token)
        self._note(group, token)

    def _find(self, space: int, count: int) -> np.ndarray:
        end = int(self._end[space])
        rows = self._gaps(space, count)
        missing = count - len(rows)
        if missing:
            if end + missing > self._taken.shape[1]:
                wider = np.zeros((len(self._taken), 2 * (end + missing)), dtype=np.bool_)
                wider[:, : self._taken.shape[1]] = self._taken
                self._taken = wider
            rows = np.concatenate([rows, np.arange(end, end + missing)])
            self._end[space] = end + missing
        self._taken[space, rows] = True
        self._held[space] += count
        return rows

    def _gaps(self, space: int, count: int) -> np.ndarray:
        """Free rows below the end: gaps worth a copy, or any, if most rows are free."""
        end = int(self._end[space])
        unused = end - int(self._held[space])
        if unused < max(1, end // 8):
            return np.empty(0, dtype=np.int64)
        free = np.flatnonzero(~self._taken[space, :end])
        if unused <= end // 2:
            starts = np.flatnonzero(np.diff(free, prepend=-2) != 1)
            lengths = np.diff(starts, append=len(free))
            free = free[np.repeat(lengths >= min(self._least, count), lengths)]
        return free[:count]
