"""Two blocks over one stream: which of its tokens HBM holds (`Pool`), and where the others go.

With what they choose by.  Ties break by one rule everywhere: of two tokens with equal scores the
older one loses.  Token ids rise with age, so in an array ordered by id the earlier entry is evicted
first.  The allocation over a tree is in `arborsim.policies.tree`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, by_tier, hbm_mask
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.blocks import Allocation, Decision, EveryStep

ADAPTATIONS = ("path", "flat")
_EVICTED = int(Tier.EVICTED)
_RUNG = by_tier(lambda tier: tier.rung).astype(np.int8)


def lowest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` lowest scores, ascending, the earliest first among equals.

    Scores, float64 ``[n]``, are ordered from oldest to newest token.  Int64 ``[min(count, n)]``.
    """
    if count == 1 and len(scores):
        return np.asarray([int(scores.argmin())])
    return lowest_of_each(scores, [count])[0]


def lowest_of_each(scores: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """`lowest` for several counts at the price of one partition."""
    parted, found = scores, []
    thresholds: dict[int, float] = {}
    # The largest first: what lies below it holds the other thresholds.  A pass for each is faster
    # than one for all, which NumPy does without vector instructions.
    for count in sorted({count for count in counts if 0 < count < len(scores)}, reverse=True):
        parted = np.partition(parted, count - 1)[:count]
        thresholds[count] = parted[-1]
    for count in counts:
        if count <= 0:
            found.append(np.empty(0, dtype=np.int64))
            continue
        if count >= len(scores):
            found.append(np.arange(len(scores)))
            continue
        threshold = thresholds[count]
        chosen = scores < threshold
        ties = np.flatnonzero(scores == threshold)
        chosen[ties[: count - np.count_nonzero(chosen)]] = True
        found.append(np.flatnonzero(chosen))
    return found


def lowest_of(mask: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` lowest scores where `mask`, bool ``[n]``, is set (`lowest`)."""
    if count == 1:  # what a policy asks at every iteration: no index array is made
        one = int(np.where(mask, scores, np.inf).argmin())
        if mask[one]:
            return np.asarray([one])
    among = np.flatnonzero(mask)
    return np.asarray(among[lowest(scores[among], count)])


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest scores, ascending, the latest first among equals."""
    keep = np.ones(len(scores), dtype=bool)
    keep[lowest(scores, len(scores) - max(0, count))] = False
    return np.flatnonzero(keep)


def keep_highest(key: np.ndarray, lengths: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Which entries are among the highest of their block, the newer of equals, bool ``[tokens]``.

    `key`, float64 ``[tokens]``, holds block after block, each from its oldest token to its newest.
    `lengths` and `keep`, int64 ``[blocks]``, say how many tokens a block has and how many are
    wanted of it, at most as many.
    """
    width = int(lengths.max())
    inside = np.arange(width) < lengths[:, None]
    table = np.full(inside.shape, -np.inf)
    table[inside] = key
    rank = np.clip(width - keep, 0, width - 1)
    threshold = np.take_along_axis(np.sort(table, axis=1), rank[:, None], axis=1)
    kept = table >= threshold
    crowded = np.flatnonzero(kept.sum(axis=1) > keep)
    if len(crowded):  # equals at the threshold: the newest stay
        higher = table[crowded] > threshold[crowded]
        ties = kept[crowded] & ~higher
        wanted = keep[crowded] - higher.sum(axis=1)
        newer = np.cumsum(ties[:, ::-1], axis=1)[:, ::-1]
        kept[crowded] = higher | (ties & (newer <= wanted[:, None]))
    return np.asarray(kept[inside])


def neighbour_mean(values: np.ndarray, kernel: int) -> np.ndarray:
    """Mean over `kernel` (odd) neighbours along the last axis (0 beyond the ends)."""
    reach = kernel // 2
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(reach, reach)])
    total = np.zeros_like(values)
    for shift in range(kernel):  # in a fixed order, so that equal neighbourhoods tie
        total += padded[..., shift : shift + values.shape[-1]]
    total /= kernel
    return total


@dataclass(frozen=True)
class Pool(Allocation):
    """One pool: the highest-scored tokens of the stream stay, wherever in the tree they are.

    Each group is a pool of its own, which may hold its share (`shares`: the budget).  Where groups
    draw on one budget (`budget_scope`), `evictions` says how many tokens each gives up.  Decisions
    are due when one exceeds its share (`headroom`).

    `adaptation="path"` (as ArborKV evaluates its baselines): the paths to the active leaves are the
    stream.  Tokens off them keep what they had.  When the whole tree exceeds the budget, whole
    off-path blocks go first, least recently active first.  `adaptation="flat"`: one pool over all
    tokens of the tree, the newest ones protected.
    """

    adaptation: str = setting(
        "path", "what the stream is on a tree: the active paths, or everything", choices=ADAPTATIONS
    )

    about = "one pool"

    def protected(self, view: CacheView, protection: Protection) -> np.ndarray:
        if self.adaptation == "path":
            return protection.mask(view)
        mask = np.zeros(view.num_tokens, dtype=bool)
        mask[: protection.head(view.prompt_tokens)] = True
        mask[max(0, view.num_tokens - protection.recent) :] = True
        return mask

    def size(self, view: CacheView) -> int:
        """Number of groups that draw on one budget."""
        if self.budget_scope == "group":
            return 1
        groups = len(view.tier)
        return groups if self.budget_scope == "model" else groups // max(1, len(view.shape.layers))

    def headroom(self, view: CacheView) -> int:
        if len(view.tier) == 1:
            return int(self.shares(view)[0]) - int(view.held[0])
        left, size = self.shares(view) - view.held, self.size(view)
        if size > 1:
            left = left.reshape(-1, size).sum(axis=1) // size
        return int(left.min())

    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        blocks = () if self.adaptation == "flat" else off_path_blocks(at.view)
        size = self.size(at.view)
        if size == 1 and not blocks and self._let_one_go(at, tiers):
            return
        for first in range(0, len(tiers), size):
            part = tiers[first : first + size]
            over, slack = self._excess(at, first, part)
            for block in blocks:
                if over <= 0:
                    break
                over -= sum(evict(tier, block) for tier in part)
            if over <= 0:
                continue
            free = at.movable & hbm_mask(part)
            count = int(np.count_nonzero(free))
            if count < over - slack:
                raise at.policy.infeasible(at.view, 0, -(-(over - slack - count) // size))
            over = min(over, count)
            numbers = [over] if size == 1 else self.evictions(at, first, free, over).tolist()
            for i, number in enumerate(numbers):
                if number:
                    self.thin(at, first + i, part[i], free[i], number)

    def _let_one_go(self, at: Decision, tiers: np.ndarray) -> bool:
        """Let the lowest of each group go that is one token over its share; False: some are not.

        What most decisions of many groups are, at a small part of the price.
        """
        plain = type(at.policy.schedule) is EveryStep and type(self).thin is Pool.thin
        over = at.view.held - at.shares
        if not plain or at.lowest_reachable >= Tier.DDR or over.max() > 1:
            return False
        groups = np.flatnonzero(over == 1)
        free = at.movable & hbm_mask(tiers[groups])
        gone = np.where(free, at.rank[groups], np.inf).argmin(axis=1)
        if not free[np.arange(len(groups)), gone].all():
            return False
        tiers[groups, gone] = Tier.EVICTED
        return True

    def _excess(self, at: Decision, first: int, part: np.ndarray) -> tuple[int, int]:
        """Tokens that must leave the groups from `first` on, and how many of them could stay.

        What comes back from below is written into `part`, int8 ``[groups, tokens]``.
        """
        held = limit = goal = share = 0
        for group, tier in enumerate(part, first):
            held += int(at.view.held[group])
            if at.lowest_reachable >= Tier.DDR:
                away = ~hbm_mask(tier) & (tier <= int(at.lowest_reachable))
                back = at.view.in_stream(away, self.adaptation)
                tier[back] = Tier.HBM
                held += int(np.count_nonzero(back))
            its_limit, its_goal = at.policy.schedule.room(at, group)
            limit, goal, share = limit + its_limit, goal + its_goal, share + int(at.shares[group])
        return held - goal if held > limit else 0, share - goal

    def evictions(self, at: Decision, first: int, free: np.ndarray, over: int) -> np.ndarray:
        """How many tokens leave each of the groups that draw on one budget, `over` or more in all.

        `free`, bool ``[groups, tokens]``, are those that may leave, of the groups from number
        `first` on: no fewer than `over`.
        """
        raise TypeError(f"{type(self).__name__} does not say how many tokens leave each group")

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        """Let the `over` lowest of the tokens that may leave, bool ``[tokens]`` `free`, leave.

        Changes `tier`, int8 ``[tokens]``, of one group.  Fewer leave if there are no more.
        """
        tier[lowest_of(free, at.rank[group], over)] = Tier.EVICTED


def evict(tier: np.ndarray, tokens: np.ndarray) -> int:
    """Evict `tokens` from one group's tiers, int8 ``[all tokens]``, return how many left HBM."""
    freed = int(np.count_nonzero(hbm_mask(tier[tokens])))
    tier[tokens] = Tier.EVICTED
    return freed


class _Blocks(Sequence[np.ndarray]):
    """Tokens of nodes in HBM, looked up when asked for: of hundreds of blocks one or two go."""

    def __init__(self, nodes: list[int], tree: ThoughtTree, in_hbm: np.ndarray) -> None:
        self._nodes, self._tree, self._in_hbm = nodes, tree, in_hbm

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, at: Any) -> Any:
        block = self._tree.tokens(self._nodes[at])
        return block[self._in_hbm[block]]


def off_path_blocks(view: CacheView) -> Sequence[np.ndarray]:
    """Token ids in HBM of each block off the active paths, in the order they are given up.

    Least recently active first, then the deepest, whose loss harms no other block's path, then the
    oldest.
    """
    tree, in_hbm = view.tree, np.logical_or.reduce(hbm_mask(view.tier))
    held = np.bincount(tree.node_of_token.values[in_hbm], minlength=len(tree))
    off = np.flatnonzero((held > 0) & ~tree.on_path(view.leaves)).tolist()
    nodes = tree.nodes
    off.sort(key=lambda node: (nodes[node].last_active, -nodes[node].depth, node))
    return _Blocks(off, tree, in_hbm)


@dataclass(frozen=True)
class Ladder:
    """Tokens that HBM cannot hold go to DDR while it has room, and are evicted then.

    Both memories hold their lowest-ranked unprotected tokens in 8 bit.  Precision once lost does
    not come back: a token quantised in HBM is quantised in DDR.  HBM's budget and DDR's size count
    tokens.  One in 8 bit counts as one, and shows in bytes only.

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
        used = {
            Tier.HBM: True,
            Tier.HBM_QUANTISED: self.hbm_quantised,
            Tier.DDR: self.ddr,
            Tier.DDR_QUANTISED: self.ddr and (self.ddr_quantised or self.hbm_quantised),
            Tier.EVICTED: self.ddr < math.inf,
        }
        return tuple(tier for tier in used if used[tier])

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

        The lowest-ranked step down first, the oldest of equals.
        """
        if self.evicts_only:
            return
        for group, tier in enumerate(tiers):
            in_hbm = hbm_mask(tier)
            tier[:] = at.view.tier[group]
            # What is evicted and stays so, the most on a long path, is not looked at again.
            held = (tier != _EVICTED) | in_hbm
            live = slice(None) if held.all() else np.flatnonzero(held)  # a slice copies nothing
            placed = np.where(in_hbm[live], np.int8(Tier.HBM), np.int8(Tier.DDR))
            placed += _RUNG[tier[live]]
            protected, rank = at.protected[live], at.rank[group, live]
            self._quantise(placed, Tier.HBM, self.hbm_quantised, protected, rank)
            below = ~hbm_mask(placed)
            over = np.count_nonzero(below) - self.ddr * at.view.budget_tokens
            if over > 0:  # nothing is evicted yet
                free = np.flatnonzero(below & ~protected)
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
        full = np.flatnonzero((tiers == int(tier)) & free)
        already = np.count_nonzero((tiers == int(narrow)) & free)
        wanted = int(share * (len(full) + int(already))) - int(already)
        tiers[full[lowest(rank.take(full), wanted)]] = narrow
