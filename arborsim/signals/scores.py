"""Per-token scores: what a policy ranks tokens by, and those that are fixed at birth.

A `Score` is a frozen description with parameters.  `Score.start` makes the state that follows one
search.  Values are always ``[groups, tokens]``.  A group of a cache is the whole model (grouping
"shared": one group), a captured layer ("layer"), or a captured layer and KV head ("head", layer by
layer).  *Frozen* scores are fixed when a token is born and computed for a whole run at once.
*Accumulating* scores are brought up to date iteration by iteration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.core.tree import GrowingTable, ThoughtTree

GROUPINGS = ("shared", "layer", "head")
Changes = Literal["never", "rises", "freely"]
"""How values change after birth, where "rises" is up to a constant that all tokens share."""
# From this many sums on, adding them side by side is faster than one after the other.
_MANY_SUMS = 256
NEVER_READ = 2.0**31  #: distance to the next reader where there is none
UNREAD = -1  # fills up the rows of tokens with fewer readers than others


def grouping_setting(default: str = "shared") -> str:
    """The field `grouping` of a score."""
    return setting(default, "what has values of its own", choices=GROUPINGS)


class Score(ABC):
    """Description of a score: a frozen dataclass whose fields are its settings."""

    @property
    @abstractmethod
    def about(self) -> str:
        """Its name in sentences."""

    @property
    @abstractmethod
    def needs(self) -> frozenset[Signal]:
        """Observations it is computed from."""

    @property
    def changes(self) -> Changes:
        """How a token's value changes after its birth."""
        return "never"

    @property
    def use(self) -> RowUse | None:
        """The reduction of attention rows that is enough for it, or None for rows as they are."""
        return None

    @property
    def row_uses(self) -> frozenset[RowUse]:
        """All that it needs of attention rows."""
        if self.use is not None:
            return frozenset({self.use})
        rows = {Signal.ATTENTION: "shared", Signal.HEAD_ATTENTION: "head"}
        return frozenset(RowUse(rows[signal], "rows") for signal in self.needs & rows.keys())

    @property
    def sizes(self) -> frozenset[Signal]:
        """Those of keys and values whose L1 norm in each KV head is enough."""
        return frozenset()

    def hidden_layers(self, layers: int) -> frozenset[int]:
        """Those of `layers` layers whose outputs it reads, all unless a subclass reads fewer."""
        return frozenset(range(layers) if Signal.HIDDEN in self.needs else ())

    @property
    def blurred(self) -> bool:
        """Whether most tokens come out alike on sparse recordings."""
        return False

    @property
    def grouping(self) -> str:
        """Which parts of the cache have values of their own: one of `GROUPINGS`."""
        return "shared"

    def with_prompt(self) -> Score:
        """The same for a prompt that is not pinned: one whose tokens have true values, too."""
        return self

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

    #: Attributes that `begin` makes anew: a copy of a state between two runs goes without
    of_run: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._table: GrowingTable | None = None  # made with the first observation

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in self.of_run}

    @property
    def values(self) -> np.ndarray:
        """Float64 ``[groups, tokens]``, or vectors ``[groups, tokens, size]``."""
        return np.empty((0, 0)) if self._table is None else self._table.values

    #: Whether it tells tokens that queries can read from others (`hold`, `lose`)
    knows_held: ClassVar[bool] = False

    def hold(self, held: np.ndarray) -> None:  # noqa: B027 - most have no use for it
        """Before `begin`: which of the tokens so far can be read, bool ``[cache groups, tokens]``.

        Those of the run itself can.
        """

    def lose(self, tokens: np.ndarray) -> None:  # noqa: B027 - most have no use for it
        """No query of the rest of the run reads these tokens of its path (one cache group only)."""

    @abstractmethod
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        """Take in a run whose tokens the tree already holds.  `generated` is False for a prompt."""

    def observe(self, step: int) -> None:
        """Bring accumulating scores up to date with iteration `step` of the run."""
        self.observe_all(step, step + 1)

    @abstractmethod
    def observe_all(self, first: int, last: int) -> None:
        """Observe iterations ``first`` to ``last``, with the same bits as one by one."""

    def _grow(self, groups: int, tokens: int) -> np.ndarray:
        """Append columns of zeros for new tokens, and return all values."""
        if self._table is None:
            self._table = GrowingTable(groups, np.float64)
        self._table.extend(tokens, 0)
        return self._table.values


