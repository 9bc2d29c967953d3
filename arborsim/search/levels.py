"""Searches that go level by level and never come back; here beam search and DVTS, elsewhere REBASE
and ETS.

A width of thoughts is shared among the newest level's states.  A finished chain keeps its place:
the width that is left shrinks by one for each.  A state that gets no share is given up for good.
The answer is elected by the finished chains, weighted by their final scores.

Beam search with a reward model (Snell et al. 2024, "Scaling LLM Test-Time Compute"): of every level
the k states with the best last score go on and share the width.

Diverse Verifier Tree Search (Beeching et al. 2024, "Scaling test-time compute"): the width is split
among S subtrees, which search on their own: the thoughts of the first level are dealt out in order,
and of every later level the best state of each subtree goes on with all of the subtree's width.

ETS compares with k and S = 4, and with the square root of the initial width N.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_first, hopeless, weighted_majority


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


@dataclass
class Beam4(LevelSearch):
    """Keep a fixed number of states.

    Parameters
    ----------
    keep : int
        k, states kept per level.
    """

    name: ClassVar[str] = "beam-4"
    keep: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 1:
            raise UsageError(f"{self.name}: keep must be 1 or more")

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        return share_evenly(candidates[: self.keep], width)


@dataclass
class BeamSqrt(LevelSearch):
    """Keep as many states as the square root of the initial width, rounded up."""

    name: ClassVar[str] = "beam-sqrt"

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        return share_evenly(candidates[: ceil_sqrt(self.width)], width)


@dataclass
class DvtsSqrt(LevelSearch):
    """As many subtrees as the square root of the width, rounded up."""

    name: ClassVar[str] = "dvts-sqrt"
    _subtree: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    @property
    def _subtrees(self) -> int:
        return ceil_sqrt(self.width)

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        if candidates[0].node == ROOT:
            return {ROOT: width}
        self._assign(frontier)
        finished = Counter(self._subtree[leaf.node] for leaf in frontier if leaf.finished)
        children: dict[int, int] = {}
        for subtree, places in enumerate(even_parts(self.width, self._subtrees)):
            best = next((x for x in candidates if self._subtree[x.node] == subtree), None)
            left = min(places - finished[subtree], width)
            if best is not None and left > 0:
                children[best.node] = left
                width -= left
        return children

    def _assign(self, frontier: Sequence[Leaf]) -> None:
        """Deal the first level out to the subtrees; later states are where their parent is."""
        fresh = [leaf for leaf in frontier if leaf.node not in self._subtree]
        first = sorted(leaf.node for leaf in fresh if leaf.depth == 1)
        for subtree, size in enumerate(even_parts(len(first), self._subtrees)):
            self._subtree.update(dict.fromkeys(first[:size], subtree))
            del first[:size]
        for leaf in sorted(fresh, key=lambda x: x.depth):
            if leaf.depth > 1:
                self._subtree[leaf.node] = self._subtree[leaf.parent]


@dataclass
class Dvts4(DvtsSqrt):
    """A fixed number of subtrees.

    Parameters
    ----------
    subtrees : int
        S; no more than `width`.
    """

    name: ClassVar[str] = "dvts-4"
    subtrees: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.subtrees <= self.width:
            raise UsageError(f"{self.name}: subtrees must be 1 to width ({self.width})")

    @property
    def _subtrees(self) -> int:
        return self.subtrees


def ceil_sqrt(number: int) -> int:
    """The least integer whose square is `number` or more."""
    return math.isqrt(number - 1) + 1


def share_evenly(leaves: Sequence[Leaf], width: int) -> dict[int, int]:
    """Share all of `width`; what does not divide goes to the first, one each."""
    parts = even_parts(width, len(leaves))
    return {leaf.node: count for leaf, count in zip(leaves, parts, strict=True) if count}


def even_parts(total: int, parts: int) -> list[int]:
    """`total` in `parts` parts that differ by one at most, the larger ones first."""
    size, larger = divmod(total, parts)
    return [size + (i < larger) for i in range(parts)]
