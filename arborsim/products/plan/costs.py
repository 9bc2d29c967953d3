"""Costs of loads and fleets, and the order of candidates that follows."""

from __future__ import annotations

import math
from dataclasses import replace

from arborsim.products.plan.results import (
    CandidateResult,
    Fleet,
    LoadPoint,
    PlanResult,
)


def without_costs(point: LoadPoint) -> LoadPoint:
    """The same without the costs, which would rest on its load."""
    return replace(point, cost_per_1000=None, cost_per_solved=None)


def machines_for(load: float, largest_load: float) -> int:
    """How many machines share a load so that none has more than the largest."""
    return max(1, math.ceil(load / largest_load - 1e-9))


def fleet_for(
    candidate: CandidateResult, load: float | None, replicas: int | None = None
) -> Fleet | None:
    """Machines for a load, each with an equal part of it; no price where their number is open.

    They are as many as the load needs, or `replicas`, whose own largest load counts if none is
    stated.

    An hour of the fleet costs the same however busy it is.  Of clients, how many searches they get
    done is taken from the runs at that part of the load.
    """
    if candidate.largest is None or candidate.at_largest is None:
        return None
    if load is None and replicas is not None:
        load = replicas * candidate.largest
    if load is None:
        return None
    machines = replicas or machines_for(load, candidate.largest)
    price = None if candidate.is_open else candidate.price_per_hour
    hourly = None if price is None else (machines * price[0], machines * price[1])
    point = candidate.at_stated or candidate.at_largest
    idle = machines * point.load / load
    cost, solved = point.cost_per_1000, point.cost_per_solved
    cost = cost and (idle * cost[0], idle * cost[1])
    solved = solved and (solved[0].times(idle), solved[1].times(idle))
    given = replicas is not None
    return Fleet(load, machines, machines * candidate.gpus, hourly, cost, solved, given)


_UNSEEN = 1.25  # runs too short to see a limit carried up to 22% more than long ones


def machines_if_off(candidate: CandidateResult, fleet: Fleet) -> tuple[int, int]:
    """The fewest and the most machines, where seconds are off by their error either way.

    A machine that takes longer for each token carries as much less.  Where no limit was seen, one
    may do, and a queue that grew too slowly to be seen may take `_UNSEEN` more.
    """
    assert candidate.largest is not None
    if fleet.stated:
        return fleet.machines, fleet.machines
    down, up = _seconds_factors(candidate)
    ends = candidate.largest / down, candidate.largest / up
    if candidate.is_open:
        return 1, machines_for(fleet.load, ends[1] / _UNSEEN)
    return machines_for(fleet.load, ends[0]), machines_for(fleet.load, ends[1])


def _error_factors(
    candidate: CandidateResult, point: LoadPoint | Fleet, unit: str
) -> tuple[float, float]:
    """Factors of a cost at this point for an error of seconds, either way.

    Machines that take longer for each token cost as much more per search, where each carries what
    it can.  A fleet for a stated load of searches costs more only if it takes another machine;
    clients get fewer searches done in it.  An error that is not known changes nothing.
    """
    if isinstance(point, Fleet) and unit != "clients":
        fewest, most = machines_if_off(candidate, point)
        return fewest / point.machines, most / point.machines
    return _seconds_factors(candidate)


def _seconds_factors(candidate: CandidateResult) -> tuple[float, float]:
    """The least and the most that seconds may be of those simulated: errors, and assumptions."""
    low, high = assumed_factors(candidate)
    off = 1 + (candidate.error or 0.0)
    return low / off, high * off


def assumed_factors(candidate: CandidateResult) -> tuple[float, float]:
    """`LoadPoint.assumed` at its largest load."""
    return (1.0, 1.0) if candidate.at_largest is None else candidate.at_largest.assumed


def paid(
    candidate: CandidateResult, point: LoadPoint | Fleet, unit: str, solved: bool = False
) -> tuple[float, float] | None:
    """Lowest and highest cost of 1,000 searches there: of prices, and of the error of seconds.

    That of 1,000 `solved` searches leaves out the interval of the solve rate.
    """
    cost, each = point.cost_per_1000, point.cost_per_solved
    if solved:
        cost = each and (1000 * each[0].value, 1000 * each[1].value)
    down, up = _error_factors(candidate, point, unit)
    return cost and (down * cost[0], up * cost[1])


