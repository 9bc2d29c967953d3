"""The bound: evict what the recorded future reads least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.settings import setting
from arborsim.policies.stream import ADAPTATIONS, StreamPolicy
from arborsim.signals.attention_scores import RemainingAttention
from arborsim.signals.observations import Signal
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class Oracle(StreamPolicy):
    """Belady's rule for a KV cache: the token with the least attention yet to come goes first.

    By default nothing but the newest token is protected and the whole tree is one pool, which
    constrains it least; protect what another policy protects to compare the two.

    Notes
    -----
    Pages of a program cost the same whenever they are missed, so that Belady's rule is optimal;
    attention is not, and a rule that looks at one eviction at a time is not quite: it keeps a token
    that is read for long, though little, rather than one that is read much but only for a while.
    The least possible loss is an assignment of tokens to forced evictions, which the tests solve
    exactly (`tests/policies/test_offline_bound.py`).
    """

    adaptation: str = setting("flat", "what the stream is on a tree", choices=ADAPTATIONS)
    keep_prompt: bool = setting(False, "protect the whole prompt")
    sinks: int = setting(0, "protected tokens at the beginning", unit="tokens", low=0)
    recent: int = setting(1, "protected newest tokens", unit="tokens", low=1)

    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "Belady 1966, doi:10.1147/sj.52.0078, applied to attention"
    summary: ClassVar[str] = "offline bound: evict what the recorded future reads least"
    method: ClassVar[Method] = Method(
        "s(i) = sum over queries u > t of a_u(i), from the recording",
        score="attention yet to come",
        recover="never: a bound for eviction only, tiers can do better",
        deviations=(
            "greedy, so not a strict bound: on the smallest episodes of the shipped traces the "
            "best possible schedule keeps up to 1.5 percentage points more attention at 30 % of "
            "the tokens, 0.2 at 50 % and 0.03 at 70 % and above (H2O keeps 2 to 20 less than this "
            "policy at 30 %)",
            "sparse recordings spread the attention they do not list evenly, also in the future",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION, Signal.FUTURE_ATTENTION})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False

    def scores(self) -> dict[str, Score]:
        return {"remaining": RemainingAttention()}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=self.keep_prompt, sinks=self.sinks, recent=self.recent)

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["remaining"]
