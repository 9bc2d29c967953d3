"""ETS (Hooper et al. 2025, "ETS: Efficient Tree Search for Inference-Time Scaling").

Leaves weigh what REBASE would give them.  Those whose paths cost more KV cache than they weigh are
given up, and REBASE shares the whole width among the others.  That is `EtsKv` (equation 2, appendix
B.1).  In `Ets` (equation 4, appendix B.2) clusters of similar last thoughts count, too: each of
which a member is kept is worth lambda_d / K.

The leaves that are kept (appendix B) maximise, over sets S of one leaf or more,

    sum of W_i over S / sum of all W_i
    - lambda_b  cost of S and all its ancestors / cost of the whole tree
    + lambda_d  clusters with a leaf in S / clusters.

Without clusters the tree makes it exact in one pass (`keep_by_tree`).  With them it is an integer
program, made smaller before it is solved (`keep_best`): same optimum, a fraction of the time.

What a set of leaves is worth is a sum over nodes and clusters, and most nodes can be decided one
by one.  Nodes that some best set keeps or gives up together become one `Group`:

*absorb*
    An inner node is kept only with a child, so an only child goes with it.  A group that holds a
    leaf and is worth more than nothing by itself goes with its parent: wherever the parent is
    kept, adding the group gains.
*cover*
    A cluster that a group covers counts nothing for the groups below it.
*credit*
    A cluster that only one group can cover is part of that group's own worth.
*drop*
    Below a group that holds a leaf, a group goes whose worth and clusters, with all that is below
    it, are worth nothing.  And so does a group without children where a sibling that holds a leaf
    is worth as much and covers the same.

These are repeated until nothing changes.  The root is always kept.  What is left is solved by
HiGHS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.settings import setting
from arborsim.searches.base import Children, Leaf, Leaves
from arborsim.searches.levels import Rebase, rebase_weights

_ROUNDING = 1e-12  # distances of vectors that point in one direction
# HiGHS stops at an absolute gap of 1e-6 that SciPy does not let one change: larger numbers make
# that gap a smaller share of the objective, whose terms lie between 0 and 1.
_SCALE = 1e4


@dataclass(kw_only=True)
class EtsKv(Rebase):
    """REBASE on the leaves that are worth their KV cache."""

    name = "ets-kv"
    lambda_b: float = setting(
        1.0, "what the whole tree costs, where all leaves together weigh 1", low=0, high=1e6
    )
    cost: str = setting(
        "node",
        "every node costs the same (the paper), or the tokens that it generated",
        choices=("node", "token"),
    )

    def share(self, frontier: Leaves, candidates: Leaves, width: int) -> Children:
        if self.lambda_b == 0:  # nothing costs: all leaves are a best set, and that is REBASE
            return super().share(frontier, candidates, width)
        weights = rebase_weights(candidates, width, self.temperature)
        tree = cost_tree(frontier, candidates, weights, self.cost)
        survivors = [candidates[number] for number in self.keep(tree, candidates)]
        return super().share(frontier, survivors, width)

    def keep(self, tree: CostTree, candidates: Leaves) -> list[int]:
        """Numbers of the candidates that survive, in ascending order."""
        return keep_by_tree(tree, self.lambda_b)


@dataclass(kw_only=True)
class Ets(EtsKv):
    """REBASE on leaves that are worth their KV cache or are unlike the others."""

    name = "ets"
    lambda_d: float = setting(
        1.0, "what covering all clusters is worth; 0 does not cluster", low=0, high=1e6
    )
    cut: float = setting(
        0.05, "average cosine distance at which clusters stay apart", low=0, high=2
    )

    @property
    def uses_embeddings(self) -> bool:
        return self.lambda_d > 0

    def keep(self, tree: CostTree, candidates: Leaves) -> list[int]:
        if self.lambda_d == 0 or len(candidates) == 1:
            return keep_by_tree(tree, self.lambda_b)
        for leaf in candidates:
            if leaf.embedding is None:
                raise UsageError(
                    f"{self.name}: thought {leaf.node} has no embedding to cluster by: record with "
                    "--capture signals, or search with ets-kv"
                )
        embeddings = np.array([leaf.embedding for leaf in candidates], dtype=np.float64)
        return keep_best(tree, self.lambda_b, self.lambda_d, similar(embeddings, self.cut))


def similar(embeddings: np.ndarray, cut: float) -> np.ndarray:
    """Cluster of each row: average linkage of cosine distances, cut at `cut`.

    `embeddings` is float ``[leaves, size]``, two leaves or more, the result int ``[leaves]``.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import
    from scipy.spatial.distance import squareform

    length = np.linalg.norm(embeddings, axis=1, keepdims=True)
    # A vector of zeros has no direction: it is like nothing else.
    rows = np.divide(embeddings, length, out=np.zeros_like(embeddings), where=length > 0)
    # One matrix product: of rows as long as a large model is wide, `pdist` takes most of a step.
    square = 1.0 - rows @ rows.T
    distance = squareform(square, checks=False)
    distance = np.where(np.isfinite(distance), distance, 1.0)
    distance[distance < _ROUNDING] = 0.0
    labels: np.ndarray = fcluster(linkage(distance, method="average"), cut, criterion="distance")
    return labels


@dataclass(frozen=True)
class CostTree:
    """The leaves to choose from, and all their ancestors."""

    #: Int [nodes]: index of each node's parent, -1 for the root; parents come before their children
    parent: np.ndarray
    leaf: np.ndarray  # int [leaves]: indices of the leaves, in the order in which they were given
    weight: np.ndarray  # float [nodes]: share of the leaves' weights, 0 for inner nodes
    cost: np.ndarray  # float [nodes]: share of the cost of the whole tree


