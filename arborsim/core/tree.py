"""The tree of thoughts that a search grows, and the tokens on each of its paths.

A *node* is a thought block: a contiguous piece of reasoning (the root is the prompt).  A *token*
is identified by the order in which it entered the cache of the episode, 0, 1, 2, ...  Branches
that decode in one batch interleave their tokens, so a node's token ids need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
DType = type | np.dtype[np.generic]
NO_PARENT = -1


@dataclass
class Node:
    """One thought block."""

    #: Index of the parent node (-1 for the root) and distance from the root
    parent: int
    depth: int
    reward: float = float("nan")  # search value in [0, 1] given at the boundary; NaN until then
    #: Entropy of the next-token distribution at the boundary, nats; NaN until then
    entropy: float = float("nan")
    #: Whether the block has ended, and whether the search has given the node up for good
    closed: bool = False
    pruned: bool = False
    last_active: int = 0  # number of the last transition that had the node on an active path


class GrowingArray:
    """A NumPy array that appends in amortised constant time. `row` is the shape of one entry."""

    def __init__(self, dtype: DType, capacity: int = 64, row: tuple[int, ...] = ()) -> None:
        self._data = np.empty((capacity, *row), dtype=dtype)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def values(self) -> np.ndarray:
        """The filled part, as a view: it must not be kept across an `extend`."""
        return self._data[: self._n]

    def extend(self, values: np.ndarray | Sequence[int]) -> None:
        end = self._n + len(values)
        if end > len(self._data):
            capacity = max(end, 2 * len(self._data))
            grown = np.empty((capacity, *self._data.shape[1:]), dtype=self._data.dtype)
            grown[: self._n] = self._data[: self._n]
            self._data = grown
        self._data[self._n : end] = values
        self._n = end


class GrowingTable:
    """A NumPy table ``[rows, n]`` that appends columns in amortised constant time.

    `cell` is the shape of an entry: values are ``[rows, n, *cell]``.
    """

    def __init__(
        self, rows: int, dtype: DType, capacity: int = 64, cell: tuple[int, ...] = ()
    ) -> None:
        self._data = np.empty((rows, capacity, *cell), dtype=dtype)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def values(self) -> np.ndarray:
        """The filled part, as a view: it must not be kept across an `extend`."""
        return self._data[:, : self._n]

    def extend(self, columns: int, fill: int | np.ndarray) -> None:
        """Append `columns` columns of `fill`."""
        end = self._n + columns
        if end > self._data.shape[1]:
            capacity = max(end, 2 * self._data.shape[1])
            rows, _, *cell = self._data.shape
            grown = np.empty((rows, capacity, *cell), dtype=self._data.dtype)
            grown[:, : self._n] = self.values
            self._data = grown
        self._data[:, self._n : end] = fill
        self._n = end


class ThoughtTree:
    """Nodes, the tokens each node holds, and distances between nodes.

    Node 0 is the root and holds the prompt.  Nodes are numbered in the order they are opened, so a
    parent always has a smaller number than its children.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.node_of_token = GrowingArray(np.int32)
        self._parents: list[int] = []
        self._depths = GrowingArray(np.int64)
        self._sizes = GrowingArray(np.int64)
        self._spans: list[GrowingArray] = []
        self._paths: dict[int, tuple[GrowingArray, int]] = {}  # and where the leaf begins
        self.transitions = 0

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def num_tokens(self) -> int:
        return len(self.node_of_token)

    @property
    def depths(self) -> IntArray:
        """Depth of every node."""
        return self._depths.values

    @property
    def sizes(self) -> IntArray:
        """Number of tokens of every node."""
        return self._sizes.values

    def open(self, node: int, parent: int) -> None:
        """Add node number `node` (must be the next one) under `parent` (-1 for the root)."""
        if node != len(self.nodes):
            raise ValueError(f"node {node} opened out of order: the next is {len(self.nodes)}")
        if not (parent == NO_PARENT and node == 0) and not 0 <= parent < node:
            raise ValueError(f"node {node} names parent {parent}, which does not exist")
        depth = 0 if parent == NO_PARENT else self.nodes[parent].depth + 1
        self.nodes.append(Node(parent=parent, depth=depth))
        self._parents.append(parent)
        self._depths.extend(np.array([depth]))
        self._sizes.extend(np.array([0]))
        self._spans.append(GrowingArray(np.int64, capacity=16))

    def append(self, nodes: Sequence[int], steps: int) -> None:
        """Append `steps` tokens to each of `nodes`, interleaved step by step.

        The token of step ``t`` and branch ``w`` gets the id ``n + t * len(nodes) + w``.
        """
        start, width = self.num_tokens, len(nodes)
        if steps == width == 1:  # a live step of a chain
            (node,) = nodes
            self.node_of_token.extend((node,))
            self._spans[node].extend((start,))
            self._sizes.values[node] += 1
            return
        ids = np.arange(start, start + steps * width)
        sizes = self._sizes.values
        self.node_of_token.extend(np.array([*nodes] * steps))
        for w, node in enumerate(nodes):
            self._spans[node].extend(ids[w::width])
            sizes[node] += steps

    def tokens(self, node: int) -> IntArray:
        """Ids of the node's own tokens, oldest first."""
        return self._spans[node].values

    def num_node_tokens(self, node: int) -> int:
        return len(self._spans[node])

    def ancestors(self, node: int) -> list[int]:
        """The chain from the root to `node`, both included."""
        chain = []
        while node != NO_PARENT:
            chain.append(node)
            node = self.nodes[node].parent
        return chain[::-1]

    def path(self, leaf: int) -> IntArray:
        """Token ids from the root to the end of `leaf`: entry ``p`` is the token at position p."""
        size = len(self._spans[leaf])
        if leaf not in self._paths:
            before = [self._spans[node].values for node in self.ancestors(leaf)[:-1]]
            path = GrowingArray(np.int64)
            if before:
                path.extend(np.concatenate(before))
            self._paths[leaf] = path, len(path)
        path, start = self._paths[leaf]
        known = len(path) - start
        if known < size:  # what was handed out stays as it is
            path.extend(self._spans[leaf].values[known:])
        return path.values

    def forget_paths(self, keep: Iterable[int] = ()) -> None:
        """Drop cached paths but those of `keep`. They are rebuilt when asked for."""
        kept = set(keep)
        self._paths = {leaf: path for leaf, path in self._paths.items() if leaf in kept}

    def on_path(self, leaves: Iterable[int]) -> np.ndarray:
        """Bool per node: is it on the path from the root to any of `leaves`?"""
        mask = np.zeros(len(self.nodes), dtype=bool)
        for leaf in leaves:
            node = leaf
            while node != NO_PARENT and not mask[node]:
                mask[node] = True
                node = self.nodes[node].parent
        return mask

    def activate(self, leaves: Sequence[int]) -> None:
        """Count a transition and note it on every node of the active paths."""
        self.transitions += 1
        for node in np.flatnonzero(self.on_path(leaves)):
            self.nodes[node].last_active = self.transitions
        self.forget_paths(leaves)

    def distance(self, leaves: Sequence[int]) -> IntArray:
        """Edges from every node to the nearest of `leaves`. Shape ``[nodes]``.

        For one leaf, ``d(i, leaf) = depth(i) + depth(leaf) - 2 depth(lowest common ancestor)``.
        For several, a sweep up the tree and one down finds the nearest in two passes.
        """
        far = len(self.nodes) + 1
        parents = self._parents  # plain lists: the sweeps touch every node
        distance = [far] * len(parents)
        for leaf in leaves:
            distance[leaf] = 0
        for child in range(len(parents) - 1, 0, -1):
            away, parent = distance[child] + 1, parents[child]
            if away < distance[parent]:
                distance[parent] = away
        for child in range(1, len(parents)):
            away = distance[parents[child]] + 1
            if away < distance[child]:
                distance[child] = away
        return np.asarray(distance, dtype=np.int64)
