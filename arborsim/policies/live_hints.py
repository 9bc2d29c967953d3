"""Hints for live runs: what memory to set aside, and how little of what is observed is read.

Decisions do not depend on them.  A policy that gives none of its own is served all the same.
"""

from __future__ import annotations

from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.policies.base import Policy


class LiveHints:
    """Mixed into a policy that knows more of its live runs than what follows from its scores."""

    @property
    def bounds_page(self) -> int:
        """Tokens of the pages by whose key bounds it chooses what is read (0: none)."""
        return 0

    def ddr_tokens(self, prompt_tokens: int, new_tokens: int, budget_tokens: int) -> int:
        """Tokens that DDR is expected to hold at most on one path, if the policy uses it.

        Live searches set memory aside for them.  More may come, at the price of growing.
        """
        return max(0, prompt_tokens + new_tokens - budget_tokens)


def hints_of(policy: Policy) -> LiveHints:
    """The hints of a policy, or those that hold for any policy."""
    return policy if isinstance(policy, LiveHints) else LiveHints()


def row_uses(policy: Policy) -> frozenset[RowUse]:
    """Reductions of attention rows that its scores need: rows can stay where they are computed."""
    return frozenset[RowUse]().union(*(score.row_uses for score in policy.scores().values()))


def read_as_norms(policy: Policy) -> frozenset[Signal]:
    """Keys, values or both, where its scores need no more than L1 norms of them."""
    scores = policy.scores().values()
    whole = frozenset[Signal]().union(*(score.needs - score.sizes for score in scores))
    return frozenset[Signal]().union(*(score.sizes for score in scores)) - whole


def hidden_layers(policy: Policy, layers: int) -> frozenset[int]:
    """Those of `layers` layers whose outputs its scores read."""
    each = (score.hidden_layers(layers) for score in policy.scores().values())
    return frozenset[int]().union(*each)
