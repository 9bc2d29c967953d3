"""What the groups of a cache stand for, and how its keys were rotated by their positions.

Plans have a row per *group*: the whole cache, a captured layer, or a KV head of one, layer by
layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864): the angle per position.

    The first `rotary_dim` numbers of a key or query are rotated, numbers ``i`` and
    ``i + rotary_dim / 2`` as a pair, by ``position * inverse_frequencies[i]``; `scaling` multiplies
    cosines and sines (YaRN's attention scaling, else 1).
    """

    inverse_frequencies: np.ndarray = field(compare=False)  # float64 [rotary_dim / 2]
    scaling: float
    rotary_dim: int


@dataclass(frozen=True)
class CacheShape:
    """The model whose vectors and rows are observed, as far as a policy may know it."""

    #: Model layers that the rows of layers and heads stand for, rising: the captured ones of a
    #: trace, all of a live model; empty if none was captured
    layers: tuple[int, ...] = ()
    kv_heads: int = 1
    head_dim: int = 1
    rope: Rope | None = None  # None if unknown

    def rows(self, groups: int) -> np.ndarray:
        """Which of `layers`, counted from 0, each of the plan's groups lies in; int64 ``[groups]``.

        One group stands for all layers and counts as the first.
        """
        per_layer = max(1, groups // max(1, len(self.layers)))
        return np.arange(groups) // per_layer


UNKNOWN = CacheShape()
"""What is known of a model of which nothing is captured."""
