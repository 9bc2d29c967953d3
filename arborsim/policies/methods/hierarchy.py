"""The semantics-aware memory hierarchy: HBM, DDR, compressed DDR, evicted (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Boundary, Event, Prefill, Pressure, Prune, Transition
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, Method, Policy, Protection
from arborsim.policies.blocks import lowest_of_each
from arborsim.policies.stream import off_path_blocks
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score

_HBM, _EVICTED = np.int8(Tier.HBM), np.int8(Tier.EVICTED)
EVICTION_BASES = ("of-candidates", "of-total")


@dataclass(frozen=True)
class Hierarchy(Policy):
    """Every `interval` iterations destroy the lowest few, keep the top in HBM, the rest in DDR.

    Of the candidates (reasoning tokens but for the first `sinks` and the newest `recent`) the
    lowest `evict_ratio` are destroyed; of the others the share `hbm_ratio` with the highest
    cumulative attention stays in HBM and the remainder moves to DDR, where it still takes part in
    attention.  A budget below that caps the HBM share further and leaves room for the tokens that
    arrive before the next decision.  On a tree, blocks off the active paths move to DDR first.
    """

    hbm_ratio: float = setting(
        0.5, "beta: share of the surviving candidates that stays in HBM", low=0, high=1
    )
    evict_ratio: float = setting(
        0.03, "r: share of the candidates destroyed at each decision", low=0, high=1
    )
    evict: str = setting(
        "of-candidates",
        "what r is a share of: the current candidates (as the pseudocode accumulates), or all "
        "candidates there ever were; the paper's tables do not tell which was run",
        choices=EVICTION_BASES,
    )
    quantised_ratio: float = setting(
        0.0, "lowest share of the DDR tokens kept as 8 bit (tier T2)", low=0, high=1
    )
    interval: int = setting(64, "between decisions", unit="iterations", low=1)
    sinks: int = setting(4, "protected after the prompt", unit="tokens", low=0)
    recent: int = setting(128, "protected newest tokens", unit="tokens", low=1)

    name: ClassVar[str] = "hierarchy"
    paper: ClassVar[str] = "semantics-aware memory hierarchy, Algorithm 1"
    summary: ClassVar[str] = "top tokens in HBM, the rest in DDR, the lowest few destroyed"
    method: ClassVar[Method] = Method(
        "s(i) = sum over queries t of mean over layers and heads of a_t(i) (Algorithm 1)",
        score="cumulative attention",
        allocate="share beta of the surviving candidates",
        place="HBM, then DDR, then 8-bit DDR; lowest share r evicted",
        schedule="every `interval` iterations, or when over budget",
        recover="fetch from DDR (stage, stream or near)",
        tiers=(Tier.HBM, Tier.DDR, Tier.DDR_QUANTISED, Tier.EVICTED),
        deviations=(
            "r and beta apply at every decision, whatever the budget, as printed: even a budget "
            "for the whole search destroys the lowest and moves others to DDR",
            "a budget caps the HBM share, with room for what arrives before the next decision",
            "on a tree, blocks off the active paths move to DDR first",
            "8-bit tokens are ranked anew at each decision and may return at full precision",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    fused: ClassVar[bool] = False

    def scores(self) -> dict[str, Score]:
        return {"attention": CumulativeAttention(up_to_constant=True)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True, sinks=self.sinks, recent=self.recent)

    def importance(self, view: CacheView, candidates: np.ndarray) -> np.ndarray:
        """How much each candidate matters: the lowest goes first.

        Parameters
        ----------
        view : CacheView
        candidates : int64 ``[n]``
            Readable tokens of the active paths that are not protected, oldest first.

        Returns
        -------
        float64 ``[n]``
        """
        return np.asarray(view.scores["attention"][0].take(candidates))

    def next_decision(self, view: CacheView) -> int:
        scheduled = self.interval - view.iterations % self.interval
        until_full = max(0, view.budget_tokens - view.in_hbm) // len(view.leaves) + 1
        return min(scheduled, until_full)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if isinstance(event, Prefill | Boundary | Prune | Pressure):
            return None
        scheduled = view.iterations % self.interval == 0 and not isinstance(event, Transition)
        if not scheduled and view.in_hbm <= view.budget_tokens:
            return None
        # Everything is by position on the path; a path that is the whole tree needs no gathers.
        whole = len(view.path) == view.num_tokens
        path = slice(None) if whole else view.path
        readable = view.tier[0, path] != Tier.EVICTED
        pinned = readable & self.protected(view)[path]
        at = np.flatnonzero(readable & ~pinned)
        importance = self.importance(view, at if whole else view.path[at])
        doomed = 0
        if scheduled:
            doomed = self._num_doomed(len(at), int(np.count_nonzero(~readable)))
        tiers = view.tier.copy()
        in_hbm = self._make_room(view, tiers, len(at) - doomed, int(np.count_nonzero(pinned)))
        cold = len(at) - doomed - in_hbm
        # Down the rungs: each holds the lowest of the ranking that no lower rung claims.  What a
        # search comes back to may lie in DDR: its protected part returns to HBM.
        here = np.where(readable, _HBM, _EVICTED)
        small = int(self.quantised_ratio * cold)
        down = lowest_of_each(importance, [doomed + cold, doomed + small if small else 0, doomed])
        for tier, lost in zip((Tier.DDR, Tier.DDR_QUANTISED, Tier.EVICTED), down, strict=True):
            here[at.take(lost)] = tier
        tiers[:, path] = here
        return Plan(tiers)

    def _num_doomed(self, candidates: int, gone: int) -> int:
        if self.evict == "of-candidates":
            return int(self.evict_ratio * candidates)
        return max(0, int(self.evict_ratio * (candidates + gone)) - gone)

    def _make_room(self, view: CacheView, tiers: np.ndarray, candidates: int, pinned: int) -> int:
        """How many candidates may stay in HBM; moves off-path blocks to DDR in `tiers` if need be.

        Raises
        ------
        BudgetInfeasible
            The pinned tokens alone exceed the budget.
        """
        spare = view.budget_tokens - pinned
        if spare < 0:
            raise BudgetInfeasible(
                self.name, pinned, view.budget_tokens, f"protected {pinned} on the active path(s)"
            )
        # Room for what arrives before the next decision, but no more than half of what there is:
        # a budget too small for all of it only makes decisions more frequent.
        room = spare - min(self.interval * len(view.leaves), spare // 2)
        wanted = int(self.hbm_ratio * candidates)
        off_path = off_path_blocks(view)
        elsewhere = sum(len(block) for block in off_path)
        for block in off_path:
            if elsewhere + wanted <= room:
                break
            tiers[:, block] = Tier.DDR
            elsewhere -= len(block)
        return min(wanted, room - elsewhere)
