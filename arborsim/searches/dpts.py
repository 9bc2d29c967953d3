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
from dataclasses import dataclass, field

from arborsim.core.settings import setting
from arborsim.searches.base import ROOT, Expansion, Leaf, Leaves, Wide, newest, reward, value
from arborsim.searches.ranking import Rewarded


@dataclass
class _State:
    """A complete node, and what came out below it."""

    leaf: Leaf  # as it was last shown
    most: int  # children that it may have
    visits: int = -1  # children opened, those asked for included; -1 if it was given up at once
    arrived: int = 0  # complete children
    #: Rewards seen below, and their sum
    count: int = 0
    total: float = 0.0

    @property
    def live(self) -> bool:
        return self.leaf.expandable and self.visits >= 0


@dataclass
class _Slot:
    """A place in the batch, free or decoding a child of a state."""

    exploits: bool
    node: int | None = None  # the state whose child it decodes, None when it is free
    follow: int | None = None  # the state that it goes on from instead of picking one


@dataclass(kw_only=True)
class Dpts(Wide, Rewarded):
    """Parallel slots that exploit and explore."""

    name = "dpts"
    synchronous = False
    width: int = setting(4, "slots", low=1)
    #: Lambda_es and lambda_ds, as shares of the mean reward
    early_stop: float = 0.8
    deep_seek: float = 0.8
    warm_up: int = 5  # rewards to see before either transition applies
    exploration: float = 1 / math.sqrt(2)  # c
    children: int = setting(3, "most per state; the root may have `width`, if more", low=1)
    steps: int = setting(100, "most thoughts in all", low=1)
    accept: float = 0.9  # a finished thought valued at least this ends the search
    _slots: list[_Slot] = field(default_factory=list, init=False, repr=False)
    _states: dict[int, _State] = field(default_factory=dict, init=False, repr=False)
    _rewards: float = field(default=0.0, init=False, repr=False)  # their sum
    _fresh: list[tuple[float, int]] = field(default_factory=list, init=False, repr=False)
    _asked: set[int] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slots = [_Slot(exploits=i < self._half) for i in range(self.width)]

    @property
    def _half(self) -> int:
        """Slots that exploit."""
        return (self.width + 1) // 2

    def expand(self, frontier: Leaves, width: int) -> Expansion:
        frontier = self.scored(frontier)
        dropped: list[int] = []
        new = newest(frontier, self._states)
        for leaf in new:
            self._back_up(leaf)
            if leaf.node == ROOT:
                continue
            if leaf.finished and value(leaf) >= self.accept:
                return Expansion(dropped=tuple(dropped), done=True)
            if self._settle(leaf):
                dropped.append(leaf.node)
        may_differ = self._asked.union(leaf.node for leaf in new).difference(dropped)
        changed = [leaf for leaf in frontier if leaf.node in may_differ]
        for leaf in changed:
            self._update(leaf)
        self._free_stranded(changed)
        children = self._fill(width)
        self._asked = set(children)
        return Expansion(children, tuple(dropped))

    def _back_up(self, leaf: Leaf) -> None:
        """Add the new reward to all proper ancestors."""
        most = max(self.children, self.width) if leaf.node == ROOT else self.children
        self._states[leaf.node] = _State(leaf, most)
        if leaf.node == ROOT:
            return
        self._rewards += reward(leaf)
        self._states[leaf.parent].arrived += 1
        node = leaf.parent
        while node in self._states:
            above = self._states[node]
            above.count += 1
            above.total += reward(leaf)
            node = above.leaf.parent

    def _settle(self, leaf: Leaf) -> bool:
        """Let the slot that decoded `leaf` make its transition (True gives the leaf up)."""
        slot = next(s for s in self._slots if s.node == leaf.parent)
        slot.node = None
        if not leaf.expandable:
            return leaf.dead
        rewards = len(self._states) - 1
        warm = rewards >= self.warm_up
        mean = self._rewards / rewards
        if slot.exploits:
            if warm and reward(leaf) < self.early_stop * mean:
                return True
            slot.follow = leaf.node
        elif warm and reward(leaf) > self.deep_seek * mean:
            slot.exploits, slot.follow = True, leaf.node
        return False

    def _update(self, leaf: Leaf) -> None:
        """Know the state as it is now: on a bank, it may have had fewer children than asked for."""
        state = self._states[leaf.node]
        if leaf.expandable and leaf.visits == 0 and state.visits != 0:
            heapq.heappush(self._fresh, (-value(leaf), leaf.node))
        state.leaf, state.visits = leaf, leaf.visits

    def _free_stranded(self, asked: Leaves) -> None:
        """Free slots whose thought never started: a bank had no child left to hand out."""
        running = {x.node: x.visits - self._states[x.node].arrived for x in asked}
        for slot in self._slots:
            if slot.node is not None and slot.node in running:
                running[slot.node] -= 1
                if running[slot.node] < 0:
                    slot.node = None

    def _fill(self, width: int) -> dict[int, int]:
        """Give every free slot a state to expand."""
        children: dict[int, int] = {}
        free = [slot for slot in self._slots if slot.node is None]
        opened = len(self._states) - 1 + self.width - len(free)
        left = min(width, self.steps - opened)
        # Slots that go on come first: their state must not be taken by another.
        for slot in sorted(free, key=lambda s: s.follow is None):
            if left <= 0:
                break
            node, slot.follow = slot.follow, None
            if node is None or not self._states[node].live:
                node = self._pick(slot)
            if node is None:
                continue
            slot.node = node
            self._states[node].visits += 1
            children[node] = children.get(node, 0) + 1
            left -= 1
        return children

    def _pick(self, slot: _Slot) -> int | None:
        """A new state for a slot, in whichever role has fewer slots than its half."""
        others = [s for s in self._slots if s is not slot and (s.node is not None or s.follow)]
        slot.exploits = sum(s.exploits for s in others) < self._half
        if slot.exploits:
            while self._fresh:
                node = self._fresh[0][1]
                if self._states[node].live and self._states[node].visits == 0:
                    return node
                heapq.heappop(self._fresh)
        open_ = (n for n, state in self._states.items() if state.live and state.visits < state.most)
        return max(open_, key=lambda n: (self._ucb(self._states[n]), -n), default=None)

    def _ucb(self, state: _State) -> float:
        mean = state.total / state.count if state.count else 0.0
        at_root = state.leaf.node == ROOT
        # The root has no reward of its own: it gets the mean of what lies below it.
        own = mean if at_root else reward(state.leaf)
        above = state if at_root else self._states[state.leaf.parent]
        return mean + self.exploration * math.sqrt(1 + above.count) * own / (1 + state.count)
