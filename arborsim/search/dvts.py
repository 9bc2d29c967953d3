"""Diverse Verifier Tree Search (Beeching et al. 2024, "Scaling test-time compute").

The width is split among S subtrees, which search on their own: the thoughts of the first level are
dealt out in order, and of every later level the best state of each subtree goes on with all of the
subtree's width.  ETS compares with S = 4 and with S = sqrt(N).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Leaf
from arborsim.search.beam import ceil_sqrt
from arborsim.search.level import LevelSearch, even_parts


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
