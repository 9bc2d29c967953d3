"""Policies as compositions: score x allocate x place x schedule x recover, and what to protect.

`Composed` turns six blocks into decisions.  A published method is a `StreamPolicy`: a dataclass
whose fields are its hyper-parameters, and which says what blocks they make (CONTRIBUTING.md has an
example).  A composition (`arborsim.policies.composition`) has the blocks themselves as fields.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import numpy as np

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.events import Event, Prune, TokenRun, Transition
from arborsim.core.observations import SparseRows
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.memory.moves import Moves, Plan
from arborsim.policies.base import CacheView, LiveHints, Method, Policy, Protection
from arborsim.policies.blocks import (
    Allocation,
    Decision,
    EveryStep,
    Never,
    Protect,
    pin_prompt_setting,
)
from arborsim.policies.placement import ADAPTATIONS, Ladder, Pool, off_path_blocks
from arborsim.signals.scores import Score, Steps, sum_in_order

_SHORT_RUN = 32  # iterations: so often looking for the lowest of all is cheaper than a heap


class Stream(NamedTuple):
    """The positions of a stream, of which those from `start` to `stop` are candidates at first."""

    ids: np.ndarray  # int64 [positions]: the token at each, or what else it is known by
    alive: np.ndarray  # bool [positions]: whether it is there
    start: int
    stop: int

    @property
    def candidates(self) -> np.ndarray:
        """Rising positions of the first candidates, int64."""
        return np.flatnonzero(self.alive[self.start : max(self.start, self.stop)]) + self.start


class HeapPool:
    """Candidates whose scores never change, or rise, few of them from one iteration to the next.

    A heap holds what each score was when it was last looked at, which is never above what it is
    now.  The lowest entry is brought up to date until the lowest is.  `scores`, float64
    ``[tokens]``, is a live array.
    """

    def __init__(self, scores: np.ndarray, stream: Stream) -> None:
        # Plain lists: reading one element of an array costs more than a heap operation.
        self._scores = scores
        self._ids: list[int] = stream.ids.tolist()
        self._alive: list[bool] = stream.alive.tolist()
        self._stop = max(stream.start, stream.stop)
        at = stream.candidates
        self._heap = list(zip(scores[stream.ids[at]].tolist(), at.tolist(), strict=True))
        heapq.heapify(self._heap)

    def admit(self, stop: int) -> None:
        """Positions before `stop` are candidates now."""
        while self._stop < stop:
            at = self._stop
            if self._alive[at]:
                heapq.heappush(self._heap, (self._scores.item(self._ids[at]), at))
            self._stop = at + 1

    def pop(self, over: int) -> list[int]:
        """Positions of candidates to evict, removed: `over` or more, fewer if there are no more."""
        heap, evicted = self._heap, list[int]()
        while heap and len(evicted) < over:
            known, at = heap[0]
            score = self._scores.item(self._ids[at])
            if score > known:
                heapq.heapreplace(heap, (score, at))
            else:
                evicted.append(heapq.heappop(heap)[1])
        return evicted


class ChangingPool:
    """Candidates whose scores change freely.  The parameters are those of `HeapPool`."""

    def __init__(self, scores: np.ndarray, stream: Stream) -> None:
        self._scores = scores
        self._of, self._alive = ids, alive = stream.ids, stream.alive
        self._stop = max(stream.start, stream.stop)
        first = stream.candidates
        # Only candidates are looked at, and they are few: those kept but for the recent ones.
        self._count = len(first)
        self._at = np.empty(len(alive), dtype=np.int64)  # positions of candidates, rising
        # On a chain a candidate is known by its position.
        self._same = ids.dtype == np.int64 and len(ids) > 0 and int(ids[-1]) == len(ids) - 1
        self._known = self._at if self._same else np.empty_like(ids)  # of each candidate
        self._at[: self._count] = first
        self._known[: self._count] = ids[first]

    def admit(self, stop: int) -> None:
        while self._stop < stop:
            if self._alive[self._stop]:
                self._at[self._count] = self._stop
                self._known[self._count] = self._of[self._stop]
                self._count += 1
            self._stop += 1

    def values_of(self, known: np.ndarray) -> np.ndarray:
        """By what candidates rank, which are known by this."""
        return self._scores.take(known)

    def pop(self, over: int) -> list[int]:
        if over == 1 and self._count:
            return [self._pop_lowest()]
        return [self._pop_lowest() for _ in range(min(over, self._count))]

    def _pop_lowest(self) -> int:
        count = self._count
        lowest = int(self.values_of(self._known[:count]).argmin())
        position = int(self._at[lowest])
        self._at[lowest : count - 1] = self._at[lowest + 1 : count]
        if not self._same:
            self._known[lowest : count - 1] = self._known[lowest + 1 : count]
        self._count = count - 1
        return position


MakeCandidates = Callable[[Stream], HeapPool | ChangingPool]


@dataclass(frozen=True)
class Composed(LiveHints, Policy):
    """A policy made of blocks.

    A decision has three parts: `allocate` says which tokens HBM holds, ranking by `score`.  `place`
    says where the others live.  `recover` says which of the others may come back.  `schedule` says
    when, and a cache over budget is always reason enough.  `protect` says what never moves down.
    """

    run_allocation: ClassVar[type[Allocation]] = Pool
    """The allocation that `candidates` follow through a run."""

    @cached_property
    def score(self) -> Score:
        raise UsageError(
            f"policy {type(self).__name__} does not say what tokens rank by: give it a score, as "
            "CONTRIBUTING.md shows"
        )

    @cached_property
    def allocate(self) -> Allocation:
        return Pool()

    @cached_property
    def place(self) -> Ladder:
        return Ladder()

    @cached_property
    def schedule(self) -> EveryStep:
        return EveryStep()

    @cached_property
    def protect(self) -> Protect:
        return Protect()

    @cached_property
    def recover(self) -> Never:
        return Never()

    @property
    def method(self) -> Method:
        each = {"layer": ", the same for every layer", "head": ", the same for every KV head"}
        alone = self.allocate.budget_scope == "group"
        blocks = ("score", "allocate", "place", "schedule", "recover")
        derived = {name: getattr(self, name).about for name in blocks}
        derived["allocate"] += each.get(self.grouping, "") if alone else ""
        derived["granularity"] = self.allocate.granularity
        return Method(self.formula, deviations=self.deviations, **derived | dict(self.words))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self.place.tiers

    @property
    def recovers(self) -> bool:
        return self.recover.recomputes

    @property
    def bounded(self) -> bool:
        return self.schedule.bounded

    def ddr_tokens(self, prompt_tokens: int, new_tokens: int, budget_tokens: int) -> int:
        over = super().ddr_tokens(prompt_tokens, new_tokens, budget_tokens)
        return int(min(over, self.place.ddr * budget_tokens))

    def scores(self) -> Mapping[str, Score]:
        score = self.score if self.protect.pin_prompt else self.score.with_prompt()
        return {"score": score, **self.allocate.scores()}

    def rank(self, view: CacheView) -> np.ndarray:
        """Float64 ``[groups, tokens]`` (or ``[tokens]``, for all groups): the lowest goes first.

        Rows of a score that are not those of groups (single layers) are added up.
        """
        values = view.scores["score"]
        return values if len(values) == len(view.tier) else sum_in_order(values, axis=0)

    def protection(self, budget_tokens: int) -> Protection:
        return self.protect.protection(budget_tokens)

    def protected(self, view: CacheView) -> np.ndarray:
        return self.allocate.protected(view, self.protection(view.budget_tokens))

    def headroom(self, view: CacheView) -> int:
        return self.allocate.headroom(view)

    def next_decision(self, view: CacheView) -> int:
        return self.schedule.next_decision(view, self.headroom(view))

    def pressure_margin(self, budget_tokens: int) -> int | None:
        return self.schedule.margin

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        schedule = self.schedule
        fits = view.num_tokens <= view.budget_tokens
        if isinstance(event, Prune) or (schedule.wait and fits):
            return None
        over = schedule.bounded and self.headroom(view) < 0
        comes_back = isinstance(event, Transition) and self.recovers
        if not (over or comes_back or schedule.due(view, event)):
            return None
        tiers = view.tier.copy()
        at = Decision(self, view, event)
        self.allocate.allot(at, tiers)
        self.place.place(at, tiers)
        if at.slots is None and np.array_equal(tiers, view.tier):
            return None
        return Plan(tiers, recover=self.recovers, slots=at.slots)

    def plans_runs(self, view: CacheView) -> bool:
        values = view.scores.get("score")
        alone = len(view.leaves) == 1 and view.tier.shape[0] == 1
        if not alone or (values is not None and len(values) > 1):
            return False
        own_decisions = type(self).decide is not Composed.decide
        blocks = type(self.schedule), type(self.allocate), type(self.recover)
        if own_decisions or blocks != (EveryStep, self.run_allocation, Never):
            return False
        # A single chain is the same pool either way.
        one_stream = self.allocate.adaptation == "path" or len(view.path) == view.num_tokens
        return one_stream and self.place.evicts_only

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        """A maker of the ranked tokens that `run` may evict."""
        (rank,) = np.broadcast_to(self.rank(view), view.tier.shape)
        changes = {score.changes for score in self.scores().values()}
        few = isinstance(run.observed.attention, SparseRows)  # of those that can rise do
        rarely = changes <= {"never"} or ("freely" not in changes and few)
        # A heap is made of all candidates, which a live step that evicts one has no use for.
        return partial(HeapPool if rarely and run.steps > _SHORT_RUN else ChangingPool, rank)

    def decide_run(self, view: CacheView, run: TokenRun, steps: Steps) -> Moves:
        protection = self.protection(view.budget_tokens)
        ids = view.path
        kind = type(self)
        plain = kind.candidates is Composed.candidates and kind.rank is Composed.rank
        if plain and run.steps == 1 and len(ids) == view.num_tokens:
            over = view.in_hbm - view.budget_tokens
            if over <= 1:
                next(steps)
                return self._evict_lowest(view, protection) if over == 1 else Moves.none()
        first_length = len(ids) - run.steps + 1
        alive = hbm_mask(view.tier[0, ids])
        head = protection.head(view.prompt_tokens)
        stream = Stream(ids, alive, head, first_length - protection.recent)
        pool = self.candidates(view, run)(stream)
        blocks = iter(off_path_blocks(view))
        at_step: list[int] = []
        off_path: list[int] = []  # evicted before any position of the path is
        evicted_at: list[int] = []
        over = view.in_hbm - run.steps - view.budget_tokens
        for step in steps:
            over += 1
            pool.admit(first_length + step - protection.recent)
            while over > 0 and (block := next(blocks, None)) is not None:
                at_step += [step] * len(block)
                off_path += block.tolist()
                over -= len(block)
            if over > 0:
                evicted = pool.pop(over)
                steps.lose(ids, evicted)
                at_step += [step] * len(evicted)
                evicted_at += evicted
                over -= len(evicted)
                if over > 0:
                    raise self.infeasible(view, 0, over)
            if over < 0:  # more has left than had to: there is nothing to decide until it is back
                over += steps.skip(-over)
        return Moves.evict(at_step, [*off_path, *ids[np.array(evicted_at, np.int64)].tolist()])

    def _evict_lowest(self, view: CacheView, protection: Protection) -> Moves:
        """Evict the lowest candidate: `decide_run` after one iteration of a chain."""
        first, stop = protection.head(view.prompt_tokens), view.num_tokens - protection.recent
        if first < stop:
            there = hbm_mask(view.tier[0, first:stop])
            lowest = int(np.where(there, self.rank(view)[0, first:stop], np.inf).argmin())
            if there[lowest]:
                return Moves.evict_one(first + lowest)
        raise self.infeasible(view, 0, 1)

    def infeasible(self, view: CacheView, free: int, over: int) -> BudgetInfeasible:
        """The error to raise where `over` tokens must leave and only `free` may."""
        _, made_of = self.protection(view.budget_tokens).floor(view.prompt_tokens)
        needed, where = view.budget_tokens + over - free, f"{len(view.leaves)} active path(s)"
        return BudgetInfeasible(self.name, needed, view.budget_tokens, f"{made_of} on {where}")


@dataclass(frozen=True)
class StreamPolicy(Composed):
    """Keep the best tokens of a stream: over budget, the lowest (of every group) are evicted.

    Subclasses name their `score` and what they `protect`.  They name other blocks,
    or `rank`, where they differ from "the lowest go, one at a time".
    """

    adaptation: str = setting("path", "what the stream is on a tree", choices=ADAPTATIONS)
    pin_prompt: bool = pin_prompt_setting(False)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt)

    @cached_property
    def allocate(self) -> Allocation:
        return Pool(self.adaptation)


@dataclass(frozen=True)
class RecentPolicy(StreamPolicy):
    """Keep the prompt and the newest tokens, whatever their score."""

    pin_prompt: bool = pin_prompt_setting(True)
    recent: int = setting(
        128, "protected newest tokens, at most a quarter of the budget", unit="tokens", low=1
    )

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.recent)
