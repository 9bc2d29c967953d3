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

    No policy that only evicts can know more, so its attention kept is (nearly) an upper bound for
    all of them.  By default nothing but the newest token is protected and the whole tree is one
    pool, which constrains it least; protect what another policy protects to compare the two.
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
