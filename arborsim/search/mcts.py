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
2020, "Watch the Unobserved"); with one slot that changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from arborsim.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_answer, value


@dataclass
class _State:
    """What is known of a complete node: where it is, and what came out at and below it."""

    parent: int
    count: int = 0
    total: float = 0.0
    arrived: list[int] = field(default_factory=list)


@dataclass
class Mcts:
    """Selection by UCT, one thought per simulation.

    Subtrees in which nothing is left to open are not selected again: a second visit would see the
    rewards of the first.

    Parameters
    ----------
    width : int
        Slots: thoughts that run at once.
    exploration : float
        w.
    children : int
        Most children per state.
    steps : int
        Most thoughts in all.
    accept : float
        A finished thought valued at least this ends the search.
    """

    name: ClassVar[str] = "mcts"
    synchronous: ClassVar[bool] = False
    width: int = 1
    exploration: float = 1.0
    children: int = 3
    steps: int = 100
    accept: float = 0.9
    _states: dict[int, _State] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.width, self.children, self.steps) < 1:
            raise UsageError("mcts: width, children and steps must be 1 or more")
        if not (self.exploration >= 0 and math.isfinite(self.exploration)):
            raise UsageError("mcts: exploration must be 0 or more")

    @property
    def slots(self) -> int:
        return self.width

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        for leaf in frontier:
            if leaf.node in self._states:
                continue
            self._back_up(leaf)
            if leaf.finished and value(leaf) >= self.accept:
                return Expansion(done=True)
        walk = _Walk(frontier, self._states, self.children, self.exploration)
        opened = len(self._states) - 1 + walk.running[ROOT]
        children: dict[int, int] = {}
        for _ in range(min(width, self.steps - opened)):
            node = walk.select()
            if node is None:
                break
            children[node] = children.get(node, 0) + 1
        return Expansion(children, walk.closed())

    def _back_up(self, leaf: Leaf) -> None:
        self._states[leaf.node] = _State(leaf.parent)
        if leaf.node == ROOT:
            return
        self._states[leaf.parent].arrived.append(leaf.node)
        reward = 0.0 if math.isnan(leaf.score) else leaf.score
        node = leaf.node
        while node in self._states:
            state = self._states[node]
            state.count += 1
            state.total += reward
            node = state.parent

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return best_answer(frontier)


class _Walk:
    """The tree at one moment.

    Attributes
    ----------
    running : dict of int to int
        Thoughts that run below each state.
    """

    def __init__(
        self, frontier: Sequence[Leaf], states: Mapping[int, _State], most: int, w: float
    ) -> None:
        self._leaves = {leaf.node: leaf for leaf in frontier}
        self._states, self._w = states, w
        self.running: dict[int, int] = {}
        self._room: dict[int, int] = {}  # children that a state may still have
        self._live: dict[int, bool] = {}  # whether anything below can be opened
        for leaf in reversed(frontier):  # children are complete after their parents
            below = [c for c in states[leaf.node].arrived if c in self._leaves]
            # What was opened, not what was asked for: a bank may have had no child left.
            direct = leaf.visits - len(states[leaf.node].arrived)
            self.running[leaf.node] = direct + sum(self.running[c] for c in below)
            self._room[leaf.node] = most - leaf.visits if leaf.expandable else 0
            self._live[leaf.node] = self._room[leaf.node] > 0 or any(self._live[c] for c in below)

    def select(self) -> int | None:
        """The state that gets the next child, which is noted as running; None if there is none."""
        if not self._live[ROOT]:
            return None
        path = [ROOT]
        while self._room[path[-1]] <= 0:
            path.append(max(self._open_children(path[-1]), key=lambda n: (self._uct(n), -n)))
        self._room[path[-1]] -= 1
        for node in reversed(path):
            self.running[node] += 1
            self._live[node] = self._room[node] > 0 or bool(self._open_children(node))
        return path[-1]

    def _open_children(self, node: int) -> list[int]:
        return [c for c in self._states[node].arrived if self._live.get(c, False)]

    def _uct(self, node: int) -> float:
        state = self._states[node]
        above = self._states[state.parent].count + self.running[state.parent]
        seen = state.count + self.running[node]
        return state.total / state.count + self._w * math.sqrt(math.log(above) / seen)

    def closed(self) -> tuple[int, ...]:
        """States below which nothing runs or can be opened, but not the answers; deepest first."""
        over = [
            leaf for node, leaf in self._leaves.items()
            if node != ROOT and not (self._live[node] or self.running[node] or leaf.finished)
        ]  # fmt: skip
        return tuple(leaf.node for leaf in sorted(over, key=lambda x: (-x.depth, x.node)))
