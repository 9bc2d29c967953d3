"""Attention scores of single layers and KV heads, from the rows of single query heads.

Group ``g`` of a cache is a captured layer (``per="layer"``) or a captured layer and KV head
(``per="head"``, layer by layer).  The row of a group is the mean over its query heads: those that
read the KV head, or all of the layer.  A head whose softmax overflowed (NaN) is left out of the
mean, and a group without any other head counts as zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import HeadRows, Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.scores import ScoreState


def grouped_row(row: np.ndarray, kv_heads: int, per: str) -> np.ndarray:
    """Attention of one query to each position, mean over the query heads of each group.

    Parameters
    ----------
    row : float32 ``[layers, heads, positions]``
        NaN where a softmax overflowed.
    kv_heads : int
        Query head ``h`` reads KV head ``h // (heads // kv_heads)``.
    per : {"layer", "head"}

    Returns
    -------
    float64 ``[groups, positions]``
        Heads are summed one after the other, so that the bits depend on nothing else.
    """
    groups = num_row_groups(row, kv_heads, per)
    by_group = row.reshape(groups, -1, row.shape[2])
    good = ~np.isnan(by_group).any(axis=-1, keepdims=True)
    total = np.zeros((groups, row.shape[2]))
    for i in range(by_group.shape[1]):
        total += np.where(good[:, i], by_group[:, i], 0)
    return np.asarray(total / np.maximum(good.sum(axis=1), 1))


def num_row_groups(row: np.ndarray, kv_heads: int, per: str) -> int:
    """Cache groups of a row ``[layers, heads, positions]``."""
    return len(row) * (kv_heads if per == "head" else 1)


class GrowingTable:
    """An array that grows along its second axis in amortised constant time.

    Its first axis is known only when the first observation arrives.
    """

    def __init__(self) -> None:
        self._data = np.empty((0, 0))
        self._n = 0

    @property
    def values(self) -> np.ndarray:
        """Float64 ``[groups, n]``: a view, not to be kept across an `extend`."""
        return self._data[:, : self._n]

    def extend(self, groups: int, count: int) -> None:
        """Append `count` columns of zeros."""
        end = self._n + count
        if end > self._data.shape[1]:
            grown = np.zeros((groups, max(end, 2 * self._data.shape[1], 64)))
            grown[: len(self._data), : self._n] = self.values
            self._data = grown
        self._n = end


class GroupedState(ABC):
    """Base of scores that follow the rows of groups: one column of values per token.

    Subclasses say in `_take` what one iteration's rows do to the values.
    """

    def __init__(self, per: str) -> None:
        self._per = per
        self._table = GrowingTable()
        self._rows: HeadRows | None = None
        self._paths: list[np.ndarray] = []

    @property
    def values(self) -> np.ndarray:
        """Float64 ``[groups, tokens]``."""
        return self._table.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._rows = run.observed.head_attention
        assert self._rows is not None, "the reader was not asked for the attention of heads"
        groups = num_row_groups(self._rows.row(0), self._rows.kv_heads, self._per)
        self._table.extend(groups, run.num_tokens)
        self._paths = [tree.path(leaf) for leaf in run.leaves]

    def observe(self, step: int) -> None:
        assert self._rows is not None
        width = len(self._paths)
        seen = []
        for w, path in enumerate(self._paths):
            row = grouped_row(self._rows.row(step * width + w), self._rows.kv_heads, self._per)
            seen.append((path[: row.shape[1]], row))
        self._take(seen)

    @abstractmethod
    def _take(self, seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Take in the iteration's rows: for each leaf its path's tokens and float64 row."""


@dataclass(frozen=True)
class HeadCumulativeAttention:
    """Attention a token has received so far in each group, summed over queries (H2O's score).

    Zhang et al. 2023, arXiv:2306.14048, section 4: per layer and KV head.

    Parameters
    ----------
    per : {"layer", "head"}
    """

    per: str = "head"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _CumulativeState(self.per)


class _CumulativeState(GroupedState):
    def _take(self, seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for tokens, row in seen:
            self.values[:, tokens] += row


@dataclass(frozen=True)
class HeadNewestAttention:
    """Attention of the newest query on a token's path to it, in each group (TOVA's score).

    Oren et al. 2024, arXiv:2401.06104.  Leaves that decode in one iteration all are newest: a
    token that several of them see gets the mean.  Off the active paths the last value stays.

    Parameters
    ----------
    per : {"layer", "head"}
    """

    per: str = "head"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return NewestState(self.per)


class NewestState(GroupedState):
    """Follows the newest query of every path."""

    def _take(self, seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        values = self.values
        queries = np.zeros(values.shape[1])
        for tokens, _ in seen:
            values[:, tokens] = 0.0
            queries[tokens] += 1
        for tokens, row in seen:
            values[:, tokens] += row
        several = queries > 1
        if several.any():
            values[:, several] /= queries[several]


@dataclass(frozen=True)
class HeadPromptAttention:
    """Attention from the last `window` prompt queries, summed, in each group (SnapKV's votes).

    Li et al. 2024, arXiv:2404.14469, Eq. 1.  Generated tokens have 0.

    Parameters
    ----------
    per : {"layer", "head"}
    window : int
        Prompt queries that count; a shorter prompt counts whole.
    """

    per: str = "head"
    window: int = 64
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _PromptState(self.per, self.window)


class _PromptState(GroupedState):
    def __init__(self, per: str, window: int) -> None:
        super().__init__(per)
        self._window = window
        self._first = 0
        self._generated = False

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._generated = generated
        self._first = run.steps - self._window

    def observe(self, step: int) -> None:
        if not self._generated and step >= self._first:
            super().observe(step)

    def _take(self, seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for tokens, row in seen:
            self.values[:, tokens] += row
