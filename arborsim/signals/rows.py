"""Attention rows by group: of the whole model, of its captured layers, or of their KV heads.

The row of a group is the mean over its query heads: those that read the KV head, all of the layer,
or (as recorded) all of the model.  A row that is not a number (a softmax that overflowed)
is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.head_rows import HeadRows
from arborsim.core.observations import AttentionRows, LayerRows, Observations, Signal, SparseRows
from arborsim.core.row_uses import RowUse
from arborsim.core.tree import ThoughtTree
from arborsim.signals.scores import ScoreState
from arborsim.signals.sparse_rows import SparseUpdater

TokenIds = slice | np.ndarray
"""The tokens that a row's values belong to, as a slice where they are 0, 1, 2, ..."""
Row = Sequence[np.ndarray]
"""Attention of one query by group: float64 ``[positions]`` each."""


def row_signal(grouping: str) -> frozenset[Signal]:
    """The signal that rows of a grouping are made from."""
    return frozenset({Signal.ATTENTION if grouping == "shared" else Signal.HEAD_ATTENTION})


def grouped_row(row: np.ndarray, kv_heads: int, grouping: str) -> np.ndarray:
    """Attention of one query to each position, mean over the query heads of each group.

    Of a row, float32 ``[layers, heads, positions]``, grouped by "layer" or "head": query head ``h``
    reads KV head ``h // (heads // kv_heads)``.  Float64 ``[groups, positions]``.  Heads are summed
    one after the other, so that the bits depend on nothing else.  Heads with a NaN (a softmax
    overflowed) are left out.  A group without any other counts as zeros.
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

    def tokens(self, leaf: int, length: int) -> TokenIds:
        """Those that the first `length` positions of a leaf's path stand for."""
        path = self._paths[leaf]
        return slice(length) if path is None else path[:length]


class RowState(ScoreState):
    """Base of scores that follow attention rows.  `_take` says what a row does.

    `sparse`, if there is one, takes the sparse rows of a straight path in its place.  Rows that
    were reduced as `use` says are taken in their place where a run has them.
    """

    _rows: GroupRows  # of the present run
    _next: Iterator[Row]
    _paths: LeafPaths
    _now: list[np.ndarray]  # the values of each group
    _single: bool  # whether each iteration has one row, of all tokens
    of_run = ("_rows", "_next", "_paths", "_now", "_single")

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
        if self._sparse is None or first:
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
                if not rows.shape[1]:
                    continue
                if self._adds and self._paths.straight and not np.isnan(rows[:, 0]).any():
                    self.values[:, : rows.shape[1]] += rows  # the same as one group at a time
                else:
                    self._take_leaf(leaf, list(rows))
        elif self._updater:
            self._updater.take_many(first, last)
        else:
            for step in range(first, last):
                self.observe(step)

    @property
    def _adds(self) -> bool:
        """Whether rows are added as they are."""
        kind = type(self)
        return kind._take is RowState._take and kind._take_leaf is RowState._take_leaf

    def _take_leaf(self, leaf: int, rows: Row) -> None:
        """Take in what a leaf pays, by group."""
        for now, row in zip(self._now, rows, strict=True):
            if is_number(row):
                self._take(now, self._paths.tokens(leaf, len(row)), row)

    def _take(self, now: np.ndarray, at: TokenIds, row: np.ndarray) -> None:
        """Take in a row, float64 ``[positions]``, of the tokens `at` of a group's values `now`.

        Adds it, unless a subclass says otherwise.
        """
        if isinstance(at, slice):
            received = now[at]
            received += row  # in place: `now[at] += row` would copy it once more
        else:
            now[at] += row
