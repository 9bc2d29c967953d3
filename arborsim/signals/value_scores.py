"""Scores from vectors that are fixed when a token is born: sizes of values, directions of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.head_scores import GrowingTable
from arborsim.signals.scores import FrozenState, ScoreState


class FrozenTable:
    """Base of states whose values, ``[rows, tokens]``, are fixed when a token is born."""

    def __init__(self) -> None:
        self._table = GrowingTable()

    @property
    def values(self) -> np.ndarray:
        return self._table.values

    def observe(self, step: int) -> None:
        pass

    def observe_all(self, first: int, last: int) -> None:
        pass

    def _append(self, columns: np.ndarray) -> None:
        """Append float64 ``[rows, new tokens]``."""
        rows, count = columns.shape
        self._table.extend(rows, count)
        self._table.values[:, self._table.values.shape[1] - count :] = columns


@dataclass(frozen=True)
class HeadValueSize:
    """L1 norm of a token's value in each group; per layer, the mean over its KV heads.

    Parameters
    ----------
    per : {"layer", "head"}
    """

    per: str = "head"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.VALUES})

    def start(self, layers: int) -> ScoreState:
        return _ValueSizeState(self.per)


class _ValueSizeState(FrozenTable):
    def __init__(self, per: str) -> None:
        super().__init__()
        self._per = per

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        assert run.observed.values is not None, "the reader was not asked for values"
        # Sums of float16 values are exact in float64, in any order.
        sizes = np.abs(run.observed.values.astype(np.float64)).sum(axis=-1)
        groups = sizes.mean(axis=-1) if self._per == "layer" else sizes.reshape(len(sizes), -1)
        self._append(groups.T)


@dataclass(frozen=True)
class ValueSize:
    """L1 norm of a token's value, mean over layers; one number for the whole model."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.VALUE_NORM})

    def start(self, layers: int) -> ScoreState:
        return _ModelValueSizeState()


class _ModelValueSizeState(FrozenState):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._values.extend(mean_value_norm(run))


def mean_value_norm(run: TokenRun) -> np.ndarray:
    """Recorded norms of the run's values, mean over layers; float64 ``[tokens]``."""
    norms = run.observed.per_layer[Signal.VALUE_NORM].astype(np.float64)
    total = np.zeros(run.num_tokens)
    for layer in range(norms.shape[1]):  # a fixed order, whatever the run's length
        total += norms[:, layer]
    return np.asarray(total / norms.shape[1])


@dataclass(frozen=True)
class KeyDirection:
    """Sketch of a token's keys over all layers and heads, scaled to length 1; ``[size, tokens]``.

    The scalar product of two columns approximates the cosine of the two tokens' keys.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEY_SKETCH})

    def start(self, layers: int) -> ScoreState:
        return _DirectionState()


class _DirectionState(FrozenTable):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        sketch = run.observed.per_layer[Signal.KEY_SKETCH].astype(np.float64).T
        squares = np.add.accumulate(sketch * sketch, axis=0)[-1]  # added strictly in order
        length = np.sqrt(squares)
        self._append(sketch / np.where(length > 0, length, 1.0))
