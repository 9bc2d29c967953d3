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

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_answer, reward, value


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
    _rewards: float = field(default=0.0, init=False, repr=False)  # their sum
    _states: dict[int, Leaf] = field(default_factory=dict, init=False, repr=False)
    _visits: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _fresh: list[tuple[float, int]] = field(default_factory=list, init=False, repr=False)
    _open: set[int] = field(default_factory=set, init=False, repr=False)
    _asked: set[int] = field(default_factory=set, init=False, repr=False)

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
        # In order of completion: what is new comes last.
        new = list(takewhile(lambda x: x.node not in self._parent, reversed(frontier)))[::-1]
        for leaf in new:
            self._note(leaf)
            if leaf.node == ROOT:
                continue
            if leaf.finished and value(leaf) >= self.accept:
                return Expansion(dropped=tuple(dropped), done=True)
            if self._settle(leaf):
                dropped.append(leaf.node)
        may_differ = self._asked.union(leaf.node for leaf in new).difference(dropped)
        changed = [leaf for leaf in frontier if leaf.node in may_differ]
        for leaf in changed:
            self._see(leaf)
        self._free_stranded(changed)
        children = self._fill(width)
        self._asked = set(children)
        return Expansion(children, tuple(dropped))

    def _note(self, leaf: Leaf) -> None:
        """Back the new reward up to all proper ancestors."""
        self._parent[leaf.node] = leaf.parent
        self._count[leaf.node], self._sum[leaf.node] = 0, 0.0
        if leaf.node == ROOT:
            return
        self._rewards += reward(leaf)
        self._arrived[leaf.parent] = self._arrived.get(leaf.parent, 0) + 1
        node = leaf.parent
        while node in self._count:
            self._count[node] += 1
            self._sum[node] += reward(leaf)
            node = self._parent[node]

    def _settle(self, leaf: Leaf) -> bool:
        """Let the slot that decoded `leaf` make its transition; True gives the leaf up."""
        slot = next(s for s in self._slots if s.node == leaf.parent)
        slot.node = None
        if not leaf.expandable:
            return leaf.dead
        rewards = len(self._parent) - 1
        warm = rewards >= self.warm_up
        mean = self._rewards / rewards
        if slot.role is Role.EXPLOIT:
            if warm and reward(leaf) < self.early_stop * mean:
                return True
            slot.follow = leaf.node
        elif warm and reward(leaf) > self.deep_seek * mean:
            slot.role, slot.follow = Role.EXPLOIT, leaf.node
        return False

    def _see(self, leaf: Leaf) -> None:
        """Know the state as it is now: on a bank, it may have had fewer children than asked for."""
        node = leaf.node
        if not leaf.expandable:
            self._states.pop(node, None)
            self._open.discard(node)
            return
        if leaf.visits == 0 and self._visits.get(node) != 0:
            heapq.heappush(self._fresh, (-value(leaf), node))
        self._states[node], self._visits[node] = leaf, leaf.visits
        self._sort(node)

    def _sort(self, node: int) -> None:
        """Put a state where it belongs: among those that may have another child, or not."""
        most = max(self.children, self.width) if node == ROOT else self.children
        if self._visits[node] < most:
            self._open.add(node)
        else:
            self._open.discard(node)

    def _free_stranded(self, asked: Sequence[Leaf]) -> None:
        """Free slots whose thought never started: a bank had no child left to hand out."""
        running = {x.node: x.visits - self._arrived.get(x.node, 0) for x in asked}
        for slot in self._slots:
            if slot.node is not None and slot.node in running:
                running[slot.node] -= 1
                if running[slot.node] < 0:
                    slot.node = None

    def _fill(self, width: int) -> dict[int, int]:
        """Give every free slot a state to expand."""
        children: dict[int, int] = {}
        free = [slot for slot in self._slots if slot.node is None]
        opened = len(self._parent) - 1 + self.width - len(free)
        left = min(width, self.steps - opened)
        # Slots that go on come first: their state must not be taken by another.
        for slot in sorted(free, key=lambda s: s.follow is None):
            if left <= 0:
                break
            node, slot.follow = slot.follow, None
            if node not in self._states:
                node = self._pick(slot)
            if node is None:
                continue
            slot.node = node
            self._visits[node] += 1
            self._sort(node)
            children[node] = children.get(node, 0) + 1
            left -= 1
        return children

    def _pick(self, slot: Slot) -> int | None:
        """A new state for a slot, in whichever role has fewer slots than its half."""
        others = [s for s in self._slots if s is not slot and (s.node is not None or s.follow)]
        exploiting = sum(s.role is Role.EXPLOIT for s in others)
        slot.role = Role.EXPLOIT if exploiting < (self.width + 1) // 2 else Role.EXPLORE
        if slot.role is Role.EXPLOIT:
            while self._fresh:
                node = self._fresh[0][1]
                if node in self._states and self._visits[node] == 0:
                    return node
                heapq.heappop(self._fresh)
        return max(self._open, key=lambda n: (self._ucb(self._states[n]), -n), default=None)

    def _ucb(self, leaf: Leaf) -> float:
        count = self._count[leaf.node]
        mean = self._sum[leaf.node] / count if count else 0.0
        # The root has no reward of its own: it gets the mean of what lies below it.
        own = mean if leaf.node == ROOT else reward(leaf)
        above = self._count[ROOT if leaf.node == ROOT else leaf.parent]
        return mean + self.exploration * math.sqrt(1 + above) * own / (1 + count)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return best_answer(frontier)
