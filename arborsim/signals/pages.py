"""Pages of keys and their bounds, and queries: what choosing pages to read is made of.

A page is a number of consecutive tokens of a path.  The first child of a node goes on with the page
that its parent has begun.  Other children begin pages of their own.  So every token is in one page,
and a chain of thoughts is cut as if it were one text.

Quest (Tang et al. 2024, arXiv:2406.10774) keeps the smallest and the largest key of each page per
channel: ``sum_d max(q_d low_d, q_d high_d)`` is at least ``q . k`` for every key k of the page.
Where a sibling has gone on with a page that a path shares, its keys are in the bounds, too: they
still hold, but are wider.  `arborsim_torch.kernels.ondemand` bounds what the backend fetches by
itself in the recall mode ``ondemand`` in the same way, over the tokens that it finds in DDR.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import ALL_QUERIES, RowUse
from arborsim.core.settings import setting
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.signals.rows import head_rows
from arborsim.signals.scores import AtBegin, FixedScore, Score, ScoreState
from arborsim.signals.vectors import vectors_per_group


@dataclass(frozen=True)
class Queries(FixedScore):
    """Scaled queries of the captured layers, float32 ``[layers x heads, tokens, head_dim]``.

    The product with a post-RoPE key is the logit.  Heads are in order, so the query heads that read
    KV head ``g`` (layer by layer) are the ``g``-th of as many equal parts as there are KV heads.
    If only those of the `newest` tokens of paths are read at a decision, others may be NaN.
    """

    newest: int = ALL_QUERIES
    needs = frozenset({Signal.HEAD_ATTENTION})
    about = "queries"

    @property
    def use(self) -> RowUse:
        return RowUse("head", "queries", self.newest, newest=self.newest)

    def compute(self, run: TokenRun) -> np.ndarray:
        rows = head_rows(run.observed)
        queries = np.stack([rows.query(i) for i in range(run.num_tokens)])
        return queries.reshape(len(queries), -1, queries.shape[-1]).swapaxes(0, 1)


@dataclass(frozen=True)
class PageOf(Score):
    """The page that each token is in, numbered as they begin, int64 ``[1, tokens]``."""

    page: int = setting(16, "of a page", unit="tokens", low=1)
    needs = frozenset()
    about = "page"

    def start(self, layers: int) -> ScoreState:
        return _PageOfState(self.page)


@dataclass(frozen=True)
class PageBounds(Score):
    """Smallest, then largest key of every page, float64 ``[groups, pages, 2 x head_dim]``."""

    page: int = setting(16, "of a page", unit="tokens", low=1)
    needs = frozenset({Signal.KEYS})
    grouping = "head"
    about = "bounds of the keys of each page"

    def start(self, layers: int) -> ScoreState:
        return _PageBoundsState(self.page)


class _Pages:
    """Gives pages to tokens as they come."""

    def __init__(self, page: int) -> None:
        self.count = 0
        self._page = page
        self._begun: dict[int, tuple[int, int]] = {}  # last page of a node, tokens in it

    def enter(self, run: TokenRun, tree: ThoughtTree) -> np.ndarray:
        """The page of each of the run's tokens, int64 ``[tokens]``."""
        pages = np.empty((run.steps, len(run.leaves)), dtype=np.int64)
        for seq, leaf in enumerate(run.leaves):
            last, filled = self._begun.get(leaf) or self._begun.pop(
                tree.nodes[leaf].parent, (-1, self._page)
            )
            at = filled + np.arange(run.steps)  # counted from the beginning of the page
            pages[:, seq] = np.where(at < self._page, last, self.count - 1 + at // self._page)
            self.count += (filled + run.steps - 1) // self._page
            self._begun[leaf] = int(pages[-1, seq]), (filled + run.steps - 1) % self._page + 1
        return pages.reshape(-1)


class _PageState(AtBegin):
    def __init__(self, page: int) -> None:
        super().__init__()
        self._pages = _Pages(page)


class _PageOfState(_PageState):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        if self._table is None:
            self._table = GrowingTable(1, np.int64)
        self._table.extend(run.num_tokens, self._pages.enter(run, tree))


class _PageBoundsState(_PageState):
    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        before, page = self._pages.count, self._pages.enter(run, tree)
        keys = vectors_per_group(run.observed, Signal.KEYS, "head").astype(np.float64)
        size = keys.shape[2]
        if self._table is None:
            self._table = GrowingTable(len(keys), np.float64, cell=(2 * size,))
        self._table.extend(self._pages.count - before, 0)
        bounds = self._table.values
        bounds[:, before:, :size], bounds[:, before:, size:] = np.inf, -np.inf
        order = np.argsort(page, kind="stable")
        first = np.flatnonzero(np.diff(page[order], prepend=-1))
        at, keys = page[order[first]], keys[:, order]
        low, high = (each.reduceat(keys, first, axis=1) for each in (np.minimum, np.maximum))
        bounds[:, at, :size] = np.minimum(bounds[:, at, :size], low)
        bounds[:, at, size:] = np.maximum(bounds[:, at, size:], high)
