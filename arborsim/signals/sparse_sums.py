"""Sums of sparse attention rows at the cost of what they list.

A sparse row gives every position it does not list the same share.  Adding that share to all of
them would cost as much as a dense row; but on a single straight path every token that exists gets
it, so it is the same constant for all, and a ranking does not change if it is left out.  A token
born later must not have the earlier shares: it starts that much lower.
"""

from __future__ import annotations

import numpy as np

from arborsim.signals.observations import SparseRows


class SparseSums:
    """Adds rows to an array of sums, leaving out what all existing tokens receive alike.

    ``sums + constant`` are the true sums of all tokens that exist; `sums` never fall.
    """

    def __init__(self) -> None:
        self.constant = 0.0
        self._sums = np.empty(0)
        self._index = np.empty(0, dtype=np.int32)
        self._extra = np.empty(0)
        self._bounds: list[int] = []

    def begin(self, rows: SparseRows, sums: np.ndarray) -> None:
        """Take the rows of a run; `sums`, float64 ``[tokens]``, ends with its tokens, all 0."""
        listed = np.diff(rows.offsets)
        others = rows.lengths - listed
        # A row that is not a number tells nothing: neither its share nor what it lists counts.
        rest = np.where(np.isnan(rows.rest), 0.0, rows.rest)
        share = np.where(others > 0, rest / np.maximum(others, 1), 0.0)
        constant = np.cumsum(np.concatenate([[self.constant], share]))
        sums[len(sums) - len(rows) :] = -constant[:-1]
        self.constant = float(constant[-1])
        a, b = int(rows.offsets[0]), int(rows.offsets[-1])
        self._index = rows.index[a:b].astype(np.int64)  # NumPy gathers by int32 three times slower
        self._extra = rows.value[a:b].astype(np.float64)
        width = int(listed[0]) if len(listed) else 0
        if width and (listed == width).all():
            self._extra.reshape(-1, width)[...] -= share[:, None]
        else:
            self._extra -= np.repeat(share, listed)
        # What is listed has the larger weights; rounding to float16 may say less.  Not so here: a
        # sum never falls below that of a token that nobody lists.
        np.fmax(self._extra, 0.0, out=self._extra)
        self._bounds = (rows.offsets - a).tolist()
        self._sums = sums

    def add(self, step: int) -> None:
        """Add one row."""
        a, b = self._bounds[step], self._bounds[step + 1]
        self._sums[self._index[a:b]] += self._extra[a:b]

    def add_many(self, first: int, last: int) -> None:
        """Add rows ``first`` to ``last``, each in turn: the same bits as one by one."""
        a, b = self._bounds[first], self._bounds[last]
        np.add.at(self._sums, self._index[a:b], self._extra[a:b])

    def settle(self, sums: np.ndarray) -> None:
        """Make `sums` the true sums."""
        if self.constant:
            sums += self.constant
            self.constant = 0.0
