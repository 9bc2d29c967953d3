"""What every method is compared with: all is kept, chance decides, or the future is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.policies.base import Method, Policy
from arborsim.policies.blocks import ANY, Allocation, Decision, Protect
from arborsim.policies.placement import Pool
from arborsim.policies.stream import RecentPolicy, StreamPolicy
from arborsim.signals.scores import GROUPINGS, EvictionTime, Score, SeededUniform


@dataclass(frozen=True)
class Full(Policy):
    """Full retention: nothing is evicted, offloaded or quantised, whatever the budget."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keep every token in HBM"
    method: ClassVar[Method] = Method("-", place="-", schedule="never", tiers=(Tier.HBM,))
    bounded: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False


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


@dataclass(frozen=True)
class Scheduled(Pool):
    """One pool for all groups, from which every token goes at its time."""

    about: ClassVar[str] = "one pool for all groups"
    together: ClassVar[str] = "model"

    def leaving(self, at: Decision, first: int, free: np.ndarray, over: int) -> np.ndarray:
        return np.asarray(np.count_nonzero(free & (at.rank <= at.view.iterations), axis=1))


@dataclass(frozen=True)
class Oracle(StreamPolicy):
    """Evict by the schedule that loses the least attention of all schedules without return.

    The schedule is an assignment of tokens to forced evictions, solved exactly from the recorded
    attention (`arborsim.signals.offline`); Belady's rule, one eviction at a time, is not optimal
    here because attention is spread over time.  By default nothing is protected and the whole tree
    is one pool, which constrains it least; protect what another policy protects to compare the two.

    With ``per=layer`` or ``per=head`` each captured layer or KV head has a schedule of its own, for
    the attention of its own rows, and as much of the budget as is best for all of them together:
    the bound of policies that choose so.
    """

    per: str = setting("shared", "what has a schedule of its own", choices=GROUPINGS)
    adaptation: str = setting("flat", "what the stream is on a tree", choices=("flat",))
    sinks: int = setting(0, "protected tokens at the beginning", unit="tokens", low=0)
    recent: int = setting(0, "protected newest tokens", unit="tokens", low=0)

    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "offline optimum, after Belady 1966, doi:10.1147/sj.52.0078"
    summary: ClassVar[str] = "offline bound: the eviction schedule that loses least attention"
    formula: ClassVar[str] = (
        "min over schedules e of sum over tokens i, queries u > e(i) of a_u(i), one token per "
        "forced eviction; per=layer, per=head: the same of each group's own rows"
    )
    words: ClassVar[Mapping[str, Any]] = {
        "recover": "never: a bound for eviction only; tiers and recomputing can do better"
    }
    deviations: ClassVar[tuple[str, ...]] = (
        "above 2^24 tokens x evictions (some 5,000 tokens) Belady's greedy rule stands in, "
        "which is no strict bound: at 30 % of the tokens it keeps up to 1.5 percentage points "
        "less than the optimum on the shipped traces",
        "per=layer and per=head share the budget out as is best where groups^2 x tokens x "
        "evictions are 2^24 at most; above, every group has the same, and a policy with uneven "
        "shares may keep more",
        "sparse recordings spread the attention they do not list evenly, also in the future",
    )
    fused: ClassVar[bool] = True  # the attention it reads was recorded before

    @property
    def label(self) -> str:
        return self.name if self.per == "shared" else f"{self.name}-{self.per}"

    @cached_property
    def score(self) -> Score:
        return EvictionTime(self.per)

    @cached_property
    def allocate(self) -> Allocation:
        return Pool(self.adaptation) if self.per == "shared" else Scheduled(self.adaptation)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, self.recent, recent_share=ANY)
