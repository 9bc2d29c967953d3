"""Evict at random: the baseline that any score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from arborsim.core.settings import setting
from arborsim.policies.stream import RecentPolicy
from arborsim.signals.scores import Score, SeededUniform


@dataclass(frozen=True)
class Random(RecentPolicy):
    """Evict uniformly at random; prompt and recent tokens stay."""

    seed: int = setting(0, "of the random numbers", low=0)

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "evict uniformly at random, prompt and recent tokens stay"
    formula: ClassVar[str] = "s(i) ~ U[0, 1)"

    @cached_property
    def score(self) -> Score:
        return SeededUniform(self.seed)
