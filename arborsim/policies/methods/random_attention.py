"""Random Attention: chance says what each KV head keeps (arXiv:2609.03430)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.events import Decode, Event
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import EveryStep, OnlyEvery, Protect, pin_prompt_setting
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.scores import GROUPINGS, Score, SeededUniform, grouping_setting


@dataclass(frozen=True)
class WhenFull(OnlyEvery):
    """Decide when the cache holds the first multiple of `iterations` tokens above its budget."""

    @property
    def about(self) -> str:
        return f"when the cache holds the first multiple of {self.iterations} tokens over budget"

    def next_decision(self, view: CacheView, headroom: int) -> int:
        return max(1, -(-(self._full(view) - view.fullest) // len(view.leaves)))

    def due(self, view: CacheView, event: Event) -> bool:
        return isinstance(event, Decode) and view.fullest >= self._full(view)

    def _full(self, view: CacheView) -> int:
        return (view.budget_tokens // self.iterations + 1) * self.iterations


@dataclass(frozen=True)
class Apart(SeededUniform):
    """Chance of each group's own, which the policy draws when it decides."""

    grouping: str = grouping_setting("head")


@dataclass(frozen=True)
class RandomAttention(StreamPolicy):
    """Keep the prompt, the newest tokens, and of the others as many as fit, drawn anew each time.

    Every KV head draws for itself, so what one head lost another may have.
    """

    pin_prompt: bool = pin_prompt_setting(True)
    interval: int = setting(64, "cut at its first multiple over budget", unit="tokens", low=1)
    window: int = setting(
        64, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=0
    )
    per: str = setting("head", "what draws for itself", choices=GROUPINGS)
    seed: int = setting(0, "of the random numbers", low=0)

    name = "random-attention"

    @cached_property
    def score(self) -> Score:
        return Apart(self.seed, self.per)

    @cached_property
    def schedule(self) -> EveryStep:
        return WhenFull(self.interval)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=0.25)

    def rank(self, view: CacheView) -> np.ndarray:
        """Uniform random numbers, others at every decision."""
        rng = np.random.default_rng([self.seed, view.iterations])
        return rng.random(view.tier.shape)
