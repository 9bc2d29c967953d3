"""The blocks that a policy can be composed of, but for scores: schedule, protect, place, recover.

Each is a small frozen dataclass whose fields are its settings.  The tables at the end are how a
composition's TOML file finds them by name.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import Boundary, Decode, Event, Prefill, Pressure, Transition
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.policies.base import NEVER, CacheView, Protection
from arborsim.policies.blocks import lowest
from arborsim.policies.tree_rule import Room
from arborsim.signals.attention import (
    CumulativeAttention,
    NewestAttention,
    ValueWeightedAttention,
)
from arborsim.signals.rolling import HiddenChangeContrast
from arborsim.signals.scores import LagVariance, Position, Score, SeededUniform

# By the tier before and, of each, outside and inside HBM from now on.
_PLACED = np.array(
    [
        tier
        for before in Tier
        for tier in (
            (Tier.DDR_QUANTISED, Tier.HBM_QUANTISED) if before.quantised else (Tier.DDR, Tier.HBM)
        )
    ],
    dtype=np.int8,
)


@dataclass(frozen=True)
class EveryStep:
    """Decide after every iteration that leaves more tokens in HBM than the budget."""

    _: KW_ONLY
    wait: bool = setting(
        True,
        "decide nothing while all tokens of the search fit the budget; false: as ArborKV and the "
        "memory hierarchy are published",
    )

    about: ClassVar[str] = "every iteration over budget"
    bounded: ClassVar[bool] = True

    @property
    def margin(self) -> int | None:
        """Tokens left when `Pressure` is raised; None for never."""
        return None

    def next_decision(self, view: CacheView) -> int:
        """Iterations until a decision is due."""
        return max(0, view.budget_tokens - view.in_hbm) // len(view.leaves) + 1

    def due(self, view: CacheView, event: Event) -> bool:
        """Whether to decide now although the budget holds."""
        return False

    def room(self, view: CacheView, pinned: int) -> Room:
        """How full HBM may be after a decision that cannot move `pinned` tokens."""
        budget = view.budget_tokens
        return Room(budget, limit=budget, goal=budget)


@dataclass(frozen=True)
class Interval(EveryStep):
    """Decide every so many iterations, or when over budget; leave room for what comes until then.

    The room is at most half of what is not protected: a budget too small for all of it only makes
    decisions more frequent.
    """

    iterations: int = setting(64, "between decisions", unit="iterations", low=1)

    about: ClassVar[str] = "every so many iterations, or when over budget"

    def next_decision(self, view: CacheView) -> int:
        scheduled = self.iterations - view.iterations % self.iterations
        return min(scheduled, super().next_decision(view))

    def due(self, view: CacheView, event: Event) -> bool:
        return isinstance(event, Decode) and view.iterations % self.iterations == 0

    def room(self, view: CacheView, pinned: int) -> Room:
        budget = view.budget_tokens
        spare = max(0, budget - pinned)
        goal = budget - min(self.iterations * len(view.leaves), spare // 2)
        return Room(budget, limit=goal, goal=goal)


@dataclass(frozen=True)
class TreeEvents(EveryStep):
    """Decide when a block closes, when the search moves on, and when HBM is nearly full."""

    slack: int = setting(
        16, "Pressure is raised when no more is left; relief frees twice as much", unit="tokens",
        low=1,
    )  # fmt: skip

    about: ClassVar[str] = "Boundary, Transition and Pressure events"

    @property
    def margin(self) -> int | None:
        return self.slack

    def next_decision(self, view: CacheView) -> int:
        return NEVER

    def due(self, view: CacheView, event: Event) -> bool:
        return isinstance(event, Boundary | Transition | Pressure)

    def room(self, view: CacheView, pinned: int) -> Room:
        budget = view.budget_tokens
        return Room(budget, limit=budget - self.slack - 1, goal=budget - 2 * self.slack)


@dataclass(frozen=True)
class AfterPrefill(EveryStep):
    """Shrink the prompt to the budget once; generated tokens all stay, beyond the budget."""

    about: ClassVar[str] = "once, after the prompt"
    bounded: ClassVar[bool] = False

    def next_decision(self, view: CacheView) -> int:
        return NEVER

    def due(self, view: CacheView, event: Event) -> bool:
        return isinstance(event, Prefill)


@dataclass(frozen=True)
class Protect:
    """Tokens that never move down."""

    prompt: bool = setting(True, "protect the whole prompt")
    sinks: int = setting(
        0, "protected first tokens: after the prompt if that is protected", unit="tokens", low=0
    )
    recent: int = setting(128, "protected newest tokens", unit="tokens", low=0)
    recent_share: float = setting(
        0.25, "the newest are at most this share of the budget", low=0, high=1
    )

    def protection(self, budget_tokens: int) -> Protection:
        recent = min(self.recent, int(self.recent_share * budget_tokens))
        return Protection(prompt=self.prompt, sinks=self.sinks, recent=recent)


@dataclass(frozen=True)
class Ladder:
    """Tokens that HBM cannot hold go to DDR while it has room, and are evicted then.

    Both memories hold their lowest-ranked unprotected tokens in 8 bit.  Precision once lost does
    not come back: a token quantised in HBM is quantised in DDR.  HBM's budget and DDR's size count
    tokens; one in 8 bit counts as one, and shows in bytes only.

    DDR has a size instead of a share of what leaves HBM: a share would be taken again at every
    decision, until little of the same tokens were left.
    """

    hbm_quantised: float = setting(
        0.0, "share of the unprotected HBM tokens in 8 bit", low=0, high=1
    )
    ddr: float = setting(
        0.0, "size of DDR in tokens, as a multiple of the HBM budget; inf: never evict", low=0
    )
    ddr_quantised: float = setting(
        0.0, "share of the unprotected DDR tokens in 8 bit", low=0, high=1
    )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that tokens can end in."""
        return (
            Tier.HBM,
            *((Tier.HBM_QUANTISED,) if self.hbm_quantised else ()),
            *((Tier.DDR,) if self.ddr else ()),
            *((Tier.DDR_QUANTISED,) if self.ddr and (self.ddr_quantised or self.hbm_quantised)
              else ()),
            *((Tier.EVICTED,) if self.ddr < math.inf else ()),
        )  # fmt: skip

    def place(
        self, view: CacheView, in_hbm: np.ndarray, protected: np.ndarray, score: np.ndarray
    ) -> np.ndarray:
        """Tier of every token; int8 ``[tokens]``.

        Parameters
        ----------
        view : CacheView
        in_hbm : bool ``[tokens]``
            Tokens that HBM holds from now on; an evicted one among them is recomputed.
        protected : bool ``[tokens]``
        score : float64 ``[tokens]``
            The lowest steps down first; of equals the oldest.
        """
        before = view.tier[0]
        # What is evicted and stays so, the most on a long path, is not looked at again.
        held = (before != Tier.EVICTED) | in_hbm
        live = slice(None) if held.all() else np.flatnonzero(held)  # a slice copies nothing
        tiers = _PLACED[2 * before[live] + in_hbm[live]]
        protected, score = protected[live], score[live]
        self._quantise(tiers, Tier.HBM, self.hbm_quantised, protected, score)
        self._overflow(tiers, self.ddr * view.budget_tokens, protected, score)
        self._quantise(tiers, Tier.DDR, self.ddr_quantised, protected, score)
        placed = np.array(before)
        placed[live] = tiers
        return placed

    @staticmethod
    def _overflow(tiers: np.ndarray, size: float, protected: np.ndarray, score: np.ndarray) -> None:
        """Evict the lowest of DDR until it holds no more than `size` tokens."""
        held = tiers >= Tier.DDR  # nothing is evicted yet
        over = int(np.count_nonzero(held)) - size
        if over > 0:
            free = np.flatnonzero(held & ~protected)
            tiers[free[lowest(score.take(free), math.ceil(over))]] = Tier.EVICTED

    @staticmethod
    def _quantise(
        tiers: np.ndarray, tier: Tier, share: float, protected: np.ndarray, score: np.ndarray
    ) -> None:
        """Fill the 8-bit part of the memory `tier` up with its lowest unprotected tokens."""
        if not share:
            return
        narrow = Tier(tier + 1)
        free = ~protected
        full = np.flatnonzero((tiers == tier) & free)
        already = np.count_nonzero((tiers == narrow) & free)
        wanted = int(share * (len(full) + int(already))) - int(already)
        tiers[full[lowest(score.take(full), wanted)]] = narrow


