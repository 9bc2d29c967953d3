"""ETS without the coverage of clusters (Hooper et al. 2025, "ETS: Efficient Tree Search for
Inference-Time Scaling", equation 2 and appendix B.1).

Leaves weigh what REBASE would give them; those whose paths cost more KV cache than they weigh are
given up, and REBASE shares the whole width among the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.errors import UsageError
from arborsim.search.base import Leaf
from arborsim.search.cost_model import Cost, CostTree, cost_tree, keep_by_tree
from arborsim.search.rebase import Rebase, rebase_weights


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
