"""Dynamic Parallel Tree Search (Ding et al. 2025, "Dynamic Parallel Tree Search for Efficient LLM
Reasoning").

Several thoughts run in parallel slots.  Half of the slots *exploit*: they follow the state with
the best reward.  The others *explore*: they pick the state with the highest

    Q/N + c sqrt(1 + N_parent) r / (1 + N),    c = 1/sqrt(2),

where N counts the rewards seen below a state, Q is their sum and r is the state's own reward.  Two
transitions keep the slots from going on for too long or giving up too soon: an exploiting slot
whose newest reward falls below ``early_stop`` times the mean of all rewards stops, and an exploring
slot whose newest reward exceeds ``deep_seek`` times the mean goes on from there and exploits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from arborsim.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_answer, value


class Role(Enum):
    EXPLOIT = "exploit"
    EXPLORE = "explore"


@dataclass
class Slot:
    """A place in the batch: `node` is the state whose child it decodes, None when it is free.

    `follow` is the state that it goes on from instead of picking one.
    """

    role: Role
    node: int | None = None
    follow: int | None = None


@dataclass
class Dpts:
    """Parallel slots that exploit and explore.

    Parameters
    ----------
    width : int
        Number of slots.
    early_stop, deep_seek : float
        Lambda_es and lambda_ds, as shares of the mean reward.
    warm_up : int
        Rewards to see before either transition applies.
    exploration : float
        c.
    children : int
        Most children per state (the root may have `width`, if that is more).
    steps : int
        Most thoughts in all.
    accept : float
        A finished thought valued at least this ends the search.
    """

    name: ClassVar[str] = "dpts"
    synchronous: ClassVar[bool] = False
    width: int = 4
    early_stop: float = 0.8
    deep_seek: float = 0.8
    warm_up: int = 5
    exploration: float = 1 / math.sqrt(2)
    children: int = 3
    steps: int = 100
    accept: float = 0.9
    _slots: list[Slot] = field(default_factory=list, init=False, repr=False)
    _parent: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _arrived: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _count: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _sum: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    _rewards: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.width, self.children, self.steps) < 1:
            raise UsageError("dpts: width, children and steps must be 1 or more")
        exploiting = (self.width + 1) // 2
        self._slots = [
            Slot(Role.EXPLOIT if i < exploiting else Role.EXPLORE) for i in range(self.width)
        ]

    @property
    def slots(self) -> int:
        return self.width

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        dropped: list[int] = []
        for leaf in frontier:
            if leaf.node in self._parent:
                continue
            self._note(leaf)
            if leaf.node == ROOT:
                continue
            if leaf.finished and value(leaf) >= self.accept:
                return Expansion(dropped=tuple(dropped), done=True)
            if self._settle(leaf):
                dropped.append(leaf.node)
        self._free_stranded(frontier)
        return Expansion(self._fill(frontier, dropped, width), tuple(dropped))

    def _note(self, leaf: Leaf) -> None:
        """Back the new reward up to all proper ancestors."""
        self._parent[leaf.node] = leaf.parent
        self._count[leaf.node], self._sum[leaf.node] = 0, 0.0
        if leaf.node == ROOT:
            return
        self._rewards.append(leaf.score)
        self._arrived[leaf.parent] = self._arrived.get(leaf.parent, 0) + 1
        node = leaf.parent
        while node in self._count:
            self._count[node] += 1
            self._sum[node] += leaf.score
            node = self._parent[node]

    def _settle(self, leaf: Leaf) -> bool:
        """Let the slot that decoded `leaf` make its transition; True gives the leaf up."""
        slot = next(s for s in self._slots if s.node == leaf.parent)
        slot.node = None
        if not leaf.expandable:
            return leaf.dead
        warm = len(self._rewards) >= self.warm_up
        mean = sum(self._rewards) / len(self._rewards)
        if slot.role is Role.EXPLOIT:
            if warm and leaf.score < self.early_stop * mean:
                return True
            slot.follow = leaf.node
        elif warm and leaf.score > self.deep_seek * mean:
            slot.role, slot.follow = Role.EXPLOIT, leaf.node
        return False

    def _free_stranded(self, frontier: Sequence[Leaf]) -> None:
        """Free slots whose thought never started: a bank had no child left to hand out."""
        running = {x.node: x.visits - self._arrived.get(x.node, 0) for x in frontier}
        for slot in self._slots:
            if slot.node is not None and slot.node in running:
                running[slot.node] -= 1
                if running[slot.node] < 0:
                    slot.node = None

    def _fill(self, frontier: Sequence[Leaf], dropped: list[int], width: int) -> dict[int, int]:
        """Give every free slot a state to expand."""
        children: dict[int, int] = {}
        left = min(width, self.steps - sum(leaf.visits for leaf in frontier))
        states = {x.node: x for x in frontier if x.expandable and x.node not in dropped}
        visits = {node: leaf.visits for node, leaf in states.items()}
        free = [slot for slot in self._slots if slot.node is None]
        # Slots that go on come first: their state must not be taken by another.
        for slot in sorted(free, key=lambda s: s.follow is None):
            if left <= 0:
                break
            node, slot.follow = slot.follow, None
            if node not in states:
                node = self._pick(slot, states, visits)
            if node is None:
                continue
            slot.node = node
            visits[node] += 1
            children[node] = children.get(node, 0) + 1
            left -= 1
        return children

    def _pick(self, slot: Slot, states: dict[int, Leaf], visits: dict[int, int]) -> int | None:
        """A new state for a slot, in whichever role has fewer slots than its half."""
        others = [s for s in self._slots if s is not slot and (s.node is not None or s.follow)]
        exploiting = sum(s.role is Role.EXPLOIT for s in others)
        slot.role = Role.EXPLOIT if exploiting < (self.width + 1) // 2 else Role.EXPLORE
        fresh = [node for node in states if visits[node] == 0]
        if slot.role is Role.EXPLOIT and fresh:
            return max(fresh, key=lambda n: (value(states[n]), -n))
        most = dict.fromkeys(states, self.children) | {ROOT: max(self.children, self.width)}
        open_ = [node for node in states if visits[node] < most[node]]
        return max(open_, key=lambda n: (self._ucb(states[n]), -n), default=None)

    def _ucb(self, leaf: Leaf) -> float:
        count = self._count[leaf.node]
        mean = self._sum[leaf.node] / count if count else 0.0
        # The root has no reward of its own: it gets the mean of what lies below it.
        reward = mean if leaf.node == ROOT else leaf.score
        above = self._count[ROOT if leaf.node == ROOT else leaf.parent]
        return mean + self.exploration * math.sqrt(1 + above) * reward / (1 + count)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return best_answer(frontier)
