"""When a token was last attended to: the timestamps of RaaS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal, SparseRows
from arborsim.core.tree import ThoughtTree
from arborsim.signals.rows import Places, RowState
from arborsim.signals.scores import Score, ScoreState
from arborsim.signals.sparse import SparseStamps, median


@dataclass(frozen=True)
class LastAttended(Score):
    """Decode iteration in which a token was last attended to enough (its birth counts).

    Prompt tokens, which every user of the score protects, have 0.

    Parameters
    ----------
    page : int or None
        None: a generated token is refreshed when the newest query pays it at least the median of
        what it pays the generated tokens of its path (EpiKV's variant of RaaS).  Else a page of
        this many consecutive generated tokens is refreshed when the query pays any of them more
        than `threshold`, and when it receives a token (Hu et al. 2025, ACL Findings).
    threshold : float
        For pages; a probability.
    up_to_constant : bool
        The timestamps of generated tokens may all be too low by the same number, which no ranking
        among them notices (a prompt's mean nothing then): a sparse row that refreshes nearly all
        tokens, as most do, is then taken in the time of what it lists.
    """

    page: int | None = None
    threshold: float = 0.01
    up_to_constant: bool = False
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    about: ClassVar[str] = "timestamp of the last use"
    changes: ClassVar = "freely"

    @property
    def blurred(self) -> bool:  # type: ignore[override]
        return self.page is None  # the share of what a row does not list often is its median

    def start(self, layers: int) -> ScoreState:
        return _LastAttendedState(self)


class _LastAttendedState(RowState):
    def __init__(self, spec: LastAttended) -> None:
        super().__init__()
        self._spec = spec
        self._iteration = 0
        self._prompt_tokens = 0
        self._generated = False
        self._sparse = SparseStamps()
        self._only_listed = False

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._generated = generated
        if not generated:
            self._prompt_tokens = run.num_tokens
            return
        stamps = self.values[0, self._prompt_tokens :]
        born = self._iteration + 1.0 + np.arange(run.steps)
        stamps[len(stamps) - run.num_tokens :] = np.repeat(born, len(run.leaves))
        rows = run.observed.attention
        follows = self._spec.up_to_constant and self._spec.page is None and self._paths.straight
        self._only_listed = follows and isinstance(rows, SparseRows)
        if self._only_listed:
            assert isinstance(rows, SparseRows)
            self._sparse.begin(rows, stamps, self._iteration)
        else:
            self._sparse.settle(stamps[: len(stamps) - run.num_tokens], self._iteration)

    def observe(self, step: int) -> None:
        if not self._generated:
            return
        self._iteration += 1
        if self._only_listed:
            self._sparse.take()
        else:
            super().observe(step)

    def _take(self, now: np.ndarray, at: Places, row: np.ndarray) -> None:
        paid = row[self._prompt_tokens :]
        stamps = now[at]  # a view if `at` is a slice, else a copy
        if self._spec.page is None:
            fresh = paid >= median(paid)
        else:
            fresh = fresh_pages(paid, self._spec.page, self._spec.threshold)
        np.putmask(stamps[self._prompt_tokens :], fresh, float(self._iteration))
        if not isinstance(at, slice):
            now[at] = stamps


def fresh_pages(paid: np.ndarray, page: int, threshold: float) -> np.ndarray:
    """Whether each token lies in a page that is refreshed; the last page always is.

    Parameters
    ----------
    paid : float64 ``[n]``
        Attention to consecutive tokens, the first of which begins a page.
    page : int
    threshold : float

    Returns
    -------
    bool ``[n]``
    """
    fresh = np.maximum.reduceat(paid, np.arange(0, len(paid), page)) > threshold
    fresh[-1] = True
    return np.repeat(fresh, page)[: len(paid)]