@dataclass(frozen=True)
class Never:
    """What left HBM stays where it is: readable in DDR, or gone."""

    about: ClassVar[str] = "never"
    fetches: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False


@dataclass(frozen=True)
class Fetch(Never):
    """Tokens of the active paths return from DDR when a decision has room for them."""

    about: ClassVar[str] = "fetch from DDR"
    fetches: ClassVar[bool] = True


@dataclass(frozen=True)
class Recompute(Fetch):
    """As `Fetch`; at transitions evicted tokens of the active paths are recomputed too."""

    about: ClassVar[str] = "fetch from DDR; recompute what was evicted, at transitions"
    recomputes: ClassVar[bool] = True


SCORES: dict[str, type[Score]] = {
    "cumulative-attention": CumulativeAttention,
    "hidden-contrast": HiddenChangeContrast,
    "lag-variance": LagVariance,
    "newest-attention": NewestAttention,
    "position": Position,
    "random": SeededUniform,
    "value-weighted-attention": ValueWeightedAttention,
}
SCHEDULES: dict[str, type[EveryStep]] = {
    "every-step": EveryStep,
    "interval": Interval,
    "tree-events": TreeEvents,
    "after-prefill": AfterPrefill,
}
RECOVERIES: dict[str, type[Never]] = {"never": Never, "fetch": Fetch, "recompute": Recompute}
PROTECTIONS: dict[str, type[Protect]] = {"tokens": Protect}
PLACES: dict[str, type[Ladder]] = {"ladder": Ladder}
