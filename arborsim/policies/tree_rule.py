"""TAE: how many tokens each block of a tree may keep in HBM (ArborKV, Eqs. 1-3, Algorithm 2).

One frozen dataclass holds the parameters; `ArborKV` inherits it, and compositions use it as the
block ``[allocate] use = "tree"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Boundary, Event, Transition
from arborsim.core.settings import setting
from arborsim.policies.allocation import tighten_distance, trim_by_weight
from arborsim.policies.arbor_blocks import attention_share, certainty, sigmoid
from arborsim.policies.base import CacheView

RELIEFS = ("alpha", "lambda")


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tree at one decision; arrays ``[blocks]``.

    Attributes
    ----------
    sizes, held, reachable : int64
        Tokens of each block; those in HBM; those that HBM could hold after this decision, because
        they are there or can be brought back.
    pinned : int64
        Protected tokens: a block never keeps fewer of those it holds.
    pruned : bool
        Blocks off the active paths that the search has given up for good.
    fixed : bool
        Blocks that relief never touches: the prompt if it is protected whole, and active leaves.
    on_path : bool
    """

    sizes: np.ndarray
    held: np.ndarray
    reachable: np.ndarray
    pinned: np.ndarray
    pruned: np.ndarray
    fixed: np.ndarray
    on_path: np.ndarray


@dataclass(frozen=True)
class Room:
    """How full HBM may be: above `limit` tokens, make room until `goal` are left.

    `budget` is what may never be exceeded; all in tokens, ``goal <= limit <= budget``.
    """

    budget: int
    limit: int
    goal: int


