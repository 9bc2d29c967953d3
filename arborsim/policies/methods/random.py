"""Evict at random: the baseline that any score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.scores import Score, SeededUniform


@dataclass(frozen=True)
class Random(StreamPolicy):
    """Evict uniformly at random; prompt and recent tokens stay."""

    seed: int = setting(0, "of the random numbers", low=0)
    recent: int = setting(
        128, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "-"
    summary: ClassVar[str] = "evict uniformly at random, prompt and recent tokens stay"
    method: ClassVar[Method] = Method("s(i) ~ U[0, 1)", score="seeded uniform")

    def scores(self) -> dict[str, Score]:
        return {"uniform": SeededUniform(self.seed)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, recent=min(self.recent, budget_tokens // 4))

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["uniform"]
