"""The layers and heads that the groups of a cache stand for.

Plans have a row per *group*: the whole cache, a captured layer, or a KV head of one, layer by
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.rope import Rope


@dataclass(frozen=True)
class CacheShape:
    """The model whose vectors and rows are observed, as far as a policy may know it."""

    #: Model layers that the rows of layers and heads stand for, rising: the captured ones of a
    #: trace, all of a live model; empty if none was captured
    layers: tuple[int, ...] = ()
    kv_heads: int = 1
    head_dim: int = 1
    rope: Rope | None = None  # None if unknown, or not the same at every length

    def rows(self, groups: int) -> np.ndarray:
        """Which of `layers`, counted from 0, each of the plan's groups lies in; int64 ``[groups]``.

        One group stands for all layers and counts as the first.
        """
        per_layer = max(1, groups // max(1, len(self.layers)))
        return np.arange(groups) // per_layer


UNKNOWN = CacheShape()
"""The shape of a model of which nothing is captured."""
