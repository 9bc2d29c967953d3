"""A plan's figures in words: loads, prices, limits, candidates, and what runs out first."""

from __future__ import annotations

from arborsim.products.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.products.plan.runs import TIME

#: Names of `LoadPoint.saturated`.
RESOURCES = {
    "hbm": "HBM space",
    "host": "host memory",
    "below": "memory below DDR",
    "searches": "allowed searches",
    "compute": "compute",
    "memory": "HBM bandwidth",
    "pcie_down": "PCIe to the host",
    "pcie_up": "PCIe from the host",
}


def money(cost: tuple[float, float] | None, currency: str) -> str:
    """A price or a range of prices, with as many digits as they need."""
    if cost is None:
        return "an unknown price"
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in cost)
    return f"{low} {currency}" if low == high else f"{low} to {high} {currency}"


def named(candidate: CandidateResult) -> str:
    """`CandidateResult.name`, spelled out for a sentence."""
    budget = "" if candidate.budget == "-" else f" at a budget of {candidate.budget}"
    recall = "" if candidate.recall == "-" else f" (recall {candidate.recall})"
    return f"{candidate.policy}{budget}{recall} on {candidate.hardware}"


def load_of(load: float, plan: PlanResult) -> str:
    """``"1.25 searches/s"``, ``"12 clients"``."""
    return f"{load:.3g} {plan.unit}" if plan.unit != "clients" else f"{load:.0f} clients"


def limits_of(plan: PlanResult) -> str:
    """The target's limits: ``"60 s and 100 ms per token"``."""
    search, token = plan.search_limit_s, plan.token_limit_s
    limits = [] if search is None else [f"{search:.4g} s"]
    return " and ".join(limits if token is None else [*limits, f"{1e3 * token:.4g} ms per token"])


def resource(point: LoadPoint, limited_by: str) -> str:
    """What runs out; where only the runs' length prevents more load, time has not run out."""
    name = point.saturated
    if name in TIME and limited_by == "run length":
        return f"busiest is {RESOURCES[name]} ({getattr(point.used, name):.0%} of the time)"
    return f"what runs out first is {first_out(point)}"


def first_out(point: LoadPoint) -> str:
    """What runs out first, with its share; a share of space is none of time, so each is named."""
    name, used = point.saturated, point.used
    if name in TIME:
        return f"{RESOURCES[name]} (busy {getattr(used, name):.0%} of the time)"
    held = ""
    if name != "searches":
        held = f" (on average {getattr(used, name):.0%} held, but full at peaks)"
    busiest = max(TIME, key=lambda other: float(getattr(used, other)))
    return (
        f"{RESOURCES[name]}{held}, which limits how many searches have a place; "
        f"{RESOURCES[busiest]} is busy {getattr(used, busiest):.0%} of the time, which limits how "
        "fast these go on"
    )
