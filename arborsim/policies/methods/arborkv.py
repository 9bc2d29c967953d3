"""ArborKV: how much of each thought block to keep, by value and tree geometry (arXiv:2605.22106).

MSVE scores each block from search value, certainty and accumulated attention (Eq. 1); TAE turns the
score and the block's place in the tree into a number of tokens to keep (Eqs. 2-3, `TreeRule`).
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

    The paper publishes no values for its parameters; these are assumed, not calibrated.

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
    paper = "ArborKV, arXiv:2605.22106"
    summary = "keep thought blocks by value and tree distance; rehydrate on return"
    formula = (
        "s_i = sigmoid(theta . [v_i, u_i, a_i]) (Eq. 1); r_i = clip(alpha eta^[off path] s_i^gamma "
        "exp(-lambda_d d_i) exp(-lambda_Delta Delta_i), r_min, 1) (Eq. 2); "
        "k_i = min(n_i, max(K_min, L_tail, floor(r_i n_i))) (Eq. 3)"
    )
    words = {
        "score": "block: MSVE; token: attention from later blocks",
        "recover": "recompute root to leaf on return (lazy rehydration)",
    }
    deviations = (
        "the paper publishes no parameter values",
        "a_i is the share of the attention to closed blocks, so that theta fits searches of any "
        "length; attention=mass takes the running mass of section 4 (both as the mean over layers "
        "and heads: theta absorbs a constant)",
        "eta discounts off-path blocks as in Eq. 2; Algorithm 1 and the program of section 4 leave "
        "it out (eta=1)",
        "Priority(i) is not defined; by default r_i / w_i decides, so that ratios end up in "
        "proportion to the weights, as Eq. 2 has them; by the KKT condition of the printed program "
        "it is k_i that is in proportion (priority=tokens), though the text concludes the same of "
        "r_i; priority=weight empties the block of the lowest weight first",
        "relief takes tokens down to the floors of Eq. 3, max(K_min, L_tail); the printed loop "
        "stops at K_min. It frees twice the margin; the loop stops at B and is called again",
        "when Pressure recomputes Eq. 3, blocks only shrink: Algorithm 2 assigns larger k_j too, "
        "but has nothing to fill them with",
        "an accepted Boundary does not trim blocks on the active path (invariant i), unless "
        "boundary_trims_path is set",
        "the printed relief loop does not end when every block is at K_min: an infeasible "
        "budget is raised instead",
        "one token at a time is done at once, by bisection on alpha",
        "the whole prompt is protected, not only its sinks, unless pin_prompt is false",
        "head-only eviction (invariant iii) contradicts heavy hitters; the latter win",
        "Boundary and Transition trim off-path blocks whatever the budget, and Pressure comes "
        "`margin` tokens before the budget, both as printed: even a budget for the whole "
        "search evicts; only_under_pressure leaves out the first",
        "Pressure that off-path blocks cannot relieve shrinks closed blocks of the active path "
        "to path_floor (the paper pins them), unless path_floor is 1",
        "pruned blocks, which the paper does not know, give up their floors when room is "
        "short, unless keep_pruned is set",
        "where room ends, blocks of the path come back only root first as far as it goes; "
        "Algorithm 2 rehydrates all, whatever the budget",
        "s_i is computed anew at every event, because attention to a block comes after its "
        "boundary, where Algorithm 1 scores it",
        "a block without reward or entropy gets 0 for it",
        "alpha or lambda tightened by Pressure is back at its setting at the next event",
    )

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
