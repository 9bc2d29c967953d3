"""The answer of a plan in three lines: what to rent, what it costs, and what would change that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arborsim.machine.fidelity import share_text
from arborsim.products.plan.results import (
    CandidateResult,
    Fleet,
    LoadPoint,
    PlanResult,
    compared_point,
    machines_if_off,
    middle_cost,
    middle_solved,
    paid,
)
from arborsim.products.plan.runs import TIME
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.words import RESOURCES, limits_of, load_of, money, named


def answer(
    best: CandidateResult, alternative: CandidateResult | None, plan: PlanResult
) -> tuple[str, str, str]:
    """Three lines, as `Recommendation.answer` has them."""
    point, fleet = compared_point(best), best.fleet
    assert point is not None
    ends = (1, 1) if fleet is None else (fleet.machines, fleet.machines)
    if fleet is not None and best.is_open:
        ends = machines_if_off(best, fleet)
    none = ", the largest load it carries (none is stated)" if fleet is None else ""
    if best.is_open:
        cost = (
            f"what searches cost is not known, as runs of {best.searches:,} searches saw no limit; "
            f"give more per run (searches = {2 * best.searches})"
        )
    elif best.price_per_hour is None:
        cost = f"its price is not known; it serves {load_of(point.load, plan)}{none}"
    else:
        known = solved_known([best])
        remark = "" if known else " (how many are solved is not known)"
        cost = cost_at(point, best, plan, known, remark) + none
    return (
        f"Rent {_to(ends)} x {best.hardware}, {_kept_by(best)}: {cost}.",
        _hourly(best, plan),
        _bounds(best, alternative, plan),
    )


def _to(ends: Sequence[int]) -> str:
    """``"2"`` or ``"2 to 3"``."""
    return " to ".join(map(str, dict.fromkeys(ends)))


def _kept_by(best: CandidateResult) -> str:
    """The policy and its budget, and whether its answers are known to be right as often."""
    name = "full retention" if best.policy == "full" else best.policy
    budget = "" if best.budget == "-" else f" at a budget of {best.budget}"
    quality = best.quality
    known = quality is None or quality.exact or quality.accuracy is not None
    return f"{name}{budget}{'' if known else ' (correct answers not measured)'}"


def _hourly(best: CandidateResult, plan: PlanResult) -> str:
    """The price of an hour, and what ranges and solve rates rest on."""
    fleet, price = best.fleet, best.price_per_hour
    parts = []
    if price is not None:
        machines = (1, 1)
        if fleet is not None and fleet.price_per_hour is not None:
            machines = machines_if_off(best, fleet)
        low, high = (n * each for n, each in zip(machines, price, strict=True))
        gpus = [n * best.gpus for n in machines]
        where = f"{_to(gpus)} GPU{'s' * (gpus[-1] != 1)}"
        if best.is_open:
            where = f"each machine of {where}"
        parts.append(f"{money((low, high), plan.currency)} an hour for {where}")
        if low < high and not best.is_open:
            error = best.error
            off = "" if error is None else f" and the seconds' error of {share_text(error)}"
            parts[-1] += f" (a range of prices{off})"
    parts.append(f"the target is met: {limits_of(plan)}")
    accuracy = best.quality.accuracy if best.quality is not None else None
    if solved_known([best]) and (rate := accuracy or plan.solved) is not None:
        live = f"live runs of {plan.answers_of}" if plan.answers_of else "live runs"
        origin = live if accuracy is not None else plan.solved_origin
        parts.append(f"{_rate_text(rate, origin)} are solved")
    return f"{'; '.join(parts)}."


def _rate_text(rate: Estimate, origin: str) -> str:
    """``"60.0% (stated)"``, ``"75.0% (48% to 93%, 16 recorded)"``."""
    if rate.is_stated:
        return f"{rate.value:.1%} (stated)"
    return f"{rate.value:.1%} ({rate.low:.0%} to {rate.high:.0%}, {rate.n} {origin})"


def _bounds(best: CandidateResult, alternative: CandidateResult | None, plan: PlanResult) -> str:
    """The limits of the machines, and what would change the answer."""
    point, fleet = best.at_largest, best.fleet
    assert point is not None
    assert best.largest is not None
    name = RESOURCES[point.saturated]
    machines = 1 if fleet is None else fleet.machines
    subject, carry = ("they", "carry") if machines > 1 else ("it", "carries")
    carried = load_of(machines * best.largest, plan)
    if best.is_open:  # a queue that grows slowly is not seen either
        limit = f"No limit was seen in runs of {best.searches:,} searches (busiest: {name})"
        parts = [f"{limit}: {subject} carried {carried}; longer runs can show more or less"]
    else:
        limit = f"{name[0].upper()}{name[1:]} limits it"
        if best.limited_by == "target" and point.saturated in TIME:
            limit = f"The latency target limits it ({name} is busiest)"
        parts = [f"{limit}: {subject} {carry} up to {carried}"]
    if fleet is not None and not best.is_open:
        least, most = machines_if_off(best, fleet)
        if least < most:
            parts.append(f"the seconds' error leaves {least} to {most} machines open")
    if (change := price_that_changes(plan, best, alternative)) is not None and change[1] > 1:
        once = f"once {best.hardware} costs {change[1]:.2g} times as much"
        parts.append(f"{named(change[0])} is cheaper {once}")
    return f"{'; '.join(parts)}."


def price_that_changes(
    plan: PlanResult, chosen: CandidateResult, alternative: CandidateResult | None
) -> tuple[CandidateResult, float] | None:
    """Which candidate becomes the cheapest when the chosen GPU's price rises by what factor.

    That is the alternative if it is on another GPU, else the chosen policy and budget on the
    cheapest other one.  Prices are the middles of their ranges; None without another GPU or prices.
    """
    others = [] if alternative is None else [alternative]
    others = [r for r in others if r.hardware != chosen.hardware] or elsewhere(plan, chosen)
    here, there = middle_cost(chosen), middle_cost(others[0]) if others else math.inf
    return (others[0], there / here) if 0 < here < math.inf and 0 < there < math.inf else None


def elsewhere(plan: PlanResult, result: CandidateResult) -> list[CandidateResult]:
    """The same policy, budget and recall on other GPUs, the cheapest first."""

    def kept(row: CandidateResult) -> tuple[str, str, str]:
        return row.policy, row.budget, row.recall

    same = [row for row in plan.met() if kept(row) == kept(result)]
    found = [row for row in same if row.hardware != result.hardware]
    return sorted(found, key=lambda row: (middle_cost(row) or math.inf, row.number))


def cost_at(
    point: LoadPoint | Fleet,
    of: CandidateResult,
    plan: PlanResult,
    solved: bool = False,
    remark: str = "",
) -> str:
    """A cost means nothing without the load that the machines' hours are divided by.

    Its range is that of prices, widened by the error of the candidate's seconds.
    """
    what = "solved searches" if solved else "searches"
    cost = money(paid(of, point, plan.unit, solved), plan.currency)
    return f"{cost} per 1,000 {what}{remark} at {load_of(point.load, plan)}"


def solved_known(rows: Sequence[CandidateResult]) -> bool:
    """Whether it is known of all of them what a solved search costs."""
    return all(math.isfinite(middle_solved(row)) for row in rows)
