"""Details of a report: more loads, one machine over time, and changed assumptions.

How much the answer depends on a number that the plan assumes: one number at a time is multiplied by
a few factors and the candidate is served again; everything else, the searches and their moments of
arrival included, stays as it was.  Searches of another length are the recorded ones stretched, so
that no trace has to be replayed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arborsim.core.workers import in_order
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import SearchDemand
from arborsim.products.plan.answer import elsewhere, price_that_changes
from arborsim.products.plan.costs import fleet_for, middle_cost
from arborsim.products.plan.demands import MixDemands, stretched
from arborsim.products.plan.evaluate import evaluate, load_curve
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.products.plan.timeline import timeline
from arborsim.products.plan.workload import Candidate, Workload

MOST_SEARCHES = 120  # per run
_SHARES = (0.5, 0.8, 1.0)  # of the largest load: the points of a curve, next to the stated load
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Assumption:
    """A number that can be changed."""

    key: str
    title: str
    kind: str  #: of its unit: bytes, bytes/s, FLOP/s or factor
    #: Of `HardwareProfile`, all multiplied; empty for the length of searches.
    fields: tuple[str, ...]


LENGTH = Assumption("length", "Length of searches", "factor", ())
ASSUMPTIONS: tuple[Assumption, ...] = (
    Assumption("hbm", "HBM size", "bytes", ("hbm_bytes",)),
    Assumption("bandwidth", "HBM bandwidth", "bytes/s", ("hbm_bytes_per_s",)),
    Assumption("compute", "Compute", "FLOP/s", ("flops_per_s",)),
    Assumption("pcie", "PCIe bandwidth", "bytes/s", ("h2d_bytes_per_s", "d2h_bytes_per_s")),
    LENGTH,
)


@dataclass(frozen=True)
class Variant:
    """A candidate with one number multiplied by `factor`."""

    factor: float
    result: CandidateResult


@dataclass(frozen=True)
class Sensitivity:
    """One candidate under one assumption."""

    candidate: int  #: its number
    assumption: Assumption
    base: float  #: the number at factor 1, in the assumption's unit; 1 for the length of searches
    variants: tuple[Variant, ...]  #: by factor, 1 among them
    idle: str = ""  #: why the number changes nothing, where that is known without serving again


#: Serves a candidate on a profile with these demands, in the order of the original ones.
Serve = Callable[[HardwareProfile, Sequence[SearchDemand]], CandidateResult]


def changed(
    profile: HardwareProfile,
    demands: Sequence[SearchDemand],
    serve: Serve,
    base: CandidateResult,
    assumption: Assumption,
    factors: Sequence[float] = FACTORS,
) -> Sensitivity:
    """A candidate under one assumption; `base` is its result with everything as it is."""
    variants = [Variant(1.0, base)]
    for factor in factors:
        if factor != 1:
            lengths = factor if assumption == LENGTH else 1.0
            longer = [stretched(demand, lengths) for demand in demands]
            variants.append(Variant(factor, serve(scaled(profile, assumption, factor), longer)))
    first = getattr(profile, assumption.fields[0]) if assumption.fields else 1
    ordered = tuple(sorted(variants, key=lambda each: each.factor))
    return Sensitivity(base.number, assumption, float(first), ordered)


def server(workload: Workload, candidate: Candidate, found: MixDemands) -> Serve:
    """Serves a candidate of a workload, in one run of at most `MOST_SEARCHES`.

    One short run tells how much a number matters; every factor sees the same searches at the same
    moments, so their differences are not those of the draws.
    """
    count = min(MOST_SEARCHES, workload.searches)
    short = workload.with_run_length(count, min(workload.warm_up, count // 5), 1)

    def serve(profile: HardwareProfile, demands: Sequence[SearchDemand]) -> CandidateResult:
        pairs = zip(found.recorded, demands, strict=True)
        moved = replace(found, recorded=tuple(replace(each, demand=one) for each, one in pairs))
        hardware = replace(candidate.hardware, profile=profile)
        result = evaluate(short, replace(candidate, hardware=hardware), moved, longer=False)
        fleet = fleet_for(result, workload.arrivals.stated, workload.replicas)
        curve = load_curve(short, hardware, moved, result, _SHARES)
        return replace(result, fleet=fleet, curve=curve)

    return serve


def without_effect(
    assumption: Assumption, demands: Sequence[SearchDemand], base: CandidateResult
) -> str:
    """Why a number changes nothing; "" if it may.

    Nothing crosses PCIe if no search asks for it by itself, nor because it is preempted.
    """
    points = [point for point in (*base.curve, base.at_largest) if point is not None]
    crossing = (
        any(len(demand.legs) or demand.column("streamed_bytes").any() for demand in demands)
        or any(demand.column("remote_bytes").any() for demand in demands)
        or any(point.preemptions_per_1000 or point.prefixes.ddr for point in points)
    )
    return "nothing moves over PCIe" if assumption.key == "pcie" and not crossing else ""


def scaled(profile: HardwareProfile, assumption: Assumption, factor: float) -> HardwareProfile:
    """`profile` with the assumption's numbers multiplied by `factor`; its name stays."""
    values = {name: getattr(profile, name) for name in assumption.fields}
    scaled = {name: type(value)(factor * value) for name, value in values.items()}
    return replace(profile, **scaled)


