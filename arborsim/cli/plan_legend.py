"""What the marks and columns of a plan's tables mean, a line each."""

from __future__ import annotations

from arborsim.plan.recommend import load_of
from arborsim.plan.results import PlanResult

#: Why there is no larger load, where it is not the target.
MARKS = {"throughput": "=", "run length": "+"}
_BEYOND = {
    "throughput": "beyond it searches arrive faster than they end",
    "run length": "runs are too short to tell: it may serve more, for less",
}


def legend(plan: PlanResult) -> list[str]:
    """Lines for what is in the tables; the marks first, then the columns as they come."""
    clients = plan.unit == "clients"
    largest = "clients" if clients else "offered"
    limits = {each.limited_by for each in plan.met()}
    lines = [
        "*  recommended",
        f"{largest}: the most that one machine is offered while every run meets the target;",
        "  all other figures are at that load",
        *(["  no mark: some run missed the target at the next larger load"] * ("target" in limits)),
        *(f"  {mark}  {_BEYOND[why]}" for why, mark in MARKS.items() if why in limits),
    ]
    if plan.runs > 1:
        lines.append(f"by seed: how much more the best of the {plan.runs} runs carries")
    lines += [
        "served: what ended per second; less in short runs, as machines begin empty",
        "runs out: HBM or DDR space if searches wait for a place (at peaks, long before",
        "  HBM %, a mean, is 100); else what is busy most: HBM speed, compute or PCIe",
    ]
    if any(each.at_largest and each.at_largest.cost_per_1000 for each in plan.met()):
        per = "served search" if clients else (
            "offered search (in the long run all are served)")  # fmt: skip
        lines.append(f"{plan.currency}/1000: per {per}")
    lines.append("kept: attention on tokens that are still readable; it is not accuracy")
    if any(each.fleet for each in plan.candidates) and plan.stated_load is not None:
        lines.append(f"fleet: GPUs for {load_of(plan.stated_load, plan)}")
    return [*lines, "HBM B/s, comp., PCIe %: shares of the time; pre-empt.: per 1,000 searches"]
