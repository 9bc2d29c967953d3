"""TOVA: what the newest query pays least attention goes (Oren et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView, Method, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import NewestAttention
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class Tova(StreamPolicy):
    """Evict the token with the lowest attention from the newest query; nothing is protected.

    Published per layer, over the mean of its heads.  With ``per=shared`` one ranking serves all
    layers, which runs on traces without vectors.
    """

    per: str = setting("layer", "what keeps tokens of its own", choices=("shared", "layer", "head"))

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "Oren et al. 2024, arXiv:2401.06104"
    summary: ClassVar[str] = "evict what the newest query attends to least"
    method: ClassVar[Method] = Method(
        "s(i) = a_t(i), t the newest query, mean over heads",
        score="attention of the newest query",
        deviations=(
            "on a tree, leaves that decode together all are newest: a token that several of them "
            "see gets the mean",
            "per=head and per=shared are not in the paper, which ranks per layer",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False

    @property
    def grouping(self) -> str:
        return self.per

    def reads(self) -> frozenset[Signal]:
        return NewestAttention(grouping=self.per).needs

    def scores(self) -> dict[str, Score]:
        return {"newest": NewestAttention(up_to_constant=True, grouping=self.per)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(recent=0)

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["newest"]
