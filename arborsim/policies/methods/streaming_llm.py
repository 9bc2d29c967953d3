"""StreamingLLM: attention sinks and a sliding window (Xiao et al., ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy


@dataclass(frozen=True)
class StreamingLLM(StreamPolicy):
    """Keep the first `sinks` tokens and the newest ``budget - sinks``; the middle goes."""

    sinks: int = setting(4, "attention sinks at the beginning", unit="tokens", low=0)

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "Xiao et al. 2024, arXiv:2309.17453"
    summary: ClassVar[str] = "keep attention sinks and a sliding window"
    method: ClassVar[Method] = Method(
        "keep i < sinks and the newest K - sinks",
        score="position",
        deviations=(
            "kept tokens keep their true positions; the published method numbers them anew, by "
            "their place in the cache",
        ),
    )

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(sinks=self.sinks, recent=1)

    def rank(self, view: CacheView) -> np.ndarray:
        return np.arange(view.num_tokens, dtype=np.float64)
