"""Scores of keys and values: their size, spread and direction, fixed when a token is born.

Traces describe the whole model by norms per layer and by a sketch of all keys.  Layers and KV heads
have their vectors.  Sums run over channels, heads and layers in a fixed order, so that the same
vector has the same score everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Observations, Signal
from arborsim.signals.scores import FixedScore, grouping_setting, sum_in_order


@dataclass(frozen=True)
class LagVariance(FixedScore):
    """Lag-KV as the EpiKV paper streams it: spread of lag-normalised key plus value.

    Keys and values are normalised per channel by the previous chunk's minimum and maximum where
    they are observed (they are too large for a trace).  The score is the mean over layers.
    """

    needs = frozenset({Signal.LAG_KEY, Signal.LAG_VALUE})
    about = "lag-normalised spread of key and value"

    def compute(self, run: TokenRun) -> np.ndarray:
        key = run.observed.per_layer[Signal.LAG_KEY].astype(np.float64)
        value = run.observed.per_layer[Signal.LAG_VALUE].astype(np.float64)
        return np.asarray(sum_in_order(key + value)[None] / key.shape[1])


def layer_mean(values: np.ndarray, first: int, last: int) -> np.ndarray:
    """Mean over the layers `first` to `last`, both included, added in their order.

    Values are ``[tokens, layers]``.  Those that are not finite are left out.  It is 0 without
    others.
    """
    if first == last:
        only = values[:, first].astype(np.float64)
        return np.where(np.isfinite(only), only, 0.0)
    chosen = values[:, first : last + 1].astype(np.float64)
    finite = np.isfinite(chosen)
    count: int | np.ndarray = last + 1 - first
    if not finite.all():
        chosen = np.where(finite, chosen, 0.0)
        count = np.maximum(finite.sum(axis=1), 1)
    return np.asarray(sum_in_order(chosen) / count)


def norms(vectors: np.ndarray) -> np.ndarray:
    """L2 norms over the last axis, float64."""
    return np.asarray(np.sqrt(sum_in_order(vectors * vectors)))


def vectors_per_group(observed: Observations, signal: Signal, grouping: str) -> np.ndarray:
    """Keys or values of a run's tokens, float16 ``[groups, tokens, size]``.

    "layer" joins the vectors of the layer's heads into one, "shared" those of all layers.
    """
    if signal is Signal.KEY_SKETCH:
        return observed.per_layer[signal][None]
    vectors = observed.keys if signal is Signal.KEYS else observed.values
    assert vectors is not None, f"the reader was not asked for {signal.value}"
    tokens, layers, heads, size = vectors.shape
    if grouping == "layer":
        return vectors.reshape(tokens, layers, heads * size).swapaxes(0, 1)
    if grouping == "shared":
        return vectors.reshape(1, tokens, layers * heads * size)
    return vectors.reshape(tokens, layers * heads, size).swapaxes(0, 1)


@dataclass(frozen=True)
class ValueSize(FixedScore):
    """L1 norm of a token's value, mean over the layers and KV heads of a group."""

    grouping: str = grouping_setting("head")
    about = "L1 norm of the value"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.VALUE_NORM if self.grouping == "shared" else Signal.VALUES})

    @property
    def sizes(self) -> frozenset[Signal]:
        return self.needs & {Signal.VALUES}

    def compute(self, run: TokenRun) -> np.ndarray:
        if self.grouping == "shared":
            recorded = run.observed.per_layer[Signal.VALUE_NORM].astype(np.float64)
            return np.asarray(sum_in_order(recorded)[None] / recorded.shape[1])
        size = run.observed.sizes.get(Signal.VALUES)
        if size is None:
            assert run.observed.values is not None, "the reader was not asked for values"
            # Sums of float16 values are exact in float64, in any order.
            size = np.abs(run.observed.values.astype(np.float64)).sum(axis=-1)
        return np.asarray(
            (size.mean(-1) if self.grouping == "layer" else size.reshape(len(size), -1)).T
        )


@dataclass(frozen=True)
class KeyLength(FixedScore):
    """L2 norm of a token's key, mean over the layers and KV heads of a group.

    Devoto et al. 2024, arXiv:2406.11430.
    """

    grouping: str = grouping_setting("head")
    about = "key norm"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.KEY_NORM if self.grouping == "shared" else Signal.KEYS})

    def compute(self, run: TokenRun) -> np.ndarray:
        if self.grouping == "shared":
            recorded = run.observed.per_layer[Signal.KEY_NORM]
            return layer_mean(recorded, 0, recorded.shape[1] - 1)[None]
        assert run.observed.keys is not None, "the reader was not asked for keys"
        length = norms(run.observed.keys.astype(np.float64))  # [tokens, layers, heads]
        if self.grouping == "head":
            return np.asarray(length.reshape(len(length), -1).T)
        return np.asarray((sum_in_order(length) / length.shape[-1]).T)


_LENGTH = 2.0**16
"""Length of a direction.

Float16 keys have 11 bits, so rounding loses little.  Products with the sum of up to 2**20
directions are whole numbers of at most 2**53: exact, in any order of adding.
"""


@dataclass(frozen=True)
class KeyDirections(FixedScore):
    """Keys scaled to the same length.  Float64 ``[groups, tokens, size]``.

    Scalar products are cosines, up to a factor.  A zero key stays zero.  "shared" takes the sketch
    of the keys of all layers and heads, a random projection in which cosines survive roughly, or
    unless `sketched` those keys themselves, joined.  "layer" joins the keys of a layer's heads.

    `whole` directions have length 2**16 and are rounded to whole numbers, others have length 1:
    products with sums of whole directions are exact, so that matrix products give the same bits on
    every machine and however a sum was built up.
    """

    grouping: str = grouping_setting("head")
    whole: bool = True
    sketched: bool = True
    about = "direction of the key"

    @property
    def needs(self) -> frozenset[Signal]:
        sketched = self.sketched and self.grouping == "shared"
        return frozenset({Signal.KEY_SKETCH if sketched else Signal.KEYS})

    def compute(self, run: TokenRun) -> np.ndarray:
        (signal,) = self.needs
        keys = vectors_per_group(run.observed, signal, self.grouping).astype(np.float64)
        length = norms(keys)[..., None]
        unit = keys / np.where(length > 0, length, 1.0)
        return np.rint(unit * _LENGTH) if self.whole else unit


@dataclass(frozen=True)
class Vectors(FixedScore):
    """Keys or values of every KV head as recorded, float16 ``[groups, tokens, head_dim]``."""

    signal: Signal
    grouping = "head"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    @property
    def about(self) -> str:
        return self.signal.value

    def compute(self, run: TokenRun) -> np.ndarray:
        return vectors_per_group(run.observed, self.signal, "head")
