"""How attention spreads over heads, keys and queries: the scores of ARKV.

Equations are numbered as in ARKV's paper (`arborsim.policies.methods.arkv`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import ReducedRows, RowUse
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.signals.attention import NewestState
from arborsim.signals.rows import head_rows, num_row_groups
from arborsim.signals.scores import Changes, OfPrompt, Score, ScoreState, sum_in_order


@dataclass(frozen=True)
class LayerSensitivity(Score):
    """ARKV's OQ score (Eqs. 3-6): ``Ent^(1/tau1) Var^(1/tau2) Kurt^(1/tau3)`` of each layer.

    Taken once, from the attention of the last `window` prompt queries to the keys before them, not
    renormalised (`layer_statistics`).  The same number for every token of a layer's groups.  It is
    0 for all if the prompt is not longer than the window.
    """

    grouping: str = "head"
    window: int = 32
    tau1: float = 7.7744
    tau2: float = 5.4070
    tau3: float = 5.5277
    needs = frozenset({Signal.HEAD_ATTENTION})
    about = "sensitivity of the layer"

    @property
    def use(self) -> RowUse:
        return RowUse(self.grouping, "moments", self.window, generated=False)

    def start(self, layers: int) -> ScoreState:
        return OfPrompt(self.of_prompt)

    def of_prompt(self, run: TokenRun) -> np.ndarray:
        """Float64 ``[groups]`` of the prompt's attention."""
        keys, reduced = run.steps - self.window, run.observed.reduced.get(self.use)
        if reduced is not None:
            statistics = reduced.leaves[0]
            return self.combine(statistics) if keys > 0 else np.zeros(len(statistics))
        rows = head_rows(run.observed)
        newest = rows.query(run.steps - 1)
        layers = len(newest)
        sensitivity = np.zeros(layers)
        if keys > 0:
            queries = [rows.row(i)[..., :keys] for i in range(keys, run.steps)]
            attention = np.stack(queries, axis=2)  # [layers, heads, queries, keys]
            of_layer = [layer_statistics(layer.astype(np.float64)) for layer in attention]
            sensitivity = self.combine(np.stack(of_layer))
        groups = num_row_groups(newest, rows.kv_heads, self.grouping)
        return np.repeat(sensitivity, groups // layers)

    def combine(self, statistics: np.ndarray) -> np.ndarray:
        """One number of each entropy, variance and kurtosis, float64 ``[layers, 3]``.

        A negative entropy (``-A ln(A + 1e-10)`` of a weight of 1) counts as 0, and 0 to any power
        is 0: a layer whose window looks at nothing before it has no claim to full precision.
        """
        exponents = 1.0 / np.array([self.tau1, self.tau2, self.tau3])
        return np.asarray(np.prod(np.maximum(statistics, 0.0) ** exponents, axis=1))


def layer_statistics(attention: np.ndarray) -> np.ndarray:
    """Entropy, variance and kurtosis of one layer (Eqs. 3-5), summed over its heads and keys.

    Attention is float64 ``[heads, queries, keys]`` with at least two queries.  A head with a NaN is
    left out.  Float64 ``[3]``: ``-sum A ln(A + 1e-10)``, the unbiased variance over the queries,
    and ``m4 / max(m2, 1e-8)^2`` with the biased central moments over the queries.
    """
    a = attention[~np.isnan(attention).any(axis=(1, 2))]
    deviation = a - a.mean(axis=1, keepdims=True)
    second, fourth = (deviation**2).mean(axis=1), (deviation**4).mean(axis=1)
    queries = a.shape[1]
    return np.array(
        [
            -(a * np.log(a + 1e-10)).sum(),
            second.sum() * queries / (queries - 1),
            (fourth / np.maximum(second, 1e-8) ** 2).sum(),
        ]
    )


@dataclass(frozen=True)
class HeavyHitters(Score):
    """ARKV's token score before pooling (Eq. 9): ``mean_q A + gamma Var_q A``, mean over the group.

    After the prompt, ``q`` runs over its last `window` queries.  From then on the score is the
    attention of the newest query, as the public code has it (one query has no variance), averaged
    over leaves that decode in one iteration.  With `cumulative`, ``q`` runs over all queries since
    the window instead.
    """

    grouping: str = "head"
    window: int = 32
    gamma: float = 263.811
    cumulative: bool = False
    needs = frozenset({Signal.HEAD_ATTENTION})
    about = "attention of the last prompt queries, then of the newest query; variance counts"
    changes: ClassVar[Changes] = "freely"

    @property
    def use(self) -> RowUse:
        """The reduction of the rows of generated tokens."""
        return RowUse(self.grouping, "newest", prompt=0)

    @property
    def use_of_prompt(self) -> RowUse:
        """The reduction of those of the prompt."""
        return RowUse(self.grouping, "spread", self.window, generated=False, weight=self.gamma)

    @property
    def row_uses(self) -> frozenset[RowUse]:
        if self.cumulative:
            return frozenset({RowUse("head", "rows", self.window)})
        return frozenset({self.use_of_prompt, self.use})

    def start(self, layers: int) -> ScoreState:
        return _HeavyHitterState(self)


class _HeavyHitterState(NewestState):
    def __init__(self, spec: HeavyHitters) -> None:
        super().__init__(spec.use)
        self._spec = spec
        self._spread = Spread()
        self._first = 0  # iteration of the run from which queries count
        self._by_spread = True
        self._of_prompt: ReducedRows | None = None  # in place of the rows of its window

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._first = 0 if generated else run.steps - self._spec.window
        self._by_spread = self._spec.cumulative or not generated
        self._of_prompt = None if generated else run.observed.reduced.get(self._spec.use_of_prompt)
        if self._by_spread and self._of_prompt is None:
            self._heads = head_rows(run.observed)
            layers, heads, _ = self._heads.query(run.num_tokens - 1).shape
            self._spread.extend(layers * heads, run.num_tokens)

    def observe(self, step: int) -> None:
        if self._by_spread:
            self._spread_out(step, step + 1)
        else:
            super().observe(step)

    def observe_all(self, first: int, last: int) -> None:
        if self._by_spread:
            self._spread_out(first, last)
        else:
            super().observe_all(first, last)

    def _spread_out(self, first: int, last: int) -> None:
        """Take in the rows of query heads, then look at what has become of the tokens they read."""
        if self._of_prompt is not None:
            self.values[:] = self._of_prompt.leaves[0]
            return
        width, read = len(self._paths), np.zeros(self.values.shape[1], dtype=bool)
        for i in range(max(first, self._first) * width, last * width):
            row = self._heads.row(i)
            at = self._paths.tokens(i % width, row.shape[2])
            tokens = np.arange(self.values.shape[1])[at]
            self._spread.add(tokens, row.reshape(-1, row.shape[2]).astype(np.float64))
            read[tokens] = True
        tokens = np.flatnonzero(read)
        self.values[:, tokens] = self._spread.heaviness(tokens, len(self.values), self._spec.gamma)


class Spread:
    """Mean and variance of the attention to each token, per query head, one query after the other.

    Welford's updates, so that the bits do not depend on how queries arrive in runs.
    """

    def __init__(self) -> None:
        self._tables: tuple[GrowingTable, ...] = ()  # queries, mean, squares

    def extend(self, heads: int, count: int) -> None:
        """Make room for `count` more tokens."""
        self._tables = self._tables or tuple(GrowingTable(heads, np.float64) for _ in range(3))
        for table in self._tables:
            table.extend(count, 0)

    def add(self, tokens: np.ndarray, row: np.ndarray) -> None:
        """Take in one query's float64 row ``[heads, tokens]``, without heads that hold a NaN."""
        heads = np.flatnonzero(~np.isnan(row).any(axis=1))
        at = np.ix_(heads, tokens)
        queries, mean, squares = (table.values for table in self._tables)
        queries[at] += 1
        deviation = row[heads] - mean[at]
        mean[at] += deviation / queries[at]
        squares[at] += deviation * (row[heads] - mean[at])

    def heaviness(self, tokens: np.ndarray, groups: int, gamma: float) -> np.ndarray:
        """Float64 ``[groups, tokens]``: mean + gamma variance, mean over the heads of a group."""
        queries, mean, squares = (table.values[:, tokens] for table in self._tables)
        variance = squares / np.maximum(queries - 1, 1)
        heavy = (mean + gamma * variance).reshape(groups, -1, len(tokens))
        heads = np.count_nonzero(queries.reshape(heavy.shape), axis=1)
        return np.asarray(sum_in_order(heavy, axis=1) / np.maximum(heads, 1))
