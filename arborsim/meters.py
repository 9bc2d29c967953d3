"""Meters: figures taken while a search is replayed, without a part in its decisions."""

from __future__ import annotations

import numpy as np

from arborsim.events import TokenRun
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.memory.tiers import Tier
from arborsim.signals.observations import AttentionRows, SparseRows
from arborsim.tree import ThoughtTree

_ROWS_AT_ONCE = 512  # rows of a few hundred positions: their arrays stay in the processor's cache


class AttentionKept:
    """Share of the recorded attention of generated tokens that falls on readable tokens.

    The recording saw the whole cache; what it attended to and the policy has evicted is lost.
    Tokens in any tier but `Tier.EVICTED` are readable.  With several groups the evicted share of
    groups counts.  Each row is a distribution, so rows weigh the same.
    """

    def __init__(self) -> None:
        self._lost = 0.0
        self._rows = 0

    @property
    def share(self) -> float:
        """In [0, 1]; NaN if nothing was generated."""
        return 1.0 - self._lost / self._rows if self._rows else float("nan")

    def prefilled(self, run: TokenRun) -> None:
        pass

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self._rows += run.num_tokens
        gone = (tier == Tier.EVICTED).mean(axis=0)
        gone = np.concatenate([gone, np.zeros(run.num_tokens)])
        evictions = moves.target == Tier.EVICTED
        if not gone.any() and not evictions.any():
            return
        assert run.observed.attention is not None, "the reader was not asked for attention"
        if len(run.leaves) == 1:
            self._one_leaf(run.observed.attention, tree.path(run.leaves[0]), gone, moves)
            return
        rows = iter(run.observed.attention)
        paths = [tree.path(leaf) for leaf in run.leaves]
        assert not len(moves), "runs of several leaves are decided one iteration at a time"
        for _ in range(run.steps):
            for path in paths:
                row = next(rows)
                self._lost += float(row.dot(gone[path[: len(row)]]))

    def _one_leaf(
        self, rows: AttentionRows, path: np.ndarray, gone: np.ndarray, moves: Moves
    ) -> None:
        lost_at = gone[path]
        position = np.full(len(gone), -1, dtype=np.int64)
        position[path] = np.arange(len(path))
        at = position[moves.token]
        evicts = (moves.target == Tier.EVICTED) & (at >= 0)
        assert (moves.group == ALL_GROUPS).all(), "moves inside a run are shared by all groups"
        if isinstance(rows, SparseRows) and not np.any((lost_at > 0) & (lost_at < 1)):
            gone_from = np.full(len(lost_at), len(rows), dtype=np.int32)
            gone_from[lost_at > 0] = 0
            gone_from[at[evicts]] = moves.step[evicts] + 1
            self._lost += _lost_of_sparse(rows, gone_from)
            return
        steps, targets = moves.step[evicts].tolist(), at[evicts].tolist()
        following = 0
        lost = 0.0
        first = 0 if lost_at.any() else min(steps, default=len(rows))  # nothing is lost before
        for step, row in enumerate(rows[first:], first):
            lost += float(row.dot(lost_at[: len(row)]))
            while following < len(steps) and steps[following] == step:
                lost_at[targets[following]] = 1.0
                following += 1
        self._lost += lost

    def moved(self, moves: Moves, tier: np.ndarray) -> None:
        pass


def _lost_of_sparse(rows: SparseRows, gone_from: np.ndarray) -> float:
    """Attention of a run's rows to evicted positions, many rows at once.

    Parameters
    ----------
    rows : SparseRows
    gone_from : int32 ``[positions]``
        The first row for which the position is gone.
    """
    count = len(rows)
    listed = np.diff(rows.offsets)
    gone_listed = np.zeros(count)
    lost = 0.0
    for first in range(0, count, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, count)
        a, b = int(rows.offsets[first]), int(rows.offsets[last])
        row = np.repeat(np.arange(first, last, dtype=np.int32), listed[first:last])
        gone = gone_from[rows.index[a:b]] <= row
        lost += float(np.dot(rows.value[a:b].astype(np.float64), gone))
        ends = np.concatenate([[0], np.cumsum(gone)])[rows.offsets[first : last + 1] - a]
        gone_listed[first:last] = np.diff(ends)
    gone_by = np.cumsum(np.bincount(gone_from, minlength=count + 1)[:count])
    others = np.maximum(rows.lengths - listed, 1)
    share = np.where(rows.lengths > listed, rows.rest / others, 0.0)
    return lost + float((share * (gone_by - gone_listed)).sum())


class MoveLog:
    """Every move in order: what two runs of the same policy are compared by."""

    def __init__(self) -> None:
        self._iteration = 0
        self._parts: list[np.ndarray] = []

    def prefilled(self, run: TokenRun) -> None:
        pass

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self._note(moves, self._iteration + 1 + moves.step)
        self._iteration += run.steps

    def moved(self, moves: Moves, tier: np.ndarray) -> None:
        self._note(moves, np.full(len(moves), self._iteration))

    def _note(self, moves: Moves, iteration: np.ndarray) -> None:
        self._parts.append(np.stack([iteration, moves.group, moves.token, moves.target], axis=1))

    @property
    def rows(self) -> np.ndarray:
        """Int64 ``[moves, 4]``: iteration, group, token, target tier; in order of token within
        an iteration, so that logs of run-wise and step-wise decisions compare equal."""
        if not self._parts:
            return np.empty((0, 4), dtype=np.int64)
        rows = np.concatenate(self._parts).astype(np.int64)
        return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
