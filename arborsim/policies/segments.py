"""Segments of thought, and what ThinKV keeps of each, as the EpiKV paper runs it.

The stream is cut into segments of 128 tokens.  How widely the newest query spreads its attention
inside a segment (entropy) sorts segments into three classes of equal number: R (narrow), E and T
(wide).  A class keeps a fixed number of tokens of each of its segments; segments are filled oldest
first until the budget is used up, so fewer tokens than the budget may stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.policies.arbor_blocks import keep_highest
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import NewestAttention
from arborsim.signals.scores import Score

ROWS = ("mean", "layers")


def segment_sizes(places: np.ndarray, length: int) -> np.ndarray:
    """How many of some positions lie in each segment, but for segments without any.

    Parameters
    ----------
    places : int64 ``[tokens]``
        Positions in the stream, rising.
    length : int
        Of a segment.

    Returns
    -------
    int64 ``[segments]``
        At least 1 each; their sum is the number of positions.
    """
    last = int(places[-1]) if len(places) else 0
    bounds = np.searchsorted(places, np.arange(0, last + length + 1, length))
    sizes = bounds[1:] - bounds[:-1]
    return np.asarray(sizes[sizes > 0])


def segment_entropy(rows: Sequence[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    """Entropy of attention inside each segment, normalised there, mean over rows.

    Parameters
    ----------
    rows : sequence of float64 ``[tokens]``
        Attention of one query, one row per layer, segment after segment; not negative.
    sizes : int64 ``[segments]``
        Tokens of each segment, at least 1.

    Returns
    -------
    float64 ``[segments]``
        Nats.  Attention that is 0 throughout a segment counts as evenly spread.
    """
    starts = np.cumsum(sizes) - sizes
    total = np.zeros(len(sizes))
    for row in rows:
        mass = np.add.reduceat(row, starts)
        share = row / np.repeat(np.where(mass > 0, mass, 1.0), sizes)
        share *= np.log(share, where=share > 0, out=np.zeros(len(share)))
        total += np.where(mass > 0, -np.add.reduceat(share, starts), np.log(sizes))
    # Logarithms differ in the last bit between processors, sums with their order: what is equal
    # must stay equal.
    return np.asarray(np.round(total / len(rows), 9))


def tertiles(entropy: np.ndarray) -> np.ndarray:
    """Class of each segment by the rank of its entropy: 0 (lowest third), 1, 2 (highest).

    Among equals the older segment counts as the higher, which keeps less.

    Parameters
    ----------
    entropy : float64 ``[segments]``

    Returns
    -------
    int64 ``[segments]``
    """
    number = len(entropy)
    rank = np.empty(number, dtype=np.int64)
    rank[np.lexsort((-np.arange(number), entropy))] = np.arange(number)
    return rank * 3 // max(1, number)


def fill_segments(sizes: np.ndarray, keeps: np.ndarray, rank: np.ndarray, room: int) -> np.ndarray:
    """Keep the best tokens of each segment, oldest segment first, while there is room.

    Parameters
    ----------
    sizes, keeps : int64 ``[segments]``
        Tokens of each segment, and how many it may keep at most.
    rank : float64 ``[tokens]``
        Segment after segment; the highest stay, the newer among equals.
    room : int
        Most tokens kept in all.

    Returns
    -------
    bool ``[tokens]``
    """
    filled = np.minimum(np.cumsum(np.minimum(sizes, keeps)), max(0, room))
    most = filled.copy()
    most[1:] -= filled[:-1]
    kept = np.repeat(most > 0, sizes)
    thinned = (most > 0) & (most < sizes)
    if thinned.any():  # only there does the rank matter: few segments, but for the first decision
        inside = np.repeat(thinned, sizes)
        kept[inside] = keep_highest(rank[inside], sizes[thinned], most[thinned])
    return kept


@dataclass(frozen=True)
class SegmentPolicy(StreamPolicy):
    """Base of policies on segments; a subclass says how tokens rank inside one (`rank`).

    Subclasses that override `scores` add to what this class asks for:
    ``{**super().scores(), "mine": ...}``.
    """

    segment: int = setting(128, "length of a segment", unit="tokens", low=1)
    keep_r: int = setting(64, "kept of a segment of class R (low entropy)", unit="tokens", low=0)
    keep_e: int = setting(32, "kept of a segment of class E", unit="tokens", low=0)
    keep_t: int = setting(8, "kept of a segment of class T (high entropy)", unit="tokens", low=0)
    rows: str = setting(
        "mean",
        "attention the entropy is taken of: one row (mean over layers and heads), or the rows of "
        "the last captured layers, whose entropies are averaged",
        choices=ROWS,
    )
    layers: int = setting(4, "last captured layers, if rows=layers", low=1)
    recent: int = setting(
        128, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    fused: ClassVar[bool] = False
    frozen_rank: ClassVar[bool] = False
    # A decision frees many tokens at once, so that most iterations need none.
    each_iteration: ClassVar[bool] = False

    def reads(self) -> frozenset[Signal]:
        rows = Signal.LAYER_ATTENTION if self.rows == "layers" else Signal.ATTENTION
        return (self.needs - {Signal.ATTENTION}) | {rows}

    def scores(self) -> dict[str, Score]:
        return {"newest": NewestAttention(self.layers if self.rows == "layers" else 0)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(recent=max(1, min(self.recent, budget_tokens // 4)))

    def rank_of(self, view: CacheView, tokens: np.ndarray) -> np.ndarray:
        """`rank` of some tokens, int64 ``[n]``; float64 ``[n]``."""
        return np.asarray(self.rank(view)[0].take(tokens))

    def _evict_lowest(
        self, view: CacheView, tiers: np.ndarray, stream: np.ndarray, over: np.ndarray
    ) -> None:
        """Evict what the segments of the stream do not keep."""
        free = (tiers[0] <= Tier.HBM_QUANTISED) & ~self.protected(view)
        whole = len(stream) == view.num_tokens  # then tokens are at their own numbers
        held = np.flatnonzero(free if whole else free[stream])  # positions in the stream
        if len(held) < over[0]:
            raise self._infeasible(view, len(held), int(over[0]))
        tokens = held if whole else stream[held]
        sizes = segment_sizes(held, self.segment)
        newest = [row.take(tokens) for row in view.scores["newest"]]
        entropy = segment_entropy(newest, sizes)
        keeps = np.array([self.keep_r, self.keep_e, self.keep_t])[tertiles(entropy)]
        kept = fill_segments(sizes, keeps, self.rank_of(view, tokens), len(held) - int(over[0]))
        tiers[0, tokens[~kept]] = Tier.EVICTED
