"""What a report shows beyond a plan: more loads, one machine over time, and sensitivities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arborsim.core.workers import in_order
from arborsim.plan.demands import MixDemands
from arborsim.plan.evaluate import load_curve
from arborsim.plan.plan import Planner
from arborsim.plan.results import CandidateResult, LoadPoint, PlanResult, compared_cost
from arborsim.plan.sensitivity import (
    ASSUMPTIONS,
    Assumption,
    Sensitivity,
    changed,
    elsewhere,
    matters,
    server,
)
from arborsim.plan.timeline import timeline
from arborsim.plan.workload import Candidate, Workload

#: Candidates with a curve: the recommended one, its alternative, and others.
MOST_CURVES = 4
_CURVE_UNITS = 2  # of progress, of which each assumption is 1


@dataclass(frozen=True)
class Task:
    """A curve, or one assumption changed, for a process of its own."""

    workload: Workload
    candidate: Candidate
    found: MixDemands
    #: As the plan has it, for a curve; for an assumption, as a short run of it came out.
    result: CandidateResult
    assumption: Assumption | None = None


def work_on(task: Task) -> tuple[LoadPoint, ...] | Sensitivity:
    """Do the task."""
    if task.assumption is None:
        return load_curve(task.workload, task.candidate.hardware, task.found, task.result)
    serve = server(task.workload, task.candidate, task.found)
    profile, demands = task.candidate.hardware.profile, task.found.demands
    return changed(profile, demands, serve, task.result, task.assumption)


def compared(plan: PlanResult) -> list[int]:
    """Numbers of the candidates with a curve.

    The recommendation's come first, then the recommended policy on another GPU, then the cheapest.
    """
    named = (plan.recommendation.candidate, plan.recommendation.alternative)
    chosen = [each for each in plan.candidates if each.number == named[0]]
    cheapest = sorted(
        plan.met(), key=lambda each: (sum(compared_cost(each) or (float("inf"),)), each.number)
    )
    others = [*(each for one in chosen for each in elsewhere(plan, one)[:1]), *cheapest]
    numbers = [*(n for n in named if n is not None), *(each.number for each in others)]
    return list(dict.fromkeys(numbers))[:MOST_CURVES]


def work(plan: PlanResult) -> int:
    """Units of progress, at most."""
    named = [n for n in (plan.recommendation.candidate, plan.recommendation.alternative)
             if n is not None]  # fmt: skip
    return _CURVE_UNITS * len(compared(plan)) + len(ASSUMPTIONS) * len(named)


def detailed(
    planner: Planner,
    plan: PlanResult,
    jobs: int = 1,
    advance: Callable[[str, int], None] = lambda what, units: None,
) -> tuple[PlanResult, tuple[Sensitivity, ...]]:
    """The plan with curves and a timeline, and what its answer depends on.

    Parameters
    ----------
    planner : Planner
        Has made `plan`.
    jobs : int
        Processes; what comes out is the same.
    advance : callable
        Called with what was done, and units of `work`.
    """
    chosen = plan.recommendation.candidate
    if chosen is None:
        return plan, ()
    by_number = {each.number: each for each in plan.candidates}
    named = [n for n in (chosen, plan.recommendation.alternative) if n is not None]
    tasks = [_task(planner, by_number[number]) for number in compared(plan)]
    for number in named:
        tasks += _assumptions(planner, by_number[number])
    curves: dict[int, tuple[LoadPoint, ...]] = {}
    found: list[Sensitivity] = []
    for task, result in zip(tasks, in_order(work_on, tasks, min(jobs, len(tasks))), strict=True):
        if isinstance(result, Sensitivity):
            found.append(result)
            advance(f"{result.assumption.title} of {task.candidate.hardware.name}", 1)
        else:
            curves[task.result.number] = result
            advance(f"loads of {task.candidate.hardware.name}", _CURVE_UNITS)
    candidates = tuple(
        replace(each, curve=curves.get(each.number, each.curve)) for each in plan.candidates
    )
    watched = timeline(planner, by_number[chosen])
    return replace(plan, candidates=candidates, timeline=watched), tuple(found)


def _task(planner: Planner, result: CandidateResult) -> Task:
    candidate = planner.candidates[result.number]
    return Task(planner.workload, candidate, planner.demands_of(result.number), result)


def _assumptions(planner: Planner, result: CandidateResult) -> Sequence[Task]:
    """Each assumption that matters, with a short run with everything as it is."""
    task = _task(planner, result)
    demands = task.found.demands
    serve = server(task.workload, task.candidate, task.found)
    base = serve(task.candidate.hardware.profile, demands)
    return [
        replace(task, result=base, assumption=assumption)
        for assumption in ASSUMPTIONS
        if matters(assumption, demands, base)
    ]
