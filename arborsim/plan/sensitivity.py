"""How much a plan's answer depends on single numbers that it assumes.

One number at a time is multiplied by a few factors and the candidate is served again; everything
else, the searches and their moments of arrival included, stays as it was.  Searches of another
length are the recorded ones stretched, so that no trace has to be replayed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import SearchDemand
from arborsim.plan.demands import MixDemands, stretched
from arborsim.plan.evaluate import evaluate, load_curve
from arborsim.plan.results import CandidateResult, PlanResult, compared_cost, fleet_for
from arborsim.plan.workload import Candidate, Workload

MOST_SEARCHES = 200  # per run
_SHARES = (0.3, 0.6, 0.85, 1.0)  # of the largest load: the points of a curve
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
    """A candidate under one assumption; `base` is what comes of everything as it is."""
    variants = [Variant(1.0, base)]
    for factor in factors:
        if factor != 1:
            lengths = factor if assumption == LENGTH else 1.0
            longer = [stretched(demand, lengths) for demand in demands]
            variants.append(Variant(factor, serve(scaled(profile, assumption, factor), longer)))
    first = getattr(profile, assumption.fields[0]) if assumption.fields else 1
    ordered = tuple(sorted(variants, key=lambda each: each.factor))
    return Sensitivity(base.number, assumption, float(first), ordered)


def server(
    workload: Workload, candidate: Candidate, found: MixDemands, searches: int = MOST_SEARCHES
) -> Serve:
    """Serves a candidate of a workload, in one run of at most that many searches.

    One short run tells how much a number matters; every factor sees the same searches at the same
    moments, so their differences are not those of the draws.
    """
    count = min(searches, workload.searches)
    short = workload.with_run_length(count, min(workload.warm_up, count // 5), 1)

    def serve(profile: HardwareProfile, demands: Sequence[SearchDemand]) -> CandidateResult:
        pairs = zip(found.recorded, demands, strict=True)
        moved = replace(found, recorded=tuple(replace(each, demand=one) for each, one in pairs))
        hardware = replace(candidate.hardware, profile=profile)
        result = evaluate(short, replace(candidate, hardware=hardware), moved)
        fleet = fleet_for(result, workload.arrivals.stated)
        curve = load_curve(short, hardware, moved, result, _SHARES)
        return replace(result, fleet=fleet, curve=curve)

    return serve


def matters(assumption: Assumption, demands: Sequence[SearchDemand], base: CandidateResult) -> bool:
    """False for PCIe where nothing crosses it."""
    return assumption.key != "pcie" or uses_pcie(demands, base)


def uses_pcie(demands: Sequence[SearchDemand], result: CandidateResult) -> bool:
    """Whether anything crosses PCIe: by the searches themselves, or because they are preempted."""
    if any(len(demand.legs) or demand.column("streamed_bytes").any() for demand in demands):
        return True
    if any(demand.column("remote_bytes").any() for demand in demands):
        return True
    points = [point for point in (*result.curve, result.at_largest) if point is not None]
    return any(point.preemptions_per_1000 for point in points)


def scaled(profile: HardwareProfile, assumption: Assumption, factor: float) -> HardwareProfile:
    """`profile` with the assumption's numbers multiplied by `factor`; its name stays."""
    values = {
        name: type(getattr(profile, name))(factor * getattr(profile, name))
        for name in assumption.fields
    }
    return replace(profile, **values) if values else profile


def break_even(plan: PlanResult) -> tuple[CandidateResult, float] | None:
    """Who becomes the cheapest when the recommended GPU's price rises, and by what factor.

    That is the alternative if it is on another GPU, else the recommended policy and budget on the
    cheapest other one.  Prices are the middles of their ranges; None without another GPU or prices.
    """
    chosen = next((r for r in plan.candidates if r.number == plan.recommendation.candidate), None)
    if chosen is None:
        return None
    named = [r for r in plan.met() if r.number == plan.recommendation.alternative]
    others = [r for r in named if r.hardware != chosen.hardware] or elsewhere(plan, chosen)
    here, there = _middle(chosen), _middle(others[0]) if others else None
    return (others[0], there / here) if here and there else None


def elsewhere(plan: PlanResult, result: CandidateResult) -> list[CandidateResult]:
    """The same policy, budget and recall on other GPUs, the cheapest first."""
    same = (result.policy, result.budget, result.recall)
    found = [
        each
        for each in plan.met()
        if (each.policy, each.budget, each.recall) == same and each.hardware != result.hardware
    ]
    return sorted(found, key=lambda each: (_middle(each) or float("inf"), each.number))


def _middle(result: CandidateResult) -> float | None:
    cost = compared_cost(result)
    return None if cost is None else sum(cost) / 2
