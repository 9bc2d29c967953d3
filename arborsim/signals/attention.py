"""Scores from attention rows: cumulative, newest, from the end of the prompt.

Every score keeps one live table, brought up to date in place with every decode iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.settings import setting
from arborsim.core.tree import ThoughtTree
from arborsim.signals.rows import GroupRows, LastLayers, Row, RowState, is_number, row_signal
from arborsim.signals.scores import Changes, Score, ScoreState, grouping_setting
from arborsim.signals.sparse_rows import ExactSums, SparseNewest, SparseSums, SparseUpdater
from arborsim.signals.vectors import ValueSize


@dataclass(frozen=True)
class CumulativeAttention(Score):
    """Attention a token has received so far, summed over queries.

    H2O's score (Zhang et al. 2023, arXiv:2306.14048, section 4), there per layer and KV head.  From
    later blocks it is ArborKV's ``A_i(t)``, the sum over u > b_i.
    """

    from_later_blocks: bool = setting(False, "count only queries outside the token's block")
    count_prompt: bool = setting(True, "count the prompt's own queries, too")
    up_to_constant: bool = setting(
        False,
        "all sums may be too low by the same number: faster on sparse recordings, and no ranking "
        "notices",
    )
    grouping: str = grouping_setting()
    changes: ClassVar[Changes] = "rises"

    @property
    def needs(self) -> frozenset[Signal]:
        return row_signal(self.grouping)

    @property
    def about(self) -> str:
        return "attention from later blocks" if self.from_later_blocks else "cumulative attention"

    @property
    def use(self) -> RowUse:
        # The prompt is one block.
        whole = self.count_prompt and not self.from_later_blocks
        return RowUse(self.grouping, "sum") if whole else RowUse(self.grouping, "sum", prompt=0)

    def start(self, layers: int) -> ScoreState:
        if self.from_later_blocks:
            return _LaterState(self.use)
        sparse = SparseSums() if self.up_to_constant else ExactSums()
        if self.count_prompt:
            return RowState(self.use, sparse)
        return _WindowState(self.use, 0, True, sparse)


class _LaterState(RowState):
    _before: list[int]  # where each leaf's block begins

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._single = False  # of a row only a part counts: `_take_leaf`
        self._before = [len(tree.path(leaf)) - tree.num_node_tokens(leaf) for leaf in run.leaves]

    def _take_leaf(self, leaf: int, rows: Row) -> None:
        for now, row in zip(self._now, rows, strict=True):
            if is_number(row):
                later = row[: self._before[leaf]]
                self._take(now, self._paths.tokens(leaf, len(later)), later)


@dataclass(frozen=True)
class ValueWeightedAttention(Score):
    """Attention received so far times the size of the token's value (VATP's score).

    ``S(i) = ||v_i||_1 x sum over queries t of a_t(i)`` (Guo et al. 2024, arXiv:2406.12335), with
    norms averaged over the layers and KV heads of a group.
    """

    grouping: str = grouping_setting()
    about = "cumulative attention x L1 norm of the value"
    changes: ClassVar[Changes] = "freely"

    @property
    def needs(self) -> frozenset[Signal]:
        return row_signal(self.grouping) | ValueSize(self.grouping).needs

    @property
    def use(self) -> RowUse:
        return CumulativeAttention(grouping=self.grouping).use

    def start(self, layers: int) -> ScoreState:
        received = CumulativeAttention(grouping=self.grouping).start(layers)
        return _ProductState(received, ValueSize(self.grouping).start(layers))


class _ProductState(ScoreState):
    def __init__(self, changing: ScoreState, frozen: ScoreState) -> None:
        super().__init__()
        self._changing, self._frozen = changing, frozen

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        self._changing.begin(run, tree, generated)
        self._frozen.begin(run, tree, generated)
        self._grow(len(self._changing.values), run.num_tokens)

    def observe_all(self, first: int, last: int) -> None:
        self._changing.observe_all(first, last)
        np.multiply(self._changing.values, self._frozen.values, out=self.values)


@dataclass(frozen=True)
class NewestAttention(Score):
    """Attention from the newest query.  Tokens off the active paths keep what they last had.

    TOVA's score (Oren et al. 2024, arXiv:2401.06104).  Leaves that decode in one iteration all are
    newest: a token that several of them see gets the mean.  With `layers`, values are the rows of
    that many of the last captured layers (fewer where a trace holds fewer).
    """

    layers: int = setting(
        0, "last captured layers to look at, each apart; 0: the mean over all", unit="layers", low=0
    )
    up_to_constant: bool = setting(
        False,
        "values may all be too low by the same number: faster on sparse recordings, and no ranking "
        "notices",
    )
    grouping: str = grouping_setting()
    about = "attention of the newest query"
    changes: ClassVar[Changes] = "freely"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({Signal.LAYER_ATTENTION}) if self.layers else row_signal(self.grouping)

    @property
    def use(self) -> RowUse:
        return RowUse(self.grouping, "newest", prompt=1)

    @property
    def row_uses(self) -> frozenset[RowUse]:
        return frozenset() if self.layers else frozenset({self.use})

    def start(self, layers: int) -> ScoreState:
        return NewestState(self.use, self.layers, self.up_to_constant and not self.layers)


class NewestState(RowState):
    """Follows the newest query of every path."""

    def __init__(self, use: RowUse, layers: int = 0, up_to_constant: bool = False) -> None:
        super().__init__(use, SparseNewest() if up_to_constant else None)
        self._layers = layers

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        if self._layers:
            rows: GroupRows = LastLayers(run.observed.layer_attention, self._layers)
            self._follow(run, tree, rows=rows)
        else:
            self._follow(run, tree)

    def observe(self, step: int) -> None:
        if self._updater or self._reduced is not None:
            super().observe(step)
        elif self._single:
            (row,) = self._rows.row(step)
            if is_number(row):
                self._now[0][: len(row)] = row
        else:
            self._replace(self._batch(step))

    def _replace(self, batch: Sequence[Row]) -> None:
        """Take in the newest rows of each leaf, by group."""
        for group, now in enumerate(self._now):
            found = [
                (self._paths.tokens(leaf, len(rows[group])), rows[group])
                for leaf, rows in enumerate(batch)
                if is_number(rows[group])
            ]
            if len(found) == 1:
                now[found[0][0]] = found[0][1]
            elif found:  # the mean of the rows that cover a token
                queries = np.zeros(len(now))
                for at, _ in found:
                    now[at] = 0.0
                    queries[at] += 1
                for at, row in found:
                    now[at] += row
                several = queries > 1
                now[several] /= queries[several]

    def observe_all(self, first: int, last: int) -> None:
        """A later row replaces an earlier one."""
        if self._reduced is not None:
            assert (first, last) == (0, self._steps), "rows were reduced over the whole run"
            if self._reduced[0].shape[1]:
                self._replace([list(rows) for rows in self._reduced])
            return
        if self._updater:
            super().observe_all(first, last)
            return
        enough = last - 1
        while enough > first and not all(
            is_number(row) for rows in self._batch(enough) for row in rows
        ):
            enough -= 1
        for step in range(enough, last):
            self.observe(step)

    def _batch(self, step: int) -> list[Row]:
        width = len(self._paths)
        return [self._rows.row(step * width + leaf) for leaf in range(width)]


@dataclass(frozen=True)
class PromptAttention(Score):
    """Attention from the last `window` prompt queries, summed (0 for generated tokens).

    SnapKV's votes (Li et al. 2024, arXiv:2404.14469, Eq. 1).  A shorter prompt counts whole.  With
    `generated`, tokens have votes from all queries since the window.
    """

    window: int = setting(64, "prompt queries that count", unit="tokens", low=1)
    generated: bool = setting(False, "queries of generated tokens count too")
    grouping: str = grouping_setting()
    changes: ClassVar[Changes] = "rises"

    @property
    def about(self) -> str:
        return "attention from the end of the prompt" + (" on" if self.generated else "")

    @property
    def needs(self) -> frozenset[Signal]:
        return row_signal(self.grouping)

    @property
    def use(self) -> RowUse:
        return RowUse(self.grouping, "sum", self.window, self.generated)

    def start(self, layers: int) -> ScoreState:
        return _WindowState(self.use, self.window, self.generated)


class _WindowState(RowState):
    """Follows the rows of the last `window` prompt queries and, if wanted, of generated tokens."""

    def __init__(
        self, use: RowUse, window: int, generated: bool, sparse: SparseUpdater | None = None
    ) -> None:
        super().__init__(use, sparse)
        self._window, self._generated = window, generated
        self._first = 0  # iteration from which queries count

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        skipped = 0 if self._generated else run.steps
        self._first = skipped if generated else max(0, run.steps - self._window)
        self._follow(run, tree, self._first)

    def observe(self, step: int) -> None:
        if step >= self._first or self._reduced is not None:
            super().observe(step)
