"""ETS's choice of leaves as the paper writes it: the objective, and one program over all nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborsim.searches.ets import CostTree, Program


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

    `arborsim.searches.ets.keep_best` finds a set of the same worth in less time.

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
