"""Searches that go level by level and never come back: beam search, DVTS, REBASE, and ETS (`ets`).

A width of thoughts is shared among the newest level's states.  A finished chain keeps its place:
the width that is left shrinks by one for each.  A state that gets no share is given up for good.
The answer is elected by the finished chains, weighted by their final scores (`ranking` has other
scores and elections).

Beam search with a reward model (Snell et al. 2024, "Scaling LLM Test-Time Compute"): of every level
the k states with the best last score go on and share the width.

Diverse Verifier Tree Search (Beeching et al. 2024, "Scaling test-time compute"): the width is split
among S subtrees, which search on their own: the thoughts of the first level are dealt out in order,
and of every later level the best state of each subtree goes on with all of the subtree's width.

With ``refill`` beams end as in the beam search of Hugging Face's transformers with
``early_stopping=True`` (5.23 finds the same sequences: `tests/search/test_hugging_face.py`).
Finished states compete with the unfinished ones: those among the best k of their level leave the
beam as answers, the others are given up.  The best k unfinished states go on with the whole width.
The search is over when k chains have finished, of which the best k are kept, or at the last level.
Where the two differ:

- Transformers takes the best 2k of all one-token continuations, so that k unfinished ones are among
  them.  Here a level has ``width`` thoughts, and the beam is narrower if fewer than k go on.
- Its score is the log-probability of the path over its length to the power of ``length_penalty``.
  Rewards being log-probabilities of one-token thoughts, ``score=mean`` is a penalty of 1.  Rewards
  being probabilities, ``score=prod`` is one of 0.
- With ``early_stopping=False`` (its default) it goes on with k finished chains until no running one
  seems able to do better, with ``"never"`` until none can.  Both rest on log-probabilities, which
  only fall.  Rewards rise, too.
- At its last level unfinished chains count as finished.
- It hands in the best chain, which is ``answer=best``.

ETS compares with k and S = 4, and with the square root of the initial width N.

REBASE, reward balanced search (Wu et al. 2024, "Inference Scaling Laws"): from the best state to
the worst, each of the unfinished states i gets

    ceil(N_i exp(R_i / T) / sum over k not yet served of exp(R_k / T))

children, where N_i is what is left of the width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.settings import setting
from arborsim.searches import base
from arborsim.searches.ranking import Rewarded, answer_setting


@dataclass(kw_only=True)
class LevelSearch(base.Wide, Rewarded, ABC):
    """One level at a time."""

    synchronous = True
    width_option = "width"
    by_levels = True
    width: int = setting(16, "N, thoughts per level at the start", low=1)
    depth: int = setting(25, "most levels", low=1)
    answer: str = answer_setting("weighted")

    @abstractmethod
    def share(self, frontier: base.Leaves, candidates: base.Leaves, width: int) -> base.Children:
        """Children per candidate (those without any left out), at most `width` in all.

        `candidates` are the states that can be continued, best first.  `width` is 1 or more.
        """

    def expand(self, frontier: base.Leaves, width: int) -> base.Expansion:
        return self.select(self.scored(frontier), width)

    def select(self, frontier: base.Leaves, width: int) -> base.Expansion:
        """As `expand`, of leaves with the scores of their paths."""
        left = min(width, self.width - sum(leaf.finished for leaf in frontier))
        candidates = [
            x for x in frontier if x.visits == 0 and x.expandable and x.depth < self.depth
        ]
        if left < 1 or not candidates:
            return base.Expansion(done=True)
        children = self.share(frontier, base.best_first(candidates), left)
        kept = [leaf.node for leaf in frontier if leaf.finished or leaf.node in children]
        return base.Expansion(children, base.hopeless(frontier, kept), done=not children)


@dataclass(kw_only=True)
class BeamSqrt(LevelSearch):
    """Keep as many states as the square root of the initial width, rounded up."""

    name = "beam-sqrt"
    refill: bool = setting(
        False,
        "a finished chain leaves its place to the next best unfinished state, as in the beam "
        "search of Hugging Face's transformers",
    )

    @property
    def _kept(self) -> int:
        return ceil_sqrt(self.width)

    def share(self, frontier: base.Leaves, candidates: base.Leaves, width: int) -> base.Children:
        kept = candidates[: self._kept]
        counts = even_parts(width, len(kept))  # what does not divide goes to the first, one each
        return {leaf.node: count for leaf, count in zip(kept, counts, strict=True) if count}

    def select(self, frontier: base.Leaves, width: int) -> base.Expansion:
        if not self.refill:
            return super().select(frontier, width)
        deepest = max(leaf.depth for leaf in frontier)
        open_ = (x for x in frontier if x.visits == 0 and (x.finished or x.expandable))
        level = base.best_first(x for x in open_ if x.depth == deepest)
        ended = [leaf for leaf in frontier if leaf.finished and leaf.depth < deepest]
        ended += [leaf for leaf in level[: self._kept] if leaf.finished]
        ended = base.best_first(ended)[: self._kept]
        states = [x for x in level if x.expandable and x.depth < self.depth]
        kept = [leaf.node for leaf in ended]
        if not states or len(kept) == self._kept:
            lost = [leaf for leaf in frontier if leaf.finished and leaf.node not in kept]
            return base.Expansion(dropped=base.deepest_first(lost), done=True)
        children = self.share(frontier, states, width)
        return base.Expansion(children, base.hopeless(frontier, [*kept, *children]))


@dataclass(kw_only=True)
class Beam4(BeamSqrt):
    """Keep a fixed number of states."""

    name = "beam-4"
    keep: int = setting(4, "k, states kept per level", low=1)

    @property
    def _kept(self) -> int:
        return self.keep


@dataclass(kw_only=True)
class DvtsSqrt(LevelSearch):
    """As many subtrees as the square root of the width, rounded up."""

    name = "dvts-sqrt"
    _subtree: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    @property
    def _subtrees(self) -> int:
        return ceil_sqrt(self.width)

    def share(self, frontier: base.Leaves, candidates: base.Leaves, width: int) -> base.Children:
        if candidates[0].node == base.ROOT:
            return {base.ROOT: width}
        self._assign(frontier)
        finished = Counter(self._subtree[leaf.node] for leaf in frontier if leaf.finished)
        children: dict[int, int] = {}
        for subtree, places in enumerate(even_parts(self.width, self._subtrees)):
            best = next((x for x in candidates if self._subtree[x.node] == subtree), None)
            left = min(places - finished[subtree], width)
            if best is not None and left > 0:
                children[best.node] = left
                width -= left
        return children

    def _assign(self, frontier: base.Leaves) -> None:
        """Deal the first level out to the subtrees.  Later states are where their parent is."""
        fresh = [leaf for leaf in frontier if leaf.node not in self._subtree]
        first = sorted(leaf.node for leaf in fresh if leaf.depth == 1)
        for subtree, size in enumerate(even_parts(len(first), self._subtrees)):
            self._subtree.update(dict.fromkeys(first[:size], subtree))
            del first[:size]
        for leaf in sorted(fresh, key=lambda x: x.depth):
            if leaf.depth > 1:
                self._subtree[leaf.node] = self._subtree[leaf.parent]


@dataclass(kw_only=True)
class Dvts4(DvtsSqrt):
    """A fixed number of subtrees."""

    name = "dvts-4"
    subtrees: int = 4  # S; no more than `width`

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.subtrees <= self.width:
            raise UsageError(f"{self.name}: subtrees must be 1 to width ({self.width})")

    @property
    def _subtrees(self) -> int:
        return self.subtrees


@dataclass(kw_only=True)
class Rebase(LevelSearch):
    """Children in proportion to the softmax of scores."""

    name = "rebase"
    temperature: float = setting(0.2, "T of the softmax over scores", low=1e-6, high=1e6)

    def share(self, frontier: base.Leaves, candidates: base.Leaves, width: int) -> base.Children:
        counts = rebase_weights(candidates, width, self.temperature)
        return {x.node: count for x, count in zip(candidates, counts, strict=True) if count}


def rebase_weights(leaves: base.Leaves, width: int, temperature: float) -> list[int]:
    """Children of each leaf, which add up to `width` exactly.

    One leaf or more, best first.  An unknown score counts as minus infinity.
    """
    scores = np.array([base.value(leaf) for leaf in leaves], dtype=np.float64)
    counts = []
    for i, score in enumerate(scores):
        # Relative to the leaf that is served: equal scores give ones exactly, nothing overflows,
        # and as the leaf is one of those that are left, no share exceeds what is left.
        rest = scores[i:]
        gap = np.subtract(rest, score, out=np.zeros(len(rest)), where=rest != score)
        count = math.ceil(width / math.fsum(np.exp(gap / temperature).tolist()))
        counts.append(min(count, width))
        width -= counts[-1]
    return counts


def ceil_sqrt(number: int) -> int:
    """The least integer whose square is `number` or more."""
    return math.isqrt(number - 1) + 1


def even_parts(total: int, parts: int) -> list[int]:
    """`total` in `parts` parts that differ by one at most, the larger ones first."""
    size, larger = divmod(total, parts)
    return [size + (i < larger) for i in range(parts)]
