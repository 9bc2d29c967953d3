"""ArborKV: how much of each thought block to keep, by value and tree geometry (arXiv:2605.22106).

MSVE scores each block from search value, certainty and accumulated attention (Eq. 1); TAE turns the
score and the block's place in the tree into a number of tokens to keep (Eqs. 2-3, `TreeRule`);
inside a block the tail and the most attended tokens stay.  Decisions fall at three events:
`Boundary`, `Transition` and `Pressure` (Algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from arborsim.core.events import Boundary, Event, Pressure, Transition
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.arbor_blocks import given_up, tokens_that_leave
from arborsim.policies.base import CacheView, Method, Policy, Protection
from arborsim.policies.tree_rule import Blocks, Room, TreeRule
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score

RETAIN = ("tail", "sinks+tail", "sinks+tail+heavy")

ABLATIONS: dict[str, dict[str, Any]] = {
    "no v": {"use_value": False},
    "no u": {"use_certainty": False},
    "no a": {"use_attention": False},
    "no sibling coordination": {"eta": 1.0},
    "TAE only": {"msve": False},
    "MSVE only": {"lambda_distance": 0.0},
    "no rehydration": {"rehydrate": False},
    "tail only": {"retain": "tail", "keep_prompt": False},
    "sinks + tail": {"retain": "sinks+tail", "keep_prompt": False},
    "sinks + tail + heavy hitters": {"keep_prompt": False},
}
"""The rows of the paper's Tables 3, 4 and 7 as settings."""


