"""Rolling scores of per-layer signals: the hidden-state and key/value families of EpiKV.

A band of layers makes one stream of numbers along the token's path; a score is a weighted sum of
rolling statistics of such streams, computed when the token is born and frozen (arXiv:2606.26472,
sections 3.2 and 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.rolling import rolling_mean, rolling_z
from arborsim.signals.scores import FrozenState, Score, ScoreState, observe_all

EPSILON = 1e-6
STATISTICS = ("z", "mean")


def layer_mean(values: np.ndarray, first: int, last: int) -> np.ndarray:
    """Mean over the layers `first` to `last`, both included, added in their order.

    Parameters
    ----------
    values : float16 ``[tokens, layers]``

    Returns
    -------
    float64 ``[tokens]``
        Layers whose value is not finite are left out; 0 without any other.
    """
    chosen = values[:, first : last + 1].astype(np.float64)
    finite = np.isfinite(chosen)
    count: int | np.ndarray = last + 1 - first
    if not finite.all():
        chosen = np.where(finite, chosen, 0.0)
        count = np.maximum(finite.sum(axis=1), 1)
    # `accumulate` adds strictly in order (`numpy.sum` may add in pairs).
    return np.asarray(np.add.accumulate(chosen, axis=1)[:, -1] / count)


@dataclass(frozen=True)
class Band:
    """Consecutive layers whose mean makes one stream.

    Parameters
    ----------
    first, last : float
        Depth of the first and last layer as shares of the model's depth, rounded to the nearest
        layer.
    weight : float
        Factor of the stream's statistic in the score.
    """

    first: float
    last: float
    weight: float = 1.0

    def layers(self, depth: int) -> tuple[int, int]:
        """First and last layer in a model of `depth` layers."""
        return min(round(self.first * depth), depth - 1), min(round(self.last * depth), depth - 1)


WHOLE_MODEL = Band(0.0, 1.0)


@dataclass(frozen=True)
class RollingBands:
    """Weighted sum over bands of a rolling statistic of a signal with one value per layer.

    The window trails over the generated tokens of the token's own path; prompt tokens, which every
    user of the score protects, get 0.

    Parameters
    ----------
    signal : Signal
    bands : tuple of Band
    statistic : {"z", "mean"}
        How far the newest value lies from the window's mean, in standard deviations, or that mean.
    window : int
        Tokens in the trailing window, the current one included.
    epsilon : float
        Added to the standard deviation.
    """

    signal: Signal
    bands: tuple[Band, ...]
    statistic: str = "z"
    window: int = 64
    epsilon: float = EPSILON

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    def start(self, layers: int) -> ScoreState:
        return _RollingState(self, layers)

    def rolling(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """The statistic as a function of the values before a run and those of the run."""
        if self.statistic == "mean":
            return partial(rolling_mean, window=self.window)
        return partial(rolling_z, window=self.window, epsilon=self.epsilon)


class _RollingState(FrozenState):
    def __init__(self, spec: RollingBands, layers: int) -> None:
        super().__init__()
        self._spec = spec
        self._rolling = spec.rolling()
        self._layers = [band.layers(layers) for band in spec.bands]
        self._streams = [GrowingArray(np.float64) for _ in spec.bands]
        self._prompt_tokens = 0

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        observed = run.observed.per_layer[self._spec.signal]
        for (first, last), stream in zip(self._layers, self._streams, strict=True):
            stream.extend(layer_mean(observed, first, last))
        scores = np.zeros(run.num_tokens)
        if not generated:
            self._prompt_tokens = run.num_tokens
        else:
            for w, leaf in enumerate(run.leaves):
                scores[w :: len(run.leaves)] = self._leaf(tree.path(leaf), run.steps)
        self._values.extend(scores)

    def _leaf(self, path: np.ndarray, steps: int) -> np.ndarray:
        """Scores of the last `steps` tokens of `path`."""
        first = max(self._prompt_tokens, len(path) - steps - (self._spec.window - 1))
        window = path[first:]
        total = np.zeros(steps)
        for band, stream in zip(self._spec.bands, self._streams, strict=True):
            values = stream.values[window]
            old, new = values[: len(values) - steps], values[len(values) - steps :]
            total += band.weight * self._rolling(old, new)
        return total


@dataclass(frozen=True)
class HiddenChangeContrast:
    """EpiKV's score ``z_A - z_B`` of the hidden-state change at two layers (Eqs. 1-3).

    Parameters
    ----------
    layer_a, layer_b : float
        Depth of the layers as a share of the model's depth (the paper: 10 and 21 of 32).
    window : int
        Tokens in the trailing window, the current one included.
    epsilon : float
    statistic : {"z", "mean"}
        "mean" is the uncorrected score, the contrast of rolling means (Eq. 2).
    """

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)
    window: int = setting(64, "trailing window", unit="tokens", low=2, high=65536)
    epsilon: float = setting(EPSILON, "added to the standard deviation", low=1e-12, high=1)
    statistic: str = setting(
        "z", "z-score of the newest value, or mean of the window", choices=STATISTICS
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HIDDEN_CHANGE})

    def start(self, layers: int) -> ScoreState:
        bands = (Band(self.layer_a, self.layer_a), Band(self.layer_b, self.layer_b, -1.0))
        score = RollingBands(Signal.HIDDEN_CHANGE, bands, self.statistic, self.window, self.epsilon)
        return score.start(layers)


@dataclass(frozen=True)
class Sum:
    """A score that is fixed at birth plus one that accumulates.

    Parameters
    ----------
    frozen, accumulating : Score
        The second one starts at 0 and changes in place.
    """

    frozen: Score
    accumulating: Score

    @property
    def needs(self) -> frozenset[Signal]:
        return self.frozen.needs | self.accumulating.needs

    def start(self, layers: int) -> ScoreState:
        return _SumState(self.frozen.start(layers), self.accumulating.start(layers))


class _SumState:
    def __init__(self, frozen: ScoreState, accumulating: ScoreState) -> None:
        self._frozen = frozen
        self._sum = accumulating

    @property
    def values(self) -> np.ndarray:
        return self._sum.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._frozen.begin(run, tree, generated)
        self._sum.begin(run, tree, generated)
        # What accumulates starts from what is fixed, so that one live array holds both.
        born = slice(len(self._sum.values) - run.num_tokens, None)
        self._sum.values[born] += self._frozen.values[born]

    def observe(self, step: int) -> None:
        self._sum.observe(step)

    def observe_all(self, first: int, last: int) -> None:
        """Observe iterations ``first`` to ``last``."""
        observe_all(self._sum, first, last)
