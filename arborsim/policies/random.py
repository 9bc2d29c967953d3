"""Evict at random: the baseline that any score has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.scores import Score, SeededUniform


@dataclass(frozen=True)
class Random(StreamPolicy):
    """Evict uniformly at random; prompt and recent tokens stay.

    Parameters
    ----------
    seed : int
    recent : int
        Protected newest tokens, at most a quarter of the budget.
    """

    seed: int = 0
    recent: int = 128

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "-"
    summary: ClassVar[str] = "evict uniformly at random, prompt and recent tokens stay"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "seed": (0, math.inf),
        "recent": (1, math.inf),
    }

    def scores(self) -> dict[str, Score]:
        return {"uniform": SeededUniform(self.seed)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["uniform"]
