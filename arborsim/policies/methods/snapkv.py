"""SnapKV: compress the prompt once, by what its last queries look at (Li et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import AfterPrefill, Protect, pin_prompt_setting
from arborsim.policies.placement import neighbour_mean
from arborsim.policies.stream import Composed, StreamPolicy
from arborsim.signals.attention import PromptAttention
from arborsim.signals.scores import GROUPINGS, Score


@dataclass(frozen=True)
class SnapKV(Composed):
    """After the prefill, keep the last `window` prompt tokens and those they attend to most.

    The budget is what the prompt may keep.  What is generated stays, whatever its length: the
    cache outgrows the budget.  There is one stream only, the prompt, on trees too.
    """

    pin_prompt: bool = pin_prompt_setting(False)
    per: str = setting("head", "what keeps tokens of its own", choices=GROUPINGS)
    window: int = setting(64, "last prompt tokens: they vote, and stay", unit="tokens", low=1)
    kernel: int = setting(5, "width of the pooling; odd", unit="tokens", low=1)

    name = "snapkv"
    schedule = AfterPrefill()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_odd(self.name, self.kernel)
        if self.pin_prompt:
            raise UsageError(f"{self.name}: compresses the prompt alone: pin_prompt must be false")

    @cached_property
    def score(self) -> Score:
        return PromptAttention(self.window, grouping=self.per)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=1.0)

    def rank(self, view: CacheView) -> np.ndarray:
        before = view.num_tokens - self.protection(view.budget_tokens).recent
        rank = np.zeros(view.tier.shape)
        rank[:, :before] = neighbour_mean(view.scores["score"][:, :before], self.kernel)
        return rank


def _check_odd(name: str, kernel: int) -> None:
    if kernel % 2 == 0:
        raise UsageError(f"{name}: kernel must be odd, not {kernel}")


@dataclass(frozen=True)
class Voting(StreamPolicy):
    """SnapKV's votes in a policy that keeps its budget while tokens are generated, too.

    Every generated token's query votes like those of the prompt's window.  Votes for the prompt
    before its window are pooled, as in SnapKV; other tokens have their own.
    """

    window: int = setting(
        64,
        "newest tokens: they stay; in the prompt they vote.  At most half of the budget stays",
        unit="tokens",
        low=1,
    )
    kernel: int = setting(5, "width of the pooling; odd", unit="tokens", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_odd(self.name, self.kernel)

    @cached_property
    def score(self) -> Score:
        return PromptAttention(self.window, True, "head")

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=0.5)

    def rank(self, view: CacheView) -> np.ndarray:
        rank = view.scores["score"].copy()
        before = max(0, view.prompt_tokens - self.window)
        rank[:, :before] = neighbour_mean(rank[:, :before], self.kernel)
        return rank
