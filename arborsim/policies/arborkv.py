"""ArborKV: how much of each thought block to keep, by value and tree geometry (arXiv:2605.22106).

MSVE scores each block from search value, certainty and accumulated attention (Eq. 1); TAE turns the
score and the block's place in the tree into a number of tokens to keep (Eqs. 2-3); inside a block
the tail and the most attended tokens stay.  Decisions fall at three events: `Boundary`,
`Transition` and `Pressure` (Algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.errors import BudgetInfeasible
from arborsim.events import Boundary, Event, Pressure, Transition
from arborsim.memory.moves import Plan
from arborsim.memory.tiers import Tier
from arborsim.policies.allocation import trim_by_weight
from arborsim.policies.base import CacheView, Method, Policy, Protection
from arborsim.policies.blocks import highest
from arborsim.policies.settings import setting
from arborsim.signals.observations import Signal
from arborsim.signals.scores import CumulativeAttention, Score


@dataclass(frozen=True)
class ArborKV(Policy):
    """Tree-aware eviction with lazy rehydration.

    The paper publishes no values for its parameters; these are assumed, not calibrated.
    """

    theta_value: float = setting(2.0, "MSVE weight of v, the reward", low=-1e3, high=1e3)
    theta_certainty: float = setting(
        0.5, "MSVE weight of u = 1 - normalised entropy", low=-1e3, high=1e3
    )
    theta_attention: float = setting(
        1.0, "MSVE weight of a, the share of the attention to closed blocks", low=-1e3, high=1e3
    )
    alpha: float = setting(1.5, "scale of Eq. 2", low=0, high=1e6)
    gamma: float = setting(1.5, "sharpness of the block score", low=0, high=1e3)
    eta: float = setting(0.7, "off-path (sibling) discount; 1 is none", low=0, high=1)
    lambda_depth: float = setting(0.0, "decay with depth", unit="1/level", low=-10, high=10)
    lambda_distance: float = setting(
        0.15, "decay with distance to the nearest active leaf", unit="1/edge", low=0, high=10
    )
    r_min: float = setting(0.05, "least share of a block that is kept", low=0, high=1)
    k_min: int = setting(4, "least tokens kept of a block", unit="tokens", low=1)
    tail: int = setting(4, "newest tokens of a block that always stay", unit="tokens", low=1)
    path_floor: float = setting(
        0.25,
        "least share kept of a closed block on the active path when off-path blocks alone cannot "
        "make room (the paper's high floor k_protect); 1 pins the path whole",
        low=0,
        high=1,
    )
    margin: int = setting(
        16,
        "delta: Pressure is raised when no more is left; relief frees twice as much, so that it "
        "is not raised again at the very next token",
        unit="tokens",
        low=1,
    )
    rehydrate: bool = setting(True, "recompute evicted blocks when the search comes back")

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
            "an accepted Boundary does not trim blocks on the active path (invariant i)",
            "the printed relief loop does not end when every block is at K_min: an infeasible "
            "budget is raised instead",
            "alpha is found by bisection, equal to trimming one token at a time",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})
    fused: ClassVar[bool] = False
    recovers: ClassVar[bool] = True

    def scores(self) -> dict[str, Score]:
        return {"attention": CumulativeAttention(from_later_blocks=True)}

    def protected(self, view: CacheView) -> np.ndarray:
        mask = np.zeros(view.num_tokens, dtype=bool)
        mask[: view.prompt_tokens] = True
        nodes = view.leaves if self.path_floor < 1 else np.flatnonzero(
            view.tree.on_path(view.leaves)
        )  # fmt: skip
        for node in nodes:
            mask[view.tree.tokens(int(node))] = True
        return mask

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(prompt=True)

    def pressure_margin(self, budget_tokens: int) -> int | None:
        return self.margin

    def block_scores(self, view: CacheView) -> np.ndarray:
        """MSVE: ``s_i = sigmoid(theta . [v, u, a])`` per node, float64 ``[nodes]``.

        A block without reward or entropy gets 0 for it.  `a` is what the block received of all
        attention to closed blocks so far, so s follows the search instead of being frozen at the
        boundary, where nothing has attended to the block yet.
        """
        nodes = view.tree.nodes
        value = np.nan_to_num(np.array([node.reward for node in nodes], dtype=np.float64))
        entropy = np.array([node.entropy for node in nodes], dtype=np.float64)
        certainty = np.nan_to_num(1.0 - entropy / np.log(view.vocabulary))
        owner = view.tree.node_of_token.values
        received = np.bincount(owner, weights=view.scores["attention"], minlength=len(nodes))
        received[[not node.closed for node in nodes]] = 0.0
        received[0] = 0.0
        attention = received / max(float(received.sum()), 1e-12)
        logit = (
            self.theta_value * value
            + self.theta_certainty * certainty
            + self.theta_attention * attention
        )
        return np.asarray(1.0 / (1.0 + np.exp(-logit)))

    def weights(self, view: CacheView, on_path: np.ndarray) -> np.ndarray:
        """Eq. 2 without alpha and clipping, per node."""
        depth = np.array([node.depth for node in view.tree.nodes], dtype=np.float64)
        distance = view.tree.distance(view.leaves)
        return np.asarray(
            np.where(on_path, 1.0, self.eta)
            * self.block_scores(view) ** self.gamma
            * np.exp(-self.lambda_depth * depth)
            * np.exp(-self.lambda_distance * distance)
        )

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if not isinstance(event, Boundary | Transition | Pressure):
            return None
        tree = view.tree
        on_path = tree.on_path(view.leaves)
        sizes = np.bincount(tree.node_of_token.values, minlength=len(tree))
        held = np.bincount(tree.node_of_token.values, view.tier[0] != Tier.EVICTED, len(tree))
        held = held.astype(np.int64)
        weights = self.weights(view, on_path)
        floors = np.minimum(sizes, np.maximum(self.k_min, self.tail))
        ratio = np.clip(self.alpha * weights, self.r_min, 1.0)
        target = np.minimum(sizes, np.maximum(floors, (ratio * sizes).astype(np.int64)))

        keep = held.copy()
        if isinstance(event, Boundary):
            trimmed = np.zeros(len(tree), dtype=bool)
            trimmed[event.node] = not on_path[event.node]  # an active path is pinned, invariant (i)
        else:
            trimmed = ~on_path
        keep[trimmed] = np.minimum(held, target)[trimmed]
        if isinstance(event, Transition) and self.rehydrate:
            self._rehydrate(view, keep, sizes, np.minimum(floors, held))
        if keep.sum() >= view.budget_tokens - self.margin:
            keep = self._relieve(view, keep, sizes, floors, weights, on_path)
        return self._plan(view, keep, held, sizes)

    def _rehydrate(
        self, view: CacheView, keep: np.ndarray, sizes: np.ndarray, floors: np.ndarray
    ) -> None:
        """Fill up the blocks of the active paths, root first, as long as floors leave room."""
        on_path = view.tree.on_path(view.leaves)
        least = int(keep[on_path].sum() + floors[~on_path].sum())
        for node in np.flatnonzero(on_path):
            missing = int(sizes[node] - keep[node])
            if missing and least + missing <= view.budget_tokens - 2 * self.margin:
                keep[node] = sizes[node]
                least += missing

    def _relieve(
        self,
        view: CacheView,
        keep: np.ndarray,
        sizes: np.ndarray,
        floors: np.ndarray,
        weights: np.ndarray,
        on_path: np.ndarray,
    ) -> np.ndarray:
        """Tighten alpha until twice the margin is free: off-path blocks first, then the path's."""
        goal = view.budget_tokens - 2 * self.margin
        scale = weights * sizes
        least = np.where(on_path, keep, np.minimum(floors, keep))
        keep = trim_by_weight(keep, scale, least, int(keep.sum()) - goal)
        if keep.sum() > goal and self.path_floor < 1:
            pinned = np.zeros(len(keep), dtype=bool)
            pinned[[0, *view.leaves]] = True
            high = np.maximum(floors, np.ceil(self.path_floor * sizes).astype(np.int64))
            least = np.where(on_path & ~pinned, np.minimum(keep, high), keep)
            keep = trim_by_weight(keep, scale, least, int(keep.sum()) - goal)
        if keep.sum() > view.budget_tokens:
            path, off = int(keep[on_path].sum()), int(keep[~on_path].sum())
            raise BudgetInfeasible(
                self.name, path + off, view.budget_tokens,
                f"active path {path} + floors of other blocks {off}",
            )  # fmt: skip
        return keep

    def _plan(
        self, view: CacheView, keep: np.ndarray, held: np.ndarray, sizes: np.ndarray
    ) -> Plan | None:
        """Tokens for the numbers: recovered blocks whole, shrunk ones by tail and heavy hitters."""
        changed = np.flatnonzero(keep != held)
        if not len(changed):
            return None
        tiers = view.tier.copy()
        for node in changed:
            block = view.tree.tokens(int(node))
            if keep[node] > held[node]:
                tiers[:, block] = Tier.HBM
                continue
            alive = block[view.tier[0, block] != Tier.EVICTED]
            tiers[:, block] = Tier.EVICTED
            tiers[:, self.retained(alive, block, int(keep[node]), view)] = Tier.HBM
        return Plan(tiers, recover=True)

    def retained(
        self, alive: np.ndarray, block: np.ndarray, keep: int, view: CacheView
    ) -> np.ndarray:
        """Algorithm 1, Evict: the tail first, then the most attended of the other tokens."""
        tail = alive[np.isin(alive, block[-self.tail :])]
        if keep <= len(tail):
            return alive[len(alive) - keep :]
        others = alive[: len(alive) - len(tail)]
        heavy = others[highest(view.scores["attention"][others], keep - len(tail))]
        return np.concatenate([heavy, tail])
