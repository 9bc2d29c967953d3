"""Scores from keys and values themselves: norms, directions, and the vectors as they are.

Traces describe the whole model (grouping "shared") by norms per layer and by a sketch of all keys;
layers and KV heads have their vectors.  Sums run over channels, heads and layers in a fixed order,
so that the same vector has the same score everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Observations, Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.rows import row_signal
from arborsim.signals.scores import (
    Changes,
    FixedScore,
    Score,
    ScoreState,
    grouping_setting,
    sum_in_order,
)


def layer_mean(values: np.ndarray, first: int, last: int) -> np.ndarray:
    """Mean over the layers `first` to `last`, both included, added in their order.

    Of values ``[tokens, layers]``; those that are not finite are left out; 0 without any other.
    """
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

    "layer" joins the vectors of the layer's heads into one; "shared" has the sketch of the keys.
    """
    if signal is Signal.KEY_SKETCH:
        return observed.per_layer[signal][None]
    vectors = observed.keys if signal is Signal.KEYS else observed.values
    assert vectors is not None, f"the reader was not asked for {signal.value}"
    tokens, layers, heads, size = vectors.shape
    if grouping == "layer":
        return vectors.reshape(tokens, layers, heads * size).swapaxes(0, 1)
    return vectors.reshape(tokens, layers * heads, size).swapaxes(0, 1)


@dataclass(frozen=True)
class ValueSize(FixedScore):
    """L1 norm of a token's value, mean over the layers and KV heads of a group."""

    grouping: str = grouping_setting("head")
    about: ClassVar[str] = "L1 norm of the value"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.VALUE_NORM if self.grouping == "shared" else Signal.VALUES})

    def compute(self, run: TokenRun) -> np.ndarray:
        if self.grouping == "shared":
            recorded = run.observed.per_layer[Signal.VALUE_NORM].astype(np.float64)
            return np.asarray(sum_in_order(recorded)[None] / recorded.shape[1])
        assert run.observed.values is not None, "the reader was not asked for values"
        # Sums of float16 values are exact in float64, in any order.
        size = np.abs(run.observed.values.astype(np.float64)).sum(axis=-1)
        return np.asarray(
            (size.mean(-1) if self.grouping == "layer" else size.reshape(len(size), -1)).T
        )


@dataclass(frozen=True)
class ValueWeightedAttention(Score):
    """Attention received so far times the size of the token's value (VATP's score).

    ``S(i) = ||v_i||_1 x sum over queries t of a_t(i)`` (Guo et al. 2024, arXiv:2406.12335); norms
    are averaged over the layers and KV heads of a group.
    """

    grouping: str = grouping_setting()
    about: ClassVar[str] = "cumulative attention x L1 norm of the value"
    changes: ClassVar[Changes] = "freely"

    @property
    def needs(self) -> frozenset[Signal]:
        return row_signal(self.grouping) | ValueSize(self.grouping).needs

    def start(self, layers: int) -> ScoreState:
        received = CumulativeAttention(grouping=self.grouping).start(layers)
        return _ProductState(received, ValueSize(self.grouping).start(layers))


class _ProductState(ScoreState):
    def __init__(self, changing: ScoreState, frozen: ScoreState) -> None:
        super().__init__()
        self._changing, self._frozen = changing, frozen

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._changing.begin(run, tree, generated)
        self._frozen.begin(run, tree, generated)
        self._grow(len(self._changing.values), run.num_tokens)

    def observe(self, step: int) -> None:
        self._changing.observe(step)
        np.multiply(self._changing.values, self._frozen.values, out=self.values)

    def observe_all(self, first: int, last: int) -> None:
        self._changing.observe_all(first, last)
        np.multiply(self._changing.values, self._frozen.values, out=self.values)


@dataclass(frozen=True)
class KeyLength(FixedScore):
    """L2 norm of a token's key, mean over the layers and KV heads of a group.

    Devoto et al. 2024, arXiv:2406.11430.
    """

    grouping: str = grouping_setting("head")
    about: ClassVar[str] = "key norm"

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
"""Length of a direction.  Float16 keys have 11 bits, so rounding loses little; products with the
sum of up to 2**20 directions are whole numbers of at most 2**53: exact, in any order of adding."""


@dataclass(frozen=True)
class KeyDirections(FixedScore):
    """Keys scaled to the same length; float64 ``[groups, tokens, size]``.

    Scalar products are cosines, up to a factor.  A zero key stays zero.  "shared" takes the sketch
    of the keys of all layers and heads, a random projection in which cosines survive roughly;
    "layer" joins the keys of a layer's heads into one vector.

    `whole` directions have length 2**16 and are rounded to whole numbers, others have length 1:
    products with sums of whole directions are exact, so that matrix products give the same bits on
    every machine and however a sum was built up.
    """

    grouping: str = grouping_setting("head")
    whole: bool = True
    about: ClassVar[str] = "direction of the key"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.KEY_SKETCH if self.grouping == "shared" else Signal.KEYS})

    def compute(self, run: TokenRun) -> np.ndarray:
        (signal,) = self.needs
        keys = vectors_per_group(run.observed, signal, self.grouping).astype(np.float64)
        length = norms(keys)[..., None]
        unit = keys / np.where(length > 0, length, 1.0)
        return np.rint(unit * _LENGTH) if self.whole else unit


@dataclass(frozen=True)
class Vectors(FixedScore):
    """Keys or values of every KV head as recorded; float16 ``[groups, tokens, head_dim]``."""

    signal: Signal

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    @property
    def grouping(self) -> str:
        return "head"

    @property
    def about(self) -> str:
        return self.signal.value

    def compute(self, run: TokenRun) -> np.ndarray:
        return vectors_per_group(run.observed, self.signal, "head")
