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

from arborsim.events import TokenRun
from arborsim.policies.settings import setting
from arborsim.signals.observations import Signal
from arborsim.signals.rolling import rolling_z
from arborsim.tree import GrowingArray, ThoughtTree


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


class _FrozenState:
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


class _UniformState(_FrozenState):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._values.extend(self._rng.random(run.num_tokens))


@dataclass(frozen=True)
class HiddenChangeContrast:
    """EpiKV's score ``z_A - z_B`` of the hidden-state change at two layers (Eqs. 1-3).

    The window trails over the generated tokens of the token's own path; prompt tokens, which every
    user of the score protects, get 0.

    Parameters
    ----------
    layer_a, layer_b : float
        Depth of the layers as a share of the model's depth (the paper: 10 and 21 of 32).
    window : int
        Tokens in the trailing window, the current one included.
    epsilon : float
    """

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)
    window: int = setting(64, "trailing window of the z-score", unit="tokens", low=2, high=65536)
    epsilon: float = setting(1e-6, "added to the standard deviation", low=1e-12, high=1)
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HIDDEN_CHANGE})

    def start(self, layers: int) -> ScoreState:
        return _ContrastState(self, layers)

    def layer_ids(self, layers: int) -> tuple[int, int]:
        """The two layers in a model of this depth, rounded to the nearest."""
        last = layers - 1
        return min(round(self.layer_a * layers), last), min(round(self.layer_b * layers), last)


class _ContrastState(_FrozenState):
    def __init__(self, spec: HiddenChangeContrast, layers: int) -> None:
        super().__init__()
        self._spec = spec
        self._layers = spec.layer_ids(layers)
        self._change = tuple(GrowingArray(np.float64) for _ in self._layers)
        self._prompt_tokens = 0

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        change = run.observed.per_layer[Signal.HIDDEN_CHANGE]
        for layer, kept in zip(self._layers, self._change, strict=True):
            kept.extend(change[:, layer].astype(np.float64))
        scores = np.zeros(run.num_tokens)
        if not generated:
            self._prompt_tokens = run.num_tokens
        else:
            for w, leaf in enumerate(run.leaves):
                scores[w :: len(run.leaves)] = self._leaf(tree.path(leaf), run.steps)
        self._values.extend(scores)

    def _leaf(self, path: np.ndarray, steps: int) -> np.ndarray:
        first = max(self._prompt_tokens, len(path) - steps - (self._spec.window - 1))
        z = []
        for kept in self._change:
            stream = kept.values[path[first:]]
            old, new = stream[: len(stream) - steps], stream[len(stream) - steps :]
            z.append(rolling_z(old, new, self._spec.window, self._spec.epsilon))
        return np.asarray(z[0] - z[1])


@dataclass(frozen=True)
class LagVariance:
    """Lag-KV as the EpiKV paper streams it: spread of lag-normalised key plus value.

    Keys and values are normalised per channel by the previous chunk's minimum and maximum where
    they are observed (they are too large for a trace); the score is the mean over layers.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.LAG_KEY, Signal.LAG_VALUE})

    def start(self, layers: int) -> ScoreState:
        return _LagState()


class _LagState(_FrozenState):
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

    Parameters
    ----------
    from_later_blocks : bool
        Count only queries outside the token's own block (ArborKV's ``A_i(t)``, sum over u > b_i).
    """

    from_later_blocks: bool = setting(False, "count only queries outside the token's block")
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _CumulativeState(self.from_later_blocks)


class _CumulativeState:
    def __init__(self, from_later_blocks: bool) -> None:
        self._from_later_blocks = from_later_blocks
        self._sums = GrowingArray(np.float64)
        self._rows: Iterator[np.ndarray] = iter(())
        self._now = self._sums.values
        self._leaves: list[tuple[np.ndarray | None, int]] = []

    @property
    def values(self) -> np.ndarray:
        return self._sums.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._sums.extend(np.zeros(run.num_tokens))
        assert run.observed.attention is not None, "the reader was not asked for attention"
        self._rows = iter(run.observed.attention)
        self._now = self._sums.values
        self._leaves = []
        for leaf in run.leaves:
            path = tree.path(leaf)
            straight = int(path[-1]) == len(path) - 1  # ids rise, so this means 0, 1, 2, ...
            own = tree.num_node_tokens(leaf) - run.steps
            self._leaves.append((None if straight else path, own))

    def observe(self, step: int) -> None:
        for path, own in self._leaves:
            row = next(self._rows)
            if self._from_later_blocks:
                row = row[: len(row) - (own + step + 1)]
            if path is None:
                received = self._now[: len(row)]
                received += row  # in place: `self._now[...] += row` would copy it once more
            else:
                self._now[path[: len(row)]] += row


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

    def values(self) -> dict[str, np.ndarray]:
        """Score arrays by name; views that stay current until the next `begin`."""
        return {name: state.values for name, state in self._states.items()}
