"""H2O: heavy hitters by cumulative attention, and a recent window (Zhang et al., NeurIPS 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arborsim.core.settings import setting
from arborsim.policies.blocks import ANY, Protect, ProtectSome
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import GROUPINGS, Score


@dataclass(frozen=True)
class H2O(StreamPolicy):
    """Half of the budget for the newest tokens, the rest for the most attended of the others.

    Every layer and KV head keeps tokens of its own, and prompt tokens are evictable too, as
    published.  With `per="shared"` one ranking serves the whole model, attention averaged over
    layers and heads: the EpiKV and memory-hierarchy papers run it so.
    """

    recent_share: float = setting(0.5, "share of the budget for the newest", low=0, high=1)
    sinks: int = setting(0, "protected tokens at the beginning", unit="tokens", low=0)
    per: str = setting(
        "head",
        "what ranks on its own: every captured layer and KV head (as published), every layer, or "
        "the whole model; only the shared ranking runs on traces without vectors",
        choices=GROUPINGS,
    )
    count_prompt: bool = setting(
        True,
        "attention of the prompt's own queries counts, as published; false: sums begin with the "
        "first generated token, as in the code of EpiKV and of the memory-hierarchy paper",
    )

    name = "h2o"

    @cached_property
    def score(self) -> Score:
        return CumulativeAttention(
            count_prompt=self.count_prompt, up_to_constant=True, grouping=self.per
        )

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, self.sinks, ANY, self.recent_share)
