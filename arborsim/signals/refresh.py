"""When a token was last attended to: the timestamps of RaaS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal, SparseRows
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.attention_scores import MeanRowState, Places
from arborsim.signals.scores import ScoreState
from arborsim.signals.sparse_newest import Listed, is_number


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
    up_to_constant : bool
        The timestamps of generated tokens may all be too low by the same number, which no ranking
        among them notices (a prompt's mean nothing then): a sparse row that refreshes nearly all
        tokens, as most do, is then taken in the time of what it lists.
    """

    page: int | None = None
    threshold: float = 0.01
    up_to_constant: bool = False
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
        self._sparse = SparseStamps()
        self._only_listed = False

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
        assert self._paths is not None
        rows, stamps = run.observed.attention, self.values[self._prompt_tokens :]
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

    def _take(self, at: Places, row: np.ndarray) -> None:
        paid = row[self._prompt_tokens :]
        stamps = self.values[at]  # a view if `at` is a slice, else a copy
        if self._spec.page is None:
            fresh = paid >= median(paid)
        else:
            fresh = fresh_pages(paid, self._spec.page, self._spec.threshold)
        np.putmask(stamps[self._prompt_tokens :], fresh, float(self._iteration))
        if not isinstance(at, slice):
            self.values[at] = stamps


def median(values: np.ndarray) -> float:
    """The median; mean of the two middle values of an even number (`numpy.median` is slower)."""
    middle = len(values) // 2
    parts = values.copy()
    parts.partition(middle)
    if len(values) % 2:
        return float(parts[middle])
    return float((parts[:middle].max() + parts[middle]) / 2)


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


class SparseStamps:
    """Timestamps of the generated tokens of one straight path, less the newest iteration.

    A token refreshed now has 0, others are negative.  Where the share of the positions that a row
    does not list is its median, everything is refreshed but the few that it lists with less: only
    these change, and those that were not refreshed the last time.
    """

    def __init__(self) -> None:
        self._values = np.empty(0)
        self._listed: Iterator[Listed] = iter(())
        self._prompt_tokens = 0
        self._stale: np.ndarray | None = None  # which are negative; None: not known
        self._shifted = False

    def begin(self, rows: SparseRows, values: np.ndarray, iteration: int) -> None:
        """Take the rows of a run after so many iterations.

        Parameters
        ----------
        rows : SparseRows
        values : float64 ``[generated tokens]``
            True timestamps if the last run was not taken here; it ends with the run's tokens.
        iteration : int
        """
        old = len(values) - len(rows)
        if not self._shifted:
            values[:old] -= iteration
            self._stale, self._shifted = None, True
        values[old:] = 0.0  # birth counts as use, whenever it comes
        self._values, self._listed = values, rows.listed()
        self._prompt_tokens = int(rows.lengths[0]) - old - 1

    def settle(self, values: np.ndarray, iteration: int) -> None:
        """Make the timestamps of older tokens, float64 ``[n]``, the true ones."""
        if self._shifted:
            values += iteration
            self._shifted = False

    def take(self) -> None:
        """Take in the next row."""
        row = next(self._listed)
        length, index, value, share = row
        count = length - self._prompt_tokens
        if not is_number(row):
            self._age(count)
        elif count - len(value) > count // 2 and not (value < share).any():
            self._refresh(count, index[:0])
        else:
            first = int(np.searchsorted(index, self._prompt_tokens))
            self._compare(count, index[first:] - self._prompt_tokens, value[first:], share)

    def _compare(self, count: int, token: np.ndarray, paid: np.ndarray, share: float) -> None:
        """Take in what a row pays the first `count` tokens: `paid` those listed, others `share`."""
        low, others = paid < share, count - len(token)
        at_most = others + int(np.count_nonzero(paid <= share))
        if int(np.count_nonzero(low)) <= (count - 1) // 2 and count // 2 < at_most and others:
            stale = token[low]
            self._refresh(count, stale[stale < count - 1])
            return
        row = np.full(count, share)
        row[token] = paid
        self._age(count)
        self._values[:count][row >= median(row)] = 0.0

    def _age(self, count: int) -> None:
        """An iteration passes: of the first `count` tokens only the newest is fresh."""
        self._values[: count - 1] -= 1.0
        self._stale = None

    def _refresh(self, count: int, stale: np.ndarray) -> None:
        """An iteration passes, and refreshes all of the first `count` tokens but `stale`."""
        kept = self._values[stale] - 1.0
        if self._stale is None:
            self._values[:count] = 0.0
        elif len(self._stale):
            self._values[self._stale] = 0.0
        self._values[stale] = kept
        self._stale = stale
