"""Attention rows by group: of the whole model, of its captured layers, or of their KV heads.

The row of a group is the mean over its query heads: those that read the KV head, all of the layer,
or (as recorded) all of the model.  A row that is not a number (a softmax that overflowed)
is left out.

A sparse row gives every position that it does not list the same share.  On a straight path, which
holds all tokens, a `SparseUpdater` takes such rows at the cost of what they list.  Kept less that
share, positions that are not listed are 0: from one row to the next only listed ones change.  In
sums the share is the same constant for all tokens that exist, and a ranking does not change if it
is left out; a token born later must not have the earlier shares: it starts that much lower.
Subtracting a share from float16 weights in float64 keeps their order and their ties.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import (
    AttentionRows,
    HeadRows,
    LayerRows,
    Observations,
    Signal,
    SparseRows,
)
from arborsim.core.row_uses import RowUse
from arborsim.core.tree import ThoughtTree
from arborsim.signals.scores import ScoreState

Places = slice | np.ndarray
"""Token ids that a row's values belong to, as a slice where they are 0, 1, 2, ..."""
Row = Sequence[np.ndarray]
"""Attention of one query by group: float64 ``[positions]`` each."""
ListedRow = tuple[int, np.ndarray, np.ndarray, float]
"""A row as `SparseRows.listed` gives it: length, positions, weights, share of the others."""
_AT_ONCE = 1 << 16  # listed positions to widen at once: they stay in the processor's cache


def row_signal(grouping: str) -> frozenset[Signal]:
    """What rows of a grouping are made from."""
    return frozenset({Signal.ATTENTION if grouping == "shared" else Signal.HEAD_ATTENTION})


def grouped_row(row: np.ndarray, kv_heads: int, grouping: str) -> np.ndarray:
    """Attention of one query to each position, mean over the query heads of each group.

    Of a row, float32 ``[layers, heads, positions]``, grouped by "layer" or "head": query head ``h``
    reads KV head ``h // (heads // kv_heads)``.  Float64 ``[groups, positions]``; heads are summed
    one after the other, so that the bits depend on nothing else.  Heads with a NaN (a softmax
    overflowed) are left out; a group without any other counts as zeros.
    """
    groups = num_row_groups(row, kv_heads, grouping)
    by_group = row.reshape(groups, -1, row.shape[2])
    good = ~np.isnan(by_group).any(axis=-1, keepdims=True)
    total = np.zeros((groups, row.shape[2]))
    for i in range(by_group.shape[1]):
        total += np.where(good[:, i], by_group[:, i], 0)
    return np.asarray(total / np.maximum(good.sum(axis=1), 1))


def num_row_groups(row: np.ndarray, kv_heads: int, grouping: str) -> int:
    """Cache groups of a row ``[layers, heads, positions]``, or of queries."""
    return len(row) * (kv_heads if grouping == "head" else 1)


def head_rows(observed: Observations) -> HeadRows:
    """Rows of single query heads."""
    assert observed.head_attention is not None, "the reader was not asked for attention of heads"
    return observed.head_attention


class GroupRows(ABC):
    """The attention rows of a run's tokens, by group."""

    groups: int

    @abstractmethod
    def row(self, token: int) -> Row: ...

    def in_order(self, first: int, last: int) -> Iterator[Row]:
        """Rows of the tokens ``first`` to ``last``, one after the other."""
        return map(self.row, range(first, last))


class ModelRows(GroupRows):
    groups = 1

    def __init__(self, rows: AttentionRows | None) -> None:
        assert rows is not None, "the reader was not asked for attention"
        self._rows = rows

    def row(self, token: int) -> Row:
        return (self._rows.row(token),)

    def in_order(self, first: int, last: int) -> Iterator[Row]:
        return zip(self._rows[first:last], strict=False)  # each in a tuple of its own


class _HeadRows(GroupRows):
    def __init__(self, rows: HeadRows, grouping: str, last: int) -> None:
        self._rows, self._grouping = rows, grouping
        # Of a prompt only the last queries may be known.
        self.groups = num_row_groups(rows.query(last), rows.kv_heads, grouping)

    def row(self, token: int) -> Row:
        return tuple(grouped_row(self._rows.row(token), self._rows.kv_heads, self._grouping))


class LastLayers(GroupRows):
    """Rows of the last captured layers, each the mean over its heads."""

    def __init__(self, rows: LayerRows | None, count: int) -> None:
        assert rows is not None, "the reader was not asked for the rows of layers"
        self._rows, self.groups = rows, min(count, len(rows.layers))

    def row(self, token: int) -> Row:
        return tuple(self._rows.of(token)[-self.groups :, 0].astype(np.float64))


def group_rows(observed: Observations, grouping: str) -> GroupRows:
    """The rows of a run by group."""
    if grouping == "shared":
        return ModelRows(observed.attention)
    return _HeadRows(head_rows(observed), grouping, observed.num_tokens - 1)


def is_number(row: np.ndarray) -> bool:
    """Whether a row holds numbers: a softmax that overflowed is not a number throughout."""
    return bool(row[0] == row[0])


