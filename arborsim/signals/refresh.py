"""When a token was last attended to: the timestamps of RaaS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.events import TokenRun
from arborsim.signals.attention_scores import MeanRowState, Places
from arborsim.signals.observations import Signal
from arborsim.signals.scores import ScoreState
from arborsim.tree import GrowingArray, ThoughtTree


@dataclass(frozen=True)
class LastAttended:
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
    """

    page: int | None = None
    threshold: float = 0.01
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _LastAttendedState(self)


class _LastAttendedState(MeanRowState):
    def __init__(self, spec: LastAttended) -> None:
        super().__init__()
        self._spec = spec
        self._stamps = GrowingArray(np.float64)
        self._iteration = 0
        self._prompt_tokens = 0
        self._generated = False

    @property
    def values(self) -> np.ndarray:
        return self._stamps.values

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._generated = generated
        if not generated:
            self._prompt_tokens = run.num_tokens
            self._stamps.extend(np.zeros(run.num_tokens))
            return
        born = self._iteration + 1.0 + np.arange(run.steps)
        self._stamps.extend(np.repeat(born, len(run.leaves)))

    def observe(self, step: int) -> None:
        if self._generated:
            self._iteration += 1
            super().observe(step)

    def _take(self, at: Places, row: np.ndarray) -> None:
        paid = row[self._prompt_tokens :]
        stamps = self.values[at]  # a view if `at` is a slice, else a copy
        if self._spec.page is None:
            fresh = paid >= median(paid)
        else:
            fresh = fresh_pages(paid, self._spec.page, self._spec.threshold)
        np.copyto(stamps[self._prompt_tokens :], self._iteration, where=fresh)
        if not isinstance(at, slice):
            self.values[at] = stamps


def median(values: np.ndarray) -> float:
    """The median; mean of the two middle values of an even number (`numpy.median` is slower)."""
    middle = len(values) // 2
    # Most positions of a sparse row share one value, which then is the median: two passes show it.
    common = sorted(values[[len(values) // 4, middle, (3 * len(values)) // 4]].tolist())[1]
    below = np.count_nonzero(values < common)
    if below <= (len(values) - 1) // 2 and np.count_nonzero(values <= common) > middle:
        return float(common)
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    parts = np.partition(values, (middle - 1, middle))
    return float((parts[middle - 1] + parts[middle]) / 2)


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
