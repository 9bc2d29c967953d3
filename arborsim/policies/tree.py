"""The allocation over a tree: how many tokens each block keeps, and which (ArborKV).

`TreeRule` holds the parameters of TAE and its numbers (Eqs. 1-3, Algorithm 2).  What blocks give up
under pressure is in `arborsim.policies.relief`.  `ArborKV` inherits it, and compositions use it as
the block `Tree`, ``[allocate] use = "tree"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Boundary, Transition
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import Allocation, Decision
from arborsim.policies.placement import keep_highest
from arborsim.policies.relief import empty_lowest, tighten_distance, trim_by_weight
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score

_TAIL = np.finfo(np.float64).max
"""Key of a block's tail: above every score, below what is protected (infinity)."""
_TABLE_TOKENS = 1 << 15
"""Tokens that are sorted together: larger tables only wait for memory."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tree at one decision, as int64 numbers of tokens and flags, ``[blocks]``."""

    sizes: np.ndarray
    held: np.ndarray  # in HBM
    reachable: np.ndarray  # that HBM could hold after the decision: there, or can be brought back
    pinned: np.ndarray  # protected, of which a block never keeps fewer
    pruned: np.ndarray  # off the active paths and given up by the search for good
    fixed: np.ndarray  # never relieved: the prompt if it is protected whole, and active leaves
    on_path: np.ndarray


def certainty(entropy: np.ndarray, vocabulary: int) -> np.ndarray:
    """``u = 1 - H / ln|V|`` (Eq. 1), or 0 where the entropy is not known (NaN)."""
    return np.asarray(np.nan_to_num(1.0 - entropy / np.log(vocabulary)))


def attention_mass(received: np.ndarray, owner: np.ndarray, closed: np.ndarray) -> np.ndarray:
    """Attention that each closed block but the prompt received from later ones.

    `received`, float64 ``[tokens]``, came from later blocks, `owner` is the block of each token.
    `closed` and the result are ``[blocks]``.
    """
    total = np.bincount(owner, weights=received, minlength=len(closed))
    total[~closed] = 0.0
    total[0] = 0.0
    return total


def attention_share(received: np.ndarray, owner: np.ndarray, closed: np.ndarray) -> np.ndarray:
    """`attention_mass` as a share of that of all blocks."""
    total = attention_mass(received, owner, closed)
    return np.asarray(total / max(float(total.sum()), 1e-12))


