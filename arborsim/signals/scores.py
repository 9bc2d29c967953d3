"""Per-token scores: what a policy ranks tokens by.

A `Score` is a frozen description with parameters; `start` makes the state that follows one search.
*Frozen* scores are fixed when a token is born and computed for a whole run at once.  *Accumulating*
scores change with every later token; they are brought up to date iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal, SparseRows
from arborsim.core.settings import setting
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.sparse_newest import Listed, is_number
from arborsim.signals.sparse_sums import SparseSums


class ScoreState(Protocol):
    """The score of every token of one search."""

    @property
    def values(self) -> np.ndarray:
        """Float64 ``[tokens]``."""
        ...

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        """Take in a run whose tokens the tree already holds; `generated` is False for a prompt."""
        ...

    def observe(self, step: int) -> None:
        """Bring accumulating scores up to date with iteration `step` of the run."""
        ...


class Score(Protocol):
    """Description of a score."""

    @property
    def needs(self) -> frozenset[Signal]: ...

    def start(self, layers: int) -> ScoreState:
        """State for a new search on a model with this many layers."""
        ...


class FrozenState:
    """Values that never change once the token is born."""

    def __init__(self) -> None:
        self._values = GrowingArray(np.float64)

    @property
    def values(self) -> np.ndarray:
        return self._values.values

    def observe(self, step: int) -> None:
        pass


@dataclass(frozen=True)
class SeededUniform:
    """Uniform random numbers in [0, 1), the same for the same seed and token order."""

    seed: int = setting(0, "of the random numbers", low=0)
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def start(self, layers: int) -> ScoreState:
        return _UniformState(self.seed)


class _UniformState(FrozenState):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._values.extend(self._rng.random(run.num_tokens))


@dataclass(frozen=True)
class LagVariance:
    """Lag-KV as the EpiKV paper streams it: spread of lag-normalised key plus value.

    Keys and values are normalised per channel by the previous chunk's minimum and maximum where
    they are observed (they are too large for a trace); the score is the mean over layers.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LAG_KEY, Signal.LAG_VALUE})

    def start(self, layers: int) -> ScoreState:
        return _LagState()


class _LagState(FrozenState):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        key = run.observed.per_layer[Signal.LAG_KEY].astype(np.float64)
        value = run.observed.per_layer[Signal.LAG_VALUE].astype(np.float64)
        total = np.zeros(run.num_tokens)
        for layer in range(key.shape[1]):  # a fixed order of summation, whatever the run's length
            total += key[:, layer] + value[:, layer]
        self._values.extend(total / key.shape[1])


@dataclass(frozen=True)
class CumulativeAttention:
    """Attention a token has received so far, mean over layers and heads, summed over queries.

    A row that is not a number tells nothing and is left out.

    Parameters
    ----------
    from_later_blocks : bool
        Count only queries outside the token's own block (ArborKV's ``A_i(t)``, sum over u > b_i).
    up_to_constant : bool
        The sums may all be too low by the same number, which no ranking notices: sparse rows are
        then summed in the time of what they list.
    """

    from_later_blocks: bool = setting(False, "count only queries outside the token's block")
    up_to_constant: bool = setting(
        False,
        "sums may all be too low by the same number: faster on sparse recordings, and no ranking "
        "notices",
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _CumulativeState(self.from_later_blocks, self.up_to_constant)


class _CumulativeState:
    def __init__(self, from_later_blocks: bool, up_to_constant: bool) -> None:
        self._from_later_blocks = from_later_blocks
        self._up_to_constant = up_to_constant and not from_later_blocks
        self._sums = GrowingArray(np.float64)
        self._sparse = SparseSums()
        self._only_listed = False
        self._rows: Iterator[np.ndarray] = iter(())
        self._listed: Iterator[Listed] | None = None  # sparse rows of one straight path
        self._now = self._sums.values
        self._leaves: list[tuple[np.ndarray | None, int]] = []

    @property
    def values(self) -> np.ndarray:
        return self._sums.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._sums.extend(np.zeros(run.num_tokens))
        rows = run.observed.attention
        assert rows is not None, "the reader was not asked for attention"
        self._now = self._sums.values
        self._leaves = []
        for leaf in run.leaves:
            path = tree.path(leaf)
            straight = int(path[-1]) == len(path) - 1  # ids rise, so this means 0, 1, 2, ...
            own = tree.num_node_tokens(leaf) - run.steps
            self._leaves.append((None if straight else path, own))
        alone = len(self._leaves) == 1 and self._leaves[0][0] is None
        self._only_listed = self._up_to_constant and alone and isinstance(rows, SparseRows)
        if self._only_listed:
            assert isinstance(rows, SparseRows)
            self._sparse.begin(rows, self._now)
            return
        self._sparse.settle(self._now[: len(self._now) - run.num_tokens])
        self._rows, self._listed = iter(rows), None
        if alone and isinstance(rows, SparseRows) and not self._from_later_blocks:
            self._listed = rows.listed()

    def observe(self, step: int) -> None:
        if self._only_listed:
            self._sparse.add(step)
            return
        if self._listed is not None:
            self._add(next(self._listed))
            return
        for path, own in self._leaves:
            row = next(self._rows)
            if row[0] != row[0]:  # not a number throughout: a softmax that overflowed
                continue
            if self._from_later_blocks:
                row = row[: len(row) - (own + step + 1)]
            if path is None:
                received = self._now[: len(row)]
                received += row  # in place: `self._now[...] += row` would copy it once more
            else:
                self._now[path[: len(row)]] += row

    def _add(self, row: Listed) -> None:
        """Add a sparse row, with the bits that adding it as a dense one gives."""
        if not is_number(row):
            return
        length, index, value, share = row
        received = self._now[:length]
        listed = received[index] + value
        received += share
        received[index] = listed

    def observe_all(self, first: int, last: int) -> None:
        """Observe iterations ``first`` to ``last``; the same bits as one by one."""
        if self._only_listed:
            self._sparse.add_many(first, last)
            return
        for step in range(first, last):
            self.observe(step)


def observe_all(state: ScoreState, first: int, last: int) -> None:
    """Bring a state up to date with many iterations, at once if it can."""
    together = getattr(state, "observe_all", None)
    if together is not None:
        together(first, last)
        return
    for step in range(first, last):
        state.observe(step)


class ScoreBook:
    """The scores of one search that a policy asked for, kept up to date together."""

    def __init__(self, scores: dict[str, Score], layers: int) -> None:
        self._states = {name: score.start(layers) for name, score in scores.items()}

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        for state in self._states.values():
            state.begin(run, tree, generated)

    def steps(self, count: int) -> Iterator[int]:
        """Observe iterations one after the other, yielding each."""
        states = tuple(self._states.values())
        for step in range(count):
            for state in states:
                state.observe(step)
            yield step

    def skip(self, count: int) -> None:
        """Observe `count` iterations after which nobody decides."""
        for state in self._states.values():
            observe_all(state, 0, count)

    def values(self) -> dict[str, np.ndarray]:
        """Score arrays by name; views that stay current until the next `begin`."""
        return {name: state.values for name, state in self._states.items()}
