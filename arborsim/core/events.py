"""The events of a search, in the order a serving engine would see them.

An episode is one search over one prompt.  It starts with a `Prefill`. Then `Transition`, `Decode`,
`Boundary` and `Prune` alternate as the search likes, and an `Answer` ends it.  `Pressure` never
comes from a trace: the controller raises it when the cache nears its budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.observations import Observations


@dataclass(frozen=True)
class TokenRun:
    """Consecutive decode iterations of the same leaves: `steps` x `leaves` tokens.

    Token ``t * len(leaves) + w`` of the run is the one that leaf ``w`` decodes in iteration ``t``.
    With one leaf this is a plain run of tokens.
    """

    leaves: tuple[int, ...]  # nodes that decode together, one token each per iteration
    steps: int  # decode iterations in the run
    token: np.ndarray  # int32 [steps * len(leaves)]: vocabulary ids
    observed: Observations  # for the same tokens

    @property
    def num_tokens(self) -> int:
        return self.steps * len(self.leaves)

    def part(self, first_step: int, last_step: int) -> TokenRun:
        """The iterations ``first_step`` up to, not including, ``last_step``."""
        width = len(self.leaves)
        a, b = first_step * width, last_step * width
        return TokenRun(
            self.leaves, last_step - first_step, self.token[a:b], self.observed.slice(a, b)
        )


@dataclass(frozen=True)
class Prefill:
    """The prompt enters the cache as node 0.  `run` has one leaf and a step per prompt token."""

    run: TokenRun


@dataclass(frozen=True)
class Decode:
    """Generated tokens enter the cache."""

    run: TokenRun


@dataclass(frozen=True)
class Transition:
    """The search turns to `leaves`. Nodes it has not seen before are in `opened` with parents.

    The next tokens belong to these leaves, so their whole paths must be readable.
    """

    leaves: tuple[int, ...]
    opened: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Boundary:
    """A thought block is complete."""

    node: int
    reward: float  # search value in [0, 1]; NaN if the search gave none
    #: Entropy of the next-token distribution after the block's last token, nats; NaN if unknown
    entropy: float


@dataclass(frozen=True)
class Prune:
    """The search gives up `node` and will not expand it again."""

    node: int


@dataclass(frozen=True)
class Pressure:
    """The cache holds `used_tokens` of `budget_tokens`: less than the safety margin is left."""

    used_tokens: int
    budget_tokens: int


@dataclass(frozen=True)
class Answer:
    """The search is over. `correct` is None if it was not judged."""

    correct: bool | None


Event = Prefill | Decode | Transition | Boundary | Prune | Pressure | Answer
