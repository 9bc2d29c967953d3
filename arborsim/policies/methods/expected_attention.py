"""Expected attention: what future queries will pay a key, from the distribution of past ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.settings import setting
from arborsim.core.tiers import hbm_mask
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import ANY, EveryStep, Interval, Protect
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.rows import head_rows
from arborsim.signals.scores import AtBegin, FixedScore, Score, ScoreState, rounded, sum_in_order
from arborsim.signals.vectors import Vectors, norms, vectors_per_group

_AT_ONCE = 256  # queries whose products are added at a time


@dataclass(frozen=True)
class QueryMoments(Score):
    """Number, sum and second moments of the queries so far, before RoPE, of each query head.

    Float64 ``[layers x heads, 1 + head_dim, 1 + head_dim]``: the sum of the outer products of
    ``(1, q)``, where ``q`` is a query over the square root of its size.  All queries of the search
    count once, but for those at the first `skip` positions.
    """

    skip: int = setting(4, "first positions whose queries do not count", low=0)
    needs = frozenset({Signal.HEAD_ATTENTION, Signal.ROPE})
    use = RowUse("head", "queries")
    about = "attention expected of future queries"
    grouping = "head"

    def start(self, layers: int) -> ScoreState:
        return _MomentsState(self.skip)


class _MomentsState(AtBegin):
    def __init__(self, skip: int) -> None:
        super().__init__()
        self._skip = skip
        self._moments: np.ndarray = np.empty((0, 0, 0))

    @property
    def values(self) -> np.ndarray:
        return self._moments

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        rows, width = head_rows(run.observed), len(run.leaves)
        assert rows.rope is not None, "the reader was not asked for RoPE"
        position = np.empty(run.num_tokens, dtype=np.int64)
        for w, leaf in enumerate(run.leaves):
            end = len(tree.path(leaf))
            position[w::width] = np.arange(end - run.steps, end)
        for first in range(0, run.num_tokens, _AT_ONCE):
            at = range(first, min(first + _AT_ONCE, run.num_tokens))
            queries = np.stack([rows.query(i) for i in at])  # [tokens, layers, heads, head_dim]
            plain = rows.rope.unrotate(queries, position[at.start : at.stop, None, None])
            self._add(plain[position[at.start : at.stop] >= self._skip])

    def _add(self, queries: np.ndarray) -> None:
        tokens, layers, heads, size = queries.shape
        one = np.ones((layers * heads, tokens, 1 + size))
        one[:, :, 1:] = queries.reshape(tokens, layers * heads, size).swapaxes(0, 1)
        fresh = one.swapaxes(1, 2) @ one
        self._moments = self._moments + fresh if self._moments.size else fresh


@dataclass(frozen=True)
class ValueLength(FixedScore):
    """L2 norm of a token's value, of every KV head."""

    needs = frozenset({Signal.VALUES})
    about = "norm of the value"
    grouping = "head"

    def compute(self, run: TokenRun) -> np.ndarray:
        return norms(vectors_per_group(run.observed, Signal.VALUES, "head").astype(np.float64))


@dataclass(frozen=True)
class ExpectedAttention(StreamPolicy):
    """Keep the keys that future queries are expected to look at.

    Queries before RoPE are taken for normally distributed.  The rotations by the next `future`
    positions are averaged.  The expectation of ``exp(q.k / sqrt(d))`` then is ``exp(mu.k / sqrt(d)
    + k' Sigma k / (2 d))``.
    """

    interval: int = setting(128, "between decisions", unit="iterations", low=1)
    future: int = setting(512, "positions to come, averaged over", unit="tokens", low=1)
    sinks: int = setting(4, "protected first tokens, not rated", unit="tokens", low=0)
    covariance: bool = setting(True, "also the covariance of queries, not only their mean")
    value_norm: bool = setting(True, "weight attention by the L2 norm of the value")
    epsilon: float = setting(0.0, "added to the attention before it is weighted", low=0)

    name = "expected-attention"
    fused = True  # queries are read, but no row of attention

    @cached_property
    def score(self) -> Score:
        return QueryMoments(self.sinks)

    @cached_property
    def schedule(self) -> EveryStep:
        return Interval(self.interval)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, recent=1, recent_share=ANY)

    def scores(self) -> Mapping[str, Score]:
        found: dict[str, Any] = {"score": self.score, "keys": Vectors(Signal.KEYS)}
        if self.value_norm:
            found["length"] = ValueLength()
        return found

    def rank(self, view: CacheView) -> np.ndarray:
        """Expected attention, times the norm of the value, of the tokens that are held."""
        stream = view.stream(self.adaptation)
        rated = stream[~Protection(sinks=self.sinks, recent=0).mask(view)[stream]]
        mean, covariance = self._queries_to_come(view)
        per_group = len(mean) // len(view.tier)
        rank = np.zeros(view.tier.shape)
        for group, tier in enumerate(view.tier):
            held = rated[hbm_mask(tier[rated])]
            if not len(held):
                continue
            keys = view.scores["keys"][group, held].astype(np.float64)
            heads = range(group * per_group, (group + 1) * per_group)
            attention = np.stack([_expected(keys, mean[h], covariance[h]) for h in heads])
            score = sum_in_order(attention, axis=0) / per_group
            if self.value_norm:
                score = (score + self.epsilon) * view.scores["length"][group, held]
            rank[group, held] = score
        return rank

    def _queries_to_come(self, view: CacheView) -> tuple[np.ndarray, np.ndarray]:
        """Mean ``[heads, head_dim]`` and covariance ``[heads, head_dim, head_dim]``, rotated."""
        moments, rope = view.scores["score"], view.shape.rope
        assert rope is not None, "a view without RoPE"
        count = np.maximum(moments[:, :1, :1], 1)  # a prompt may be shorter than the sinks
        mean = moments[:, 0, 1:] / count[:, 0]
        length = max(len(view.tree.path(leaf)) for leaf in view.leaves)
        rotation = rope.mean_rotation(length, self.future, mean.shape[1])
        if not self.covariance:
            return mean @ rotation.T, np.zeros((*mean.shape, mean.shape[1]))
        covariance = moments[:, 1:, 1:] / count - mean[:, :, None] * mean[:, None, :]
        return mean @ rotation.T, rotation @ covariance @ rotation.T


def _expected(keys: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Share of each key ``[n, head_dim]`` in the attention expected of one query head, ``[n]``."""
    logits = keys @ mean
    if covariance.any():
        logits += np.einsum("nd,nd->n", keys @ covariance, keys) / 2
    logits = rounded(logits)
    weight = np.exp(logits - logits.max())
    return np.asarray(weight / weight.sum())