@dataclass(frozen=True)
class TreeRule:
    """Parameters of MSVE and TAE, and the numbers that follow from them.

    The paper publishes no values: the defaults are assumed, not calibrated.
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
    attention: str = setting(
        "share",
        "a: share of the attention that closed blocks received, or its running mass (section 4)",
        choices=("share", "mass"),
    )
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
        choices=("alpha", "lambda"),
    )
    priority: str = setting(
        "ratio",
        "which block gives the next token under pressure (the paper leaves Priority open): the one "
        "that keeps the largest ratio for its weight w of Eq. 2, r/w; the most tokens for it, k/w, "
        "as the printed program has it; or that of the lowest w, until it is at its floor",
        choices=("ratio", "tokens", "weight"),
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

        `attention` from later blocks, float64 ``[tokens]``, is read only if `reads_attention`.
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
            received = attention_share if self.attention == "share" else attention_mass
            paid = received(attention, view.tree.node_of_token.values, closed)
            logit += self.theta_attention * paid
        return np.asarray(1.0 / (1.0 + np.exp(-logit)))

    def floors(self, blocks: Blocks) -> np.ndarray:
        """Least tokens of each block: K_min, L_tail, and what is protected in it."""
        least = np.maximum(max(self.k_min, self.tail), blocks.pinned)
        return np.asarray(np.minimum(blocks.sizes, least))

    def last_floors(self, blocks: Blocks) -> np.ndarray:
        """Tokens that blocks can be brought down to: pruned ones to those protected in them."""
        floors = self.floors(blocks)
        return floors if self.keep_pruned else np.where(blocks.pruned, blocks.pinned, floors)

    def numbers(self, at: Decision, blocks: Blocks, trim_path: bool) -> np.ndarray:
        """Tokens of each block that are in HBM after the decision, int64 ``[blocks]``.

        A block ends with fewer than it holds (it shrinks), as many (it stays as it is), or with
        all that can be reached (it is brought back).

        `Boundary` shrinks the closed block (with `trim_path` even while it is on the active path),
        any other event shrinks all off-path blocks.  `Transition` brings back the active path if
        the policy recovers.  Path and floors that alone exceed the budget are an error.
        """
        view, event, budget = at.view, at.event, at.view.budget_tokens
        limit, goal = at.policy.schedule.room(at, 0)
        attention = view.scores["block-attention"][0] if self.reads_attention else None
        distance = view.tree.distance(view.leaves)
        weights = np.asarray(  # Eq. 2 without alpha and clipping
            np.where(blocks.on_path, 1.0, self.eta)
            * self.block_scores(view, attention) ** self.gamma
            * np.exp(-self.lambda_depth * view.tree.depths)
            * np.exp(-self.lambda_distance * distance)
        )
        ratio = np.clip(self.alpha * weights, self.r_min, 1.0)
        target = np.maximum(self.floors(blocks), (ratio * blocks.sizes).astype(np.int64))  # Eq. 3
        shrinks = ~blocks.on_path
        if isinstance(event, Boundary):
            shrinks = np.zeros(len(shrinks), dtype=bool)
            shrinks[event.node] = trim_path or not blocks.on_path[event.node]
        if self.only_under_pressure and blocks.held.sum() <= limit:
            shrinks[:] = False
        keep = np.where(shrinks, np.minimum(blocks.held, target), blocks.held)
        if isinstance(event, Transition) and at.policy.recover.fetches:
            keep = self._bring_back(blocks, keep, goal)
        if keep.sum() > limit:
            keep = self._relieve(blocks, keep, weights, distance, goal)
        if keep.sum() > budget:
            path, off = int(keep[blocks.on_path].sum()), int(keep[~blocks.on_path].sum())
            made_of = f"active path {path} + floors of other blocks {off}"
            raise BudgetInfeasible(at.policy.name, path + off, budget, made_of)
        return keep

    def _bring_back(self, blocks: Blocks, keep: np.ndarray, goal: int) -> np.ndarray:
        """Fill up the blocks of the active paths, root first, as long as floors leave room."""
        keep = keep.copy()
        floors = np.minimum(self.last_floors(blocks), blocks.held)
        least = int(keep[blocks.on_path].sum() + floors[~blocks.on_path].sum())
        missing = blocks.reachable - keep
        for node in np.flatnonzero(blocks.on_path & (missing > 0)).tolist():
            if least + missing[node] <= goal:
                keep[node] = blocks.reachable[node]
                least += int(missing[node])
        return keep

    def _relieve(
        self, blocks: Blocks, keep: np.ndarray, weights: np.ndarray, distance: np.ndarray,
        goal: int,
    ) -> np.ndarray:  # fmt: skip
        """Shrink blocks until `goal` tokens are left.

        Off-path blocks shrink to their floors first, then pruned ones give those up, then the
        closed blocks of the path shrink.
        """
        scale = weights * blocks.sizes
        floors = self.floors(blocks)
        least = np.where(blocks.on_path, keep, np.minimum(floors, keep))
        order = weights if self.priority in ("tokens", "weight") else scale
        trim = empty_lowest if self.priority == "weight" else trim_by_weight
        if self.relief == "lambda":
            wanted = np.maximum(floors, (self.r_min * blocks.sizes).astype(np.int64))
            lowest = np.where(blocks.on_path, keep, np.minimum(wanted, keep))
            keep = tighten_distance(keep, self.alpha * scale, distance, lowest, goal)
        keep = trim(keep, order, least, int(keep.sum()) - goal)
        least = np.where(blocks.pruned, np.minimum(self.last_floors(blocks), keep), keep)
        keep = trim(keep, order, least, int(keep.sum()) - goal)
        if keep.sum() > goal and self.path_floor < 1:
            high = np.maximum(floors, np.ceil(self.path_floor * blocks.sizes).astype(np.int64))
            open_to = blocks.on_path & ~blocks.fixed
            least = np.where(open_to, np.minimum(keep, high), keep)
            keep = trim(keep, order, least, int(keep.sum()) - goal)
        return keep


@dataclass(frozen=True)
class Tree(TreeRule, Allocation):
    """ArborKV's numbers per block (TAE).  Inside a block the tail and the highest-scored stay."""

    about = "per block of the tree, by value and distance (ArborKV's TAE)"
    granularity = "thought block, then token"
    adaptation = "flat"
    trims_path: ClassVar[bool] = False
    """Whether `Boundary` trims the closed block on the active path too."""

    def scores(self) -> Mapping[str, Score]:
        if not self.reads_attention:
            return {}
        return {"block-attention": CumulativeAttention(from_later_blocks=True)}

    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        if not protection.pin_prompt:  # sinks are the prompt's
            protection = replace(protection, sinks=min(protection.sinks, view.prompt_tokens))
        mask = protection.mask(view)
        pinned = set(view.leaves)  # what no decision may trim: open leaves, or the whole path
        if self.path_floor == 1:
            pinned = set(np.flatnonzero(view.tree.on_path(view.leaves)).tolist())
        if self.trims_path:
            pinned -= {leaf for leaf in view.leaves if view.tree.nodes[leaf].closed}
        for node in pinned - {0}:  # of the prompt, what `protect` says
            mask[view.tree.tokens(node)] = True
        return mask

    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        tree, tier = at.view.tree, tiers[0]
        blocks = self._blocks(at, tier)
        keep = self.numbers(at, blocks, self.trims_path)
        for node in np.flatnonzero(keep > blocks.held).tolist():
            tokens = tree.tokens(node)
            away = ~hbm_mask(tier[tokens]) & (tier[tokens] <= int(at.lowest_reachable))
            tier[tokens[away]] = Tier.HBM
        shrunk = np.flatnonzero(keep < blocks.held)
        if len(shrunk):
            tier[self._evicted(at, shrunk, keep[shrunk])] = Tier.EVICTED

    def _blocks(self, at: Decision, tier: np.ndarray) -> Blocks:
        tree, count = at.view.tree, len(at.view.tree)
        owner = tree.node_of_token.values
        fixed = np.zeros(count, dtype=bool)
        fixed[list(at.view.leaves)] = True
        fixed[0] = at.policy.protect.pin_prompt  # nothing is added to it
        on_path = tree.on_path(at.view.leaves)
        held = np.bincount(owner[hbm_mask(tier)], minlength=count)
        reachable = held
        if at.lowest_reachable is Tier.EVICTED:
            reachable = tree.sizes
        elif at.lowest_reachable >= Tier.DDR:
            reachable = np.bincount(owner[tier <= at.lowest_reachable], minlength=count)
        return Blocks(
            sizes=tree.sizes,
            held=held,
            reachable=reachable,
            pinned=np.bincount(owner[at.protected], minlength=count),
            pruned=np.array([node.pruned for node in tree.nodes], dtype=bool) & ~on_path,
            fixed=fixed,
            on_path=on_path,
        )

    def _evicted(self, at: Decision, nodes: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Tokens that blocks give up to shrink to `keep` (Algorithm 1, Evict), in no order.

        A block keeps protected tokens first, then its tail, then its highest-scored tokens.  Of
        equals the newest.  Each of the blocks `nodes`, int64 ``[blocks]``, keeps at most what it
        has in HBM.  Blocks of similar size are sorted together, as the rows of one table.
        """
        evicted = []
        tree = at.view.tree
        # 0 for a token that may leave, above for a protected one, below for one not in HBM.
        state = at.protected.astype(np.int8)
        state[~hbm_mask(at.view.tier[0])] = -1
        for rows in _similar(tree.sizes[nodes]):
            lengths = tree.sizes[nodes[rows]]
            ids = np.concatenate(list(map(tree.tokens, nodes[rows].tolist())))
            key, of_each = at.rank[0].take(ids), state.take(ids)
            held = of_each >= 0
            if of_each.any():
                key[of_each > 0] = np.inf
                key[~held] = -np.inf
            ends = np.cumsum(lengths)
            for back in range(1, min(self.tail, int(lengths.max())) + 1):  # tails above all scores
                last = ends[lengths >= back] - back
                key[last] = np.where(np.isfinite(key[last]), _TAIL, key[last])
            kept = keep_highest(key, lengths, keep[rows])
            evicted.append(ids.take(np.flatnonzero(held & ~kept)))
        return np.concatenate(evicted)


def _similar(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of blocks of similar length, few enough at a time for the CPU cache."""
    order = np.argsort(lengths, kind="stable")
    rising = lengths[order]
    first = 0
    while first < len(order):
        table = np.arange(1, len(order) - first + 1) * rising[first:]
        last = first + max(1, int(np.searchsorted(table, _TABLE_TOKENS, side="right")))
        yield order[first:last]
        first = last
