"""Scores from keys and values themselves: norms, directions, and the vectors as they are.

Group ``g`` of a cache is a captured layer (``per="layer"``) or a captured layer and KV head
(``per="head"``, layer by layer); ``per="shared"`` is the whole model, which traces describe by
norms per layer and by a sketch of all keys.  Sums run over channels and heads in a fixed order, so
that the same vector has the same score everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Observations, Signal
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.hidden_scores import WHOLE_MODEL, layer_mean
from arborsim.signals.scores import FrozenState, ScoreState

# From so many sums on, adding them side by side is faster than one after the other.
_MANY_SUMS = 256


def sum_in_order(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Sum over an axis, added strictly one after the other (`numpy.sum` may add in pairs)."""
    if values.size < _MANY_SUMS * values.shape[axis] or not values.size:
        return np.asarray(np.take(np.add.accumulate(values, axis=axis), -1, axis=axis))
    parts = np.moveaxis(values, axis, 0)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return np.asarray(total)


def norms(vectors: np.ndarray) -> np.ndarray:
    """L2 norms over the last axis, float64."""
    return np.asarray(np.sqrt(sum_in_order(vectors * vectors)))


def vectors_per_group(observed: Observations, signal: Signal, per: str) -> np.ndarray:
    """Vectors of a run's tokens.

    Parameters
    ----------
    observed : Observations
    signal : Signal
        `KEYS` or `VALUES`, or `KEY_SKETCH` with ``per="shared"``.
    per : {"shared", "layer", "head"}
        "layer" joins the vectors of the layer's heads into one.

    Returns
    -------
    float16 ``[tokens, groups, size]``
    """
    if signal is Signal.KEY_SKETCH:
        return observed.per_layer[signal][:, None, :]
    vectors = observed.keys if signal is Signal.KEYS else observed.values
    assert vectors is not None, f"the reader was not asked for {signal.value}"
    tokens, layers, heads, size = vectors.shape
    if per == "layer":
        return vectors.reshape(tokens, layers, heads * size)
    return vectors.reshape(tokens, layers * heads, size)


class _GroupedState(ABC):
    """Values per group that are fixed at birth; subclasses compute those of a run's tokens."""

    def __init__(self) -> None:
        # How many groups there are shows only when the first vectors arrive.
        self._kept: GrowingArray | None = None

    @property
    def values(self) -> np.ndarray:
        """``[groups, tokens]`` or ``[groups, tokens, size]``."""
        assert self._kept is not None, "no token has been observed"
        return self._kept.values.swapaxes(0, 1)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        fresh = self._compute(run.observed)
        if self._kept is None:
            self._kept = GrowingArray(fresh.dtype, row=fresh.shape[1:])
        self._kept.extend(fresh)

    def observe(self, step: int) -> None:  # noqa: B027 - nothing changes after birth
        pass

    @abstractmethod
    def _compute(self, observed: Observations) -> np.ndarray:
        """``[tokens, groups, ...]``"""


@dataclass(frozen=True)
class KeyLength:
    """L2 norm of each token's key (Devoto et al. 2024, arXiv:2406.11430); float64.

    Parameters
    ----------
    per : {"shared", "layer", "head"}
        "layer" is the mean over the heads of a captured layer, "shared" over all layers and heads.
    """

    per: str = "head"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.KEY_NORM if self.per == "shared" else Signal.KEYS})

    def start(self, layers: int) -> ScoreState:
        return _SharedNormState() if self.per == "shared" else _NormState(self.per)


class _SharedNormState(FrozenState):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        observed = run.observed.per_layer[Signal.KEY_NORM]
        first, last = WHOLE_MODEL.layers(observed.shape[1])
        self._values.extend(layer_mean(observed, first, last))


class _NormState(_GroupedState):
    def __init__(self, per: str) -> None:
        super().__init__()
        self._per = per

    def _compute(self, observed: Observations) -> np.ndarray:
        assert observed.keys is not None, "the reader was not asked for keys"
        by_head = norms(observed.keys.astype(np.float64))  # [tokens, layers, heads]
        if self._per == "head":
            return np.asarray(by_head.reshape(len(by_head), -1))
        return np.asarray(sum_in_order(by_head) / by_head.shape[-1])


_LENGTH = 2.0**16
"""Length of a direction.  Float16 keys have 11 bits, so rounding loses little; products with the
sum of up to 2**20 directions are whole numbers of at most 2**53: exact, in any order of adding."""


@dataclass(frozen=True)
class KeyDirections:
    """Keys scaled to length 2**16 and rounded to whole numbers; float64 ``[groups, tokens, size]``.

    Products with sums of directions are exact, so matrix products give the same bits on every
    machine and however a sum was built up.  A zero key stays zero.

    Parameters
    ----------
    per : {"shared", "layer", "head"}
        "shared" takes the sketch of the keys of all layers and heads, a random projection in which
        cosines survive roughly; "layer" joins the keys of a layer's heads into one vector.
    """

    per: str = "head"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.KEY_SKETCH if self.per == "shared" else Signal.KEYS})

    def start(self, layers: int) -> ScoreState:
        (signal,) = self.needs
        return _DirectionState(signal, self.per)


class _DirectionState(_GroupedState):
    def __init__(self, signal: Signal, per: str) -> None:
        super().__init__()
        self._signal = signal
        self._per = per

    def _compute(self, observed: Observations) -> np.ndarray:
        keys = vectors_per_group(observed, self._signal, self._per).astype(np.float64)
        length = norms(keys)[..., None]
        return np.asarray(np.rint(keys / np.where(length > 0, length, 1.0) * _LENGTH))


@dataclass(frozen=True)
class Vectors:
    """Keys or values as recorded; float16 ``[groups, tokens, head_dim]``.

    Parameters
    ----------
    signal : Signal
        `KEYS` or `VALUES`.
    """

    signal: Signal

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({self.signal})

    def start(self, layers: int) -> ScoreState:
        return _VectorState(self.signal)


class _VectorState(_GroupedState):
    def __init__(self, signal: Signal) -> None:
        super().__init__()
        self._signal = signal

    def _compute(self, observed: Observations) -> np.ndarray:
        return vectors_per_group(observed, self._signal, "head")
