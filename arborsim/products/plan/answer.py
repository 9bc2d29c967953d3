"""The answer of a plan in three lines: what to rent, how fast it is there, what runs out first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arborsim.products.plan.costs import (
    compared_point,
    machines_if_off,
    middle_cost,
    middle_solved,
    paid,
)
from arborsim.products.plan.results import RUN_LENGTH, CandidateResult, Fleet, LoadPoint, PlanResult
from arborsim.products.plan.runs import TIME
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.target import KINDS
from arborsim.products.plan.words import (
    RESOURCES,
    load_of,
    money,
    named,
    rate_of,
    rented,
    times_at,
)


def answer(
    best: CandidateResult, alternative: CandidateResult | None, plan: PlanResult
) -> tuple[str, str, str]:
    """Three lines, as `Recommendation.answer` has them."""
    return _rent(best, plan), _speed(best, plan), _bounds(best, alternative, plan)


def _rent(best: CandidateResult, plan: PlanResult) -> str:
    """The machines to rent, and their cost."""
    point, fleet = compared_point(best), best.fleet
    assert point is not None
    ends = (1, 1) if fleet is None else (fleet.machines, fleet.machines)
    if fleet is not None and best.is_open:
        ends = machines_if_off(best, fleet)
    none = ", the largest load it carries (none is stated)" if fleet is None else ""
    if best.is_open and point.cost_per_1000 is None:
        cost = (
            f"what {plan.noun} cost is not known, as runs of {best.searches:,} saw no limit; "
            f"give more per run (searches = {2 * best.searches})"
        )
    elif best.price_per_hour is None:
        cost = f"its price is not known; it serves {load_of(point.load, plan)}{none}"
    else:
        cost = cost_at(point, best, plan, solved_known([best])) + none
    return f"Rent {rented(best, ends)}, {_kept_by(best)}: {cost}{_hourly(best, plan)}."


def _kept_by(best: CandidateResult) -> str:
    """The policy and its budget, and whether its answers are known to be right as often."""
    name = "full retention" if best.policy == "full" else best.policy
    budget = "" if best.budget == "-" else f" at a budget of {best.budget}"
    quality = best.quality
    known = quality is None or quality.exact or quality.accuracy is not None
    return f"{name}{budget}{'' if known else ' (correct answers not measured)'}"


def _hourly(best: CandidateResult, plan: PlanResult) -> str:
    """The price of an hour: of all machines where their number is known."""
    fleet, price = best.fleet, best.price_per_hour
    if price is None:
        return ""
    machines, each = (1, 1), " for each machine" * best.is_open
    if fleet is not None and fleet.price_per_hour is not None:
        machines, each = machines_if_off(best, fleet), ""
    low, high = (n * end for n, end in zip(machines, price, strict=True))
    return f"; {money((low, high), plan.currency)} an hour{each}"


def _speed(best: CandidateResult, plan: PlanResult) -> str:
    """Times there, against the target, and the share that is solved."""
    point = best.shown_point
    assert point is not None
    limited = {limit.kind for limit in plan.target.limits}
    shown = [kind for kind in ("ttft", "tpot", "search") if kind in limited or kind != "search"]
    ranks = {plan.target.of(kind) if kind in limited else 95.0 for kind in shown}
    texts: list[str] = []
    for kind in shown:
        rank = plan.target.of(kind) if kind in limited else 95.0
        mark = f"p{rank:g} " if not texts or len(ranks) > 1 else ""
        texts.append(f"{mark}{KINDS[kind].short} {times_at(point, kind, rank, plan)}")
    met = "the target is met"
    if point.goodput < 1:
        met += f" ({point.goodput:.1%} of the {plan.noun} meet all of it)"
    parts = [f"{', '.join(texts)}: {met}"]
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
    """The resource that runs out first, its load, and what would change the answer."""
    point, fleet = best.at_largest, best.fleet
    assert point is not None
    assert best.largest is not None
    name = RESOURCES[point.saturated]
    machines = 1 if fleet is None else fleet.machines
    carried = rate_of(machines * best.largest, plan)
    if best.limited_by == RUN_LENGTH:  # a queue that grows slowly is not seen either
        parts = [
            f"No limit was seen up to {carried} in runs of {best.searches:,} (busiest: {name})"
        ]
    elif best.limited_by == "target" and point.saturated in TIME:
        parts = [f"Beyond {carried} the target is missed ({name} is busiest)"]
    else:
        parts = [f"{name[0].upper()}{name[1:]} runs out first, at {carried}"]
    if fleet is not None and not best.is_open:
        least, most = machines_if_off(best, fleet)
        if least < most:
            parts.append(f"the seconds' error leaves {least} to {most} machines open")
    if (change := price_that_changes(plan, best, alternative)) is not None and change[1] > 1:
        once = f"once {best.gpu} costs {change[1]:.2g} times as much"
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
    others = [r for r in others if r.gpu != chosen.gpu] or elsewhere(plan, chosen)
    here, there = middle_cost(chosen), middle_cost(others[0]) if others else math.inf
    return (others[0], there / here) if 0 < here < math.inf and 0 < there < math.inf else None


def elsewhere(plan: PlanResult, result: CandidateResult) -> list[CandidateResult]:
    """The same policy, budget and recall on other GPUs, the cheapest first."""

    def kept(row: CandidateResult) -> tuple[str, str, str]:
        return row.policy, row.budget, row.recall

    same = [row for row in plan.met() if kept(row) == kept(result)]
    found = [row for row in same if row.gpu != result.gpu]
    return sorted(found, key=lambda row: (middle_cost(row) or math.inf, row.number))


def cost_at(
    point: LoadPoint | Fleet, of: CandidateResult, plan: PlanResult, solved: bool = False
) -> str:
    """A cost means nothing without the load that the machines' hours are divided by.

    Its range is that of prices, widened by the error of the candidate's seconds.
    """
    what = f"solved {plan.noun}" if solved else plan.noun
    cost = money(paid(of, point, plan.unit, solved), plan.currency)
    return f"{cost} per 1,000 {what} at {rate_of(point.load, plan)}"


def solved_known(rows: Sequence[CandidateResult]) -> bool:
    """Whether it is known of all of them what a solved search costs."""
    return all(math.isfinite(middle_solved(row)) for row in rows)
