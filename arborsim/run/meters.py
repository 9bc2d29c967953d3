"""Meters: figures taken while a search is replayed, without a part in its decisions."""

from __future__ import annotations

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import AttentionRows, SparseRows
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import ALL_GROUPS, Moves

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
        gone = tier[0] == Tier.EVICTED if len(tier) == 1 else (tier == Tier.EVICTED).mean(axis=0)
        if not gone.any() and not (moves.target == Tier.EVICTED).any():
            return
        assert run.observed.attention is not None, "the reader was not asked for attention"
        if len(run.leaves) == 1:
            self._one_leaf(run.observed.attention, tree.path(run.leaves[0]), gone, moves)
            return
        gone = np.concatenate([gone, np.zeros(run.num_tokens)])
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
        assert (moves.group == ALL_GROUPS).all(), "moves inside a run are shared by all groups"
        old = len(path) - len(rows)
        if old < len(gone):  # else the path is all there is
            gone = gone[path[:old]]
        step, at = _evicted_on(path, moves)
        if isinstance(rows, SparseRows) and (gone.dtype == bool or not _fractional(gone)):
            self._lost += _lost_of_sparse(rows, gone > 0, at, step)
            return
        lost_at = np.concatenate([gone, np.zeros(len(rows))])
        steps, targets = step.tolist(), at.tolist()
        following = 0
        lost = 0.0
        first = 0 if gone.any() else min(steps, default=len(rows))  # nothing is lost before
        for t, row in enumerate(rows[first:], first):
            lost += float(row.dot(lost_at[: len(row)]))
            while following < len(steps) and steps[following] == t:
                lost_at[targets[following]] = 1.0
                following += 1
        self._lost += lost

    def moved(self, moves: Moves, tier: np.ndarray) -> None:
        pass


def _fractional(gone: np.ndarray) -> bool:
    """Whether tokens are gone in some groups and not in others."""
    return bool(((gone > 0) & (gone < 1)).any())


def _evicted_on(path: np.ndarray, moves: Moves) -> tuple[np.ndarray, np.ndarray]:
    """Steps and positions of the evictions on a path, token ids that rise."""
    evicts = moves.target == Tier.EVICTED
    step, token = moves.step[evicts], moves.token[evicts]
    at = np.searchsorted(path, token)
    found = path.take(at, mode="clip") == token
    return step[found], at[found]


def _lost_of_sparse(rows: SparseRows, gone: np.ndarray, at: np.ndarray, step: np.ndarray) -> float:
    """Attention of a run's rows to evicted positions, many rows at once.

    Parameters
    ----------
    rows : SparseRows
    gone : bool ``[positions before the run]``
    at, step : int64 ``[evictions]``
        Positions evicted during the run, and the iterations after which they are.
    """
    count = len(rows)
    listed = np.diff(rows.offsets)
    # The first row for which each position is gone.
    gone_from = np.full(len(gone) + count, count, dtype=np.int32)
    gone_from[: len(gone)][gone] = 0
    gone_from[at] = step + 1
    gone_listed = np.zeros(count)
    lost = 0.0
    for first in range(0, count, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, count)
        a, b = int(rows.offsets[first]), int(rows.offsets[last])
        row = np.repeat(np.arange(first, last, dtype=np.int32), listed[first:last])
        hit = gone_from.take(rows.index[a:b]) <= row
        lost += float(np.dot(rows.value[a:b].astype(np.float64), hit))
        ends = np.concatenate([[0], np.cumsum(hit)])[rows.offsets[first : last + 1] - a]
        gone_listed[first:last] = np.diff(ends)
    gone_by = np.count_nonzero(gone) + np.cumsum(np.bincount(step + 1, minlength=count)[:count])
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