def cost_per_million(
    candidate: CandidateResult, point: LoadPoint | Fleet, unit: str, output: bool
) -> tuple[float, float] | None:
    """Lowest and highest cost of a million input, or `output`, tokens there.

    Each is paid for by the time that the machine is busy with it (`LoadPoint.input_share`).
    """
    at = (candidate.at_stated or candidate.at_largest) if isinstance(point, Fleet) else point
    cost = paid(candidate, point, unit)
    if cost is None or at is None or at.tokens is None:
        return None
    tokens = at.tokens.generated if output else at.tokens.prompt
    share = 1 - at.input_share if output else at.input_share
    if not tokens or math.isnan(share):
        return None
    return cost[0] * share * 1e3 / tokens, cost[1] * share * 1e3 / tokens


def compared_point(result: CandidateResult) -> LoadPoint | Fleet | None:
    """Where candidates are compared: a fleet for the stated load, or else the largest load."""
    return result.fleet or result.at_largest


def compared_cost(result: CandidateResult) -> tuple[float, float] | None:
    """Lowest and highest cost of 1,000 searches there, at the prices."""
    point = compared_point(result)
    return None if point is None else point.cost_per_1000


def middle_cost(result: CandidateResult) -> float:
    """The middle of `compared_cost`; infinite without a price."""
    cost = compared_cost(result)
    return math.inf if cost is None else (cost[0] + cost[1]) / 2


def order_cost(result: CandidateResult) -> float:
    """Order of candidates: `middle_cost`, or its upper bound where no limit was seen.

    That is no figure to show: it keeps a machine that seems far cheaper from being passed over.
    Seconds of a policy that are assumed count with the most that is plausible: no assumption makes
    a policy the cheapest.
    """
    price, fleet, point = result.price_per_hour, result.fleet, result.at_largest
    if not result.is_open or price is None or point is None:
        return middle_cost(result) * assumed_factors(result)[1]
    machines, served_per_s = _UNSEEN, point.served_per_s.value
    if fleet is not None:
        machines = machines_for(fleet.load, point.load / _UNSEEN)
        served_per_s = fleet.machines * (result.at_stated or point).served_per_s.value
    return 1000 * machines * (price[0] + price[1]) / 2 / 3600 / served_per_s


def told_apart(a: CandidateResult, b: CandidateResult) -> bool:
    """Whether one costs less than the other whatever is true of the seconds of their policies.

    Only ranges of seconds that no one measured count: errors of others are common to both.
    """
    if assumed_factors(a) == assumed_factors(b) == (1.0, 1.0):
        return True
    cheaper, dearer = sorted((a, b), key=middle_cost)
    most = middle_cost(cheaper) * assumed_factors(cheaper)[1]
    return most < middle_cost(dearer) * assumed_factors(dearer)[0]


def order_solved(result: CandidateResult) -> float:
    """Order of candidates where solved searches count: `middle_solved`, as `order_cost`."""
    return middle_solved(result) * assumed_factors(result)[1]


def middle_solved(result: CandidateResult) -> float:
    """The middle of the costs of 1,000 solved searches there; infinite where it is not known."""
    point = compared_point(result)
    cost = None if point is None else point.cost_per_solved
    return math.inf if cost is None else 500 * (cost[0].value + cost[1].value)


def ranked(plan: PlanResult) -> list[CandidateResult]:
    """Those that meet the target: the recommended one, then the others, the cheapest first.

    That is per solved search where the share of solved ones is known, and after these per search;
    without prices the largest load comes first.
    """

    def rank(row: CandidateResult) -> tuple[float, ...]:
        other = row.number != plan.recommendation.candidate
        cost = middle_cost(row) * assumed_factors(row)[1]
        return other, order_solved(row), cost, -(row.largest or 0.0), row.number

    return sorted(plan.met(), key=rank)
