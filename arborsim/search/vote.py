"""Which finished thought to hand in: votes over classes of equal answers.

Leaves whose answers read the same are one class; a leaf without an answer's text (a bank that
recorded none) is a class of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from arborsim.search.base import Leaf, best_answer, best_first, reward


def majority(frontier: Sequence[Leaf]) -> tuple[int, ...]:
    """The answer that most leaves gave, whatever their scores (Wang et al. 2022)."""
    return _elect(frontier, lambda leaf: 1.0)


def weighted_majority(frontier: Sequence[Leaf]) -> tuple[int, ...]:
    """The answer with the highest sum of final scores; an unknown score weighs nothing."""
    return _elect(frontier, reward)


def _elect(frontier: Sequence[Leaf], weight: Callable[[Leaf], float]) -> tuple[int, ...]:
    """The best leaf of the heaviest class; ties go to the answer that was given first."""
    classes: dict[str | int, list[Leaf]] = {}
    for leaf in frontier:
        if leaf.finished:
            classes.setdefault(leaf.node if leaf.answer is None else leaf.answer, []).append(leaf)
    if not classes:
        return best_answer(frontier)
    # Exact sums: the order in which leaves completed must not break a tie.
    winner = max(classes.values(), key=lambda leaves: math.fsum(map(weight, leaves)))
    return (best_first(winner)[0].node,)
