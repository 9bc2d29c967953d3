"""Scores from the attention rows of the whole model, or of its last captured layers.

All of them keep one live array, brought up to date in place with every decode iteration.  A row
that is not a number (a softmax that overflowed) tells nothing and is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import AttentionRows, LayerAttentionRows, Signal, SparseRows
from arborsim.core.settings import setting
from arborsim.core.tree import ThoughtTree
from arborsim.signals.head_scores import GrowingTable
from arborsim.signals.scores import ScoreState
from arborsim.signals.sparse_newest import SparseNewest
from arborsim.signals.value_scores import mean_value_norm

Places = slice | np.ndarray
"""Token ids that a row's values belong to, as a slice where they are 0, 1, 2, ..."""


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

    def places(self, leaf: int, length: int) -> Places:
        """Tokens that the first `length` positions of a leaf's path stand for."""
        path = self._paths[leaf]
        return slice(length) if path is None else path[:length]


class MeanRowState(ABC):
    """Base of scores that follow the rows averaged over layers and heads.

    A subclass keeps `values` and says in `_take` what a row does to them.
    """

    def __init__(self) -> None:
        self._rows: Iterator[np.ndarray] = iter(())
        self._paths: LeafPaths | None = None

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        assert run.observed.attention is not None, "the reader was not asked for attention"
        self._rows = iter(run.observed.attention)
        self._paths = LeafPaths(run, tree)

    def observe(self, step: int) -> None:
        assert self._paths is not None
        for w in range(len(self._paths)):
            row = next(self._rows)
            if is_number(row):
                self._take(self._paths.places(w, len(row)), row)

    @abstractmethod
    def _take(self, at: Places, row: np.ndarray) -> None:
        """Take in a row, float64 ``[positions]``, of the tokens `at`."""


@dataclass(frozen=True)
class NewestAttention:
    """Attention from the newest query; tokens off the active paths keep what they last had.

    Leaves that decode in one iteration all are newest: a token that several of them see gets the
    mean.

    Parameters
    ----------
    layers : int
        0 for the mean over all layers and heads (values ``[1, tokens]``); else that many of the
        last captured layers, each the mean over its heads (values ``[layers, tokens]``, fewer
        rows where the trace holds fewer).
    up_to_constant : bool
        The values may all be too low by the same number, which no ranking notices: sparse rows are
        then taken in the time of what they list.
    """

    layers: int = setting(
        0, "last captured layers to look at, each apart; 0: the mean over all", unit="layers", low=0
    )
    up_to_constant: bool = setting(
        False,
        "values may all be too low by the same number: faster on sparse recordings, and no ranking "
        "notices",
    )

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.LAYER_ATTENTION if self.layers else Signal.ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _NewestState(self.layers, self.up_to_constant and not self.layers)


class _NewestState:
    def __init__(self, layers: int, up_to_constant: bool) -> None:
        self._layers = layers
        self._up_to_constant = up_to_constant
        self._sparse = SparseNewest()
        self._only_listed = False
        self._table = GrowingTable()
        self._row: Callable[[int], np.ndarray] = lambda token: np.empty((0, 0))
        self._paths: LeafPaths | None = None

    @property
    def values(self) -> np.ndarray:
        return self._table.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        count = 1
        if self._layers:
            rows = run.observed.layer_attention
            assert rows is not None, "the reader was not asked for the rows of layers"
            count = min(self._layers, len(rows.layers))
            self._row = _last_layers(rows, count)
        else:
            assert run.observed.attention is not None, "the reader was not asked for attention"
            self._row = _whole_model(run.observed.attention)
        self._table.extend(count, run.num_tokens)
        self._paths = LeafPaths(run, tree)
        follows = self._up_to_constant and self._paths.straight
        sparse = run.observed.attention
        self._only_listed = follows and isinstance(sparse, SparseRows)
        if self._only_listed:
            assert isinstance(sparse, SparseRows)
            self._sparse.begin(sparse, self.values[0])
        else:
            self._sparse.settle(self.values[0])

    def observe(self, step: int) -> None:
        if self._only_listed:
            self._sparse.take()
            return
        assert self._paths is not None
        if self._paths.straight:  # one path, which holds all tokens: the most frequent case
            now = self._table.values
            for layer, row in enumerate(self._row(step)):
                if is_number(row):
                    now[layer, : len(row)] = row
            return
        batch = self._batch(step)
        for layer, now in enumerate(self._table.values):
            found = [
                (self._paths.places(w, rows.shape[1]), rows[layer])
                for w, rows in enumerate(batch)
                if is_number(rows[layer])
            ]
            if len(found) == 1:
                now[found[0][0]] = found[0][1]
            elif found:
                _write_mean(now, found)

    def observe_all(self, first: int, last: int) -> None:
        """Observe iterations ``first`` to ``last``: a later row replaces an earlier one."""
        if self._only_listed:
            self._sparse.take_many(first, last)
            return
        enough = last - 1
        while enough > first and not all(
            is_number(row) for rows in self._batch(enough) for row in rows
        ):
            enough -= 1
        for step in range(enough, last):
            self.observe(step)

    def _batch(self, step: int) -> list[np.ndarray]:
        assert self._paths is not None
        width = len(self._paths)
        return [self._row(step * width + w) for w in range(width)]


