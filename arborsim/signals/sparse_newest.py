"""The newest sparse attention row at the cost of what it lists.

A sparse row gives every position it does not list the same share.  Kept less that share, all of
them are 0: from one row to the next only listed positions change.  Subtracting a share from float16
weights in float64 keeps their order and their ties.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arborsim.core.observations import SparseRows

Listed = tuple[int, np.ndarray, np.ndarray, float]
"""A row as `SparseRows.listed` gives it: length, positions, weights, share of the others."""


def is_number(row: Listed) -> bool:
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
        if not is_number(row):
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
        while enough > first and not is_number(next(self._rows[enough : enough + 1].listed())):
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
