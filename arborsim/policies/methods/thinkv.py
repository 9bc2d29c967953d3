"""Segments of thought: ThinKV as the EpiKV paper re-implements it (arXiv:2606.26472, Appendix D).

The stream is cut into segments of 128 tokens.  How widely the newest query spreads its attention
inside a segment (entropy) sorts segments into three classes, about a third each: R (narrow), E and
T (wide).  A class keeps a fixed number of tokens of each of its segments.  Segments are filled
oldest first until the budget is used up, so fewer tokens than the budget may stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import Decision, Protect, ProtectSome, pin_prompt_setting
from arborsim.policies.placement import Pool, keep_highest
from arborsim.policies.stream import ChangingPool, MakeCandidates, RecentPolicy, Stream
from arborsim.signals.attention import NewestAttention
from arborsim.signals.rolling import HiddenChangeContrast
from arborsim.signals.scores import Score, rounded, sum_in_order


@dataclass(frozen=True)
class Segments(Pool):
    """A fixed number of tokens per segment of the stream, by its class, oldest segment first.

    `keeps` are for classes R, E and T.  The entropy is that of the mean over the rows of
    `attention`, the newest query's.
    """

    segment: int = 128
    keeps: tuple[int, int, int] = (64, 32, 8)
    attention: Score = NewestAttention()  # noqa: RUF009 - frozen

    about = "a fixed number per segment by its class, oldest segment first"

    @property
    def granularity(self) -> str:
        return f"segment of {self.segment} tokens"

    def scores(self) -> Mapping[str, Score]:
        return {"attention": self.attention}

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        """Evict what the segments of the stream do not keep."""
        view = at.view
        stream = view.stream(self.adaptation)
        protection = at.policy.protection(view.budget_tokens)
        newest = self.protected(view, Protection(recent=protection.recent))
        held = np.flatnonzero((hbm_mask(tier) & ~newest)[stream])  # positions in the stream
        tokens = stream[held]
        may_go = free[tokens]
        kept = self.kept(held, tokens, may_go, view.scores["attention"], at.rank[group], over)
        tier[tokens[may_go][~kept]] = Tier.EVICTED

    def kept(
        self, held: np.ndarray, tokens: np.ndarray, may_go: np.ndarray, rows: np.ndarray,
        rank: np.ndarray, over: int,
    ) -> np.ndarray:  # fmt: skip
        """Which of the tokens that `may_go` segments keep if `over` or more have to, bool ``[m]``.

        `held` and `tokens`, int64 ``[n]``, are rising positions in the stream and the tokens there,
        but for the newest: `may_go`, bool ``[n]``, leaves out a prompt that is pinned, which counts
        in entropies and tertiles all the same.  Rows, float64 ``[layers, all tokens]``, are the
        newest query's attention, and `rank` is float64 ``[all tokens]``.
        """
        sizes = segment_sizes(held, self.segment)
        some = sizes > 0
        mean = sum_in_order(rows.take(tokens, axis=1), axis=0) / len(rows)
        keeps = np.array(self.keeps)[tertiles(segment_entropy(mean, sizes[some]))]
        own = segment_sizes(held[may_go], self.segment, len(sizes))[some]
        room = int(np.count_nonzero(may_go)) - over
        return fill_segments(own, keeps, rank.take(tokens[may_go]), room)


class SegmentPool(ChangingPool):
    """Candidates in segments, of which those go that `segments` do not keep.

    What is held before position `start` is no candidate, but counts in entropies.
    """

    def __init__(
        self, segments: Segments, attention: np.ndarray, rank: np.ndarray, stream: Stream
    ) -> None:
        super().__init__(rank, stream)
        self._segments, self._attention = segments, attention
        self._pinned, self._old = np.flatnonzero(stream.alive[: stream.start]), stream.stop

    def admit(self, stop: int) -> None:
        self._old = stop
        super().admit(stop)

    def pop(self, over: int) -> list[int]:
        at, known = self._at[: self._count], self._known[: self._count]
        kept = np.zeros(len(at), dtype=bool)
        if over < len(at):
            pinned = self._pinned[self._pinned < self._old]
            held = np.concatenate([pinned, at])
            tokens = np.concatenate([self._of[pinned], known])
            may_go = np.arange(len(held)) >= len(pinned)
            kept = self._segments.kept(held, tokens, may_go, self._attention, self._scores, over)
        evicted: list[int] = at[~kept].tolist()
        count = self._count = len(at) - len(evicted)
        self._at[:count], self._known[:count] = at[kept], known[kept]
        return evicted


@dataclass(frozen=True)
class SegmentPolicy(RecentPolicy):
    """Base of policies on segments.  A subclass says by what `score` tokens rank inside one."""

    pin_prompt: bool = pin_prompt_setting(False)
    segment: int = setting(128, "length of a segment", unit="tokens", low=1)
    keep_r: int = setting(64, "kept of a segment of class R (low entropy)", unit="tokens", low=0)
    keep_e: int = setting(32, "kept of a segment of class E", unit="tokens", low=0)
    keep_t: int = setting(8, "kept of a segment of class T (high entropy)", unit="tokens", low=0)
    rows: str = setting(
        "mean",
        "attention of the newest query: the mean over all layers and heads, or the last captured "
        "layers (as run by EpiKV: entropies of their mean, tokens by the very last)",
        choices=("mean", "layers"),
    )
    layers: int = setting(4, "last captured layers, if rows=layers", low=1)

    run_allocation = Segments

    def attention(self) -> NewestAttention:
        """The attention whose entropies are taken."""
        return NewestAttention(self.layers if self.rows == "layers" else 0)

    @cached_property
    def allocate(self) -> Segments:
        keeps = (self.keep_r, self.keep_e, self.keep_t)
        return Segments(self.adaptation, self.segment, keeps, self.attention())

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, recent=self.recent)

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        (rank,) = self.rank(view)
        return partial(SegmentPool, self.allocate, view.scores["attention"], rank)


@dataclass(frozen=True)
class ThinKV(SegmentPolicy):
    """Keep 64, 32 or 8 tokens of each segment, by the entropy of attention inside it.

    The tokens kept are those to which the newest query pays most attention.  Prompt tokens are
    evictable.  Only the newest ``min(recent, budget / 4)`` are protected.
    """

    name = "thinkv"

    @cached_property
    def score(self) -> Score:
        return self.attention()

    def rank(self, view: CacheView) -> np.ndarray:
        return view.scores["score"][-1:]


@dataclass(frozen=True)
class SegmentHS(SegmentPolicy):
    """ThinKV's segments and budgets per segment, with tokens ranked by EpiKV's score inside one."""

    pin_prompt: bool = pin_prompt_setting(True)
    layer_a: float = setting(10 / 32, "layer A", unit="share of the depth", low=0, high=1)
    layer_b: float = setting(21 / 32, "layer B", unit="share of the depth", low=0, high=1)
    window: int = setting(
        64, "trailing window of the rolling statistic", unit="tokens", low=2, high=65536
    )

    name = "segment-hs"

    @cached_property
    def score(self) -> Score:
        return HiddenChangeContrast(self.layer_a, self.layer_b, self.window)


def segment_sizes(places: np.ndarray, length: int, segments: int | None = None) -> np.ndarray:
    """How many of some rising positions lie in each segment, for as many as they need, or more."""
    if segments is None:
        segments = int(places[-1]) // length + 1 if len(places) else 0
    bounds = np.searchsorted(places, np.arange(segments + 1) * length)
    return np.asarray(bounds[1:] - bounds[:-1])


def segment_entropy(row: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Entropy of attention inside each segment, normalised there, in nats.

    The row, float64 ``[tokens]``, is the attention of one query, segment after segment.  `sizes`,
    int64 ``[segments]``, are at least 1.  Attention that is 0 throughout a segment counts as evenly
    spread.  Float64 ``[segments]``.
    """
    starts = np.cumsum(sizes) - sizes
    mass = np.add.reduceat(row, starts)
    share = row / np.repeat(np.where(mass > 0, mass, 1.0), sizes)
    share *= np.log(share, where=share > 0, out=np.zeros(len(share)))
    entropy = np.where(mass > 0, -np.add.reduceat(share, starts), np.log(sizes))
    # Logarithms differ in the last bit between processors, sums with their order: what is equal
    # must stay equal.
    return rounded(entropy)


def tertiles(entropy: np.ndarray) -> np.ndarray:
    """Class of each segment: 0 up to the entropy at a third of all in order, 1 up to two thirds.

    Int64 ``[segments]``, where 2 is the class of the highest.
    """
    number = len(entropy)
    if not number:
        return np.empty(0, dtype=np.int64)
    ordered = np.sort(entropy)
    return np.searchsorted(ordered[[number // 3, 2 * number // 3]], entropy)


def fill_segments(sizes: np.ndarray, keeps: np.ndarray, rank: np.ndarray, room: int) -> np.ndarray:
    """Keep the best tokens of each segment, oldest segment first, while there is room.

    Segments have `sizes` and keep at most `keeps`, int64 ``[segments]``, and `room` in all.  Of
    `rank`, float64 ``[tokens]``, segment after segment, the highest stay, the newer among equals.
    Bool ``[tokens]``.
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
