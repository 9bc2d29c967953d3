"""How rewards rank: those along a path make its score, and the finished chains elect the answer.

Process reward models score every step.  How the steps' scores become one for the path is a choice
of the search.  Lightman et al. 2023 ("Let's Verify Step by Step") take the product or minimum, the
code of REBASE, ETS and best-of-N the last one (the default here), the minimum, the product or the
mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from arborsim.core.errors import UnknownName
from arborsim.core.settings import check_settings, setting
from arborsim.searches import base

#: The score of a path from the rewards of its thoughts, the first one first
AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda rewards: rewards[-1],
    "min": lambda rewards: math.nan if any(map(math.isnan, rewards)) else min(rewards),
    "prod": math.prod,
    "mean": lambda rewards: math.fsum(rewards) / len(rewards),
}
#: What a finished chain's vote for its answer weighs, by the way to elect; None: there is no vote
_VOTES: Mapping[str, Callable[[base.Leaf], float] | None] = {
    "best": None,  # the finished chain with the best score wins
    "vote": lambda leaf: 1.0,  # the answer that most chains give, whatever their scores
    "weighted": base.reward,  # the highest sum of scores; an unknown one weighs nothing
}


def answer_setting(default: str) -> str:
    """The option `answer` of a search."""
    return setting(default, "elected by the finished chains", choices=tuple(_VOTES))


def aggregate_of(name: str) -> Callable[[Sequence[float]], float]:
    """One of `AGGREGATES`, or an `UnknownName`."""
    if name not in AGGREGATES:
        raise UnknownName("way to aggregate step scores", name, AGGREGATES)
    return AGGREGATES[name]


def elected(frontier: base.Leaves, how: str) -> tuple[int, ...]:
    """Finished leaves, best first, or if there are none the best leaf.

    By score (`how` is ``"best"``), or the best leaf of each class of equal answers, the class with
    the most votes first (``"vote"``, ``"weighted"``).  Ties go to the answer given first.  A leaf
    without an answer's text (a bank that recorded none) is a class of its own.
    """
    finished, weight = [leaf for leaf in frontier if leaf.finished], _VOTES[how]
    if not finished:
        return base.best_answer(frontier)
    if weight is None:
        return tuple(leaf.node for leaf in base.best_first(finished))
    classes: dict[str | int, list[base.Leaf]] = {}
    for leaf in finished:
        classes.setdefault(leaf.node if leaf.answer is None else leaf.answer, []).append(leaf)
    # Exact sums: the order in which leaves completed must not break a tie.
    votes = [-math.fsum(map(weight, leaves)) for leaves in classes.values()]
    ranked = sorted(zip(votes, classes.values(), strict=True), key=lambda each: each[0])
    return tuple(base.best_first(leaves)[0].node for _, leaves in ranked)


@dataclass(kw_only=True)
class Rewarded(base.Search):
    """A search that ranks by rewards.  Its methods see `scored` leaves."""

    score: str = setting("last", "of a path, from its thoughts' rewards", choices=tuple(AGGREGATES))
    answer: str = answer_setting("best")
    _paths: dict[int, tuple[tuple[float, ...], float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_settings(self, self.name)

    def scored(self, frontier: base.Leaves) -> base.Leaves:
        """The leaves with the scores of their paths, NaN if a reward on the path is unknown.

        A thought was shown before its children were opened: the rewards above are known even if it
        has been given up since.
        """
        if self.score == "last":
            return frontier
        return [replace(leaf, score=self._score(leaf)) for leaf in frontier]

    def _score(self, leaf: base.Leaf) -> float:
        if leaf.node == base.ROOT:
            return leaf.score
        if leaf.node not in self._paths:
            above, _ = self._paths.get(leaf.parent, ((), math.nan))
            rewards = (*above, leaf.score)
            self._paths[leaf.node] = rewards, AGGREGATES[self.score](rewards)
        return self._paths[leaf.node][1]

    def answers(self, frontier: base.Leaves) -> tuple[int, ...]:
        return elected(self.scored(frontier), self.answer)[:1]
