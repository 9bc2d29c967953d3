"""Two blocks over one stream: which of its tokens HBM holds (`Pool`), and where the others go.

The allocation over a tree is in `arborsim.policies.tree_blocks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import Allocation, Decision
from arborsim.policies.selection import lowest, lowest_of

ADAPTATIONS = ("path", "flat")


@dataclass(frozen=True)
class Pool(Allocation):
    """One pool: the highest-scored tokens of the stream stay, wherever in the tree they are.

    `adaptation="path"` (as ArborKV evaluates its baselines): the paths to the active leaves are
    the stream.  Tokens off them keep what they had; when the whole tree exceeds the budget, whole
    off-path blocks go first, least recently active first.  `adaptation="flat"`: one pool over all
    tokens of the tree, the newest ones protected.
    """

    adaptation: str = setting(
        "path", "what the stream is on a tree: the active paths, or everything",
        choices=ADAPTATIONS,
    )  # fmt: skip

    about: ClassVar[str] = "one pool"

    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        if self.adaptation == "path":
            return protection.mask(view)
        mask = np.zeros(view.num_tokens, dtype=bool)
        mask[: protection.head(view.prompt_tokens)] = True
        mask[max(0, view.num_tokens - protection.recent) :] = True
        return mask

    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        blocks = [] if self.adaptation == "flat" else off_path_blocks(at.view)
        for group, tier in enumerate(tiers):
            held = int(at.view.held[group])
            if at.lowest_reachable > Tier.HBM_QUANTISED:
                away = (tier > Tier.HBM_QUANTISED) & (tier <= at.lowest_reachable)
                back = at.in_stream(away)
                tier[back] = Tier.HBM
                held += int(np.count_nonzero(back))
            limit, goal = at.policy.schedule.room(at, group)
            over = held - goal if held > limit else 0
            for block in blocks:
                if over <= 0:
                    break
                over -= evict(tier, block)
            if over > 0:
                free = at.movable & (tier <= Tier.HBM_QUANTISED)
                excess, count = over - (at.view.budget_tokens - goal), int(np.count_nonzero(free))
                if count < excess:
                    raise at.policy.infeasible(at.view, count, excess)
                self.thin(at, group, tier, free, over)

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        """Let the `over` lowest of the tokens that may leave, bool ``[tokens]`` `free`, leave.

        Changes `tier`, int8 ``[tokens]``, of one group; fewer leave if there are no more.
        """
        tier[lowest_of(free, at.rank[group], over)] = Tier.EVICTED


def evict(tier: np.ndarray, tokens: np.ndarray) -> int:
    """Evict `tokens` from one group's tiers, int8 ``[all tokens]``; how many left HBM."""
    freed = int(np.count_nonzero(tier[tokens] <= Tier.HBM_QUANTISED))
    tier[tokens] = Tier.EVICTED
    return freed


def off_path_blocks(view: CacheView) -> list[np.ndarray]:
    """Token ids in HBM of each block off the active paths, in the order they are given up.

    Least recently active first; among equals the deepest, whose loss harms no other block's path;
    then the oldest.
    """
    tree = view.tree
    off = np.flatnonzero(~tree.on_path(view.leaves)).tolist()
    if not off:
        return []
    nodes = tree.nodes
    off.sort(key=lambda node: (nodes[node].last_active, -nodes[node].depth, node))
    in_hbm = np.asarray((view.tier <= Tier.HBM_QUANTISED).any(axis=0))
    blocks = (tree.tokens(node) for node in off)
    return [kept for block in blocks if len(kept := block[in_hbm[block]])]


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

    @property
    def evicts_only(self) -> bool:
        """Whether there is but one step: out."""
        return not self.hbm_quantised and not self.ddr

    @property
    def about(self) -> str:
        if self.evicts_only:
            return "evict"
        return " > ".join(tier.name.lower().replace("_", " ") for tier in self.tiers)

    def place(self, at: Decision, tiers: np.ndarray) -> None:
        """Give every token its tier in `tiers`, int8 ``[groups, tokens]`` as allotted.

        The lowest-ranked step down first; of equals the oldest.
        """
        if self.evicts_only:
            return
        for group, tier in enumerate(tiers):
            in_hbm = tier <= Tier.HBM_QUANTISED
            tier[:] = at.view.tier[group]
            # What is evicted and stays so, the most on a long path, is not looked at again.
            held = (tier != Tier.EVICTED) | in_hbm
            live = slice(None) if held.all() else np.flatnonzero(held)  # a slice copies nothing
            placed = np.where(in_hbm[live], np.int8(Tier.HBM), np.int8(Tier.DDR))
            placed += tier[live] & 1  # quantised tiers have odd numbers
            protected, rank = at.protected[live], at.rank[group, live]
            self._quantise(placed, Tier.HBM, self.hbm_quantised, protected, rank)
            over = np.count_nonzero(placed >= Tier.DDR) - self.ddr * at.view.budget_tokens
            if over > 0:  # nothing is evicted yet
                free = np.flatnonzero((placed >= Tier.DDR) & ~protected)
                placed[free[lowest(rank.take(free), math.ceil(over))]] = Tier.EVICTED
            self._quantise(placed, Tier.DDR, self.ddr_quantised, protected, rank)
            tier[live] = placed

    @staticmethod
    def _quantise(
        tiers: np.ndarray, tier: Tier, share: float, protected: np.ndarray, rank: np.ndarray
    ) -> None:
        """Fill the 8-bit part of the memory `tier` up with its lowest unprotected tokens."""
        if not share:
            return
        narrow = Tier(tier + 1)
        free = ~protected
        full = np.flatnonzero((tiers == tier) & free)
        already = np.count_nonzero((tiers == narrow) & free)
        wanted = int(share * (len(full) + int(already))) - int(already)
        tiers[full[lowest(rank.take(full), wanted)]] = narrow
