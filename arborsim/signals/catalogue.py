"""Scores by name, for policies that are composed in a file: ``[score] use = "hidden-contrast"``.

A score that has a row per layer is averaged over them, since a composition makes one plan for the
whole model.  To add a score, add a line: its fields are the settings of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.attention_scores import NewestAttention, ValueWeightedAttention
from arborsim.signals.hidden_scores import HiddenChangeContrast
from arborsim.signals.scores import (
    CumulativeAttention,
    LagVariance,
    Score,
    ScoreState,
    SeededUniform,
)


@dataclass(frozen=True)
class Position:
    """The order of arrival: what is oldest ranks lowest."""

    needs: ClassVar[frozenset[Signal]] = frozenset()

    def start(self, layers: int) -> ScoreState:
        return _PositionState()


class _PositionState:
    def __init__(self) -> None:
        self._tokens = 0

    @property
    def values(self) -> np.ndarray:
        return np.arange(self._tokens, dtype=np.float64)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._tokens += run.num_tokens

    def observe(self, step: int) -> None:
        pass


SCORES: dict[str, type[Score]] = {
    "cumulative-attention": CumulativeAttention,
    "hidden-contrast": HiddenChangeContrast,
    "lag-variance": LagVariance,
    "newest-attention": NewestAttention,
    "position": Position,
    "random": SeededUniform,
    "value-weighted-attention": ValueWeightedAttention,
}
