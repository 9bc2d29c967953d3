"""When tokens were last attended to: the timestamps of RaaS."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal, SparseRows
from arborsim.core.row_uses import ALL_QUERIES, RowUse
from arborsim.core.tree import ThoughtTree
from arborsim.signals.rows import RowState, TokenIds
from arborsim.signals.scores import Changes, Score, ScoreState
from arborsim.signals.sparse_rows import SparseUpdater, lists_numbers


@dataclass(frozen=True)
class LastAttended(Score):
    """Decode iteration in which a token was last attended to enough (its birth counts).

    Prompt tokens have 0.  `with_prompt` they count as generated ones, one iteration each, in all
    that follows.  Without `page`, a generated token is refreshed when the newest query pays it at
    least the median of what it pays the generated tokens that it can read (EpiKV's variant of RaaS,
    with the lower of the two middle values of an even number).  Else a page of that many
    consecutive generated tokens is refreshed when the query pays any of them more than `threshold`,
    and when it receives a token (Hu et al. 2025, ACL Findings).

    With `up_to_constant` the timestamps of generated tokens may all be too low by the same number,
    which no ranking among them notices (a prompt's mean nothing then): a sparse row that refreshes
    nearly all tokens, as most do, is then taken in the time of what it lists.
    """

    page: int | None = None
    threshold: float = 0.01
    up_to_constant: bool = False
    prompt: bool = False
    needs = frozenset({Signal.ATTENTION})
    about = "timestamp of the last use"
    changes: ClassVar[Changes] = "freely"

    @property
    def blurred(self) -> bool:
        return self.page is None  # the share of what a row does not list often is its median

    @property
    def use(self) -> RowUse:
        prompt = ALL_QUERIES if self.prompt else 0
        return RowUse("shared", "last", prompt, page=self.page, threshold=self.threshold)

    def with_prompt(self) -> Score:
        return replace(self, prompt=True)

    def start(self, layers: int) -> ScoreState:
        return _LastAttendedState(self)


class _LastAttendedState(RowState):
    knows_held = True

    def __init__(self, spec: LastAttended) -> None:
        super().__init__(spec.use)
        self._spec = spec
        self._iteration = 0
        self._prompt_tokens = 0
        self._generated = False
        self._held: np.ndarray = np.ones(0, dtype=bool)  # by token: whether queries can read it
        self._evicted = 0
        self._stamps = _SparseStamps()

    def hold(self, held: np.ndarray) -> None:
        self._held = np.asarray(held.any(axis=0))

    def lose(self, tokens: np.ndarray) -> None:
        self._held[tokens] = False
        self._evicted += len(tokens)
        self._stamps.evicted += len(tokens)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._generated = generated or self._spec.prompt
        if not self._generated:
            self._grow(1, run.num_tokens)
            self._prompt_tokens = run.num_tokens
            return
        super().begin(run, tree, generated)
        self._held = np.concatenate([self._held, np.ones(run.num_tokens, dtype=bool)])
        self._evicted = len(self._held) - int(np.count_nonzero(self._held))
        stamps = self.values[0, self._prompt_tokens :]
        born = self._iteration + 1.0 + np.arange(run.steps)
        stamps[len(stamps) - run.num_tokens :] = np.repeat(born, len(run.leaves))
        rows = run.observed.attention
        follows = self._spec.up_to_constant and self._spec.page is None and self._paths.straight
        if follows and isinstance(rows, SparseRows):
            self._updater = self._stamps
            self._stamps.hold(self._held[self._prompt_tokens :])
            self._stamps.begin(rows, stamps, self._iteration)
        else:
            self._updater = None
            self._stamps.settle(stamps[: len(stamps) - run.num_tokens], self._iteration)

    def observe(self, step: int) -> None:
        if not self._generated:
            return
        if self._reduced is None:
            self._iteration += 1
        super().observe(step)

    def observe_all(self, first: int, last: int) -> None:
        if self._reduced is None:
            for step in range(first, last):  # iterations count, whatever takes the rows
                self.observe(step)
        else:
            super().observe_all(first, last)
            self._iteration += last - first

    def _take(self, now: np.ndarray, at: TokenIds, row: np.ndarray) -> None:
        if self._reduced is not None:
            used = np.where(row > 0, row + float(self._iteration), 0.0)
            now[at] = np.maximum(now[at], used)
            return
        paid = row[self._prompt_tokens :]
        stamps = now[at]  # a view if `at` is a slice, else a copy
        held = self._held[at][self._prompt_tokens :] if self._evicted else None
        if self._spec.page is None:
            fresh = paid >= median(paid if held is None else paid[held])
        else:
            paid = paid if held is None else np.where(held, paid, 0.0)
            fresh = fresh_pages(paid, self._spec.page, self._spec.threshold)
        np.putmask(stamps[self._prompt_tokens :], fresh, float(self._iteration))
        if not isinstance(at, slice):
            now[at] = stamps


def fresh_pages(paid: np.ndarray, page: int, threshold: float) -> np.ndarray:
    """Whether each token lies in a page that is refreshed, as the last one always is, bool ``[n]``.

    `paid`, float64 ``[n]``, is the attention to consecutive tokens, the first begins a page.
    """
    fresh = np.maximum.reduceat(paid, np.arange(0, len(paid), page)) > threshold
    fresh[-1] = True
    return np.repeat(fresh, page)[: len(paid)]


def median(values: np.ndarray) -> float:
    """The median, the lower of the two middle values of an even number, as `torch.median`."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])


class _SparseStamps(SparseUpdater):
    """Timestamps of generated tokens, less the newest iteration.

    A token refreshed now has 0, others are negative, and values of evicted ones are not used.
    Where the share of the positions that a row does not list is its median, everything is refreshed
    but the few that it lists with less: only these change, and those that were not refreshed the
    last time.
    """

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._stale: np.ndarray | None = None  # which are negative; None: not known
        self._shifted = False
        self._held = np.empty(0, dtype=bool)
        self.evicted = 0  # generated tokens that no query reads any more

    def hold(self, held: np.ndarray) -> None:
        """Which tokens can be read, bool ``[generated tokens]``, with those of the next run.

        Kept up to date by whom it belongs to, as is `evicted`.
        """
        self._held, self.evicted = held, len(held) - int(np.count_nonzero(held))

    def begin(self, rows: SparseRows, values: np.ndarray, iteration: int = 0) -> None:
        """Take the rows of a run, after the iterations before it.

        Values, float64 ``[generated tokens]``, are true if the last run was not taken here.
        """
        super().begin(rows, values)
        old = len(values) - len(rows)
        if not self._shifted:
            values[:old] -= iteration
            self._stale, self._shifted = None, True
        values[old:] = 0.0  # birth counts as use, whenever it comes
        self._prompt_tokens = int(rows.lengths[0]) - old - 1

    def settle(self, values: np.ndarray, iteration: int = 0) -> None:
        if self._shifted:
            values += iteration
            self._shifted = False

    def take(self, step: int) -> None:
        row = next(self._next)
        length, index, value, share = row
        count = length - self._prompt_tokens
        readable = count - self.evicted
        if not lists_numbers(row):
            self._age(count)
        elif readable - len(value) > (readable - 1) // 2 and not (
            len(value) and np.minimum.reduce(value) < share
        ):
            self._refresh(count, index[:0])
        else:
            first = int(np.searchsorted(index, self._prompt_tokens))
            token, paid = index[first:] - self._prompt_tokens, value[first:]
            if self.evicted:
                held = self._held[token]
                token, paid = token[held], paid[held]
            self._compare(count, token, paid, share)

    def _compare(self, count: int, token: np.ndarray, paid: np.ndarray, share: float) -> None:
        """Take in what a row pays the first `count` tokens: `paid` those listed, others `share`."""
        readable = count - self.evicted
        low, others, middle = paid < share, readable - len(token), (readable - 1) // 2
        at_most = others + int(np.count_nonzero(paid <= share))
        if np.count_nonzero(low) <= middle < at_most and others:
            stale = token[low]
            self._refresh(count, stale[stale < count - 1])
            return
        row = np.full(count, share)
        row[token] = paid
        self._age(count)
        self._values[:count][row >= median(row[self._held[:count]] if self.evicted else row)] = 0.0

    def _age(self, count: int) -> None:
        """An iteration passes: of the first `count` tokens only the newest is fresh."""
        self._values[: count - 1] -= 1.0
        self._stale = None

    def _refresh(self, count: int, stale: np.ndarray) -> None:
        """An iteration passes, and refreshes all of the first `count` tokens but `stale`."""
        if self._stale is not None and not len(self._stale) and not len(stale):
            return  # as most rows: all were fresh, and are
        kept = self._values[stale] - 1.0
        if self._stale is None:
            self._values[:count] = 0.0
        elif len(self._stale):
            self._values[self._stale] = 0.0
        self._values[stale] = kept
        self._stale = stale
