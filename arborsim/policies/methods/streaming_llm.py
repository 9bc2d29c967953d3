"""StreamingLLM: attention sinks and a sliding window (Xiao et al., ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arborsim.core.settings import setting
from arborsim.policies.blocks import ANY, Protect
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.scores import Position


@dataclass(frozen=True)
class StreamingLLM(StreamPolicy):
    """Keep the first `sinks` tokens and the newest ``budget - sinks``; the middle goes."""

    sinks: int = setting(4, "attention sinks at the beginning", unit="tokens", low=0)

    name = "streaming-llm"
    score = Position()

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, recent=1, recent_share=ANY)
