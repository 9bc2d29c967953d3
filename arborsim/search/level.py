"""Searches that go level by level and never come back: what beam, DVTS, REBASE and ETS share.

A width of thoughts is shared among the newest level's states.  A finished chain keeps its place:
the width that is left shrinks by one for each.  A state that gets no share is given up for good.
The answer is elected by the finished chains, weighted by their final scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import Expansion, Leaf, best_first, hopeless
from arborsim.search.vote import weighted_majority


@dataclass
class LevelSearch(ABC):
    """One level at a time.

    Parameters
    ----------
    width : int
        N, thoughts per level at the start.
    depth : int
        Most levels.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool] = True
    width: int = 16
    depth: int = 25

    def __post_init__(self) -> None:
        if min(self.width, self.depth) < 1:
            raise UsageError(f"{self.name}: width and depth must be 1 or more")

    @property
    def slots(self) -> int:
        return self.width

    @abstractmethod
    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        """Children per candidate (those without any left out), at most `width` in all.

        `candidates` are the states that can be continued, best first; `width` is 1 or more.
        """

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        left = min(width, self.width - sum(leaf.finished for leaf in frontier))
        candidates = [
            x for x in frontier if x.visits == 0 and x.expandable and x.depth < self.depth
        ]
        if left < 1 or not candidates:
            return Expansion(done=True)
        children = self.share(frontier, best_first(candidates), left)
        kept = [leaf.node for leaf in frontier if leaf.finished or leaf.node in children]
        return Expansion(children, hopeless(frontier, kept), done=not children)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return weighted_majority(frontier)


def even_parts(total: int, parts: int) -> list[int]:
    """`total` in so many parts that differ by one at most, the larger ones first."""
    size, larger = divmod(total, parts)
    return [size + (i < larger) for i in range(parts)]