@dataclass(frozen=True)
class TreeRule:
    """Parameters of MSVE and TAE, and the numbers that follow from them.

    The paper publishes no values; these are assumed, not calibrated.
    """

    theta_value: float = setting(2.0, "MSVE weight of v, the reward", low=-1e3, high=1e3)
    theta_certainty: float = setting(
        0.5, "MSVE weight of u = 1 - normalised entropy", low=-1e3, high=1e3
    )
    theta_attention: float = setting(
        1.0, "MSVE weight of a, the share of the attention to closed blocks", low=-1e3, high=1e3
    )
    use_value: bool = setting(True, "false: without v (Table 3)")
    use_certainty: bool = setting(True, "false: without u (Table 3)")
    use_attention: bool = setting(True, "false: without a (Table 3)")
    msve: bool = setting(True, "false: s = 1 for every block, 'TAE only' (Table 3)")
    alpha: float = setting(1.5, "scale of Eq. 2", low=0, high=1e6)
    gamma: float = setting(1.5, "sharpness of the block score", low=0, high=1e3)
    eta: float = setting(
        0.7, "off-path discount; 1: without sibling coordination (Table 3)", low=0, high=1
    )
    lambda_depth: float = setting(0.0, "decay with depth", unit="1/level", low=-10, high=10)
    lambda_distance: float = setting(
        0.15,
        "decay with distance to the nearest active leaf; 0: 'MSVE only' (Table 3)",
        unit="1/edge",
        low=0,
        high=10,
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
    relief: str = setting(
        "alpha",
        "what tightens under pressure: the scale alpha, or lambda (the decay with distance) first "
        "and then alpha",
        choices=RELIEFS,
    )
    only_under_pressure: bool = setting(
        False,
        "leave blocks whole while HBM has room; false: every Boundary and Transition trims to "
        "Eq. 3, whatever the budget (Algorithm 2)",
    )
    keep_pruned: bool = setting(
        False,
        "pruned blocks keep K_min and L_tail like others; false: they give up all they hold when "
        "floors alone are too much",
    )

    @property
    def reads_attention(self) -> bool:
        """Whether MSVE needs the attention that blocks receive."""
        return self.msve and self.use_attention and self.theta_attention != 0

    def block_scores(self, view: CacheView, attention: np.ndarray | None) -> np.ndarray:
        """MSVE: ``s_i = sigmoid(theta . [v, u, a])`` per node, float64 ``[nodes]``.

        A block without reward or entropy gets 0 for it.  `a` is what the block received of all
        attention to closed blocks so far, so s follows the search instead of being frozen at the
        boundary, where nothing has attended to the block yet.

        Parameters
        ----------
        view : CacheView
        attention : float64 ``[tokens]`` or None
            Attention from later blocks; read only if `reads_attention`.
        """
        nodes = view.tree.nodes
        if not self.msve:
            return np.ones(len(nodes))
        logit = np.zeros(len(nodes))
        if self.use_value:
            logit += self.theta_value * np.nan_to_num(np.array([node.reward for node in nodes]))
        if self.use_certainty:
            entropy = np.array([node.entropy for node in nodes])
            logit += self.theta_certainty * certainty(entropy, view.vocabulary)
        if self.reads_attention:
            assert attention is not None
            closed = np.array([node.closed for node in nodes])
            share = attention_share(attention, view.tree.node_of_token.values, closed)
            logit += self.theta_attention * share
        return sigmoid(logit)

    def weights(
        self, view: CacheView, on_path: np.ndarray, distance: np.ndarray,
        attention: np.ndarray | None,
    ) -> np.ndarray:  # fmt: skip
        """Eq. 2 without alpha and clipping, per node."""
        return np.asarray(
            np.where(on_path, 1.0, self.eta)
            * self.block_scores(view, attention) ** self.gamma
            * np.exp(-self.lambda_depth * view.tree.depths)
            * np.exp(-self.lambda_distance * distance)
        )

    def floors(self, blocks: Blocks) -> np.ndarray:
        """Least tokens of each block: K_min, L_tail, and what is protected in it."""
        least = np.maximum(max(self.k_min, self.tail), blocks.pinned)
        return np.asarray(np.minimum(blocks.sizes, least))

    def last_floors(self, blocks: Blocks) -> np.ndarray:
        """What blocks can be brought down to: pruned ones to what is protected in them."""
        floors = self.floors(blocks)
        return floors if self.keep_pruned else np.where(blocks.pruned, blocks.pinned, floors)

    def targets(self, blocks: Blocks, weights: np.ndarray) -> np.ndarray:
        """Eq. 3: tokens to keep of each block; int64 ``[blocks]``."""
        ratio = np.clip(self.alpha * weights, self.r_min, 1.0)
        return np.asarray(np.maximum(self.floors(blocks), (ratio * blocks.sizes).astype(np.int64)))

    def numbers(
        self, who: str, view: CacheView, event: Event, blocks: Blocks, room: Room, *,
        attention: np.ndarray | None = None, recover: bool = True, trim_path: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Tokens of each block that are in HBM after `event`; int64 ``[blocks]``.

        A block ends with fewer than it holds (it shrinks), as many (it stays as it is), or with
        all that can be reached (it is brought back).

        Parameters
        ----------
        who : str
            Name of the policy, for the error.
        view : CacheView
        event : Event
            `Boundary` shrinks the closed block; any other shrinks all off-path blocks; `Transition`
            brings back the active path.
        blocks : Blocks
        room : Room
        attention : float64 ``[tokens]``, optional
            See `block_scores`.
        recover : bool
            Whether a transition brings blocks back.
        trim_path : bool
            Let `Boundary` shrink the block even while it is on the active path.

        Raises
        ------
        BudgetInfeasible
            Path and floors alone exceed the budget.
        """
        distance = view.tree.distance(view.leaves)
        weights = self.weights(view, blocks.on_path, distance, attention)
        target = self.targets(blocks, weights)
        shrinks = ~blocks.on_path
        if isinstance(event, Boundary):
            shrinks = np.zeros(len(shrinks), dtype=bool)
            shrinks[event.node] = trim_path or not blocks.on_path[event.node]
        if self.only_under_pressure and blocks.held.sum() <= room.limit:
            shrinks[:] = False
        keep = np.where(shrinks, np.minimum(blocks.held, target), blocks.held)
        if isinstance(event, Transition) and recover:
            keep = self._bring_back(blocks, keep, room)
        if keep.sum() > room.limit:
            keep = self._relieve(blocks, keep, weights, distance, room)
        if keep.sum() > room.budget:
            path, off = int(keep[blocks.on_path].sum()), int(keep[~blocks.on_path].sum())
            raise BudgetInfeasible(
                who, path + off, room.budget, f"active path {path} + floors of other blocks {off}"
            )
        return keep

    def _bring_back(self, blocks: Blocks, keep: np.ndarray, room: Room) -> np.ndarray:
        """Fill up the blocks of the active paths, root first, as long as floors leave room."""
        keep = keep.copy()
        floors = np.minimum(self.last_floors(blocks), blocks.held)
        least = int(keep[blocks.on_path].sum() + floors[~blocks.on_path].sum())
        missing = blocks.reachable - keep
        for node in np.flatnonzero(blocks.on_path & (missing > 0)).tolist():
            if least + missing[node] <= room.goal:
                keep[node] = blocks.reachable[node]
                least += int(missing[node])
        return keep

    def _relieve(
        self, blocks: Blocks, keep: np.ndarray, weights: np.ndarray, distance: np.ndarray,
        room: Room,
    ) -> np.ndarray:  # fmt: skip
        """Make room down to the goal.

        Off-path blocks shrink to their floors first, then pruned ones give those up, then the
        closed blocks of the path shrink.
        """
        scale = weights * blocks.sizes
        floors = self.floors(blocks)
        least = np.where(blocks.on_path, keep, np.minimum(floors, keep))
        if self.relief == "lambda":
            wanted = np.maximum(floors, (self.r_min * blocks.sizes).astype(np.int64))
            lowest = np.where(blocks.on_path, keep, np.minimum(wanted, keep))
            keep = tighten_distance(keep, self.alpha * scale, distance, lowest, room.goal)
        keep = trim_by_weight(keep, scale, least, int(keep.sum()) - room.goal)
        least = np.where(blocks.pruned, np.minimum(self.last_floors(blocks), keep), keep)
        keep = trim_by_weight(keep, scale, least, int(keep.sum()) - room.goal)
        if keep.sum() > room.goal and self.path_floor < 1:
            high = np.maximum(floors, np.ceil(self.path_floor * blocks.sizes).astype(np.int64))
            open_to = blocks.on_path & ~blocks.fixed
            least = np.where(open_to, np.minimum(keep, high), keep)
            keep = trim_by_weight(keep, scale, least, int(keep.sum()) - room.goal)
        return keep