@dataclass(frozen=True)
class ArborKV(TreeRule, Policy):
    """Tree-aware eviction with lazy rehydration.

    The paper publishes no values for its parameters; these are assumed, not calibrated.

    The rows of its ablations (Tables 3, 4 and 7) as settings::

        no v: --set use_value=false
        no u: --set use_certainty=false
        no a: --set use_attention=false
        no sibling coordination: --set eta=1
        TAE only: --set msve=false
        MSVE only: --set lambda_distance=0
        no rehydration: --set rehydrate=false
        tail only: --set retain=tail --set keep_prompt=false
        sinks + tail: --set retain=sinks+tail --set keep_prompt=false
        sinks + tail + heavy hitters: --set keep_prompt=false
    """

    retain: str = setting(
        "sinks+tail+heavy",
        "what stays inside a block (Table 7): its newest tokens, the prompt's global sinks too, or "
        "also the most attended tokens; without heavy hitters a block's earliest tokens leave "
        "first (invariant iii, head-only eviction)",
        choices=RETAIN,
    )
    keep_prompt: bool = setting(
        True, "protect the prompt whole; false: only its sinks, the rest is a block like others"
    )
    sinks: int = setting(
        4, "global sinks, if the prompt is not kept whole", unit="tokens", low=0, high=1e9
    )
    margin: int = setting(
        16,
        "delta: Pressure is raised when no more is left; relief frees twice as much, so that it "
        "is not raised again at the very next token",
        unit="tokens",
        low=1,
    )
    rehydrate: bool = setting(
        True, "recompute evicted blocks when the search comes back; false: Table 4"
    )
    boundary_trims_path: bool = setting(
        False, "as Algorithm 2 is printed, Boundary trims the closed block on the active path too"
    )

    name: ClassVar[str] = "arborkv"
    paper: ClassVar[str] = "ArborKV, arXiv:2605.22106"
    summary: ClassVar[str] = "keep thought blocks by value and tree distance; rehydrate on return"
    method: ClassVar[Method] = Method(
        "s_i = sigmoid(theta . [v_i, u_i, a_i]) (Eq. 1); r_i = clip(alpha eta^[off path] s_i^gamma "
        "exp(-lambda_d d_i) exp(-lambda_Delta Delta_i), r_min, 1) (Eq. 2); "
        "k_i = min(n_i, max(K_min, L_tail, floor(r_i n_i))) (Eq. 3)",
        score="block: MSVE; token: attention from later blocks",
        allocate="per block of the tree, by value and distance (TAE)",
        schedule="Boundary, Transition and Pressure events",
        recover="recompute root to leaf on return (lazy rehydration)",
        granularity="thought block, then token",
        deviations=(
            "the paper publishes no parameter values",
            "an accepted Boundary does not trim blocks on the active path (invariant i), unless "
            "boundary_trims_path is set",
            "the printed relief loop does not end when every block is at K_min: an infeasible "
            "budget is raised instead",
            "alpha is found by bisection, equal to trimming one token at a time",
            "the whole prompt is protected, not only its sinks, unless keep_prompt is false",
            "head-only eviction (invariant iii) contradicts heavy hitters; the latter win",
            "Boundary and Transition trim off-path blocks whatever the budget, and Pressure comes "
            "`margin` tokens before the budget, both as printed: even a budget for the whole "
            "search evicts; only_under_pressure leaves out the first",
            "Pressure that off-path blocks cannot relieve shrinks closed blocks of the active path "
            "to path_floor (the paper pins them), unless path_floor is 1",
            "pruned blocks, which the paper does not know, give up their floors when room is "
            "short, unless keep_pruned is set",
            "where room ends, blocks of the path come back only root first as far as it goes; "
            "Algorithm 2 rehydrates all, whatever the budget",
            "s_i is computed anew at every event, because attention to a block comes after its "
            "boundary, where Algorithm 1 scores it",
            "a block without reward or entropy gets 0 for it",
            "alpha or lambda tightened by Pressure is back at its setting at the next event",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    fused: ClassVar[bool] = False
    recovers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fused", not self.reads())

    def reads(self) -> frozenset[Signal]:
        heavy = self.retain == "sinks+tail+heavy"
        return self.needs if heavy or self.reads_attention else frozenset()

    def scores(self) -> dict[str, Score]:
        return {"attention": CumulativeAttention(from_later_blocks=True)} if self.reads() else {}

    def protected(self, view: CacheView) -> np.ndarray:
        mask = np.zeros(view.num_tokens, dtype=bool)
        mask[: min(self.protection(view.budget_tokens).head(view.prompt_tokens),
                   view.prompt_tokens)] = True  # fmt: skip
        for node in self._pinned(view):
            mask[view.tree.tokens(node)] = True
        return mask

    def _pinned(self, view: CacheView) -> list[int]:
        """Nodes that no decision may trim: open leaves, or the whole path."""
        nodes = set(view.leaves)
        if self.path_floor == 1:
            nodes = set(np.flatnonzero(view.tree.on_path(view.leaves)).tolist())
            if not self.keep_prompt:
                nodes.discard(0)
        if self.boundary_trims_path:
            nodes -= {leaf for leaf in view.leaves if view.tree.nodes[leaf].closed}
        return sorted(nodes)

    def protection(self, budget_tokens: int) -> Protection:
        if self.keep_prompt:
            return Protection(prompt=True)
        return Protection(sinks=0 if self.retain == "tail" else self.sinks)

    def pressure_margin(self, budget_tokens: int) -> int | None:
        return self.margin

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if not isinstance(event, Boundary | Transition | Pressure):
            return None
        protected = self.protected(view)
        blocks = self._blocks(view, protected)
        budget = view.budget_tokens
        keep = self.numbers(
            self.name, view, event, blocks,
            Room(budget, limit=budget - self.margin - 1, goal=budget - 2 * self.margin),
            attention=view.scores["attention"][0] if self.reads() else None,
            recover=self.rehydrate,
            trim_path=self.boundary_trims_path,
        )  # fmt: skip
        back = np.flatnonzero(keep > blocks.held).tolist()
        shrunk = np.flatnonzero(keep < blocks.held)
        if not back and not len(shrunk):
            return None
        tiers = view.tier.copy()
        for node in back:
            tiers[:, view.tree.tokens(node)] = Tier.HBM
        score = view.scores["attention"][0] if self.retain == "sinks+tail+heavy" else None
        leaving = tokens_that_leave(view, shrunk, keep[shrunk], score, protected, self.tail)
        tiers[:, leaving] = Tier.EVICTED
        return Plan(tiers, recover=True)

    def _blocks(self, view: CacheView, protected: np.ndarray) -> Blocks:
        tree = view.tree
        fixed = np.zeros(len(tree), dtype=bool)
        fixed[list(view.leaves)] = True
        fixed[0] |= self.keep_prompt
        pinned = np.zeros(len(tree), dtype=np.int64)
        pinned[0] = np.count_nonzero(protected[: view.prompt_tokens])
        owner = tree.node_of_token.values
        in_hbm = view.tier[0] != Tier.EVICTED
        on_path = tree.on_path(view.leaves)
        return Blocks(
            sizes=tree.sizes, held=np.bincount(owner[in_hbm], minlength=len(tree)),
            reachable=tree.sizes, pinned=pinned, pruned=given_up(view, on_path), fixed=fixed,
            on_path=on_path,
        )  # fmt: skip
