"""Reductions of attention rows that scores need, for backends to make where rows are computed.

Most scores follow the sum of the rows, the newest one, or when tokens were used last.  A backend
that knows so hands over one vector per path and decision instead of a row per token
(`Observations.reduced`). A replay has the rows themselves.  Both lead to the same values: weights
are whole multiples of 2**-24, the smallest step of float16, and at most 1, so float64 adds up to
2**29 of them exactly, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

ALL_QUERIES = 1 << 60


@dataclass(frozen=True)
class RowUse:
    """A reduction of the rows of a grouping (`arborsim.signals.scores.GROUPINGS`).

    - "sum": their sum over the queries of each path
    - "newest": the row of its last query
    - "last": by position the last query that uses it
    - "reach": one number per group, what queries pay to all but the first `sinks` positions and
      their own `recent` newest ones
    - "rows": every row (with "head", those of query heads)
    - "queries": no row, but the query itself, of the `newest` last iterations before a decision
    - "sparsity", of all query heads: per query how many rows are numbers, and how many of their
      entries are at least `part` of their row's largest
    - "spread", of single query heads and the prompt alone: by position the mean over its queries
      plus `weight` times the variance, mean over the heads of a group (`arborsim.signals.spread`)
    - "moments", of the same: three numbers for each group, entropy, variance and kurtosis of its
      layer

    A position is used by a query that pays it at least the median of what it pays those that it can
    read (of an even number the lower of the two in the middle).  With `page` a page of as many
    positions is used if any is paid more than `threshold`, and the last page always.  Positions of
    the prompt are among them if its queries count.
    """

    grouping: str
    keeps: Literal[
        "sum", "newest", "last", "reach", "sparsity", "spread", "moments", "rows", "queries"
    ]
    prompt: int = ALL_QUERIES  # how many of the prompt's queries count, the last ones
    generated: bool = True  # whether queries of generated tokens count
    page: int | None = None  # of "last"
    threshold: float = 0.0  # of "last", with pages
    sinks: int = 0  # of "reach", at most an eighth of the prompt
    recent: int = 0  # of "reach", at most a quarter of the prompt, and at least one
    part: float = 0.0  # of "sparsity", more than 0
    weight: float = 0.0  # of "spread"
    newest: int = ALL_QUERIES  # of "queries"

    @property
    def reduced(self) -> bool:
        """Whether one vector per path and group is enough."""
        return self.keeps not in ("rows", "queries")

    @property
    def of_heads(self) -> bool:
        """Whether it is made of rows of single query heads, once the prompt is over."""
        return self.keeps in ("spread", "moments")

    def first(self, prompt_tokens: int) -> int:
        """Position of the first query of the prompt that counts."""
        return max(0, prompt_tokens - self.prompt)

    def excluded(self, prompt_tokens: int) -> tuple[int, int]:
        """First positions and newest ones that do not count for "reach", else 0 and 0."""
        if self.keeps != "reach":
            return 0, 0
        return min(self.sinks, prompt_tokens // 8), max(1, min(self.recent, prompt_tokens // 4))


@dataclass(frozen=True)
class ReducedRows:
    """The reduced rows of a run, which cannot be cut any more.

    Per leaf ``[groups, positions]``, of a type that float64 holds exactly: the sum, or the newest
    row, NaN where no row was a number, or which of the run's iterations was the last to use a
    position, from 1 on, 0 if none did.  Of "reach" ``[groups, 1]``, of "moments" ``[groups, 3]``,
    of "sparsity" ``[2, iterations]``.  No positions, or iterations, where no query counts.
    """

    leaves: tuple[np.ndarray, ...]
