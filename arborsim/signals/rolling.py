"""Rolling statistics over a trailing window, and the scores of EpiKV that are made of them.

A running sum over the whole sequence is fast, but its rounding depends on where it started, so a
live run (one token at a time) and a replay (a whole run at once) would disagree in the last bit
and, at a tie, in the decision.  Here every output sums its own window, always newest first,
whatever the number of windows.

A band of layers makes one stream of numbers along the token's path.  A score is a weighted sum of
rolling statistics of such streams, computed when the token is born and frozen (arXiv:2606.26472,
sections 3.2 and 3.3).  EpiKV measures the length of a hidden-state change.  `HiddenCosine` measures
its angle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.scores import AtBirth, Score, ScoreState, sum_in_order
from arborsim.signals.vectors import layer_mean, norms

_SHORT = 4  # runs of fewer windows than this are computed in whole tables
_AT_ONCE = 256  # vectors to widen at once
EPSILON = 1e-6
TURNS = ("state", "change")


def rolling_mean_std(
    history: np.ndarray, new: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and population standard deviation over the trailing `window` values.

    `history`, float64 ``[h]``, holds values before the first of `new`, float64 ``[n]``, oldest
    first.  With fewer than `window` - 1 the window is not yet full.  Mean, standard deviation and
    number of values in the window, itself included, of each new value.  Float64 ``[n]``.
    """
    by_lag, count, known = _windows(history, new, window)
    mean = sum_in_order(by_lag, axis=0) / count
    if len(new) < _SHORT * window:  # few calls matter more than memory
        full = np.arange(window)[:, None] < count  # else the window reaches back too far
        squares = np.where(full, by_lag - mean, 0.0) ** 2
        return mean, np.sqrt(sum_in_order(squares, axis=0) / count), count
    total = np.zeros(len(new))
    for lag, values in enumerate(by_lag):
        square = (values - mean) ** 2
        square[: max(0, lag - known)] = 0.0  # the window reaches back too far here
        total += square
    return mean, np.sqrt(total / count), count


def rolling_mean(history: np.ndarray, new: np.ndarray, window: int) -> np.ndarray:
    """The mean alone, float64 ``[n]``, with the parameters of `rolling_mean_std`."""
    by_lag, count, _ = _windows(history, new, window)
    return np.asarray(sum_in_order(by_lag, axis=0) / count)


