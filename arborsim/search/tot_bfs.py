"""Tree of Thoughts, breadth first (Yao et al. 2023, "Tree of Thoughts", Algorithm 1, ToT-BFS).

Every kept state proposes k thoughts, all proposals are valued, and the best b states go on.  The
paper's Game of 24: b = 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import Expansion, Leaf, best_answer, best_first, hopeless


@dataclass
class TotBfs:
    """Propose, value, keep the best.

    Parameters
    ----------
    keep : int
        b, states kept per level.
    children : int
        k, thoughts proposed per state.
    levels : int
        Most levels; 0 for "until all kept states are finished".
    any_of : int
        Leaves that may be handed in as the answer (the paper counts a Game of 24 as solved if any
        of the 5 kept states solves it); 1 hands in the best one only.
    """

    name: ClassVar[str] = "tot-bfs"
    synchronous: ClassVar[bool] = True
    keep: int = 5
    children: int = 8
    levels: int = 0
    any_of: int = 1

    def __post_init__(self) -> None:
        if min(self.keep, self.children, self.any_of) < 1 or self.levels < 0:
            raise UsageError(
                "tot-bfs: keep, children and any_of must be 1 or more, levels 0 or more"
            )

    @property
    def slots(self) -> int:
        return self.keep * self.children

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        # Finished states compete with the new ones for their place.
        leaves = best_first(x for x in frontier if x.visits == 0 and (x.finished or x.expandable))
        kept = leaves[: self.keep]
        dropped = hopeless(frontier, (leaf.node for leaf in kept))
        children: dict[int, int] = {}
        for leaf in kept:
            share = min(self.children, width)
            if leaf.finished or share == 0 or (self.levels and leaf.depth >= self.levels):
                continue
            children[leaf.node] = share
            width -= share
        return Expansion(children, dropped, done=not children)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        finished = best_first(leaf for leaf in frontier if leaf.finished)
        return tuple(x.node for x in finished[: self.any_of]) or best_answer(frontier)
