"""ETS (Hooper et al. 2025, "ETS: Efficient Tree Search for Inference-Time Scaling").

Leaves weigh what REBASE would give them; those whose paths cost more KV cache than they weigh are
given up, and REBASE shares the whole width among the others.  That is `EtsKv` (equation 2, appendix
B.1).  In `Ets` (equation 4, appendix B.2) clusters of similar last thoughts count, too: each of
which a member is kept is worth lambda_d / K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.search.base import Leaf
from arborsim.search.cost_model import Cost, CostTree, cost_tree, keep_best, keep_by_tree
from arborsim.search.rebase import Rebase, rebase_weights

_ROUNDING = 1e-12  # distances of vectors that point in one direction


@dataclass
class EtsKv(Rebase):
    """REBASE on the leaves that are worth their KV cache.

    Parameters
    ----------
    lambda_b : float
        What the whole tree costs, where all leaves together weigh 1.
    cost : str
        ``node`` (the paper): every node costs the same; ``token``: what it generated.
    """

    name: ClassVar[str] = "ets-kv"
    lambda_b: float = 1.0
    cost: str = "node"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.lambda_b >= 0 and math.isfinite(self.lambda_b)):
            raise UsageError(f"{self.name}: lambda_b must be 0 or more")
        if self.cost not in {c.value for c in Cost}:
            raise UsageError(f"{self.name}: cost must be node or token, not {self.cost!r}")

    def share(
        self, frontier: Sequence[Leaf], candidates: Sequence[Leaf], width: int
    ) -> Mapping[int, int]:
        if self.lambda_b == 0:  # nothing costs: all leaves are a best set, and that is REBASE
            return super().share(frontier, candidates, width)
        weights = rebase_weights(candidates, width, self.temperature)
        tree = cost_tree(frontier, candidates, weights, Cost(self.cost))
        survivors = [candidates[number] for number in self.keep(tree, candidates)]
        return super().share(frontier, survivors, width)

    def keep(self, tree: CostTree, candidates: Sequence[Leaf]) -> list[int]:
        """Numbers of the candidates that survive, in ascending order."""
        return keep_by_tree(tree, self.lambda_b)


@dataclass
class Ets(EtsKv):
    """REBASE on leaves that are worth their KV cache or are unlike the others.

    Parameters
    ----------
    lambda_d : float
        What covering all clusters is worth; 0 does not cluster.
    cut : float
        Average cosine distance at which clusters stay apart.
    """

    name: ClassVar[str] = "ets"
    lambda_d: float = 1.0
    cut: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.lambda_d >= 0 and math.isfinite(self.lambda_d)):
            raise UsageError(f"{self.name}: lambda_d must be 0 or more")
        if not 0 <= self.cut <= 2:
            raise UsageError(f"{self.name}: cut is a cosine distance and must be 0 to 2")

    @property
    def uses_embeddings(self) -> bool:
        """Whether a driver has to give leaves their embeddings."""
        return self.lambda_d > 0

    def keep(self, tree: CostTree, candidates: Sequence[Leaf]) -> list[int]:
        if self.lambda_d == 0 or len(candidates) == 1:
            return keep_by_tree(tree, self.lambda_b)
        clusters = similar(self._embeddings(candidates), self.cut)
        return keep_best(tree, self.lambda_b, self.lambda_d, clusters)

    def _embeddings(self, leaves: Sequence[Leaf]) -> np.ndarray:
        rows = []
        for leaf in leaves:
            if leaf.embedding is None:
                raise UsageError(
                    f"{self.name}: thought {leaf.node} has no embedding to cluster by: record with "
                    "--capture signals, or search with ets-kv"
                )
            rows.append(leaf.embedding)
        return np.array(rows, dtype=np.float64)


def similar(embeddings: np.ndarray, cut: float) -> np.ndarray:
    """Cluster of each row: average linkage of cosine distances, cut at `cut`.

    Parameters
    ----------
    embeddings : float ndarray ``[leaves, size]``
        Two leaves or more.
    cut : float

    Returns
    -------
    int ndarray ``[leaves]``
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
