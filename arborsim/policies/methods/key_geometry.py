"""Policies that read keys alone: their norm, or their direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.settings import setting
from arborsim.core.tiers import hbm_mask
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import Protect, ProtectSome, pin_prompt_setting
from arborsim.policies.stream import ChangingPool, MakeCandidates, RecentPolicy, Stream
from arborsim.signals.scores import GROUPINGS, Score
from arborsim.signals.vectors import KeyDirections, KeyLength


@dataclass(frozen=True)
class KeyPolicy(RecentPolicy):
    """Base of both policies: groups by choice, and the newest tokens stay."""

    pin_prompt: bool = pin_prompt_setting(False)
    per: str = setting(
        "head",
        "ranking: one for the whole model, one per captured layer, or one per captured layer and "
        "KV head (as published); only the shared one runs on traces without vectors",
        choices=GROUPINGS,
    )

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, recent=self.recent)


@dataclass(frozen=True)
class KeyNorm(KeyPolicy):
    """Keep the tokens whose keys are shortest: they are the ones that get attention."""

    name = "key-norm"

    @cached_property
    def score(self) -> Score:
        return KeyLength(self.per)

    def rank(self, view: CacheView) -> np.ndarray:
        return -view.scores["score"]


@dataclass(frozen=True)
class KeyDiff(KeyPolicy):
    """Keep the keys that point least in the mean direction of all keys in the cache.

    The mean changes with every token that comes or goes, so ranks are computed at each decision
    over what the cache holds then.
    """

    name = "keydiff"

    @cached_property
    def score(self) -> Score:
        return KeyDirections(self.per)

    def rank(self, view: CacheView) -> np.ndarray:
        """Minus the product with the sum of all directions: the order of minus the cosine."""
        # Directions are whole numbers, so these products are exact however they are summed.
        rank = np.zeros(view.tier.shape)
        there = view.in_stream(hbm_mask(view.tier), self.adaptation)
        for group, directions in enumerate(view.scores["score"]):
            if 2 * np.count_nonzero(there[group]) > view.num_tokens:  # cheaper than to gather them
                total = there[group].astype(np.float64) @ directions
                rank[group] = -(directions @ total)
                continue
            held = np.flatnonzero(there[group])
            keys = directions[held]
            rank[group, held] = -(keys @ keys.sum(axis=0))
        return rank

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        recent = self.protection(view.budget_tokens).recent
        return partial(LikenessPool, view.scores["score"][0], recent)


class LikenessPool(ChangingPool):
    """Candidates of one group, of which the one most like the sum of all held directions goes.

    The sum is carried along: directions, float64 ``[tokens, size]``, are whole numbers, so that
    nothing is lost by it.  The `recent` positions behind `stop` are held, too, but no candidates.
    """

    def __init__(self, directions: np.ndarray, recent: int, stream: Stream) -> None:
        directions, alive = directions[stream.ids], stream.alive
        super().__init__(directions, stream._replace(ids=directions))
        self._recent = recent
        self._arrived = stream.stop + recent
        self._total = directions[: self._arrived][alive[: self._arrived]].sum(axis=0)
        self._likeness = np.empty(len(alive))

    def admit(self, stop: int) -> None:
        while self._arrived < stop + self._recent:
            self._total += self._scores[self._arrived]
            self._arrived += 1
        super().admit(stop)

    def _pop_lowest(self) -> int:
        count = self._count
        likeness = np.dot(self._known[:count], self._total, out=self._likeness[:count])
        place = int(likeness.argmax())
        alike = likeness == likeness[place]
        if np.count_nonzero(alike) > 1:  # of equals the oldest
            places = np.flatnonzero(alike)
            place = int(places[self._at[places].argmin()])
        position, last = int(self._at[place]), count - 1
        # In no order: the last candidate takes the place of the one evicted.
        self._at[place], self._known[place] = self._at[last], self._known[last]
        self._count = last
        self._total -= self._scores[position]
        return position