class LeafPaths:
    """Where the rows of a run's leaves belong."""

    def __init__(self, run: TokenRun, tree: ThoughtTree) -> None:
        paths = (tree.path(leaf) for leaf in run.leaves)
        # ids rise: the last one shows whether they are 0, 1, 2, ...
        self._paths = [None if int(path[-1]) == len(path) - 1 else path for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def straight(self) -> bool:
        """Whether there is one path, which holds all tokens."""
        return len(self._paths) == 1 and self._paths[0] is None

    def places(self, leaf: int, length: int) -> Places:
        """Tokens that the first `length` positions of a leaf's path stand for."""
        path = self._paths[leaf]
        return slice(length) if path is None else path[:length]


class RowState(ScoreState):
    """Base of scores that follow attention rows; `_take` says what a row does.

    `sparse`, if there is one, takes the sparse rows of a straight path in its place.  Rows that
    were reduced as `use` says are taken in their place where a run has them.
    """

    _rows: GroupRows  # of the present run
    _next: Iterator[Row]
    _paths: LeafPaths
    _now: list[np.ndarray]  # the values of each group
    _single: bool  # whether each iteration has one row, of all tokens

    def __init__(self, use: RowUse, sparse: SparseUpdater | None = None) -> None:
        super().__init__()
        self._use, self._grouping = use, use.grouping
        self._sparse = sparse if use.grouping == "shared" else None
        self._updater: SparseUpdater | None = None  # `sparse` where it takes the rows of the run
        self._reduced: tuple[np.ndarray, ...] | None = None  # of each leaf, in place of the rows

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._follow(run, tree)

    def _follow(
        self, run: TokenRun, tree: ThoughtTree, first: int = 0, rows: GroupRows | None = None
    ) -> None:
        """Take in the rows of `run`, from its iteration `first` on: those of the grouping."""
        self._paths, self._steps = LeafPaths(run, tree), run.steps
        reduced = run.observed.reduced.get(self._use)
        self._reduced = None if reduced is None else reduced.leaves
        if self._reduced is not None:
            self._now = list(self._grow(len(self._reduced[0]), run.num_tokens))
            return
        self._rows = rows or group_rows(run.observed, self._grouping)
        self._next = self._rows.in_order(first * len(run.leaves), run.num_tokens)
        self._now = list(self._grow(self._rows.groups, run.num_tokens))
        self._single = self._paths.straight and len(self._now) == 1
        if self._sparse is None:
            return
        attention, values = run.observed.attention, self._now[0]
        if isinstance(attention, SparseRows) and self._paths.straight:
            self._updater = self._sparse
            self._sparse.begin(attention, values)
        else:
            self._updater = None
            self._sparse.settle(values[: len(values) - run.num_tokens])

    def observe(self, step: int) -> None:
        if self._reduced is not None:
            self.observe_all(step, step + 1)
            return
        if self._updater:
            self._updater.take(step)
            return
        if self._single:  # most rows: the same as below, without what many leaves or groups take
            (row,) = next(self._next)
            if row[0] == row[0]:
                self._take(self._now[0], slice(len(row)), row)
            return
        for leaf in range(len(self._paths)):
            self._take_leaf(leaf, next(self._next))

    def observe_all(self, first: int, last: int) -> None:
        if self._reduced is not None:
            assert (first, last) == (0, self._steps), "rows were reduced over the whole run"
            for leaf, rows in enumerate(self._reduced):
                if rows.shape[1]:
                    self._take_leaf(leaf, list(rows))
        elif self._updater:
            self._updater.take_many(first, last)
        else:
            super().observe_all(first, last)

    def _take_leaf(self, leaf: int, rows: Row) -> None:
        """Take in what a leaf pays, by group."""
        for now, row in zip(self._now, rows, strict=True):
            if is_number(row):
                self._take(now, self._paths.places(leaf, len(row)), row)

    def _take(self, now: np.ndarray, at: Places, row: np.ndarray) -> None:
        """Take in a row, float64 ``[positions]``, of the tokens `at` of a group's values `now`.

        Adds it, unless a subclass says otherwise.
        """
        if isinstance(at, slice):
            received = now[at]
            received += row  # in place: `now[at] += row` would copy it once more
        else:
            now[at] += row


class SparseUpdater(ABC):
    """Brings values up to date with the sparse rows of a straight path."""

    _rows: SparseRows  # of the present run
    _next: Iterator[ListedRow]
    _values: np.ndarray

    def begin(self, rows: SparseRows, values: np.ndarray) -> None:
        """Take the rows of a run; `values`, float64 ``[tokens]``, ends with its tokens, all 0."""
        self._rows, self._next, self._values = rows, rows.listed(), values

    @abstractmethod
    def take(self, step: int) -> None:
        """Take in row `step`, the next one."""

    def take_many(self, first: int, last: int) -> None:
        """Take in rows ``first`` to ``last``; the same bits as one by one."""
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

    ``values + constant`` are the true sums of all tokens that exist; values never fall.
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
