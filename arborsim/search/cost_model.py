"""Which leaves of a tree are worth the KV cache of their paths (ETS, appendix B).

Maximise over sets S of one leaf or more

    sum of W_i over S / sum of all W_i
    - lambda_b  cost of S and all its ancestors / cost of the whole tree
    + lambda_d  clusters with a leaf in S / clusters.

With clusters this is an integer program; without them the tree makes it exact in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from arborsim.search.base import Leaf

# HiGHS stops at an absolute gap of 1e-6 that SciPy does not let one change: larger numbers make
# that gap a smaller share of the objective, whose terms lie between 0 and 1.
_SCALE = 1e4


class Cost(Enum):
    """What keeping a node costs: one, or its own tokens."""

    NODE = "node"
    TOKEN = "token"


@dataclass(frozen=True)
class CostTree:
    """The leaves to choose from, and all their ancestors.

    Attributes
    ----------
    parent : int ndarray ``[nodes]``
        Index of each node's parent, -1 for the root; parents come before their children.
    leaf : int ndarray ``[leaves]``
        Indices of the leaves, in the order in which they were given.
    weight : float ndarray ``[nodes]``
        Share of the leaves' weights, 0 for inner nodes.
    cost : float ndarray ``[nodes]``
        Share of the cost of the whole tree.
    """

    parent: np.ndarray
    leaf: np.ndarray
    weight: np.ndarray
    cost: np.ndarray


def cost_tree(
    frontier: Sequence[Leaf], leaves: Sequence[Leaf], weights: Sequence[int], cost: Cost
) -> CostTree:
    """The tree above `leaves`, which weigh `weights` (more than 0 in all)."""
    known = {leaf.node: leaf for leaf in frontier}
    nodes: dict[int, Leaf] = {}
    for leaf in leaves:
        at: Leaf | None = leaf
        while at is not None and at.node not in nodes:
            nodes[at.node] = at
            at = known.get(at.parent)
    ordered = sorted(nodes.values(), key=lambda x: (x.depth, x.node))
    index = {x.node: i for i, x in enumerate(ordered)}
    places = [index[leaf.node] for leaf in leaves]
    weight = np.zeros(len(ordered))
    weight[places] = np.asarray(weights, dtype=np.float64) / sum(weights)
    costs = np.ones(len(ordered))
    if cost is Cost.TOKEN:  # the prompt is kept whatever is chosen
        above = [nodes[x.parent].tokens if x.parent in nodes else x.tokens for x in ordered]
        costs = np.array([x.tokens for x in ordered], dtype=np.float64) - above
    parent = np.array([index.get(x.parent, -1) for x in ordered])
    return CostTree(parent, np.array(places), weight, costs / max(costs.sum(), 1.0))


def objective(
    tree: CostTree,
    kept: Sequence[int],
    lambda_b: float,
    lambda_d: float = 0.0,
    clusters: np.ndarray | None = None,
) -> float:
    """What keeping the leaves numbered `kept` is worth."""
    alive: set[int] = set()
    for number in kept:
        node = int(tree.leaf[number])
        while node >= 0 and node not in alive:
            alive.add(node)
            node = int(tree.parent[node])
    nodes = sorted(alive)
    worth = float(tree.weight[nodes].sum() - lambda_b * tree.cost[nodes].sum())
    if clusters is None:
        return worth
    covered = len(np.unique(clusters[list(kept)]))
    return worth + lambda_d * covered / len(np.unique(clusters))


def keep_by_program(
    tree: CostTree, lambda_b: float, lambda_d: float, clusters: np.ndarray
) -> list[int]:
    """Numbers of the leaves of a best set, by integer programming over all nodes and clusters.

    `arborsim.search.reduction.keep_best` finds a set of the same worth in less time.

    Parameters
    ----------
    tree : CostTree
    lambda_b, lambda_d : float
    clusters : int ndarray ``[leaves]``
        Cluster of each leaf.
    """
    labels, of_leaf = np.unique(clusters, return_inverse=True)
    nodes = len(tree.parent)
    gain = tree.weight - lambda_b * tree.cost
    program = Program([*gain.tolist(), *[lambda_d / len(labels)] * len(labels)])
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            program.only_with(node, [parent])
            children.setdefault(parent, []).append(node)
    for node, below in children.items():
        program.only_with(node, below)
    for cluster in range(len(labels)):
        program.only_with(nodes + cluster, tree.leaf[of_leaf == cluster].tolist())
    program.choose(0)  # every set keeps the root
    chosen = program.solve()
    return np.flatnonzero(chosen[:nodes][tree.leaf]).tolist()


class Program:
    """Choose things so that their gains sum up to the most.

    Parameters
    ----------
    gain : sequence of float
        What choosing each thing adds.
    """

    def __init__(self, gain: Sequence[float]) -> None:
        self._gain = np.array(gain, dtype=np.float64)
        self._lowest = np.zeros(len(self._gain))
        self._rows = 0
        self._row: list[int] = []
        self._column: list[int] = []
        self._entry: list[float] = []

    def only_with(self, one: int, others: Sequence[int]) -> None:
        """`one` may be chosen only if at least one of `others` is."""
        self._row += [self._rows] * (1 + len(others))
        self._column += [one, *others]
        self._entry += [-1.0, *[1.0] * len(others)]
        self._rows += 1

    def choose(self, one: int) -> None:
        """`one` is chosen in any case."""
        self._lowest[one] = 1.0

    def solve(self) -> np.ndarray:
        """Which things are chosen, as bool ndarray ``[things]``."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, rarely needed
        from scipy.sparse import csr_array

        matrix = csr_array(
            (self._entry, (self._row, self._column)), shape=(self._rows, len(self._gain))
        )
        for whole in (0, 1):  # without whole numbers first: mostly they come out whole anyway
            found = milp(
                -_SCALE * self._gain,
                integrality=np.full(len(self._gain), whole),
                bounds=Bounds(self._lowest, 1),
                constraints=LinearConstraint(matrix, 0, np.inf),
                options={"mip_rel_gap": 0.0},
            )
            if not found.success:  # programs here are bounded; choosing everything is a solution
                raise RuntimeError(f"ETS's integer program was not solved: {found.message}")
            if np.all(np.abs(found.x - np.round(found.x)) < 1e-9):
                break
        chosen: np.ndarray = found.x > 0.5
        return chosen


def keep_by_tree(tree: CostTree, lambda_b: float) -> list[int]:
    """Numbers of the leaves of a best set without clusters, exactly; ties keep fewer nodes.

    From the deepest nodes up: what a node is worth is what it is worth itself and all of its
    children that are worth more than nothing, or, where none is, its best child.
    """
    children: list[list[int]] = [[] for _ in tree.parent]
    worth = (tree.weight - lambda_b * tree.cost).tolist()
    chosen: list[list[int]] = [[] for _ in tree.parent]
    for node in range(len(tree.parent) - 1, -1, -1):
        below = sorted(children[node])
        if below:
            chosen[node] = [c for c in below if worth[c] > 0] or [
                max(below, key=lambda c: worth[c])
            ]
            worth[node] += sum(worth[c] for c in chosen[node])
        if tree.parent[node] >= 0:
            children[tree.parent[node]].append(node)
    kept, waiting = set(), [0]
    while waiting:
        node = waiting.pop()
        kept.add(node)
        waiting += chosen[node]
    return [number for number, node in enumerate(tree.leaf.tolist()) if node in kept]
