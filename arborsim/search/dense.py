"""A tree with so many children per node, whatever they are worth: a bank for any search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, best_first

MOST_NODES = 1_000_000  #: a tree that may grow larger is refused


@dataclass
class Dense:
    """Every node that can be continued gets the children of its depth.

    The deepest nodes come first, and a node is given up as soon as everything below it is complete:
    the keys and values of few paths are held at once.

    Parameters
    ----------
    children : tuple of int
        Children per node at depth 0, 1, ...; the last entry holds for deeper nodes, too.
    depth : int
        Depth of the last level; 0 for as many as `children` has entries.
    slots : int
        Thoughts that may run at once.

    Raises
    ------
    UsageError
        A number is below 1, or the tree may have more than `MOST_NODES` nodes.
    """

    name: ClassVar[str] = "dense"
    synchronous: ClassVar[bool] = False
    keeps_duplicates: ClassVar[bool] = True
    children: tuple[int, ...] = (8,)
    depth: int = 0
    slots: int = 256
    _known: dict[int, Leaf] = field(default_factory=dict, init=False, repr=False)
    _opened: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _open_below: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _finished: list[Leaf] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.children or min(*self.children, self.slots) < 1 or self.depth < 0:
            raise UsageError("children per node are 1 or more, and so are the thoughts at once")
        self.depth = self.depth or len(self.children)
        if self.largest > MOST_NODES:
            raise UsageError(
                f"{_spelled(self.children)} children to depth {self.depth} may be "
                f"{self.largest:.3g} thoughts per problem, more than {MOST_NODES}: ask for fewer "
                "children per depth, or for less depth"
            )

    @property
    def largest(self) -> int:
        """Most thoughts that the tree can have."""
        level, total = 1, 0
        for depth in range(self.depth):
            level *= self._children_at(depth)
            total += level
            if total > MOST_NODES:  # how much more does not matter
                break
        return total

    def _children_at(self, depth: int) -> int:
        return self.children[min(depth, len(self.children) - 1)]

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        dropped: list[Leaf] = []
        # In order of completion: what is new comes last.
        fresh = list(takewhile(lambda x: x.node not in self._known, reversed(frontier)))
        for leaf in reversed(fresh):
            self._enter(leaf, dropped)
        dropped.sort(key=lambda x: (-x.depth, x.node))
        children: dict[int, int] = {}
        waiting = sorted(self._opened, key=lambda n: (-self._known[n].depth, n))
        for node in waiting:
            now = min(width, self._children_at(self._known[node].depth) - self._opened[node])
            if now == 0:
                break
            children[node] = now
            width -= now
            self._opened[node] += now
            self._open_below[node] += now
            if self._opened[node] == self._children_at(self._known[node].depth):
                del self._opened[node]
        over = not children and not any(self._open_below.values())
        return Expansion(children, tuple(leaf.node for leaf in dropped), done=over)

    def _enter(self, leaf: Leaf, dropped: list[Leaf]) -> None:
        """A thought is complete: it waits for children, or is given up with what is above it."""
        self._known[leaf.node] = leaf
        if leaf.expandable and leaf.depth < self.depth:
            self._opened[leaf.node] = self._open_below[leaf.node] = 0
            return
        if leaf.finished:
            self._finished.append(leaf)
        dropped.append(leaf)
        node = leaf.parent
        while node in self._open_below:
            self._open_below[node] -= 1
            if self._open_below[node] or node in self._opened:
                return
            del self._open_below[node]
            if node != ROOT:
                dropped.append(self._known[node])
            node = self._known[node].parent

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        """All finished thoughts: whether any is right bounds what a search can find."""
        return tuple(leaf.node for leaf in best_first(self._finished)) or (ROOT,)


def _spelled(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
