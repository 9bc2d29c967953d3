"""Tree of Thoughts (Yao et al. 2023, "Tree of Thoughts"), breadth first and depth first.

ToT-BFS (algorithm 1): every kept state proposes k thoughts, all proposals are valued, and the best
b states go on.  The paper's Game of 24: b = 5.

ToT-DFS (algorithm 2): the most promising state is followed until it is finished or its value falls
below a threshold.  Then the search backtracks.  The paper's crosswords: at most 3 children per
state, 100 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.settings import setting, whole_number
from arborsim.searches import base
from arborsim.searches.ranking import Rewarded, elected


@dataclass(kw_only=True)
class TotBfs(Rewarded):
    """Propose, value, keep the best."""

    name = "tot-bfs"
    synchronous = True
    width_option = "children"
    as_published = True
    by_levels = True
    keep: int = setting(5, "b, states kept per level", low=1)
    children: int = setting(8, "k, thoughts proposed per state", low=1)
    levels: int = setting(0, "most levels; 0: until all kept states are finished", low=0)
    any_of: int = setting(
        1,
        "leaves that may be handed in as the answer (the paper counts a Game of 24 as solved if "
        "any of the 5 kept states solves it); 1 hands in the elected one only",
        low=1,
    )

    @property
    def slots(self) -> int:
        return self.keep * self.children

    @classmethod
    def at_width(cls, width: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Each of the kept states gets its part of the width."""
        if "children" in given:
            return {}
        keep = cls.keep
        with suppress(ValueError):  # of no number, which is refused where it is set
            keep = whole_number(str(given.get("keep", keep)))
        if width < keep:
            raise UsageError(
                f"{cls.name}: width {width} is less than one child for each of the {keep} states "
                f"that it keeps: use {keep} or more, or --set {cls.name}.keep={width}"
            )
        return {"children": width // max(keep, 1)}

    def expand(self, frontier: base.Leaves, width: int) -> base.Expansion:
        frontier = self.scored(frontier)
        # Finished states compete with the new ones for their place.
        leaves = base.best_first(
            x for x in frontier if x.visits == 0 and (x.finished or x.expandable)
        )
        kept = leaves[: self.keep]
        dropped = base.hopeless(frontier, (leaf.node for leaf in kept))
        children: dict[int, int] = {}
        for leaf in kept:
            share = min(self.children, width)
            if leaf.finished or share == 0 or (self.levels and leaf.depth >= self.levels):
                continue
            children[leaf.node] = share
            width -= share
        return base.Expansion(children, dropped, done=not children)

    def answers(self, frontier: base.Leaves) -> tuple[int, ...]:
        return elected(self.scored(frontier), self.answer)[: self.any_of]


@dataclass(kw_only=True)
class TotDfs(base.Wide, Rewarded):
    """Depth-first search with backtracking."""

    name = "tot-dfs"
    synchronous = True
    threshold: float = setting(0.02, "a thought valued below this is given up at once")
    relative: float = setting(
        0.6,
        "so is one valued below this share of its parent's value: for values that measure "
        "progress, a fall means that something went wrong; 0 switches it off",
    )
    children: int = setting(3, "most per state", low=1)
    propose: int = setting(
        1,
        "thoughts proposed when a state is reached, before the best is followed; further ones are "
        "proposed, as many at a time, when the search comes back; 1 follows each thought at once",
        low=1,
    )
    steps: int = setting(100, "most thoughts in all", low=1)
    accept: float = setting(0.9, "a finished thought valued at least this ends the search")
    width: int = setting(1, "proposals of one state that may run in one batch", low=1)
    _seen: set[int] = field(default_factory=lambda: {base.ROOT}, init=False, repr=False)
    _at: int = field(default=base.ROOT, init=False, repr=False)

    def expand(self, frontier: base.Leaves, width: int) -> base.Expansion:
        frontier = self.scored(frontier)
        states = {leaf.node: leaf for leaf in frontier}
        dropped: list[int] = []
        for leaf in base.newest(frontier, self._seen):
            self._seen.add(leaf.node)
            if leaf.finished and base.value(leaf) >= self.accept:
                return base.Expansion(dropped=tuple(dropped), done=True)
            above = max(base.value(states[leaf.parent]), 0.0)  # the root has no value
            if leaf.dead or base.value(leaf) < max(self.threshold, self.relative * above):
                dropped.append(leaf.node)
        while True:
            state = states[self._at]
            below = [x for x in frontier if x.parent == state.node and x.expandable]
            below = [leaf for leaf in below if leaf.node not in dropped]
            # Proposals of one state are completed before the best of them is followed.  A state may
            # have come to its end early: a bank had no more children for it.
            full = state.visits >= self.children or state.dead
            proposed = state.visits and state.visits % self.propose == 0
            if below and (proposed or full):
                self._at = base.best_first(below)[0].node
            elif not full:
                opened = sum(leaf.visits for leaf in frontier)
                batch = self.propose - state.visits % self.propose
                left = max(0, self.steps - max(opened, len(self._seen) - 1))
                count = min(batch, self.children - state.visits, width, left)
                return base.Expansion(
                    {state.node: count} if count else {}, tuple(dropped), done=count == 0
                )
            elif self._at == base.ROOT:
                return base.Expansion(dropped=tuple(dropped), done=True)
            else:
                dropped.append(state.node)
                self._at = state.parent
