"""ThinKV as the EpiKV paper re-implements it for its comparison (arXiv:2606.26472, Appendix D)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.policies.base import CacheView, Method
from arborsim.policies.segments import SegmentPolicy


@dataclass(frozen=True)
class ThinKV(SegmentPolicy):
    """Keep 64, 32 or 8 tokens of each segment, by the entropy of attention inside it.

    The tokens kept are those to which the newest query pays most attention.  Prompt tokens are
    evictable; only the newest ``min(recent, budget / 4)`` are protected.
    """

    name: ClassVar[str] = "thinkv"
    paper: ClassVar[str] = "Ramachandran et al. 2026, as re-implemented by EpiKV, arXiv:2606.26472"
    summary: ClassVar[str] = "keep more of the segments to which attention is narrow"
    method: ClassVar[Method] = Method(
        "H_j = -sum p_i ln p_i over the tokens i of segment j, p_i = a_t(i) / sum_j a_t, t the "
        "newest query; tertiles of H: R keeps 64, E 32, T 8, by a_t(i)",
        score="attention of the newest query",
        allocate="a fixed number per segment by its class, oldest segment first",
        granularity="segment of 128 tokens",
        deviations=(
            "EpiKV's variant, without the quantisation and the calibrated thresholds of ThinKV "
            "itself, which `thinkv-paper` reconstructs",
            "rows=mean (default) takes one entropy of the row averaged over all layers and heads, "
            "which every trace holds; rows=layers averages over the last 4 captured layers, as run "
            "by EpiKV",
            "segments are 128 consecutive tokens of the stream, evicted ones counted; an entropy "
            "is taken over those still held",
            "a segment without attention counts as evenly attended",
        ),
    )

    def rank(self, view: CacheView) -> np.ndarray:
        return self.rank_of(view, np.arange(view.num_tokens))[None]

    def rank_of(self, view: CacheView, tokens: np.ndarray) -> np.ndarray:
        first, *others = view.scores["newest"]
        total = first.take(tokens)
        for row in others:  # in a fixed order: ties must not depend on the way of summing
            total += row.take(tokens)
        return np.asarray(total)
