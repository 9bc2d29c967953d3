"""Policies made for one sequence, and what they do on a tree.

`adaptation="path"` (as ArborKV evaluates its baselines): the path to the active leaf is the stream
the policy sees.  Tokens off the path keep what they had; when the whole tree exceeds the budget,
whole off-path blocks go first, least recently active first.  Destroyed is destroyed.
`adaptation="flat"`: one pool over all tokens of the tree, the newest ones protected.
With several active leaves a token is on path if any active leaf's path holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Boundary, Event, Pressure, Prune, TokenRun
from arborsim.core.observations import SparseRows
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan, RunPlan
from arborsim.policies.base import CacheView, Policy, Protection
from arborsim.policies.blocks import (
    ChangingPool,
    FrozenPool,
    Pool,
    RisingPool,
    least_recently_active,
    lowest_of,
)

ADAPTATIONS = ("path", "flat")


@dataclass(frozen=True)
class StreamPolicy(Policy):
    """Keep the best tokens of a stream; when over budget, evict the lowest.

    Subclasses give `rank` (what to evict first) and `protection` (what never to evict); with a
    `grouping` other than "shared", every cache group evicts by its own ranking.
    """

    adaptation: str = setting("path", "what the stream is on a tree", choices=ADAPTATIONS)

    frozen_rank: ClassVar[bool] = True
    """Whether a token's rank is fixed at its birth; decides how runs are planned."""
    rising_rank: ClassVar[bool] = False
    """Whether a rank that is not frozen never falls (up to a constant that all tokens share)."""
    each_iteration: ClassVar[bool] = True
    """False for policies that override `next_decision`, so that runs are not planned at once."""

    def rank(self, view: CacheView) -> np.ndarray:
        """Float64 ``[groups, tokens]`` (or ``[tokens]``, for all groups): the lowest goes first."""
        raise TypeError(f"{type(self).__name__} does not say how tokens rank")

    def protected(self, view: CacheView) -> np.ndarray:
        protection = self.protection(view.budget_tokens)
        if self.adaptation == "path":
            return protection.mask(view)
        mask = np.zeros(view.num_tokens, dtype=bool)
        mask[: protection.head(view.prompt_tokens)] = True
        mask[view.num_tokens - min(protection.recent, view.num_tokens) :] = True
        return mask

    def next_decision(self, view: CacheView) -> int:
        return max(0, view.budget_tokens - view.in_hbm) // len(view.leaves) + 1

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        over = view.held - view.budget_tokens
        if over.max() <= 0 or isinstance(event, Boundary | Prune | Pressure):
            return None
        tiers = view.tier.copy()
        if self.adaptation == "path":
            for block in off_path_blocks(view):
                giving = np.flatnonzero(over > 0)
                if not len(giving):
                    break
                for group in giving:
                    over[group] -= evict(tiers[group], block)
            stream = view.path
        else:
            stream = np.arange(view.num_tokens)
        if over.max() > 0:
            self._evict_lowest(view, tiers, stream, over)
        return Plan(tiers)

    def _evict_lowest(
        self, view: CacheView, tiers: np.ndarray, stream: np.ndarray, over: np.ndarray
    ) -> None:
        """In each group, evict as many of the stream's tokens as it is over budget."""
        rank = np.broadcast_to(self.rank(view), tiers.shape)
        eligible = ~self.protected(view)
        if len(stream) < view.num_tokens:
            in_stream = np.zeros(view.num_tokens, dtype=bool)
            in_stream[stream] = True
            eligible &= in_stream
        for group in np.flatnonzero(over > 0):
            free = eligible & (tiers[group] <= Tier.HBM_QUANTISED)
            doomed = lowest_of(free, rank[group], int(over[group]))
            if len(doomed) < over[group]:
                raise self._infeasible(view, len(doomed), int(over[group]))
            tiers[group, doomed] = Tier.EVICTED

    def plans_runs(self, view: CacheView) -> bool:
        alone = len(view.leaves) == 1 and view.tier.shape[0] == 1
        if not (self.each_iteration and alone):
            return False
        # A single chain is the same pool either way.
        return self.adaptation == "path" or len(view.path) == view.num_tokens

    def candidates(
        self,
        view: CacheView,
        run: TokenRun,
        ids: np.ndarray,
        alive: np.ndarray,
        start: int,
        stop: int,
    ) -> Pool:
        """What `run` may evict, ranked; the other parameters are those of `ChangingPool`."""
        (rank,) = np.broadcast_to(self.rank(view), view.tier.shape)
        if self.frozen_rank:
            return FrozenPool(rank[ids], alive, start, stop)
        if self.rising_rank and isinstance(run.observed.attention, SparseRows):
            return RisingPool(rank, ids, alive, start, stop)
        return ChangingPool(rank, ids, alive, start, stop)

    def decide_run(self, view: CacheView, run: TokenRun, steps: Iterator[int]) -> RunPlan:
        protection = self.protection(view.budget_tokens)
        ids = view.path
        first_length = len(ids) - run.steps + 1
        alive = view.tier[0, ids] <= Tier.HBM_QUANTISED
        head = protection.head(view.prompt_tokens)
        pool = self.candidates(view, run, ids, alive, head, first_length - protection.recent)
        blocks = iter(off_path_blocks(view))
        at_step: list[int] = []
        evicted: list[int] = []
        over = view.in_hbm - run.steps - view.budget_tokens
        for step in steps:
            over += 1
            pool.admit(first_length + step - protection.recent)
            while over > 0:
                block = next(blocks, None)
                if block is not None:
                    at_step += [step] * len(block)
                    evicted += block.tolist()
                    over -= len(block)
                    continue
                at = pool.pop()
                if at is None:
                    raise self._infeasible(view, 0, over)
                at_step.append(step)
                evicted.append(int(ids[at]))
                over -= 1
        return RunPlan.evict(at_step, evicted)

    def _infeasible(self, view: CacheView, free: int, over: int) -> BudgetInfeasible:
        protection: Protection = self.protection(view.budget_tokens)
        _, made_of = protection.floor(view.prompt_tokens)
        return BudgetInfeasible(
            self.name,
            view.budget_tokens + over - free,
            view.budget_tokens,
            f"{made_of} on {len(view.leaves)} active path(s)",
        )


def evict(tier: np.ndarray, tokens: np.ndarray) -> int:
    """Evict `tokens` from one group's tiers, int8 ``[all tokens]``; how many left HBM."""
    freed = int(np.count_nonzero(tier[tokens] <= Tier.HBM_QUANTISED))
    tier[tokens] = Tier.EVICTED
    return freed


def off_path_blocks(view: CacheView) -> list[np.ndarray]:
    """Token ids in HBM of each block off the active paths, in the order they are given up."""
    tree = view.tree
    on_path = tree.on_path(view.leaves)
    off = np.flatnonzero(~on_path).tolist()
    if not off:
        return []
    order = least_recently_active(
        [node.last_active for node in tree.nodes], [node.depth for node in tree.nodes], iter(off)
    )
    in_hbm = np.asarray((view.tier <= Tier.HBM_QUANTISED).any(axis=0))
    blocks = (tree.tokens(node) for node in order)
    return [kept for block in blocks if len(kept := block[in_hbm[block]])]