def break_even(plan: PlanResult) -> tuple[CandidateResult, float] | None:
    """`price_that_changes` what the plan recommends."""
    chosen, alternative, *_ = *plan.named(), None, None
    return None if chosen is None else price_that_changes(plan, chosen, alternative)


#: Candidates with a curve: the recommended one, its alternative, and others.
MOST_CURVES = 3
_CURVE_UNITS = 2  # of progress, of which each assumption is 1


@dataclass(frozen=True)
class VariantTask:
    """A curve, or one assumption changed, for a process of its own."""

    workload: Workload
    candidate: Candidate
    found: MixDemands
    #: As the plan has it, for a curve; for an assumption, as a short run of it came out.
    result: CandidateResult
    assumption: Assumption | None = None


def work_on(task: VariantTask) -> tuple[LoadPoint, ...] | Sensitivity:
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
    named = plan.named()
    others = elsewhere(plan, named[0])[:1] if named else []
    others += sorted(plan.met(), key=lambda each: (middle_cost(each), each.number))
    return list(dict.fromkeys(each.number for each in (*named, *others)))[:MOST_CURVES]


def work(plan: PlanResult, assumptions: bool = True) -> int:
    """Units of progress, at most."""
    changes = len(ASSUMPTIONS) * len(plan.named()) if assumptions else 0
    return _CURVE_UNITS * len(compared(plan)) + changes


def share_of_plan(workload: Workload, assumptions: bool = True) -> float:
    """How many candidates take about as long as what a page adds to a plan.

    A candidate takes about ten runs per seed; curves take three, and each changed number one short
    run for every one of those.
    """
    runs = 10 * workload.runs * workload.searches
    curves = MOST_CURVES * 3 * workload.runs * workload.searches
    short = min(MOST_SEARCHES, workload.searches)
    changes = 2 * len(ASSUMPTIONS) * (len(FACTORS) - 1) * 10 * short
    return (curves + (changes if assumptions else 0)) / runs


def detailed(
    planner: Planner,
    plan: PlanResult,
    jobs: int = 1,
    advance: Callable[[str, int], None] = lambda what, units: None,
    assumptions: bool = True,
) -> tuple[PlanResult, tuple[Sensitivity, ...]]:
    """The plan that `planner` has made, with curves and a timeline, and what its answer rests on.

    The latter only with `assumptions`.  `jobs` processes give the same; `advance` is called with
    what was done, and units of `work`.
    """
    named = [row.number for row in plan.named()]
    if not named:
        return plan, ()
    by_number = {each.number: each for each in plan.candidates}
    tasks = [_curve(planner, by_number[number]) for number in compared(plan)]
    idle: list[Sensitivity] = []
    for number in named if assumptions else ():
        own, without = _assumptions(planner, by_number[number])
        tasks += own
        idle += without
        for each in without:
            advance(f"{each.assumption.title} of {by_number[number].hardware}", 1)
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
    watched = timeline(planner, by_number[named[0]])

    def order(each: Sensitivity) -> tuple[int, int]:
        return named.index(each.candidate), ASSUMPTIONS.index(each.assumption)

    found = sorted([*found, *idle], key=order)
    return replace(plan, candidates=candidates, timeline=watched), tuple(found)


def _curve(planner: Planner, result: CandidateResult) -> VariantTask:
    candidate = planner.candidates[result.number]
    return VariantTask(planner.workload, candidate, planner.demands_of(result.number), result)


def _assumptions(
    planner: Planner, result: CandidateResult
) -> tuple[list[VariantTask], list[Sensitivity]]:
    """Each assumption that may matter, with a short run with everything as it is; and the others.

    Those need no runs: what is served is the same under every factor.
    """
    task = _curve(planner, result)
    profile, demands = task.candidate.hardware.profile, task.found.demands
    base = server(task.workload, task.candidate, task.found)(profile, demands)
    tasks, idle = [], []
    for each in ASSUMPTIONS:
        if why := without_effect(each, demands, base):
            same = tuple(Variant(factor, base) for factor in FACTORS)
            number = float(getattr(profile, each.fields[0]))
            idle.append(Sensitivity(base.number, each, number, same, why))
        else:
            tasks.append(replace(task, result=base, assumption=each))
    return tasks, idle