def _windows(
    history: np.ndarray, new: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The values of every window, how many are known, and how many came before the new ones.

    Row ``lag`` of the table ``[window, n]`` holds, for every output, the value that many tokens
    back, or 0 where there is none.
    """
    history = history[max(0, len(history) - (window - 1)) :]
    padded = np.concatenate([np.zeros(window - 1 - len(history)), history, new])
    count = np.minimum(len(history) + 1 + np.arange(len(new)), window).astype(np.float64)
    size = padded.itemsize  # a view, as `sliding_window_view` makes at many times the cost
    by_lag: np.ndarray = np.ndarray(
        (window, len(new)), padded.dtype, padded, (window - 1) * size, (-size, size)
    )
    return by_lag, count, len(history)


def rolling_z(history: np.ndarray, new: np.ndarray, window: int, epsilon: float) -> np.ndarray:
    """``(g - mean) / (std + epsilon)`` over the trailing window (0 with less than two)."""
    mean, std, count = rolling_mean_std(history, new, window)
    return np.where(count < 2, 0.0, (new - mean) / (std + epsilon))


@dataclass(frozen=True)
class Band:
    """Consecutive layers whose mean makes one stream, with its statistic's weight in the score.

    `first` and `last` are shares of the model's depth, rounded to the nearest layer.
    """

    first: float
    last: float
    weight: float = 1.0

    def layers(self, depth: int) -> tuple[int, int]:
        """First and last layer in a model of `depth` layers."""
        return min(round(self.first * depth), depth - 1), min(round(self.last * depth), depth - 1)


@dataclass(frozen=True)
class RollingBands(Score):
    """Weighted sum over bands of a rolling statistic of a signal with one value per layer.

    The `window` newest tokens, the current one included, trail over the generated tokens of the
    token's own path, and prompt tokens get 0.  `with_prompt` they count as generated ones.  The
    statistic is the window's mean, or how far ("z") the newest value lies from it in standard
    deviations, to which `epsilon` is added.
    """

    signal: Signal
    bands: tuple[Band, ...]
    statistic: str = "z"
    window: int = 64
    epsilon: float = EPSILON
    prompt: bool = False

    def with_prompt(self) -> Score:
        return replace(self, prompt=True)

    @property
    def about(self) -> str:
        kind = "z-scored" if self.statistic == "z" else "rolling mean"
        contrast = "" if len(self.bands) < 2 else ", contrast of two bands of layers"
        name = self.signal.value.replace("_", " ").replace("hidden ", "hidden-state ")
        return f"{name}, {kind}{contrast}"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    def start(self, layers: int) -> ScoreState:
        return RollingState(self, layers)


class RollingState(AtBirth):
    """Streams that trail along every path.  `streams` says what flows in them."""

    def __init__(self, spec: RollingBands, layers: int) -> None:
        super().__init__(self._scores)
        self._spec = spec
        self._layers = [band.layers(layers) for band in spec.bands]
        self._streams = [GrowingArray(np.float64) for _ in spec.bands]
        self._prompt_tokens = 0
        self._tree, self._generated = ThoughtTree(), False  # those of the newest run

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._tree, self._generated = tree, generated
        super().begin(run, tree, generated)

    def streams(self, run: TokenRun) -> list[np.ndarray]:
        """New values of each band's stream, float64 ``[tokens]``."""
        observed = run.observed.per_layer[self._spec.signal]
        return [layer_mean(observed, first, last) for first, last in self._layers]

    def _scores(self, run: TokenRun) -> np.ndarray:
        for stream, fresh in zip(self._streams, self.streams(run), strict=True):
            stream.extend(fresh)
        scores = np.zeros((1, run.num_tokens))
        if not self._generated and not self._spec.prompt:
            self._prompt_tokens = run.num_tokens
        else:
            for w, leaf in enumerate(run.leaves):
                scores[0, w :: len(run.leaves)] = self._leaf(self._tree.path(leaf), run.steps)
        return scores

    def _leaf(self, path: np.ndarray, steps: int) -> np.ndarray:
        """Scores of the last `steps` tokens of `path`."""
        spec = self._spec
        window = path[max(self._prompt_tokens, len(path) - steps - (spec.window - 1)) :]
        total = np.zeros(steps)
        for band, stream in zip(spec.bands, self._streams, strict=True):
            values = stream.values[window]
            old, new = values[: len(values) - steps], values[len(values) - steps :]
            if spec.statistic == "mean":
                total += band.weight * rolling_mean(old, new, spec.window)
            else:
                total += band.weight * rolling_z(old, new, spec.window, spec.epsilon)
        return total


@dataclass(frozen=True)
class HiddenChangeContrast(Score):
    """EpiKV's score ``z_A - z_B`` of the hidden-state change at two layers (Eqs. 1-3).

    The paper's layers are 10 and 21 of 32.  The statistic "mean" is its uncorrected score, the
    contrast of rolling means (Eq. 2).
    """

    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)
    window: int = setting(64, "trailing window", unit="tokens", low=2, high=65536)
    epsilon: float = setting(EPSILON, "added to the standard deviation", low=1e-12, high=1)
    statistic: str = setting(
        "z", "z-score of the newest value, or mean of the window", choices=("z", "mean")
    )
    needs = frozenset({Signal.HIDDEN_CHANGE})

    @property
    def about(self) -> str:
        kind = "z-scored" if self.statistic == "z" else "rolling mean"
        return f"hidden-state change, {kind}, contrast of two layers"

    @property
    def bands(self) -> RollingBands:
        """The same as two bands of one layer each."""
        bands = (Band(self.layer_a, self.layer_a), Band(self.layer_b, self.layer_b, -1.0))
        return RollingBands(Signal.HIDDEN_CHANGE, bands, self.statistic, self.window, self.epsilon)

    def with_prompt(self) -> Score:
        return self.bands.with_prompt()

    def start(self, layers: int) -> ScoreState:
        return self.bands.start(layers)


