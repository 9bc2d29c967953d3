"""Attention rows by group: of the whole model, of its captured layers, or of their KV heads.

The row of a group is the mean over its query heads: those that read the KV head, all of the layer,
or (as recorded) all of the model.  A row that is not a number (a softmax that overflowed) tells
nothing and is left out.
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
)
from arborsim.core.tree import ThoughtTree
from arborsim.signals.scores import ScoreState

Places = slice | np.ndarray
"""Token ids that a row's values belong to, as a slice where they are 0, 1, 2, ..."""
Row = Sequence[np.ndarray]
"""Attention of one query by group: float64 ``[positions]`` each."""


def row_signal(grouping: str) -> frozenset[Signal]:
    """What rows of a grouping are made from."""
    return frozenset({Signal.ATTENTION if grouping == "shared" else Signal.HEAD_ATTENTION})


def grouped_row(row: np.ndarray, kv_heads: int, grouping: str) -> np.ndarray:
    """Attention of one query to each position, mean over the query heads of each group.

    Parameters
    ----------
    row : float32 ``[layers, heads, positions]``
        NaN where a softmax overflowed.
    kv_heads : int
        Query head ``h`` reads KV head ``h // (heads // kv_heads)``.
    grouping : {"layer", "head"}

    Returns
    -------
    float64 ``[groups, positions]``
        Heads are summed one after the other, so that the bits depend on nothing else.  Heads with
        a NaN are left out; a group without any other counts as zeros.
    """
    groups = num_row_groups(row, kv_heads, grouping)
    by_group = row.reshape(groups, -1, row.shape[2])
    good = ~np.isnan(by_group).any(axis=-1, keepdims=True)
    total = np.zeros((groups, row.shape[2]))
    for i in range(by_group.shape[1]):
        total += np.where(good[:, i], by_group[:, i], 0)
    return np.asarray(total / np.maximum(good.sum(axis=1), 1))


def num_row_groups(row: np.ndarray, kv_heads: int, grouping: str) -> int:
    """Cache groups of a row ``[layers, heads, positions]``."""
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
    def __init__(self, rows: HeadRows, grouping: str) -> None:
        self._rows, self._grouping = rows, grouping
        self.groups = num_row_groups(rows.row(0), rows.kv_heads, grouping)

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
    return _HeadRows(head_rows(observed), grouping)


def is_number(row: np.ndarray) -> bool:
    """Whether a row holds numbers: a softmax that overflowed is not a number throughout."""
    return bool(row[0] == row[0])


class LeafPaths:
    """Where the rows of a run's leaves belong."""

    def __init__(self, run: TokenRun, tree: ThoughtTree) -> None:
        paths = (tree.path(leaf) for leaf in run.leaves)
        # ids rise, so the last one tells whether they are 0, 1, 2, ...
        self._paths = [None if int(path[-1]) == len(path) - 1 else path for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def straight(self) -> bool:
        """Whether there is one path, which holds all tokens."""
        return len(self._paths) == 1 and self._paths[0] is None

    def tokens(self, leaf: int, length: int) -> np.ndarray:
        """`places` as ids, int64 ``[length]``."""
        path = self._paths[leaf]
        return np.arange(length) if path is None else path[:length]

    def places(self, leaf: int, length: int) -> Places:
        """Tokens that the first `length` positions of a leaf's path stand for."""
        path = self._paths[leaf]
        return slice(length) if path is None else path[:length]


class RowState(ScoreState):
    """Base of scores that follow attention rows; a subclass says in `_take` what a row does."""

    _rows: GroupRows  # of the present run
    _next: Iterator[Row]
    _paths: LeafPaths
    _now: list[np.ndarray]  # the values of each group

    def __init__(self, grouping: str = "shared") -> None:
        super().__init__()
        self._grouping = grouping

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._follow(group_rows(run.observed, self._grouping), run, tree)

    def _follow(self, rows: GroupRows, run: TokenRun, tree: ThoughtTree, first: int = 0) -> None:
        """Take in the rows of `run`, from its iteration `first` on."""
        self._rows, self._paths = rows, LeafPaths(run, tree)
        self._next = rows.in_order(first * len(run.leaves), run.num_tokens)
        self._now = list(self._grow(rows.groups, run.num_tokens))

    def observe(self, step: int) -> None:
        for leaf in range(len(self._paths)):
            for now, row in zip(self._now, next(self._next), strict=True):
                if is_number(row):
                    self._take(now, self._paths.places(leaf, len(row)), row)

    @abstractmethod
    def _take(self, now: np.ndarray, at: Places, row: np.ndarray) -> None:
        """Take in a row, float64 ``[positions]``, of the tokens `at` of a group's values `now`."""


def add_at(now: np.ndarray, at: Places, row: np.ndarray) -> None:
    """Add `row` to the values of some tokens."""
    if isinstance(at, slice):
        received = now[at]
        received += row  # in place: `now[at] += row` would copy it once more
    else:
        now[at] += row
