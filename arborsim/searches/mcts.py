"""Monte Carlo tree search by UCT (Kocsis and Szepesvari 2006, "Bandit based Monte-Carlo Planning";
Browne et al. 2012, "A Survey of Monte Carlo Tree Search Methods", Algorithm 2).

Every thought is one simulation: from the root down to a state that may have another child
(*selection*), its next child (*expansion*), the child's reward in the place of a playout
(*evaluation*), added to all states above it (*backup*).  Where all children are there, selection
goes on with the one that has the highest

    Q/N + w sqrt(ln N_parent / N),

N being the rewards seen in a child and below it and Q their sum, as "Reasoning via Planning" (Hao
et al. 2023) and LATS (Zhou et al. 2023) have it, both with w = 1.

With several slots, thoughts that still run count as visits in the root, not in the mean (Liu et al.
2020, "Watch the Unobserved").  With one slot that changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from arborsim.core.settings import setting
from arborsim.searches import base
from arborsim.searches.ranking import Rewarded


@dataclass
class _State:
    """A complete node: what came out at and below it, and what may still come."""

    leaf: base.Leaf  # as it was last shown
    #: Rewards seen here and below, and their sum
    count: int = 0
    total: float = 0.0
    #: Thoughts that run below, and those of them that are children
    running: int = 0
    direct: int = 0
    room: int = 0  # children that it may still have
    live: bool = False  # whether anything can be opened here or below
    arrived: list[_State] = field(default_factory=list)  # complete children

    def settle(self) -> None:
        self.live = self.room > 0 or any(child.live for child in self.arrived)


@dataclass(kw_only=True)
class Mcts(base.Wide, Rewarded):
    """Selection by UCT, one thought per simulation.

    Subtrees in which nothing is left to open are not selected again: a second visit would see the
    rewards of the first.
    """

    name = "mcts"
    synchronous = False
    width: int = setting(1, "slots: thoughts that run at once", low=1)
    exploration: float = setting(1.0, "w", low=0, high=1e6)
    children: int = setting(3, "most per state", low=1)
    steps: int = setting(100, "most thoughts in all", low=1)
    accept: float = setting(0.9, "a finished thought valued at least this ends the search")
    _states: dict[int, _State] = field(default_factory=dict, init=False, repr=False)
    _asked: set[int] = field(default_factory=set, init=False, repr=False)

    def expand(self, frontier: base.Leaves, width: int) -> base.Expansion:
        frontier = self.scored(frontier)
        new = base.newest(frontier, self._states)
        for leaf in new:
            self._back_up(leaf)
        if any(leaf.finished and base.value(leaf) >= self.accept for leaf in new):
            return base.Expansion(done=True)
        may_differ = self._asked.union(*((leaf.node, leaf.parent) for leaf in new))
        changed = [leaf for leaf in frontier if leaf.node in may_differ]
        for leaf in changed:
            self._update(leaf)
        closed = self._closed(changed)
        children: dict[int, int] = {}
        opened = len(self._states) - 1 + self._states[base.ROOT].running
        for _ in range(min(width, self.steps - opened)):
            state = self._select()
            if state is None:
                break
            children[state.leaf.node] = children.get(state.leaf.node, 0) + 1
        self._asked = set(children)
        return base.Expansion(children, closed)

    def _back_up(self, leaf: base.Leaf) -> None:
        self._states[leaf.node] = _State(leaf)
        if leaf.node == base.ROOT:
            return
        self._states[leaf.parent].arrived.append(self._states[leaf.node])
        for state in self._upwards(leaf.node):
            state.count += 1
            state.total += base.reward(leaf)

    def _upwards(self, node: int) -> Iterator[_State]:
        """The state and all above it."""
        while node in self._states:
            yield self._states[node]
            node = self._states[node].leaf.parent

    def _update(self, leaf: base.Leaf) -> None:
        """Count children that were opened, not those asked for: a bank may have had none."""
        state = self._states[leaf.node]
        state.leaf = leaf
        state.room = self.children - leaf.visits if leaf.expandable else 0
        more = leaf.visits - len(state.arrived) - state.direct
        state.direct += more
        for above in self._upwards(leaf.node):
            above.running += more
            above.settle()

    def _select(self) -> _State | None:
        """The state that gets the next child, noted as running, or None if there is none."""
        state = self._states[base.ROOT]
        if not state.live:
            return None
        while state.room <= 0:
            state = max((child for child in state.arrived if child.live), key=self._rank)
        state.room -= 1
        state.direct += 1
        for on_path in self._upwards(state.leaf.node):
            on_path.running += 1
            on_path.settle()
        return state

    def _rank(self, state: _State) -> tuple[float, int]:
        """UCT, the older node first among equals."""
        above = self._states[state.leaf.parent]
        seen = state.count + state.running
        wide = math.sqrt(math.log(above.count + above.running) / seen)
        return state.total / state.count + self.exploration * wide, -state.leaf.node

    def _closed(self, changed: Iterable[base.Leaf]) -> tuple[int, ...]:
        """States below which nothing runs or can be opened, but not the answers, deepest first."""
        over: dict[int, base.Leaf] = {}
        for leaf in changed:
            for state in self._upwards(leaf.node):
                if state.live or state.running or state.leaf.node == base.ROOT:
                    break
                if not state.leaf.finished:
                    over[state.leaf.node] = state.leaf
        return base.deepest_first(over.values())
