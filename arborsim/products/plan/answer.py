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
    paid_solved,
)
from arborsim.products.plan.runs import TIME
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.words import RESOURCES, limits_of, load_of, money, named


def answer(
    best: CandidateResult, alternative: CandidateResult | None, plan: PlanResult
) -> tuple[str, str, str]:
    """Three lines, as `Recommendation.answer` has them."""
    point = compared_point(best)
    assert point is not None
    fleet, solved = best.fleet, solved_known([best])
    ends = (1, 1) if fleet is None else (fleet.machines, fleet.machines)
    if fleet is not None and best.is_open:
        ends = machines_if_off(best, fleet)
    machines = " to ".join(map(str, dict.fromkeys(ends)))
    at = f"{load_of(point.load, plan)}"
    if fleet is None:
        at += ", the largest load it carries (none is stated)"
    if best.is_open:
        cost = (
            f"what searches cost is not known, as runs of {best.searches:,} searches saw no limit; "
            f"give more per run (searches = {2 * best.searches})"
        )
    elif best.price_per_hour is None:
        cost = f"its price is not known; it serves {at}"
    else:
        range_of = paid_solved if solved else paid
        what = "solved searches" if solved else "searches (how many are solved is not known)"
        cost = f"{money(range_of(best, point, plan.unit), plan.currency)} per 1,000 {what} at {at}"
    return (
        f"Rent {machines} x {best.hardware}, {_kept_by(best)}: {cost}.",
        _hourly(best, plan, solved),
        _bounds(best, alternative, plan),
    )


def _kept_by(best: CandidateResult) -> str:
    """The policy and its budget, and whether its answers are known to be right as often."""
    name = "full retention" if best.policy == "full" else best.policy
    budget = "" if best.budget == "-" else f" at a budget of {best.budget}"
    quality = best.quality
    known = quality is None or quality.exact or quality.accuracy is not None
    return f"{name}{budget}{'' if known else ' (correct answers not measured)'}"


def _hourly(best: CandidateResult, plan: PlanResult, solved: bool) -> str:
    """The price of an hour, and what ranges and solve rates rest on."""
    fleet, price = best.fleet, best.price_per_hour
    gpus = [best.gpus if fleet is None else fleet.gpus]
    served = f"the target is met: {plan.percentile:g}% of the searches within {limits_of(plan)}"
    parts = []
    if price is not None and best.is_open:
        parts.append(
            f"{money(price, plan.currency)} an hour for each machine of {_gpus([best.gpus])}"
        )
    elif price is not None:
        hourly = price
        if fleet is not None and fleet.price_per_hour is not None:
            fewest, most = machines_if_off(best, fleet)
            hourly = (fewest * price[0], most * price[1])
            gpus = list(dict.fromkeys((fewest * best.gpus, most * best.gpus)))
        parts.append(f"{money(hourly, plan.currency)} an hour for {_gpus(gpus)}")
        if hourly[0] < hourly[1]:
            error = (
                "" if best.error is None else f" and the seconds' error of {share_text(best.error)}"
            )
            parts[-1] += f" (a range of prices{error})"
    parts.append(served)
    accuracy = best.quality.accuracy if best.quality is not None else None
    if solved and (rate := accuracy or plan.solved) is not None:
        live = f"live runs of {plan.answers_of}" if plan.answers_of else "live runs"
        origin = live if accuracy is not None else plan.solved_origin
        parts.append(f"{_rate_text(rate, origin)} are solved")
    return f"{'; '.join(parts)}."


def _gpus(counts: Sequence[int]) -> str:
    """``"1 GPU"``, ``"1 to 2 GPUs"``."""
    return f"{' to '.join(map(str, counts))} GPU{'s' * (counts[-1] != 1)}"


def _rate_text(rate: Estimate, origin: str) -> str:
    """``"60.0% (stated)"``, ``"75.0% (48% to 93%, 16 recorded)"``."""
    if rate.is_stated:
        return f"{rate.value:.1%} (stated)"
    return f"{rate.value:.1%} ({rate.low:.0%} to {rate.high:.0%}, {rate.n} {origin})"


def _bounds(best: CandidateResult, alternative: CandidateResult | None, plan: PlanResult) -> str:
    """What limits the machines, and what would change the answer."""
    point, fleet = best.at_largest, best.fleet
    assert point is not None
    assert best.largest is not None
    name = RESOURCES[point.saturated]
    if best.is_open:
        limit = f"No limit was seen in runs of {best.searches:,} searches (busiest: {name})"
    elif best.limited_by == "target" and point.saturated in TIME:
        limit = f"The latency target limits it ({name} is busiest)"
    else:
        limit = f"{name[0].upper()}{name[1:]} limits it"
    machines = 1 if fleet is None else fleet.machines
    carried = load_of(machines * best.largest, plan)
    subject = "they" if machines > 1 else "it"
    if best.is_open:  # a queue that grows slowly is not seen either
        parts = [f"{limit}: {subject} carried {carried}; longer runs can show more or less"]
    else:
        parts = [f"{limit}: {subject} {'carry' if machines > 1 else 'carries'} up to {carried}"]
    if fleet is not None and not best.is_open:
        least, largest = machines_if_off(best, fleet)
        if least < largest:
            parts.append(f"the seconds' error leaves {least} to {largest} machines open")
    if (change := price_that_changes(plan, best, alternative)) is not None:
        other, factor = change
        if factor > 1:
            parts.append(
                f"{named(other)} is cheaper once {best.hardware} costs {factor:.2g} times as much"
            )
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
    same = (result.policy, result.budget, result.recall)
    found = [
        each
        for each in plan.met()
        if (each.policy, each.budget, each.recall) == same and each.hardware != result.hardware
    ]
    return sorted(found, key=lambda each: (middle_cost(each) or math.inf, each.number))


def cost_at(
    point: LoadPoint | Fleet, of: CandidateResult, plan: PlanResult, solved: bool = False
) -> str:
    """A cost means nothing without the load that the machines' hours are divided by.

    Its range is that of prices, widened by the error of the candidate's seconds.
    """
    range_of = paid_solved if solved else paid
    what = "solved searches" if solved else "searches"
    cost = money(range_of(of, point, plan.unit), plan.currency)
    return f"{cost} per 1,000 {what} at {load_of(point.load, plan)}"


def solved_known(rows: Sequence[CandidateResult]) -> bool:
    """Whether it is known of all of them what a solved search costs."""
    return all(math.isfinite(middle_solved(row)) for row in rows)