@dataclass(frozen=True)
class HiddenCosine(Score):
    """``1 - cos`` of hidden vectors at one layer, z-scored over the token's own path.

    Vectors are those of a token and the one before it ("state"), or the changes that led to them
    ("change").  The score is 0 where there are not as many tokens, or a vector is zero.  The layer
    is the recorded one nearest to the one asked for.  Prompt tokens count as in `RollingBands`.
    """

    turn: str = setting("state", "what turns: the hidden state, or its change", choices=TURNS)
    layer: float = setting(10 / 32, "layer", unit="share of the depth", low=0, high=1)
    window: int = setting(64, "trailing window", unit="tokens", low=2, high=65536)
    epsilon: float = setting(EPSILON, "added to the standard deviation", low=1e-12, high=1)
    prompt: bool = False
    needs = frozenset({Signal.HIDDEN})

    @property
    def about(self) -> str:
        return f"turn of the hidden {self.turn}, z-scored"

    def with_prompt(self) -> Score:
        return replace(self, prompt=True)

    @property
    def band(self) -> Band:
        """Its one layer."""
        return Band(self.layer, self.layer)

    def hidden_layers(self, layers: int) -> frozenset[int]:
        return frozenset({self.band.layers(layers)[0]})

    def start(self, layers: int) -> ScoreState:
        return _CosineState(self, layers)


class _CosineState(RollingState):
    def __init__(self, spec: HiddenCosine, layers: int) -> None:
        what = Signal.HIDDEN, (spec.band,), "z", spec.window, spec.epsilon, spec.prompt
        super().__init__(RollingBands(*what), layers)
        self._layer, _ = spec.band.layers(layers)
        self._back = 1 + TURNS.index(spec.turn)  # vectors before a token that count
        self._newest: dict[int, np.ndarray] = {}  # of a node's tokens and those before them

    def streams(self, run: TokenRun) -> list[np.ndarray]:
        assert run.observed.hidden is not None, "the reader was not asked for hidden vectors"
        vectors = run.observed.hidden.nearest(self._layer)
        width, fresh = len(run.leaves), np.zeros(run.num_tokens)
        for w, leaf in enumerate(run.leaves):
            own = vectors[w::width]
            before = self._before(leaf) if self._generated else own[:0]
            if self._generated or self._spec.prompt:  # else the windows leave it out
                fresh[w::width] = self._distances(before, own)
            path = np.concatenate([before, own[-self._back :]])
            self._newest[leaf] = path[-self._back :]
        return [fresh]

    def _before(self, leaf: int) -> np.ndarray:
        """The newest vectors on the path to `leaf`, float16 ``[at most back, size]``."""
        while leaf not in self._newest:  # the prompt is
            leaf = self._tree.nodes[leaf].parent
        return self._newest[leaf]

    def _distances(self, before: np.ndarray, own: np.ndarray) -> np.ndarray:
        path = np.concatenate([before, own])
        parts = [np.zeros(self._back - len(before))]  # of tokens that have too few before them
        for first in range(0, len(path) - self._back, _AT_ONCE):
            some = path[first : first + _AT_ONCE + self._back].astype(np.float64)
            parts.append(_cosine_distances(np.diff(some, axis=0) if self._back > 1 else some))
        return np.concatenate(parts)[: len(own)]


def _cosine_distances(vectors: np.ndarray) -> np.ndarray:
    """``1 - cos`` of each vector ``[n, size]`` and the one before it, float64 ``[n - 1]``."""
    length = norms(vectors)
    both = length[1:] * length[:-1]
    product = sum_in_order(vectors[1:] * vectors[:-1])
    return np.where(both > 0, 1 - product / np.where(both > 0, both, 1.0), 0.0)
