"""Which steps of the reasoning read each token, as a reference task knows it.

A task numbers the steps of its reasoning and says, when a token is born, which of them will read
it.  Nothing else has to be known: at any time a token is needed if a step that has not been passed
reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.signals.scores import AtBegin, Score, ScoreState

NEVER = 2.0**31  #: distance to the next reader where there is none
UNREAD = -1  # fills up the rows of tokens with fewer readers than others


@dataclass(frozen=True)
class Readers(Score):
    """Per token the step that the reasoning is at after it, then the steps that read it."""

    needs = frozenset({Signal.READERS})
    about = "steps of the task that read the token"

    def start(self, layers: int) -> ScoreState:
        return _ReadersState()


class _ReadersState(AtBegin):
    """Int32 ``[1, tokens, 1 + most readers]``, which gets wider as tokens have more readers."""

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        fresh = run.observed.per_layer[Signal.READERS]
        known = self._table
        width = max(fresh.shape[1], 0 if known is None else known.values.shape[2])
        if known is None or known.values.shape[2] < width:
            self._table = GrowingTable(1, np.int32, cell=(width,))
            if known is not None:
                self._append(known.values[0])
        self._append(fresh)

    def _append(self, rows: np.ndarray) -> None:
        assert self._table is not None
        self._table.extend(len(rows), UNREAD)
        self._table.values[0, -len(rows) :, : rows.shape[1]] = rows


def table_of(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of different lengths as one table, int32 ``[tokens, longest]``."""
    table = np.full((len(rows), max(map(len, rows), default=1)), UNREAD, dtype=np.int32)
    for own, row in zip(table, rows, strict=True):
        own[: len(row)] = row
    return table


def distance(steps: np.ndarray, now: np.ndarray | int) -> np.ndarray:
    """Steps from `now` to the nearest one that reads a token, or `NEVER`.

    Of `steps`, int32 ``[readers, tokens]``, and `now`, one step or int ``[tokens]``.  Float64
    ``[tokens]``.
    """
    nearest = np.full(steps.shape[1], NEVER, dtype=np.uint32)
    ahead = np.empty(steps.shape[1], dtype=np.int32)
    now = np.asarray(now, dtype=np.int32)
    for each in steps:
        np.subtract(each, now, out=ahead)
        # What lies behind is negative, and so large without a sign; `UNREAD` always does.
        np.minimum(nearest, ahead.view(np.uint32), out=nearest)
    return nearest.astype(np.float64)
