"""What is said when no candidate meets the target."""

from __future__ import annotations

import math

from arborsim.plan.results import MISSED, UNFIT, CandidateResult, PlanResult
from arborsim.plan.wording import limits_of


def nobody(plan: PlanResult) -> str:
    """By how much the best one misses the target, and what would help: three short lines."""
    missed = [each for each in plan.candidates if each.status == MISSED and each.alone]
    if missed:
        best = min(missed, key=lambda each: (_excess(each, plan), each.number))
        return (
            f"No candidate meets {limits_of(plan)} for {plan.percentile:g}% of the searches. "
            f"Nearest: {best.name}, {_missed_by(best, plan)}."
        )
    unfit = [each for each in plan.candidates if each.status == UNFIT]
    first = unfit[0] if unfit else plan.candidates[0] if plan.candidates else None
    if first is None:
        return "No candidate was finished."
    return f"No candidate can serve these searches; {first.name}: {first.reason}"


def _missed_by(best: CandidateResult, plan: PlanResult) -> str:
    """How many times the limits even a search alone takes, and which limits it would meet."""
    alone = best.alone
    assert alone is not None
    over, enough = [], []
    for value, limit, unit, key in (
        (alone.at_percentile_s, plan.search_limit_s, "s", "search"),
        (alone.token_at_percentile_s, plan.token_limit_s, "ms", "token"),
    ):
        if limit is not None and value > limit:
            scale = 1e3 if unit == "ms" else 1.0
            over.append(f"{scale * value:.3g} {unit} per {key} ({value / limit:.3g}x)")
            enough.append(f'{key} = "{_up(scale * value)} {unit}"')
    if not over:
        return "which meets it alone, but not beside others. Relax the target or take faster GPUs"
    return f"alone {', '.join(over)}. Relax to {', '.join(enough)}, or take faster or more GPUs"


def _excess(candidate: CandidateResult, plan: PlanResult) -> float:
    assert candidate.alone is not None
    return max(
        candidate.alone.at_percentile_s / (plan.search_limit_s or math.inf),
        candidate.alone.token_at_percentile_s / (plan.token_limit_s or math.inf),
    )


def _up(value: float) -> str:
    """Two digits, rounded up."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:g}"
