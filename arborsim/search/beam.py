"""Beam search with a reward model (Snell et al. 2024, "Scaling LLM Test-Time Compute").

Of every level the k states with the best last score go on and share the width.  ETS compares with
k = 4 and with k = sqrt(N), N the initial width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import Leaf
from arborsim.search.level import LevelSearch, even_parts


@dataclass
class Beam4(LevelSearch):
    """Keep a fixed number of states.

    Parameters
    ----------
    keep : int
        k, states kept per level.
    """

    name: ClassVar[str] = "beam-4"
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 1:
            raise UsageError(f"{self.name}: keep must be 1 or more")

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        return share_evenly(candidates[: self.keep], width)


@dataclass
class BeamSqrt(LevelSearch):
    """Keep as many states as the square root of the initial width, rounded up."""

    name: ClassVar[str] = "beam-sqrt"

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        return share_evenly(candidates[: ceil_sqrt(self.width)], width)


def ceil_sqrt(number: int) -> int:
    """The least integer whose square is `number` or more."""
    return math.isqrt(number - 1) + 1


def share_evenly(leaves: Sequence[Leaf], width: int) -> dict[int, int]:
    """Share all of `width`; what does not divide goes to the first, one each."""
    parts = even_parts(width, len(leaves))
    return {leaf.node: count for leaf, count in zip(leaves, parts, strict=True) if count}
