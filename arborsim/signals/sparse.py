"""Sparse attention rows at the cost of what they list: sums, the newest row, timestamps.

A sparse row gives every position that it does not list the same share.  Kept less that share, all
of them are 0: from one row to the next only listed positions change.  In sums the share of a single
straight path is the same constant for all tokens that exist, and a ranking does not change if it is
left out; a token born later must not have the earlier shares: it starts that much lower.
Subtracting a share from float16 weights in float64 keeps their order and their ties.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arborsim.core.observations import SparseRows

_AT_ONCE = 1 << 16  # listed positions to widen at once: they stay in the processor's cache
Listed = tuple[int, np.ndarray, np.ndarray, float]
"""A row as `SparseRows.listed` gives it: length, positions, weights, share of the others."""


def lists_numbers(row: Listed) -> bool:
    """Whether a row holds numbers: a softmax that overflowed is not a number throughout."""
    _, _, value, share = row
    return share == share and not (len(value) and value[0] != value[0])


class SparseNewest:
    """Holds the newest row of one straight path, less what positions that it does not list get."""

    def __init__(self) -> None:
        self._rows: SparseRows | None = None
        self._listed: Iterator[Listed] = iter(())
        self._values = np.empty(0)
        self._newest: Listed | None = None
        self._changed = np.empty(0, dtype=np.int64)

    def begin(self, rows: SparseRows, values: np.ndarray) -> None:
        """Take the rows of a run; `values`, float64 ``[tokens]``, ends with its tokens, all 0."""
        self._rows, self._listed, self._values = rows, rows.listed(), values

    def take(self) -> None:
        """Replace the values by the next row."""
        row = next(self._listed)
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
        """Take rows ``first`` to ``last``, of which only the last that is a number matters."""
        assert self._rows is not None
        enough = last - 1
        while enough > first and not lists_numbers(next(self._rows[enough : enough + 1].listed())):
            enough -= 1
        self._listed = self._rows[enough:].listed()
        for _ in range(enough, last):
            self.take()

    def settle(self, values: np.ndarray) -> None:
        """Make `values`, float64 ``[tokens]``, the true ones."""
        if self._newest is None:
            return
        length, index, value, share = self._newest
        values[:length] = share
        values[index] = value
        values[length:] = 0.0
        self._newest, self._changed = None, np.empty(0, dtype=np.int64)


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


def median(values: np.ndarray) -> float:
    """The median; mean of the two middle values of an even number (`numpy.median` is slower)."""
    middle = len(values) // 2
    parts = values.copy()
    parts.partition(middle)
    if len(values) % 2:
        return float(parts[middle])
    return float((parts[:middle].max() + parts[middle]) / 2)


class SparseStamps:
    """Timestamps of the generated tokens of one straight path, less the newest iteration.

    A token refreshed now has 0, others are negative.  Where the share of the positions that a row
    does not list is its median, everything is refreshed but the few that it lists with less: only
    these change, and those that were not refreshed the last time.
    """

    def __init__(self) -> None:
        self._values = np.empty(0)
        self._listed: Iterator[Listed] = iter(())
        self._prompt_tokens = 0
        self._stale: np.ndarray | None = None  # which are negative; None: not known
        self._shifted = False

    def begin(self, rows: SparseRows, values: np.ndarray, iteration: int) -> None:
        """Take the rows of a run after so many iterations.

        Parameters
        ----------
        rows : SparseRows
        values : float64 ``[generated tokens]``
            True timestamps if the last run was not taken here; it ends with the run's tokens.
        iteration : int
        """
        old = len(values) - len(rows)
        if not self._shifted:
            values[:old] -= iteration
            self._stale, self._shifted = None, True
        values[old:] = 0.0  # birth counts as use, whenever it comes
        self._values, self._listed = values, rows.listed()
        self._prompt_tokens = int(rows.lengths[0]) - old - 1

    def settle(self, values: np.ndarray, iteration: int) -> None:
        """Make the timestamps of older tokens, float64 ``[n]``, the true ones."""
        if self._shifted:
            values += iteration
            self._shifted = False

    def take(self) -> None:
        """Take in the next row."""
        row = next(self._listed)
        length, index, value, share = row
        count = length - self._prompt_tokens
        if not lists_numbers(row):
            self._age(count)
        elif count - len(value) > count // 2 and not (value < share).any():
            self._refresh(count, index[:0])
        else:
            first = int(np.searchsorted(index, self._prompt_tokens))
            self._compare(count, index[first:] - self._prompt_tokens, value[first:], share)

    def _compare(self, count: int, token: np.ndarray, paid: np.ndarray, share: float) -> None:
        """Take in what a row pays the first `count` tokens: `paid` those listed, others `share`."""
        low, others = paid < share, count - len(token)
        at_most = others + int(np.count_nonzero(paid <= share))
        if int(np.count_nonzero(low)) <= (count - 1) // 2 and count // 2 < at_most and others:
            stale = token[low]
            self._refresh(count, stale[stale < count - 1])
            return
        row = np.full(count, share)
        row[token] = paid
        self._age(count)
        self._values[:count][row >= median(row)] = 0.0

    def _age(self, count: int) -> None:
        """An iteration passes: of the first `count` tokens only the newest is fresh."""
        self._values[: count - 1] -= 1.0
        self._stale = None

    def _refresh(self, count: int, stale: np.ndarray) -> None:
        """An iteration passes, and refreshes all of the first `count` tokens but `stale`."""
        kept = self._values[stale] - 1.0
        if self._stale is None:
            self._values[:count] = 0.0
        elif len(self._stale):
            self._values[self._stale] = 0.0
        self._values[stale] = kept
        self._stale = stale
