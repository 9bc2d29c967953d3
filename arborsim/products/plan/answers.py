"""How many answers policies get right, from live runs on other problems that a workload names."""

from __future__ import annotations

from arborsim.core.statistics import clopper_pearson
from arborsim.play.results import ANY
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.workload import Workload
from arborsim.products.replay.answers import Answers, Searched, resolved


def counted(workload: Workload) -> dict[tuple[str, str], Estimate | None]:
    """Share of right answers by policy and budget, as a candidate has them; None if unknown.

    Only what was counted under the very same settings and budget is taken.  Searches that a budget
    could not hold count as wrong.
    """
    if workload.answers is None:
        return {}
    about, known = workload.answers, Answers.known()
    rows = known.of(Searched(about.task, about.search, about.model, about.options, {}, 0.0))
    searched = [row.searched for row in rows if dict(row.searched.options) == dict(about.options)]
    found: dict[tuple[str, str], Estimate | None] = {}
    for each in workload.candidates():
        policy, budget = each.policy.policy, each.budget_text
        match = searched and known.for_(
            searched[0], policy.name, resolved(policy), ANY if budget == "-" else budget
        )
        key = each.policy.name, budget
        found[key] = None
        if match and match.exact:
            right, n = match.counted.right, match.counted.n + match.counted.infeasible
            found[key] = Estimate(right / n, *clopper_pearson(right, n), n)
    return found
