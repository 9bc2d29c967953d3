"""What no plan may do, whichever policy made it.

1. Protected tokens never move down a tier.
2. What was destroyed stays destroyed, unless the plan recovers it by recomputing.
3. After a decision, HBM holds no more tokens than the budget (checked by the controller for plans,
   here for every iteration of a run).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from arborsim.core.errors import PlanError
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan, RunPlan

if TYPE_CHECKING:
    from arborsim.core.events import TokenRun
    from arborsim.policies.base import CacheView, Policy


def check_plan(policy: Policy, view: CacheView, plan: Plan) -> None:
    """Raise `PlanError` if `plan` breaks rule 1 or 2."""
    if plan.tiers.shape != view.tier.shape:
        raise PlanError(
            f"{policy.name} planned tiers of shape {plan.tiers.shape}, "
            f"the cache has {view.tier.shape}"
        )
    lowered = plan.tiers > view.tier
    if policy.bounded and lowered.any():
        broken = lowered & policy.protected(view)
        if broken.any():
            token = int(np.flatnonzero(broken.any(axis=0))[0])
            raise PlanError(f"{policy.name} moves protected token {token} down")
    if plan.recover:
        return
    back = (view.tier == Tier.EVICTED) & (plan.tiers != Tier.EVICTED)
    if back.any():
        token = int(np.nonzero(back)[1][0])
        raise PlanError(f"{policy.name} reads token {token}, which is evicted, without recover")


def check_run(policy: Policy, view: CacheView, run: TokenRun, plan: RunPlan) -> None:
    """Raise `PlanError` if `plan` breaks a rule in any iteration.

    `view` is the cache at the end of the run without the plan; one leaf only.
    """
    if not len(plan.step):
        return
    steps, width = run.steps, len(run.leaves)
    born = view.num_tokens - run.num_tokens
    if (np.diff(plan.step) < 0).any() or plan.step[0] < 0 or plan.step[-1] >= steps:
        raise PlanError(f"{policy.name} planned moves outside the run's {steps} iterations")
    if len(np.unique(plan.token)) != len(plan.token):
        raise PlanError(f"{policy.name} moves a token twice within a run")
    if (view.tier[:, plan.token] == Tier.EVICTED).any():
        raise PlanError(f"{policy.name} moves a token that is already evicted")
    if (plan.token >= born + (plan.step + 1) * width).any():
        raise PlanError(f"{policy.name} moves a token before it exists")

    path = view.tree.path(run.leaves[0])
    position = np.full(view.num_tokens, -1, dtype=np.int64)
    position[path] = np.arange(len(path))
    at = position[plan.token]
    length = len(path) - steps + plan.step + 1
    protection = policy.protection(view.budget_tokens)
    on_path = at >= 0
    unsafe = (at < protection.head(view.prompt_tokens)) | (at >= length - protection.recent)
    if (on_path & unsafe).any():
        token = plan.token[on_path & unsafe][0]
        raise PlanError(f"{policy.name} moves protected token {token} down")

    leaves_hbm = (plan.target > Tier.HBM_QUANTISED) & (
        view.tier[0, plan.token] <= Tier.HBM_QUANTISED
    )
    leaving = np.bincount(plan.step[leaves_hbm], minlength=steps)
    start = view.in_hbm - run.num_tokens
    used = start + np.arange(1, steps + 1) * width - np.cumsum(leaving)
    if (used > view.budget_tokens).any():
        step = int(np.argmax(used > view.budget_tokens))
        raise PlanError(
            f"{policy.name} leaves {used[step]} tokens in HBM, budget {view.budget_tokens}"
        )
