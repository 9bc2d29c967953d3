"""StreamingLLM: attention sinks and a sliding window (Xiao et al., ICLR 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Protection
from arborsim.policies.stream import StreamPolicy


@dataclass(frozen=True)
class StreamingLLM(StreamPolicy):
    """Keep the first `sinks` tokens and the newest ``budget - sinks``; the middle goes.

    Parameters
    ----------
    sinks : int
        Attention sinks at the beginning of the prompt.
    """

    sinks: int = 4

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "Xiao et al. 2024, arXiv:2309.17453"
    summary: ClassVar[str] = "keep attention sinks and a sliding window"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"sinks": (0, math.inf)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(sinks=self.sinks, recent=1)

    def rank(self, view: CacheView) -> np.ndarray:
        return np.arange(view.num_tokens, dtype=np.float64)
