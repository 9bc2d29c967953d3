"""The memory hierarchy with other scores: the ablations of its Table 12."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method
from arborsim.policies.methods.hierarchy import Hierarchy
from arborsim.signals.attention import CumulativeAttention, ValueWeightedAttention
from arborsim.signals.scores import Score
from arborsim.signals.vectors import KeyDirections

_DEVIATIONS = (
    "the paper prints no formula: attention is divided by its largest value among the candidates, "
    "and redundancy is the mean cosine to the nearest candidates on either side",
    "cosines come from a random projection of the keys of all layers and heads",
    *Hierarchy.method.deviations,
)

_DIRECTION = KeyDirections("shared", whole=False)
# Columns that are compared together: few enough for the CPU cache.
_COLUMNS = 8192


def neighbour_cosine(direction: np.ndarray, reach: int) -> np.ndarray:
    """Mean scalar product of each column with up to `reach` columns on either side.

    Parameters
    ----------
    direction : float64 ``[size, n]``
        Columns of length 1.
    reach : int

    Returns
    -------
    float64 ``[n]``
        0 for a column without neighbours.
    """
    number = direction.shape[1]
    reach = min(reach, number - 1)
    total = np.zeros(number)
    for lag in range(1, reach + 1):
        cosine = products_in_order(direction[:, lag:], direction[:, :-lag])
        total[lag:] += cosine
        total[:-lag] += cosine
    place = np.arange(number)
    count = np.minimum(place, reach) + np.minimum(place[::-1], reach)
    return np.asarray(total / np.maximum(count, 1))


def products_in_order(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Scalar product of each column of `left` with that of `right`; float64 ``[n]``.

    Added from the first row to the last, so that equal columns have equal products wherever they
    stand.
    """
    total = left[0] * right[0]
    product = np.empty_like(total)
    for a, b in zip(left[1:], right[1:], strict=True):
        np.multiply(a, b, out=product)
        total += product
    return np.asarray(total)


def similarity(direction: np.ndarray, candidates: np.ndarray, reach: int) -> np.ndarray:
    """`neighbour_cosine` of some tokens, as many at a time as the CPU cache holds.

    Parameters
    ----------
    direction : float64 ``[tokens, size]``
    candidates : int64 ``[n]``
        Tokens; each is compared with its neighbours among them.
    reach : int

    Returns
    -------
    float64 ``[n]``
    """
    number, width = len(candidates), max(_COLUMNS, reach)
    similar = np.empty(number)
    for first in range(0, number, width):
        last, low = min(first + width, number), max(0, first - reach)
        near = candidates[low : last + reach]
        columns = np.ascontiguousarray(direction.take(near, axis=0).T)
        similar[first:last] = neighbour_cosine(columns, reach)[first - low : last - low]
    return similar


@dataclass(frozen=True)
class Redundancy(Hierarchy):
    """The hierarchy that ranks by attention minus the similarity of a key to its neighbours."""

    weight: float = setting(1.0, "weight of the redundancy", low=0)
    reach: int = setting(8, "neighbours compared on either side", unit="tokens", low=1)

    name: ClassVar[str] = "redundancy"
    paper: ClassVar[str] = "semantics-aware memory hierarchy, Table 12"
    summary: ClassVar[str] = "the hierarchy with a score of attention minus redundancy"
    method: ClassVar[Method] = replace(
        Hierarchy.method,
        formula="s(i) = A(i) / max A - w R(i); A(i) = sum over queries t of a_t(i), R(i) = mean "
        "cosine of key i to the `reach` nearest candidates on either side (Table 12)",
        score="cumulative attention - redundancy of the key",
        deviations=_DEVIATIONS,
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION, Signal.KEY_SKETCH})

    def scores(self) -> dict[str, Score]:
        return {
            "attention": CumulativeAttention(),
            "direction": _DIRECTION,
        }

    def importance(self, view: CacheView, candidates: np.ndarray) -> np.ndarray:
        attention = view.scores["attention"][0, candidates]
        largest = attention.max(initial=0.0)
        similar = similarity(view.scores["direction"][0], candidates, self.reach)
        return np.asarray(attention / (largest or 1.0) - self.weight * similar)


@dataclass(frozen=True)
class AttnValRedundancy(Redundancy):
    """The hierarchy that ranks by attention times value norm, minus redundancy."""

    name: ClassVar[str] = "attn-val-redundancy"
    summary: ClassVar[str] = "the hierarchy with attention x value norm - redundancy"
    method: ClassVar[Method] = replace(
        Redundancy.method,
        formula="s(i) = A(i) |v_i| / max A |v| - w R(i); A(i) = sum over queries t of a_t(i), "
        "|v_i| the L1 norm of the value, R(i) = mean cosine of key i to the `reach` nearest "
        "candidates on either side (Table 12)",
        score="cumulative attention x value norm - redundancy of the key",
    )
    needs: ClassVar[frozenset[Signal]] = Redundancy.needs | {Signal.VALUE_NORM}

    def scores(self) -> dict[str, Score]:
        return {
            "attention": ValueWeightedAttention(),
            "direction": _DIRECTION,
        }
