"""ETS's integer program, made smaller before it is solved: same optimum, a fraction of the time.

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
    it, are worth nothing; and so does a group without children where a sibling that holds a leaf
    is worth as much and covers the same.

These are repeated until nothing changes.  The root is always kept; what is left is solved by
HiGHS.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from arborsim.search.cost_model import CostTree, Program


@dataclass(eq=False)
class Group:
    """Nodes that are kept or given up together.

    Attributes
    ----------
    gain : float
        What keeping them is worth, without `clusters`.
    leaves : list of int
        Numbers of the leaves among them; without any, one of `children` has to be kept.
    clusters : set of int
        Clusters that they cover and that others may cover as well.
    children : list of Group
    """

    gain: float
    leaves: list[int] = field(default_factory=list)
    clusters: set[int] = field(default_factory=set)
    children: list[Group] = field(default_factory=list)

    def absorb(self, other: Group) -> None:
        self.gain += other.gain
        self.leaves += other.leaves
        self.clusters |= other.clusters
        self.children += other.children


def keep_best(tree: CostTree, lambda_b: float, lambda_d: float, clusters: np.ndarray) -> list[int]:
    """Numbers of the leaves of a best set, as `cost_model.keep_by_program` finds one.

    Parameters
    ----------
    tree : CostTree
    lambda_b, lambda_d : float
    clusters : int ndarray ``[leaves]``
        Cluster of each leaf.
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
    """One group per node; returns the root's."""
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
