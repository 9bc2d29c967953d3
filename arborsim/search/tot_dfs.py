"""Tree of Thoughts, depth first (Yao et al. 2023, "Tree of Thoughts", Algorithm 2, ToT-DFS).

The most promising state is followed until it is finished or its value falls below a threshold;
then the search backtracks.  The paper's crosswords: at most 3 children per state, 100 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_answer, best_first, value


@dataclass
class TotDfs:
    """Depth-first search with backtracking.

    Parameters
    ----------
    threshold : float
        A thought valued below this is given up at once.
    relative : float
        So is one valued below this share of its parent's value: for values that measure progress,
        a fall means that something went wrong.  0 switches it off.
    children : int
        Most children per state.
    propose : int
        Thoughts proposed when a state is reached, before the best is followed; further ones are
        proposed, as many at a time, when the search comes back.  1 follows each thought at once.
    steps : int
        Most thoughts in all.
    accept : float
        A finished thought valued at least this ends the search.
    width : int
        Proposals of one state that may run in one batch.
    """

    name: ClassVar[str] = "tot-dfs"
    synchronous: ClassVar[bool] = True
    threshold: float = 0.02
    relative: float = 0.6
    children: int = 3
    propose: int = 1
    steps: int = 100
    accept: float = 0.9
    width: int = 1
    _seen: set[int] = field(default_factory=lambda: {ROOT}, init=False, repr=False)
    _at: int = field(default=ROOT, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.children, self.propose, self.steps, self.width) < 1:
            raise UsageError("tot-dfs: children, propose, steps and width must be 1 or more")

    @property
    def slots(self) -> int:
        return self.width

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        states = {leaf.node: leaf for leaf in frontier}
        dropped: list[int] = []
        for leaf in frontier:
            if leaf.node in self._seen:
                continue
            self._seen.add(leaf.node)
            if leaf.finished and value(leaf) >= self.accept:
                return Expansion(dropped=tuple(dropped), done=True)
            if leaf.dead or value(leaf) < self._bar(states[leaf.parent]):
                dropped.append(leaf.node)
        while True:
            state = states[self._at]
            below = [
                leaf for leaf in frontier
                if leaf.parent == state.node and leaf.expandable and leaf.node not in dropped
            ]  # fmt: skip
            # Proposals of one state are completed before the best of them is followed.  A state may
            # have come to its end early: a bank had no more children for it.
            full = state.visits >= self.children or state.dead
            proposed = state.visits and state.visits % self.propose == 0
            if below and (proposed or full):
                self._at = best_first(below)[0].node
            elif not full:
                opened = sum(leaf.visits for leaf in frontier)
                batch = self.propose - state.visits % self.propose
                left = max(0, self.steps - max(opened, len(self._seen) - 1))
                count = min(batch, self.children - state.visits, width, left)
                return Expansion(
                    {state.node: count} if count else {}, tuple(dropped), done=count == 0
                )
            elif self._at == ROOT:
                return Expansion(dropped=tuple(dropped), done=True)
            else:
                dropped.append(state.node)
                self._at = state.parent

    def _bar(self, parent: Leaf) -> float:
        known = max(value(parent), 0.0)  # the root has no value
        return max(self.threshold, self.relative * known)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return best_answer(frontier)