class AtBegin(ScoreState):
    """Values that runs change when they begin, and iterations do not."""

    def observe_all(self, first: int, last: int) -> None:
        pass


class AtBirth(AtBegin):
    """Values that never change, made by `compute` for a run's tokens (`FixedScore.compute`)."""

    def __init__(self, compute: Callable[[TokenRun], np.ndarray]) -> None:
        super().__init__()
        self._compute = compute

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        fresh = self._compute(run)
        if self._table is None:
            self._table = GrowingTable(len(fresh), fresh.dtype, cell=fresh.shape[2:])
        self._table.extend(fresh.shape[1], fresh)


class OfPrompt(AtBirth):
    """A number per group for all its tokens, made by `compute` of the prompt's run."""

    def __init__(self, compute: Callable[[TokenRun], np.ndarray]) -> None:
        super().__init__(lambda run: np.repeat(self._of_groups[:, None], run.num_tokens, axis=1))
        self._of_prompt = compute

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        if not generated:
            self._of_groups = self._of_prompt(run)
        super().begin(run, tree, generated)


def sum_in_order(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Sum over an axis, added strictly one after the other (`numpy.sum` may add in pairs)."""
    if values.size < _MANY_SUMS * values.shape[axis] or not values.size:
        return np.asarray(np.add.accumulate(values, axis=axis).take(-1, axis))
    parts = np.moveaxis(values, axis, 0)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return np.asarray(total)


def rounded(values: np.ndarray) -> np.ndarray:
    """To nine decimals, so that plans do not depend on how a machine's BLAS or libm rounds."""
    return np.asarray(np.round(values, 9))


class Steps(Iterator[int]):
    """The iterations of a run, 0, 1, ...: `states` are up to date with the one it is at."""

    def __init__(self, states: Sequence[ScoreState], count: int) -> None:
        self._states, self._next, self._count = states, 0, count
        self._told = [state for state in states if state.knows_held]

    def __next__(self) -> int:
        step = self._next
        if step == self._count:
            raise StopIteration
        self._next += 1
        for state in self._states:
            state.observe(step)
        return step

    def skip(self, count: int) -> int:
        """Observe the next `count` iterations or those that are left, and return their number."""
        first = self._next
        self._next = min(first + count, self._count)
        if self._next > first:
            for state in self._states:
                state.observe_all(first, self._next)
        return self._next - first

    def lose(self, path: np.ndarray, positions: list[int]) -> None:
        """After the iteration that it is at, what stands there on the `path` was evicted."""
        for state in self._told:
            state.lose(path[positions])


class ScoreBook:
    """The scores of one search that a policy asked for, kept up to date together.

    Equal scores are followed once, whatever their names.
    """

    def __init__(self, scores: Mapping[str, Score], layers: int) -> None:
        followed = {score: score.start(layers) for score in dict.fromkeys(scores.values())}
        self._named = {name: followed[score] for name, score in scores.items()}
        self._states = tuple(dict.fromkeys(self._named.values()))

    def begin(
        self, run: TokenRun, tree: ThoughtTree, generated: bool, tier: np.ndarray | None = None
    ) -> None:
        """Take in a run.  `tier`, int8 ``[cache groups, tokens]``, is that of the tokens before it.

        Without, all can be read.
        """
        if tier is None:
            tier = np.zeros((1, tree.num_tokens - run.num_tokens), dtype=np.int8)
        held: np.ndarray | None = None
        for state in self._states:
            if state.knows_held:
                held = np.asarray(tier != Tier.EVICTED) if held is None else held
                state.hold(held)
            state.begin(run, tree, generated)

    def steps(self, count: int) -> Steps:
        """Iterations of a run of `count`, to be observed one after the other."""
        return Steps(self._states, count)

    def skip(self, count: int) -> None:
        """Observe `count` iterations between which no decision falls."""
        self.steps(count).skip(count)

    def values(self) -> dict[str, np.ndarray]:
        """Score arrays by name, as views that stay current until the next `begin`."""
        return {name: state.values for name, state in self._named.items()}


@dataclass(frozen=True)
class SeededUniform(Score):
    """Uniform random numbers in [0, 1), the same for the same seed and token order."""

    seed: int = setting(0, "of the random numbers", low=0)
    needs = frozenset()
    about = "seeded uniform"

    def start(self, layers: int) -> ScoreState:
        return AtBirth(partial(_drawn, np.random.default_rng(self.seed)))


def _drawn(rng: np.random.Generator, run: TokenRun) -> np.ndarray:
    return rng.random((1, run.num_tokens))


@dataclass(frozen=True)
class Position(Score):
    """The order of arrival: what is oldest ranks lowest."""

    needs = frozenset()
    about = "position"

    def start(self, layers: int) -> ScoreState:
        return _Arrivals()


class _Arrivals(AtBegin):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        first = self.values.shape[1]
        self._grow(1, run.num_tokens)[0, first:] = np.arange(first, first + run.num_tokens)


@dataclass(frozen=True)
class EvictionTime(FixedScore):
    """Iteration after which the offline optimum evicts a token, infinite for those that stay.

    Replays alone can know it: the optimum is that of the recorded attention.
    """

    grouping: str = grouping_setting()

    about = "time of eviction in the optimal schedule"

    @property
    def needs(self) -> frozenset[Signal]:
        shared = self.grouping == "shared"
        rows = Signal.ATTENTION if shared else Signal.HEAD_ATTENTION
        return frozenset({rows, Signal.EVICTION_TIME})

    def compute(self, run: TokenRun) -> np.ndarray:
        return np.asarray(run.observed.per_layer[Signal.EVICTION_TIME].T, np.float64)


@dataclass(frozen=True)
class Readers(Score):
    """Per token the step that the reasoning is at after it, then the steps that read it.

    A reference task numbers the steps of its reasoning and says, when a token is born, which of
    them will read it.  A token is needed if a step that has not been passed reads it.
    """

    needs = frozenset({Signal.READERS})
    about = "steps of the task that read the token"

    def start(self, layers: int) -> ScoreState:
        return _ReadersState()


class _ReadersState(AtBegin):
    """Int32 ``[1, tokens, 1 + most readers]``, which gets wider as tokens have more readers."""

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        fresh = run.observed.per_layer[Signal.READERS]
        known = self._table
        width = max(fresh.shape[1], 0 if known is None else known.values.shape[2])
        if known is None or known.values.shape[2] < width:
            self._table = GrowingTable(1, np.int32, cell=(width,))
            if known is not None:
                self._append(known.values[0])
        self._append(fresh)

    def _append(self, rows: np.ndarray) -> None:
        assert self._table is not None
        self._table.extend(len(rows), UNREAD)
        self._table.values[0, -len(rows) :, : rows.shape[1]] = rows


def readers_table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of different lengths as one table, int32 ``[tokens, longest]``."""
    table = np.full((len(rows), max(map(len, rows), default=1)), UNREAD, dtype=np.int32)
    for own, row in zip(table, rows, strict=True):
        own[: len(row)] = row
    return table


def steps_to_reader(steps: np.ndarray, now: np.ndarray | int) -> np.ndarray:
    """Steps from `now` to the nearest one that reads a token, or `NEVER_READ`.

    Of `steps`, int32 ``[readers, tokens]``, and `now`, one step or int ``[tokens]``.  Float64
    ``[tokens]``.
    """
    nearest = np.full(steps.shape[1], NEVER_READ, dtype=np.uint32)
    ahead = np.empty(steps.shape[1], dtype=np.int32)
    now = np.asarray(now, dtype=np.int32)
    for each in steps:
        np.subtract(each, now, out=ahead)
        # What lies behind is negative, and so large without a sign; `UNREAD` always does.
        np.minimum(nearest, ahead.view(np.uint32), out=nearest)
    return nearest.astype(np.float64)
