"""The baselines of every comparison: keep all, the newest, by chance, or by a known future.

Two bounds know the future.  `Oracle` loses the least attention, whatever attention is good for.
`Needed` keeps what the task will read, so that answers survive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.events import Decode
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.blocks import ANY, Allocation, Decision, EveryStep, Protect
from arborsim.policies.placement import ADAPTATIONS, Pool
from arborsim.policies.stream import RecentPolicy, StreamPolicy
from arborsim.signals.scores import (
    GROUPINGS,
    NEVER_READ,
    EvictionTime,
    Position,
    Readers,
    Score,
    SeededUniform,
    steps_to_reader,
)


@dataclass(frozen=True)
class Full(Policy):
    """Full retention: nothing is evicted, offloaded or quantised, whatever the budget."""

    name = "full"
    tiers = (Tier.HBM,)
    bounded = False
    uses_budget = False


@dataclass(frozen=True)
class Random(RecentPolicy):
    """Evict uniformly at random.  Prompt and recent tokens stay."""

    seed: int = setting(0, "of the random numbers", low=0)
    sinks: int = setting(0, "protected first tokens", unit="tokens", low=0)

    name = "random"

    @cached_property
    def score(self) -> Score:
        return SeededUniform(self.seed)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, self.recent)


@dataclass(frozen=True)
class Scheduled(Pool):
    """One pool for all groups, from which every token goes at its time."""

    about = "one pool for all groups"
    budget_scope = "model"

    def evictions(self, at: Decision, first: int, free: np.ndarray, over: int) -> np.ndarray:
        return np.asarray(np.count_nonzero(free & (at.rank <= at.view.iterations), axis=1))


@dataclass(frozen=True)
class Oracle(StreamPolicy):
    """Evict by the schedule that loses the least attention of all schedules without return.

    The schedule is an assignment of tokens to forced evictions, solved exactly from the recorded
    attention (`arborsim.signals.offline`).  Belady's rule, one eviction at a time, is not optimal
    here because attention is spread over time.  By default nothing is protected and the whole tree
    is one pool, which constrains it least.  Protect what another policy protects to compare the
    two.

    With ``per=layer`` or ``per=head`` each captured layer or KV head has a schedule of its own, for
    the attention of its own rows, and as much of the budget as is best for all of them together:
    the bound of policies that choose so.
    """

    per: str = setting("shared", "what has a schedule of its own", choices=GROUPINGS)
    adaptation: str = setting("flat", "what the stream is on a tree", choices=("flat",))
    sinks: int = setting(0, "protected tokens at the beginning", unit="tokens", low=0)
    recent: int = setting(0, "protected newest tokens", unit="tokens", low=0)

    name = "oracle"
    fused = True  # the attention it reads was recorded before

    @property
    def label(self) -> str:
        return self.name if self.per == "shared" else f"{self.name}-{self.per}"

    @cached_property
    def score(self) -> Score:
        return EvictionTime(self.per)

    @cached_property
    def allocate(self) -> Allocation:
        return Pool(self.adaptation) if self.per == "shared" else Scheduled(self.adaptation)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, self.recent, recent_share=ANY)


_COMES_BACK = 1e6  # further off than any step


@dataclass(frozen=True)
class OnlyRead(Pool):
    """Tokens that no active path will read go, whether or not there is room for them."""

    about = "one pool, of tokens that will be read"

    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        super().allot(at, tiers)  # counts what is held before this decision
        unread = at.rank <= -_COMES_BACK
        tiers[at.movable & hbm_mask(tiers) & unread] = Tier.EVICTED


@dataclass(frozen=True)
class EveryIteration(EveryStep):
    """Decide after every iteration, whatever the budget."""

    wait: bool = False

    about = "every iteration"
    occasions = (Decode,)

    def next_decision(self, view: CacheView, headroom: int) -> int:
        return 1


@dataclass(frozen=True)
class Needed(StreamPolicy):
    """Keep what the task says later tokens read: the bound for answers.

    The reference tasks know which step of their reasoning reads which token (`Readers`).  Tokens
    that no later step of an active path reads go first.  Among them, those go last that a path
    would need if it continued from the end of their thought, as a search that backtracks may.  If
    still more has to go, the token whose next reader is furthest off does, the older among equals.
    Nothing else is known of the future: which thoughts the search will give up is not.

    With ``fill=false`` tokens that no active path will read go at once, whatever the budget: then
    the peak is what the task needs, and answers show whether that is enough for the model.
    """

    adaptation: str = setting("flat", "what the stream is on a tree", choices=ADAPTATIONS)
    sinks: int = setting(4, "protected first tokens", unit="tokens", low=0)
    recent: int = setting(
        16, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )
    fill: bool = setting(True, "keep what no active path reads while there is room")

    name = "needed"

    score = Readers()

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, self.recent)

    @cached_property
    def allocate(self) -> Allocation:
        return Pool(self.adaptation) if self.fill else OnlyRead(self.adaptation)

    @cached_property
    def schedule(self) -> EveryStep:
        return EveryStep() if self.fill else EveryIteration()

    def plans_runs(self, view: CacheView) -> bool:
        return False  # what is needed changes from one iteration to the next

    def rank(self, view: CacheView) -> np.ndarray:
        rows = view.scores["score"][0]
        mask = hbm_mask(view.tier[0])
        held: slice | np.ndarray = slice(None) if mask.all() else np.flatnonzero(mask)
        steps = np.ascontiguousarray(rows[held, 1:].T)
        node = view.tree.node_of_token.values
        ends = np.append(np.flatnonzero(node[1:] != node[:-1]), len(node) - 1)
        last = np.zeros(len(view.tree), dtype=np.int64)
        last[node[ends]] = ends  # ids rise: the last token of a node is what stays
        values = steps_to_reader(steps, rows[last, 0].take(node[held]))
        values += _COMES_BACK
        for leaf in view.leaves:
            path = view.tree.path(leaf)
            nearest = steps_to_reader(steps, rows[path[-1], 0])
            if len(path) < view.num_tokens:
                on_path = np.zeros(view.num_tokens, dtype=bool)
                on_path[path] = True
                nearest[~on_path[held]] = NEVER_READ
            np.minimum(values, nearest, out=values)
        np.minimum(values, NEVER_READ, out=values)  # unread is unread, on a path or off it
        np.negative(values, out=values)
        if isinstance(held, slice):
            return values[None]
        ranked = np.full((1, view.num_tokens), -np.inf)
        ranked[0, held] = values
        return ranked


@dataclass(frozen=True)
class StreamingLLM(StreamPolicy):
    """Keep the first `sinks` tokens and the newest ``budget - sinks``.  The middle goes."""

    sinks: int = setting(4, "attention sinks at the beginning", unit="tokens", low=0)

    name = "streaming-llm"
    score = Position()

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, self.sinks, recent=1, recent_share=ANY)