def _whole_model(rows: AttentionRows) -> Callable[[int], np.ndarray]:
    """Float64 ``[1, position + 1]`` of a token."""
    return lambda token: rows.row(token)[None]


def _last_layers(rows: LayerAttentionRows, count: int) -> Callable[[int], np.ndarray]:
    """Float64 ``[count, position + 1]`` of a token."""
    return lambda token: rows.of(token)[-count:, 0].astype(np.float64)


def _write_mean(now: np.ndarray, found: list[tuple[Places, np.ndarray]]) -> None:
    """Replace values by the mean of the rows that cover them."""
    queries = np.zeros(len(now))
    for at, _ in found:
        now[at] = 0.0
        queries[at] += 1
    for at, row in found:
        now[at] += row
    several = queries > 1
    now[several] /= queries[several]


@dataclass(frozen=True)
class ValueWeightedAttention:
    """Attention received so far times the size of the token's value (VATP's score).

    ``S(i) = ||v_i||_1 x sum over queries t of a_t(i)`` (Guo et al. 2024, arXiv:2406.12335), here
    with attention averaged over layers and heads, and norms averaged over layers.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION, Signal.VALUE_NORM})

    def start(self, layers: int) -> ScoreState:
        return _ValueWeightedState()


class _ValueWeightedState(MeanRowState):
    def __init__(self) -> None:
        super().__init__()
        self._table = GrowingTable()  # product, attention received, norm

    @property
    def values(self) -> np.ndarray:
        return np.asarray(self._table.values[0])

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._table.extend(3, run.num_tokens)
        fresh = self._table.values[2]
        fresh[len(fresh) - run.num_tokens :] = mean_value_norm(run)

    def _take(self, at: Places, row: np.ndarray) -> None:
        product, received, norm = self._table.values
        if isinstance(at, slice):
            received = received[at]
            received += row
            np.multiply(received, norm[at], out=product[at])
            return
        received[at] += row
        product[at] = received[at] * norm[at]


@dataclass(frozen=True)
class PromptAttention:
    """Attention from the last prompt queries, summed, mean over layers and heads.

    SnapKV's votes (Li et al. 2024, arXiv:2404.14469, Eq. 1) in one ranking for the whole model;
    generated tokens have 0.

    Parameters
    ----------
    window : int
        Prompt queries that count; a shorter prompt counts whole.
    """

    window: int = 64
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _PromptState(self.window)


class _PromptState(MeanRowState):
    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        self._table = GrowingTable()
        self._steps = range(0)

    @property
    def values(self) -> np.ndarray:
        return self._table.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._table.extend(1, run.num_tokens)
        self._steps = range(0) if generated else range(run.steps)[-self._window :]
        assert run.observed.attention is not None
        self._rows = iter(run.observed.attention[self._steps.start :])

    def observe(self, step: int) -> None:
        if step in self._steps:
            super().observe(step)

    def _take(self, at: Places, row: np.ndarray) -> None:
        self._table.values[0, at] += row
