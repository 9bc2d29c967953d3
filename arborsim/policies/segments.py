"""Segments of thought, and what ThinKV keeps of each, as the EpiKV paper runs it.

The stream is cut into segments of 128 tokens.  How widely the newest query spreads its attention
inside a segment (entropy) sorts segments into three classes of equal number: R (narrow), E and T
(wide).  A class keeps a fixed number of tokens of each of its segments; segments are filled oldest
first until the budget is used up, so fewer tokens than the budget may stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.memory.tiers import Tier
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import highest
from arborsim.policies.settings import setting
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention_scores import NewestAttention
from arborsim.signals.observations import Signal
from arborsim.signals.scores import Score

ROWS = ("mean", "layers")


def segment_entropy(rows: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """Entropy of attention inside each segment, normalised there, mean over rows.

    Parameters
    ----------
    rows : float64 ``[layers, tokens]``
        Attention of one query, one row per layer; not negative.
    segment : int64 ``[tokens]``
        Segment of each token, 0, 1, ...; every number up to the largest occurs.

    Returns
    -------
    float64 ``[segments]``
        Nats.  Attention that is 0 throughout a segment counts as evenly spread.
    """
    size = np.bincount(segment)
    total = np.zeros(len(size))
    for row in rows:
        # `bincount` adds in the order of the tokens, so sums have the same bits everywhere.
        mass = np.bincount(segment, weights=row)
        share = row / np.where(mass > 0, mass, 1.0)[segment]
        terms = share * np.log(np.where(share > 0, share, 1.0))
        total += np.where(mass > 0, -np.bincount(segment, weights=terms), np.log(size))
    # Logarithms differ in the last bit between processors: what is equal must stay equal.
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


def fill_segments(
    segment: np.ndarray, keeps: np.ndarray, rank: np.ndarray, room: int
) -> np.ndarray:
    """Keep the best tokens of each segment, oldest segment first, while there is room.

    Parameters
    ----------
    segment : int64 ``[tokens]``
        Segment of each token, not falling.
    keeps : int64 ``[segments]``
        Most tokens a segment may keep.
    rank : float64 ``[tokens]``
        The highest stay; the newer among equals.
    room : int
        Most tokens kept in all.

    Returns
    -------
    bool ``[tokens]``
    """
    kept = np.zeros(len(segment), dtype=bool)
    bounds = np.searchsorted(segment, np.arange(len(keeps) + 1))
    for number, most in enumerate(keeps.tolist()):
        first, last = bounds[number], bounds[number + 1]
        chosen = first + highest(rank[first:last], min(most, room))
        kept[chosen] = True
        room -= len(chosen)
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

    def _evict_lowest(
        self, view: CacheView, tiers: np.ndarray, stream: np.ndarray, over: np.ndarray
    ) -> None:
        """Evict what the segments of the stream do not keep."""
        held = np.flatnonzero(tiers[0, stream] <= Tier.HBM_QUANTISED)  # positions in the stream
        held = held[~self.protected(view)[stream[held]]]
        if len(held) < over[0]:
            raise self._infeasible(view, len(held), int(over[0]))
        tokens = stream[held]
        _, segment = np.unique(held // self.segment, return_inverse=True)
        entropy = segment_entropy(view.scores["newest"][:, tokens], segment)
        keeps = np.array([self.keep_r, self.keep_e, self.keep_t])[tertiles(entropy)]
        kept = fill_segments(segment, keeps, self.rank(view)[tokens], len(held) - int(over[0]))
        tiers[0, tokens[~kept]] = Tier.EVICTED
