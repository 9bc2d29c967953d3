"""Blocks that policies are composed of: what to protect, when to decide, and what comes back.

Each is a small frozen dataclass whose fields are its settings.  Scores are in `arborsim.signals`,
allocations and places in `arborsim.policies.placement`, and the allocation over a tree in `tree`.
`arborsim.policies.stream.Composed` puts them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Boundary, Decode, Event, Prefill, Pressure, Transition
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.policies.base import NEVER, CacheView, Protection
from arborsim.signals.scores import Score

ANY = 1 << 60
"""A share or number without limit."""


def pin_prompt_setting(default: bool) -> bool:
    """The field `pin_prompt` of a policy."""
    return setting(default, "protect the whole prompt; false: it competes like other tokens")


class Allocation(ABC):
    """Which tokens HBM holds: `Pool`, or `Tree` (`arborsim.policies.tree`)."""

    about: ClassVar[str]
    #: Which groups draw on one budget: each has its own ("group"), the KV heads of a layer have one
    #: together ("layer"), or all of the model ("model").
    budget_scope: ClassVar[str] = "group"

    @property
    def adaptation(self) -> str:
        """The stream on a tree: the active paths ("path"), or everything ("flat")."""
        return "path"

    @property
    def granularity(self) -> str:
        """The unit of a decision."""
        return "token"

    def scores(self) -> Mapping[str, Score]:
        """Scores needed in addition to the tokens' own."""
        return {}

    @abstractmethod
    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        """Bool ``[tokens]``: what never moves down."""

    def headroom(self, view: CacheView) -> int:
        """Tokens that every group can take before one exceeds its share (below 0: one does)."""
        return view.budget_tokens - view.in_hbm

    def shares(self, view: CacheView) -> np.ndarray:
        """Tokens that each group may hold, int64 ``[groups]``, on average at most the budget."""
        return np.full(len(view.tier), view.budget_tokens)

    @abstractmethod
    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        """Say which tokens HBM holds: write `EVICTED` for those that leave it, `HBM` for returns.

        `tiers`, int8 ``[groups, tokens]``, is as before the decision.  `Ladder.place` later gives
        tokens that leave HBM their place.
        """


class PolicyBlocks(Protocol):
    """The blocks of a policy (`arborsim.policies.stream.Composed`), as they know each other."""

    name: ClassVar[str]

    @property
    def allocate(self) -> Allocation: ...
    @property
    def schedule(self) -> EveryStep: ...
    @property
    def protect(self) -> Protect: ...
    @property
    def recover(self) -> Never: ...
    def rank(self, view: CacheView) -> np.ndarray: ...
    def protection(self, budget_tokens: int) -> Protection: ...
    def protected(self, view: CacheView) -> np.ndarray: ...
    def infeasible(self, view: CacheView, free: int, over: int) -> BudgetInfeasible: ...


class Decision:
    """A policy, its view and the event.  Everything else is computed once, when asked for."""

    def __init__(self, policy: PolicyBlocks, view: CacheView, event: Event) -> None:
        self.policy, self.view, self.event = policy, view, event
        #: `Plan.slots`; None unless `lead` was called
        self.slots: np.ndarray | None = None

    @cached_property
    def protected(self) -> np.ndarray:
        """Bool ``[tokens]``: what never moves down."""
        return self.policy.protected(self.view)

    @cached_property
    def shares(self) -> np.ndarray:
        """Int64 ``[groups]``: tokens that each group may hold."""
        return self.policy.allocate.shares(self.view)

    @cached_property
    def rank(self) -> np.ndarray:
        """Float64 ``[groups, tokens]``: the lowest goes first."""
        return np.broadcast_to(self.policy.rank(self.view), self.view.tier.shape)

    @cached_property
    def lowest_reachable(self) -> Tier:
        """The lowest tier whose tokens can be in HBM after this decision."""
        recover = self.policy.recover
        if recover.recomputes and isinstance(self.event, Transition):
            return Tier.EVICTED
        return Tier.DDR_COARSE if recover.fetches else Tier.HBM_COARSE

    @cached_property
    def movable(self) -> np.ndarray:
        """Bool ``[tokens]``: of the stream, and not protected."""
        return self.view.in_stream(~self.protected, self.policy.allocate.adaptation)

    def lead(self, group: int, tokens: np.ndarray) -> None:
        """Give the first slots of a group to `tokens`, int64, in this order.

        The others follow in the order that they have.
        """
        view = self.view
        if self.slots is None:
            known = np.arange(view.num_tokens) if view.slots is None else view.slots
            self.slots = np.broadcast_to(known, view.tier.shape).copy()
        others = np.ones(view.num_tokens, dtype=bool)
        others[tokens] = False
        order = np.concatenate([tokens, view.by_slot(group, np.flatnonzero(others))])
        self.slots[group, order] = np.arange(len(order))


@dataclass(frozen=True)
class Protect:
    """Tokens that never move down."""

    pin_prompt: bool = pin_prompt_setting(True)
    sinks: int = setting(
        0, "protected first tokens: after the prompt if that is pinned", unit="tokens", low=0
    )
    recent: int = setting(128, "protected newest tokens", unit="tokens", low=0)
    recent_share: float = setting(
        0.25, "the newest are at most this share of the budget", low=0, high=1
    )

    def protection(self, budget_tokens: int) -> Protection:
        recent = int(min(self.recent, self.recent_share * budget_tokens))
        return Protection(self.pin_prompt, self.sinks, recent)


