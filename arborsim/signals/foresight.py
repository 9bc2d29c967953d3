"""What replays alone can know: the offline optimum for the recorded attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.scores import FrozenState, ScoreState


@dataclass(frozen=True)
class EvictionTime:
    """Iteration after which the offline optimum evicts a token; infinite for those that stay."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.EVICTION_TIME})

    def start(self, layers: int) -> ScoreState:
        return _TimeState()


class _TimeState(FrozenState):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        times = run.observed.per_layer[Signal.EVICTION_TIME]
        self._values.extend(np.asarray(times, dtype=np.float64))
