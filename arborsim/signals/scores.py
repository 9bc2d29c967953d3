"""Per-token scores: what a policy ranks tokens by.

A `Score` is a frozen description with parameters; `Score.start` makes the state that follows one
search.  Values are always ``[groups, tokens]``.  A group of a cache is the whole model (grouping
"shared": one group), a captured layer ("layer"), or a captured layer and KV head ("head", layer by
layer).  *Frozen* scores are fixed when a token is born and computed for a whole run at once;
*accumulating* scores are brought up to date iteration by iteration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Literal

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tree import GrowingTable, ThoughtTree

GROUPINGS = ("shared", "layer", "head")
Changes = Literal["never", "rises", "freely"]
"""What becomes of a value; "rises" is up to a constant that all tokens share."""
# From this many sums on, adding them side by side is faster than one after the other.
_MANY_SUMS = 256


def grouping_setting(default: str = "shared") -> str:
    """The field `grouping` of a score."""
    return setting(default, "what has values of its own", choices=GROUPINGS)


class Score(ABC):
    """Description of a score: a frozen dataclass whose fields are its settings."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What it measures, in a few words."""

    @property
    @abstractmethod
    def needs(self) -> frozenset[Signal]:
        """Observations it is computed from."""

    @property
    def changes(self) -> Changes:
        """What becomes of a token's value after its birth."""
        return "never"

    @property
    def blurred(self) -> bool:
        """Whether most tokens come out alike on sparse recordings."""
        return False

    @property
    def grouping(self) -> str:
        """Which parts of the cache have values of their own: one of `GROUPINGS`."""
        return "shared"

    @abstractmethod
    def start(self, layers: int) -> ScoreState:
        """State for a new search on a model with this many layers."""


class FixedScore(Score):
    """A score that is fixed when a token is born."""

    def start(self, layers: int) -> ScoreState:
        return AtBirth(self.compute)

    @abstractmethod
    def compute(self, run: TokenRun) -> np.ndarray:
        """Values of a run's tokens: ``[groups, tokens]`` or ``[groups, tokens, size]``."""


class ScoreState(ABC):
    """The score of every token of one search, in a table that is kept up to date in place."""

    def __init__(self) -> None:
        self._table: GrowingTable | None = None  # made with the first observation

    @property
    def values(self) -> np.ndarray:
        """Float64 ``[groups, tokens]``, or vectors ``[groups, tokens, size]``."""
        return np.empty((0, 0)) if self._table is None else self._table.values

    @abstractmethod
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        """Take in a run whose tokens the tree already holds; `generated` is False for a prompt."""

    @abstractmethod
    def observe(self, step: int) -> None:
        """Bring accumulating scores up to date with iteration `step` of the run."""

    def observe_all(self, first: int, last: int) -> None:
        """Observe iterations ``first`` to ``last``; the same bits as one by one."""
        for step in range(first, last):
            self.observe(step)

    def _grow(self, groups: int, tokens: int) -> np.ndarray:
        """Append columns of zeros for new tokens; returns all values."""
        if self._table is None:
            self._table = GrowingTable(groups, np.float64)
        self._table.extend(tokens, 0)
        return self._table.values


class AtBirth(ScoreState):
    """Values that never change; `compute` makes those of a run's tokens (`FixedScore.compute`)."""

    def __init__(self, compute: Callable[[TokenRun], np.ndarray]) -> None:
        super().__init__()
        self._compute = compute

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        fresh = self._compute(run)
        if self._table is None:
            self._table = GrowingTable(len(fresh), fresh.dtype, cell=fresh.shape[2:])
        self._table.extend(fresh.shape[1], fresh)

    def observe(self, step: int) -> None:
        pass

    def observe_all(self, first: int, last: int) -> None:
        pass


def sum_in_order(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Sum over an axis, added strictly one after the other (`numpy.sum` may add in pairs)."""
    if values.size < _MANY_SUMS * values.shape[axis] or not values.size:
        return np.asarray(np.add.accumulate(values, axis=axis).take(-1, axis))
    parts = np.moveaxis(values, axis, 0)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return np.asarray(total)


@dataclass(frozen=True)
class SeededUniform(Score):
    """Uniform random numbers in [0, 1), the same for the same seed and token order."""

    seed: int = setting(0, "of the random numbers", low=0)
    needs: ClassVar[frozenset[Signal]] = frozenset()
    about: ClassVar[str] = "seeded uniform"

    def start(self, layers: int) -> ScoreState:
        rng = np.random.default_rng(self.seed)
        return AtBirth(lambda run: rng.random((1, run.num_tokens)))


@dataclass(frozen=True)
class Position(Score):
    """The order of arrival: what is oldest ranks lowest."""

    needs: ClassVar[frozenset[Signal]] = frozenset()
    about: ClassVar[str] = "position"

    def start(self, layers: int) -> ScoreState:
        arrivals = count()
        return AtBirth(lambda run: np.fromiter(arrivals, np.float64, run.num_tokens)[None])


@dataclass(frozen=True)
class LagVariance(FixedScore):
    """Lag-KV as the EpiKV paper streams it: spread of lag-normalised key plus value.

    Keys and values are normalised per channel by the previous chunk's minimum and maximum where
    they are observed (they are too large for a trace); the score is the mean over layers.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LAG_KEY, Signal.LAG_VALUE})
    about: ClassVar[str] = "lag-normalised spread of key and value"

    def compute(self, run: TokenRun) -> np.ndarray:
        key = run.observed.per_layer[Signal.LAG_KEY].astype(np.float64)
        value = run.observed.per_layer[Signal.LAG_VALUE].astype(np.float64)
        return np.asarray(sum_in_order(key + value)[None] / key.shape[1])


@dataclass(frozen=True)
class EvictionTime(FixedScore):
    """Iteration after which the offline optimum evicts a token; infinite for those that stay.

    Replays alone can know it: the optimum is that of the recorded attention.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION, Signal.EVICTION_TIME})
    about: ClassVar[str] = "time of eviction in the optimal schedule"

    def compute(self, run: TokenRun) -> np.ndarray:
        return np.asarray(run.observed.per_layer[Signal.EVICTION_TIME], np.float64)[None]


class ScoreBook:
    """The scores of one search that a policy asked for, kept up to date together.

    Equal scores are followed once, whatever their names.
    """

    def __init__(self, scores: Mapping[str, Score], layers: int) -> None:
        followed = {score: score.start(layers) for score in dict.fromkeys(scores.values())}
        self._named = {name: followed[score] for name, score in scores.items()}
        self._states = tuple(dict.fromkeys(self._named.values()))

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        for state in self._states:
            state.begin(run, tree, generated)

    def steps(self, count: int) -> Iterator[int]:
        """Observe iterations one after the other, yielding each."""
        for step in range(count):
            for state in self._states:
                state.observe(step)
            yield step

    def skip(self, count: int) -> None:
        """Observe `count` iterations between which no decision falls."""
        for state in self._states:
            state.observe_all(0, count)

    def values(self) -> dict[str, np.ndarray]:
        """Score arrays by name; views that stay current until the next `begin`."""
        return {name: state.values for name, state in self._named.items()}
