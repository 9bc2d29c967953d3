"""REBASE, reward balanced search (Wu et al. 2024, "Inference Scaling Laws").

From the best state to the worst, each of the unfinished states i gets

    ceil(N_i exp(R_i / T) / sum over k not yet served of exp(R_k / T))

children, where N_i is what is left of the width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.search.base import Leaf, value
from arborsim.search.levels import LevelSearch


@dataclass
class Rebase(LevelSearch):
    """Children in proportion to the softmax of scores.

    Parameters
    ----------
    temperature : float
        T_R of the softmax over scores.
    """

    name: ClassVar[str] = "rebase"
    temperature: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UsageError(f"{self.name}: temperature must be more than 0")

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        counts = rebase_weights(candidates, width, self.temperature)
        return {x.node: count for x, count in zip(candidates, counts, strict=True) if count}


def rebase_weights(leaves: Sequence[Leaf], width: int, temperature: float) -> list[int]:
    """Children of each leaf; they add up to `width` exactly.

    Parameters
    ----------
    leaves : sequence of Leaf
        One or more, best first; an unknown score counts as minus infinity.
    width : int
    temperature : float
    """
    scores = np.array([value(leaf) for leaf in leaves], dtype=np.float64)
    counts = []
    for i, score in enumerate(scores):
        # Relative to the leaf that is served: equal scores give ones exactly, nothing overflows,
        # and as the leaf is one of those that are left, no share exceeds what is left.
        rest = scores[i:]
        gap = np.subtract(rest, score, out=np.zeros(len(rest)), where=rest != score)
        count = math.ceil(width / math.fsum(np.exp(gap / temperature).tolist()))
        counts.append(min(count, width))
        width -= counts[-1]
    return counts
