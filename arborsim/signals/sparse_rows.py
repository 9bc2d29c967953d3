"""Scores from sparse attention rows, at the cost of what the rows list.

A sparse row gives every position that it does not list the same share.  On a straight path, which
holds all tokens, positions that are not listed are 0 once that share is subtracted: from one row to
the next only listed ones change.  In sums the share is the same constant for all tokens that exist,
and a ranking does not change if it is left out.  A token born later must not have the earlier
shares, so it starts that much lower.  Subtracting a share from float16 weights in float64 keeps
their order and their ties.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from arborsim.core.observations import SparseRows

ListedRow = tuple[int, np.ndarray, np.ndarray, float]
"""A row as `SparseRows.listed` gives it: length, positions, weights, share of the others."""
_AT_ONCE = 1 << 16  # listed positions to widen at once: they stay in the processor's cache


class SparseUpdater(ABC):
    """Brings values up to date with the sparse rows of a straight path."""

    _rows: SparseRows  # of the present run
    _next: Iterator[ListedRow]
    _values: np.ndarray

    def begin(self, rows: SparseRows, values: np.ndarray) -> None:
        """Take the rows of a run.  `values`, float64 ``[tokens]``, ends with its tokens, all 0."""
        self._rows, self._next, self._values = rows, rows.listed(), values

    @abstractmethod
    def take(self, step: int) -> None:
        """Take in row `step`, the next one."""

    def take_many(self, first: int, last: int) -> None:
        """Take in rows ``first`` to ``last``, with the same bits as one by one."""
        for step in range(first, last):
            self.take(step)

    @abstractmethod
    def settle(self, values: np.ndarray) -> None:
        """Make `values`, float64 ``[tokens]``, the true ones: other rows follow."""


def lists_numbers(row: ListedRow) -> bool:
    """Whether a row holds numbers: a softmax that overflowed is not a number throughout."""
    _, _, value, share = row
    return share == share and not (len(value) and value[0] != value[0])


class SparseNewest(SparseUpdater):
    """Holds the newest row, less what positions that it does not list get."""

    def __init__(self) -> None:
        self._newest: ListedRow | None = None
        self._changed = np.empty(0, dtype=np.int64)

    def take(self, step: int) -> None:
        row = next(self._next)
        length, index, value, share = row
        if not lists_numbers(row):
            if self._newest is not None:  # the token born with it has received nothing
                self._values[length - 1] = -self._newest[3]
                self._changed = np.append(self._changed, length - 1)
            return
        if self._newest is None:
            self._values[:length] = 0.0
        self._values[self._changed] = 0.0
        self._values[index] = value - share
        self._newest, self._changed = row, index

    def take_many(self, first: int, last: int) -> None:
        """Only the last row that is a number matters."""
        enough = last - 1
        while enough > first and not lists_numbers(next(self._rows[enough : enough + 1].listed())):
            enough -= 1
        self._next = self._rows[enough:].listed()
        super().take_many(enough, last)

    def settle(self, values: np.ndarray) -> None:
        if self._newest is None:
            return
        length, index, value, share = self._newest
        values[:length] = share
        values[index] = value
        values[length:] = 0.0
        self._newest, self._changed = None, np.empty(0, dtype=np.int64)


class ExactSums(SparseUpdater):
    """Adds rows, with the bits that adding them written out gives."""

    def take(self, step: int) -> None:
        row = next(self._next)
        if lists_numbers(row):
            length, index, value, share = row
            received = self._values[:length]
            listed = received[index] + value
            received += share
            received[index] = listed

    def settle(self, values: np.ndarray) -> None:
        pass


class SparseSums(SparseUpdater):
    """Adds rows, leaving out what all existing tokens receive alike.

    ``values + constant`` are the true sums of all tokens that exist.  Values never fall.
    """

    def __init__(self) -> None:
        self.constant = 0.0
        self._share = np.empty(0)
        # Of rows `_first` up to, not including, `_last`:
        self._first = self._last = 0
        self._index = np.empty(0, dtype=np.int64)
        self._extra = np.empty(0)
        self._bounds: list[int] = []

    def begin(self, rows: SparseRows, values: np.ndarray) -> None:
        super().begin(rows, values)
        listed = np.diff(rows.offsets)
        others = rows.lengths - listed
        # Of a row that is not a number neither the share nor what it lists counts.
        rest = np.where(np.isnan(rows.rest), 0.0, rows.rest)
        self._share = np.where(others > 0, rest / np.maximum(others, 1), 0.0)
        constant = np.cumsum(np.concatenate([[self.constant], self._share]))
        values[len(values) - len(rows) :] = -constant[:-1]
        self.constant = float(constant[-1])
        self._first = self._last = 0

    def _load(self, first: int) -> None:
        """Widen what the rows from `first` on list, as many as fit."""
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
        # sum never falls below that of a token that is never listed.
        np.fmax(self._extra, 0.0, out=self._extra)
        self._bounds = (offsets[first : last + 1] - a).tolist()
        self._first, self._last = first, last

    def take(self, step: int) -> None:
        if not self._first <= step < self._last:
            self._load(step)
        at = step - self._first
        a, b = self._bounds[at], self._bounds[at + 1]
        self._values[self._index[a:b]] += self._extra[a:b]

    def take_many(self, first: int, last: int) -> None:
        while first < last:
            if not self._first <= first < self._last:
                self._load(first)
            stop = min(last, self._last)
            a, b = self._bounds[first - self._first], self._bounds[stop - self._first]
            np.add.at(self._values, self._index[a:b], self._extra[a:b])
            first = stop

    def settle(self, values: np.ndarray) -> None:
        if self.constant:
            values += self.constant
            self.constant = 0.0
