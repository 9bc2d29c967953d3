"""The thoughts that a search can go on from, as it is shown them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arborsim.search import Leaf
from arborsim_torch.recording import LiveNode


class Frontier:
    """Complete thoughts that have not been given up, in order of completion.

    Parameters
    ----------
    nodes : list of LiveNode
        All nodes of the search, which go on growing.
    depth : callable
        Of a node: its depth in the tree.
    """

    def __init__(self, nodes: list[LiveNode], depth: Callable[[int], int]) -> None:
        self._nodes, self._depth = nodes, depth
        self._leaves: dict[int, Leaf] = {}

    def leaves(self) -> list[Leaf]:
        """What the search chooses from."""
        return list(self._leaves.values())

    def enter(self, n: int) -> None:
        """A thought is complete, and all that is known of it will not change any more."""
        node = self._nodes[n]
        self._leaves[n] = Leaf(
            n, node.parent, self._depth(n), node.score, node.finished, node.dead,
            node.visits, len(node.generated), node.embedding, node.answer, node.twin,
        )  # fmt: skip

    def leave(self, n: int) -> None:
        """A thought was given up."""
        del self._leaves[n]

    def visited(self, n: int) -> None:
        """A thought has got children."""
        self._leaves[n] = replace(self._leaves[n], visits=self._nodes[n].visits)
