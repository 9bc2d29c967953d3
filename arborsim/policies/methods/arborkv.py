"""ArborKV: how much of each thought block to keep, by value and tree geometry (arXiv:2605.22106).

MSVE scores each block from search value, certainty and accumulated attention (Eq. 1).  TAE turns
the score and the block's place in the tree into a number of tokens to keep (Eqs. 2-3, `TreeRule`).
Inside a block the tail and the most attended tokens stay.  Decisions fall at three events:
`Boundary`, `Transition` and `Pressure` (Algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from arborsim.core.settings import setting
from arborsim.policies.blocks import (
    ANY,
    Allocation,
    EveryStep,
    Never,
    Protect,
    Recompute,
    TreeEvents,
    pin_prompt_setting,
)
from arborsim.policies.stream import Composed
from arborsim.policies.tree import Tree, TreeRule
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Position, Score


@dataclass(frozen=True)
class _Printed(Tree):
    """As Algorithm 2 is printed."""

    trims_path = True


@dataclass(frozen=True)
class ArborKV(TreeRule, Composed):
    """Tree-aware eviction with lazy rehydration.

    The paper publishes no values for its parameters: the defaults are assumed, not calibrated.

    The rows of its ablations (Tables 3, 4 and 7) as settings::

        no v: --set use_value=false
        no u: --set use_certainty=false
        no a: --set use_attention=false
        no sibling coordination: --set eta=1
        TAE only: --set msve=false
        MSVE only: --set lambda_distance=0
        no rehydration: --set rehydrate=false
        tail only: --set retain=tail --set pin_prompt=false
        sinks + tail: --set retain=sinks+tail --set pin_prompt=false
        sinks + tail + heavy hitters: --set pin_prompt=false
    """

    retain: str = setting(
        "sinks+tail+heavy",
        "what stays inside a block (Table 7): its newest tokens, the prompt's global sinks too, or "
        "also the most attended tokens; without heavy hitters a block's earliest tokens leave "
        "first (invariant iii, head-only eviction)",
        choices=("tail", "sinks+tail", "sinks+tail+heavy"),
    )
    pin_prompt: bool = pin_prompt_setting(True)
    sinks: int = setting(
        4, "global sinks, if the prompt is not pinned", unit="tokens", low=0, high=1e9
    )
    margin: int = setting(
        16,
        "delta: Pressure is raised when no more is left; relief frees twice as much, so that it "
        "is not raised again at the very next token",
        unit="tokens",
        low=1,
    )
    rehydrate: bool = setting(
        True, "recompute evicted blocks when the search comes back; false: Table 4"
    )
    boundary_trims_path: bool = setting(
        False, "as Algorithm 2 is printed, Boundary trims the closed block on the active path too"
    )

    name = "arborkv"

    @cached_property
    def score(self) -> Score:
        heavy = self.retain == "sinks+tail+heavy"
        return CumulativeAttention(from_later_blocks=True) if heavy else Position()

    @cached_property
    def allocate(self) -> Allocation:
        rule = {each.name: getattr(self, each.name) for each in fields(TreeRule)}
        return _Printed(**rule) if self.boundary_trims_path else Tree(**rule)

    @cached_property
    def schedule(self) -> EveryStep:
        return TreeEvents(self.margin, wait=False)

    @cached_property
    def protect(self) -> Protect:
        sinks = 0 if self.pin_prompt or self.retain == "tail" else self.sinks
        return Protect(self.pin_prompt, sinks, recent=1, recent_share=ANY)

    @cached_property
    def recover(self) -> Never:
        return Recompute() if self.rehydrate else Never()
