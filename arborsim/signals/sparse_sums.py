"""Sums of sparse attention rows at the cost of what they list.

A sparse row gives every position it does not list the same share.  Adding that share to all of
them would cost as much as a dense row; but on a single straight path every token that exists gets
it, so it is the same constant for all, and a ranking does not change if it is left out.  A token
born later must not have the earlier shares: it starts that much lower.
"""

from __future__ import annotations

import numpy as np

from arborsim.core.observations import SparseRows

_AT_ONCE = 1 << 16  # listed positions to widen at once: they stay in the processor's cache


class SparseSums:
    """Adds rows to an array of sums, leaving out what all existing tokens receive alike.

    ``sums + constant`` are the true sums of all tokens that exist; `sums` never fall.
    """

    def __init__(self) -> None:
        self.constant = 0.0
        self._sums = np.empty(0)
        self._rows: SparseRows | None = None
        self._share = np.empty(0)
        # Of rows `_first` up to, not including, `_last`:
        self._first = self._last = 0
        self._index = np.empty(0, dtype=np.int64)
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
        self._rows, self._share, self._sums = rows, share, sums
        self._first = self._last = 0

    def _load(self, first: int) -> None:
        """Widen what the rows from `first` on list, as many as fit."""
        assert self._rows is not None
        rows, offsets = self._rows, self._rows.offsets
        last = int(np.searchsorted(offsets, offsets[first] + _AT_ONCE, side="right")) - 1
        last = min(max(last, first + 1), len(rows))
        a, b = int(offsets[first]), int(offsets[last])
        self._index = rows.index[a:b].astype(np.int64)  # NumPy gathers by int32 three times slower
        self._extra = rows.value[a:b].astype(np.float64)
        listed, share = np.diff(offsets[first : last + 1]), self._share[first:last]
        width = int(listed[0])
        if width and (listed == width).all():
            self._extra.reshape(-1, width)[...] -= share[:, None]
        else:
            self._extra -= np.repeat(share, listed)
        # What is listed has the larger weights; rounding to float16 may say less.  Not so here: a
        # sum never falls below that of a token that nobody lists.
        np.fmax(self._extra, 0.0, out=self._extra)
        self._bounds = (offsets[first : last + 1] - a).tolist()
        self._first, self._last = first, last

    def add(self, step: int) -> None:
        """Add one row."""
        if not self._first <= step < self._last:
            self._load(step)
        at = step - self._first
        a, b = self._bounds[at], self._bounds[at + 1]
        self._sums[self._index[a:b]] += self._extra[a:b]

    def add_many(self, first: int, last: int) -> None:
        """Add rows ``first`` to ``last``, each in turn: the same bits as one by one."""
        while first < last:
            if not self._first <= first < self._last:
                self._load(first)
            stop = min(last, self._last)
            a, b = self._bounds[first - self._first], self._bounds[stop - self._first]
            np.add.at(self._sums, self._index[a:b], self._extra[a:b])
            first = stop

    def settle(self, sums: np.ndarray) -> None:
        """Make `sums` the true sums."""
        if self.constant:
            sums += self.constant
            self.constant = 0.0