def cost_tree(frontier: Leaves, leaves: Leaves, weights: Sequence[int], cost: str) -> CostTree:
    """The tree above `leaves`, which weigh `weights` (more than 0 in all).

    Keeping a node costs the same for all (`cost` is ``"node"``), or its tokens (``"token"``).
    """
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
    if cost == "token":  # the prompt is kept whatever is chosen
        above = [nodes[x.parent].tokens if x.parent in nodes else x.tokens for x in ordered]
        costs = np.array([x.tokens for x in ordered], dtype=np.float64) - above
    parent = np.array([index.get(x.parent, -1) for x in ordered])
    return CostTree(parent, np.array(places), weight, costs / max(costs.sum(), 1.0))


def keep_by_tree(tree: CostTree, lambda_b: float) -> list[int]:
    """Numbers of the leaves of a best set without clusters, exactly.  Ties keep fewer nodes.

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


@dataclass(eq=False)
class Group:
    """Nodes that are kept or given up together."""

    gain: float  # what keeping them is worth, without `clusters`
    #: Numbers of the leaves among them; without any, one of `children` has to be kept
    leaves: list[int] = field(default_factory=list)
    #: Clusters that they cover and that others may cover as well
    clusters: set[int] = field(default_factory=set)
    children: list[Group] = field(default_factory=list)

    def absorb(self, other: Group) -> None:
        self.gain += other.gain
        self.leaves += other.leaves
        self.clusters |= other.clusters
        self.children += other.children


def keep_best(tree: CostTree, lambda_b: float, lambda_d: float, clusters: np.ndarray) -> list[int]:
    """Numbers of the leaves of a best set, by integer programming.

    `clusters`, int ``[leaves]``, is the cluster of each leaf.
    """
    labels, of_leaf = np.unique(clusters, return_inverse=True)
    bonus = lambda_d / len(labels)
    root = _groups(tree, lambda_b, of_leaf)
    while True:
        _absorb(root)
        _cover(root)
        changed = _drop(root, bonus)
        if not (_credit(root, bonus) or changed):
            break
    groups = _top_down(root)
    kept = _solved(groups, bonus) if len(groups) > 1 else groups
    return sorted(number for group in kept for number in group.leaves)


def _groups(tree: CostTree, lambda_b: float, of_leaf: np.ndarray) -> Group:
    """One group per node.  Returns the root's."""
    groups = [Group(gain) for gain in (tree.weight - lambda_b * tree.cost).tolist()]
    for number, (node, cluster) in enumerate(zip(tree.leaf.tolist(), of_leaf, strict=True)):
        groups[node].leaves.append(number)
        groups[node].clusters.add(int(cluster))
    for group, parent in zip(groups, tree.parent.tolist(), strict=True):
        if parent >= 0:
            groups[parent].children.append(group)
    return groups[0]


def _top_down(root: Group) -> list[Group]:
    """All groups, parents before their children."""
    order = [root]
    for group in order:  # it grows
        order += group.children
    return order


def _absorb(root: Group) -> None:
    for group in reversed(_top_down(root)):
        children, group.children = group.children, []
        only = len(children) == 1 and not group.leaves
        for child in children:
            if only or (child.leaves and child.gain > 0):
                group.absorb(child)
            else:
                group.children.append(child)


def _cover(root: Group) -> None:
    above: dict[int, set[int]] = {id(root): set()}
    for group in _top_down(root):
        covered = above[id(group)]
        group.clusters -= covered
        covered = covered | group.clusters
        above.update((id(child), covered) for child in group.children)


def _credit(root: Group, bonus: float) -> bool:
    groups = _top_down(root)
    holders = Counter(cluster for group in groups for cluster in group.clusters)
    changed = False
    for group in groups:
        own = {cluster for cluster in group.clusters if holders[cluster] == 1}
        if own:
            group.gain += bonus * len(own)
            group.clusters -= own
            changed = True
    return changed


def _drop(root: Group, bonus: float) -> bool:
    """Whether anything went."""
    most: dict[int, float] = {}  # what a group and all below it can be worth
    changed = False
    for group in reversed(_top_down(root)):
        before = len(group.children)
        if group.leaves:
            group.children = [child for child in group.children if most[id(child)] > 0]
        group.children = _undominated(group.children)
        changed |= len(group.children) < before
        below = [most[id(child)] for child in group.children]
        gains = sum(gain for gain in below if gain > 0)
        if below and not group.leaves:
            gains = max(gains, max(below))
        most[id(group)] = group.gain + bonus * len(group.clusters) + gains
    return changed


def _undominated(siblings: list[Group]) -> list[Group]:
    kept: list[Group] = []
    for group in sorted(siblings, key=lambda g: (-g.gain, -len(g.clusters))):
        if group.children or not any(x.leaves and group.clusters <= x.clusters for x in kept):
            kept.append(group)
    return kept


def _solved(groups: list[Group], bonus: float) -> list[Group]:
    """The groups of a best set, by integer programming."""
    number = {id(group): i for i, group in enumerate(groups)}
    holders: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        for cluster in sorted(group.clusters):
            holders.setdefault(cluster, []).append(i)
    program = Program([*(group.gain for group in groups), *[bonus] * len(holders)])
    for i, group in enumerate(groups):
        below = [number[id(child)] for child in group.children]
        for child in below:
            program.only_with(child, [i])
        if not group.leaves:
            program.only_with(i, below)
    for i, members in enumerate(holders.values(), len(groups)):
        program.only_with(i, members)
    program.choose(0)
    chosen = program.solve().tolist()
    return [group for group, kept in zip(groups, chosen, strict=False) if kept]


class Program:
    """Choose things so that the sum of what each one gains is largest."""

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
