"""A plan's figures in sentences: what is recommended, at which load, and what runs out there."""

from __future__ import annotations

from arborsim.plan.limits import TIME
from arborsim.plan.load_point import LoadPoint
from arborsim.plan.results import CandidateResult, PlanResult

_RESOURCES = {
    "hbm": "HBM space", "host": "host memory", "searches": "allowed searches",
    "compute": "compute", "memory": "HBM bandwidth", "pcie_down": "PCIe to the host",
    "pcie_up": "PCIe from the host",
}  # fmt: skip


def money(cost: tuple[float, float] | None, currency: str) -> str:
    """A price or a range of prices, with as many digits as they need."""
    if cost is None:
        return "an unknown price"
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in cost)
    return f"{low} {currency}" if low == high else f"{low} to {high} {currency}"


def named(candidate: CandidateResult) -> str:
    """All that tells a candidate from the others, in a sentence."""
    budget = "" if candidate.budget == "-" else f" at a budget of {candidate.budget}"
    recall = "" if candidate.recall == "-" else f" (recall {candidate.recall})"
    return f"{candidate.policy}{budget}{recall} on {candidate.hardware}"


def load_of(load: float, plan: PlanResult) -> str:
    """``"1.25 searches/s"``, ``"12 clients"``."""
    return f"{load:.3g} {plan.unit}" if plan.unit != "clients" else f"{load:.0f} clients"


def limits_of(plan: PlanResult) -> str:
    """The target's limits: ``"60 s and 100 ms per token"``."""
    limits = []
    if plan.search_limit_s is not None:
        limits.append(f"{plan.search_limit_s:.4g} s")
    if plan.token_limit_s is not None:
        limits.append(f"{1e3 * plan.token_limit_s:.4g} ms per token")
    return " and ".join(limits)


def cost_at(cost: tuple[float, float] | None, load: float, plan: PlanResult) -> str:
    """A cost means nothing without the load that the machines' hours are divided by."""
    return f"{money(cost, plan.currency)} per 1,000 searches at {load_of(load, plan)}"


def resource(point: LoadPoint, limited_by: str) -> str:
    """What runs out, with its share; a share of space is none of time, so both are told apart.

    Where only the length of the runs is in the way of more load, time has not run out.
    """
    name, used = point.saturated, point.used
    busiest = max(TIME, key=lambda other: float(getattr(used, other)))
    time = f"{_RESOURCES[busiest]} is busy {getattr(used, busiest):.0%} of the time"
    if name in TIME and limited_by == "run length":
        return f"busiest is {_RESOURCES[name]} ({getattr(used, name):.0%} of the time)"
    first = f"what runs out first is {_RESOURCES[name]}"
    if name in TIME:
        return f"{first} (busy {getattr(used, name):.0%} of the time)"
    held = ""
    if name != "searches":
        held = f" (on average {getattr(used, name):.0%} held, but full at peaks)"
    return (
        f"{first}{held}, which limits how many searches have a place; {time}, which "
        "limits how fast these go on"
    )
