"""Machines for a stated load, each with an equal part of it."""

from __future__ import annotations

import math

from arborsim.plan.results import CandidateResult, Fleet


def machines_for(load: float, largest_load: float) -> int:
    """How many machines share a load so that none has more than the largest."""
    return max(1, math.ceil(load / largest_load - 1e-9))


def fleet_for(candidate: CandidateResult, load: float | None) -> Fleet | None:
    """Machines for a load, each with an equal part of it."""
    if load is None or candidate.largest is None or candidate.at_largest is None:
        return None
    machines = machines_for(load, candidate.largest)
    price = candidate.price_per_hour
    hourly = None if price is None else (machines * price[0], machines * price[1])
    cost = candidate.at_largest.cost_per_1000
    if cost is not None:  # machines that are less busy cost the same, by the hour
        idle = machines * candidate.largest / load
        cost = (idle * cost[0], idle * cost[1])
    return Fleet(load, machines, machines * candidate.gpus, hourly, cost)
