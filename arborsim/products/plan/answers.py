"""How many answers policies get right, from live runs: of the user, or those that are known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from arborsim.play.results import ANY
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.workload import Workload
from arborsim.products.replay.answers import Searched, resolved, shipped
from arborsim.products.replay.counting import counted_in, read_log


def counted(workload: Workload) -> dict[tuple[str, str], Estimate | None]:
    """Share of right answers by policy and budget, as a candidate has them; None if unknown.

    Only what was counted under the very same settings and budget is taken.  Searches that a budget
    could not hold count as wrong.
    """
    if workload.answers is None:
        return {}
    about, known = workload.answers, shipped()
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
            found[key] = Estimate.share(right, n)
    return found


def problems_of(paths: Iterable[Path]) -> str:
    """Tasks and models of logs: ``"game24 by arborsim-game24"``; "" where they do not say."""
    searched = (each.searched for path in paths for each in counted_in(path))
    names = dict.fromkeys(f"{s.task} by {s.model}" for s in searched if s.task and s.model)
    return " and ".join(names)


def read_accuracies(paths: Iterable[Path]) -> dict[tuple[str, str], Estimate]:
    """Accuracy by policy and budget, of all the logs that ``arborsim live --out`` wrote.

    That is the share of judged answers that are right, with Clopper and Pearson's 95% interval.
    The budget of a policy that ignores budgets is "-".  Searches that a budget could not hold count
    as wrong.
    """
    verdicts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for path in paths:
        _, results = read_log(path)
        for result in results:
            if result.correct is not None or result.infeasible:
                budget = "-" if result.budget == ANY else result.budget
                verdicts[result.policy, budget].append(bool(result.correct))
    return {key: Estimate.share(sum(right), len(right)) for key, right in verdicts.items()}