@dataclass(frozen=True)
class ProtectSome(Protect):
    """`Protect` at least one of the newest tokens, and sinks up to a share of the budget."""

    sinks_share: float = ANY

    def protection(self, budget_tokens: int) -> Protection:
        found = super().protection(budget_tokens)
        sinks = int(min(self.sinks, self.sinks_share * budget_tokens))
        return replace(found, sinks=sinks, recent=max(1, found.recent))


@dataclass(frozen=True)
class EveryStep:
    """Decide after every iteration that leaves more tokens in HBM than the budget."""

    _: KW_ONLY
    wait: bool = setting(
        True,
        "decide nothing while all tokens of the search fit the budget; false: as ArborKV and the "
        "memory hierarchy are published",
    )

    bounded: ClassVar[bool] = True
    occasions: ClassVar[tuple[type, ...]] = ()
    """Events after which to decide although the budget holds."""

    @property
    def about(self) -> str:
        return "every iteration over budget"

    @property
    def margin(self) -> int | None:
        """Tokens left when `Pressure` is raised (None: never)."""
        return None

    def next_decision(self, view: CacheView, headroom: int) -> int:
        """Iterations until a decision is due, where groups can take `headroom` tokens each."""
        return max(0, headroom) // len(view.leaves) + 1

    def due(self, view: CacheView, event: Event) -> bool:
        """Whether to decide now although the budget holds."""
        return isinstance(event, self.occasions)

    def room(self, at: Decision, group: int) -> tuple[int, int]:
        """Tokens that HBM may hold of a group, and how many a decision leaves if it holds more.

        ``(limit, goal)`` with ``goal <= limit <= share``.
        """
        share = int(at.shares[group])
        return share, share


@dataclass(frozen=True)
class OnlyEvery(EveryStep):
    """Decide at intervals only: in between the cache grows beyond the budget."""

    iterations: int = setting(128, "between decisions", unit="iterations", low=1)

    bounded = False

    @property
    def about(self) -> str:
        return f"every {self.iterations} iterations; in between the cache outgrows the budget"

    def next_decision(self, view: CacheView, headroom: int) -> int:
        return self.iterations - view.iterations % self.iterations

    def due(self, view: CacheView, event: Event) -> bool:
        return isinstance(event, Decode) and view.iterations % self.iterations == 0


@dataclass(frozen=True)
class Interval(OnlyEvery):
    """Decide at intervals or when over budget, and leave room for what comes until then.

    The room is at most half of what is not protected: a budget too small for all of it only makes
    decisions more frequent.
    """

    iterations: int = setting(64, "between decisions", unit="iterations", low=1)

    bounded = True

    @property
    def about(self) -> str:
        return f"every {self.iterations} iterations, or when over budget"

    def next_decision(self, view: CacheView, headroom: int) -> int:
        scheduled = super().next_decision(view, headroom)
        return min(scheduled, EveryStep.next_decision(self, view, headroom))

    def room(self, at: Decision, group: int) -> tuple[int, int]:
        share, reachable = int(at.shares[group]), at.view.tier[group] <= int(at.lowest_reachable)
        free = max(0, share - int(np.count_nonzero(at.protected & reachable)))
        goal = share - min(self.iterations * len(at.view.leaves), free // 2)
        return goal, goal


@dataclass(frozen=True)
class TreeEvents(EveryStep):
    """Decide when a block closes, when the search moves on, and when HBM is nearly full."""

    slack: int = setting(
        16,
        "Pressure is raised when no more is left; relief frees twice as much",
        unit="tokens",
        low=1,
    )

    about = "Boundary, Transition and Pressure events"
    occasions = (Boundary, Transition, Pressure)

    @property
    def margin(self) -> int | None:
        return self.slack

    def next_decision(self, view: CacheView, headroom: int) -> int:
        return NEVER

    def room(self, at: Decision, group: int) -> tuple[int, int]:
        share = int(at.shares[group])
        return share - self.slack - 1, share - 2 * self.slack


@dataclass(frozen=True)
class AfterPrefill(EveryStep):
    """Shrink the prompt to the budget once.  Generated tokens all stay, beyond the budget."""

    about = "once, after the prompt"
    bounded = False
    occasions = (Prefill,)

    def next_decision(self, view: CacheView, headroom: int) -> int:
        return NEVER


@dataclass(frozen=True)
class Never:
    """Tokens that left HBM stay where they are: readable in DDR, or gone."""

    about: ClassVar[str] = "never"
    fetches: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False


@dataclass(frozen=True)
class Fetch(Never):
    """Tokens of the active paths return from DDR when a decision has room for them."""

    about = "fetch from DDR"
    fetches = True


@dataclass(frozen=True)
class Recompute(Fetch):
    """As `Fetch`, and at transitions recompute evicted tokens of the active paths."""

    about = "fetch from DDR; recompute what was evicted, at transitions"
    recomputes = True
