"""A candidate under several loads: how its figures change on the way to the largest one."""

from __future__ import annotations

from collections.abc import Sequence

from arborsim.plan.arrivals import ClosedLoop
from arborsim.plan.demands import VariantDemands
from arborsim.plan.evaluate import solved
from arborsim.plan.load_point import LoadPoint
from arborsim.plan.points import summed_up
from arborsim.plan.results import CandidateResult
from arborsim.plan.runs import Bench
from arborsim.plan.workload import Hardware, Workload

SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)


def load_curve(
    workload: Workload,
    hardware: Hardware,
    found: VariantDemands,
    result: CandidateResult,
    shares: Sequence[float] = SHARES,
) -> tuple[LoadPoint, ...]:
    """Figures at shares of the largest load, rising; nothing for a candidate that has none.

    Parameters
    ----------
    workload : Workload
    hardware : Hardware
    found : VariantDemands
        What `result` was evaluated from.
    result : CandidateResult
        Has the figures at its largest load, which are not computed again.
    shares : sequence of float
        Above 0; whole clients of a closed loop, each number once.
    """
    if result.largest is None or result.at_largest is None:
        return ()
    bench, share = Bench(workload, hardware, found), solved(workload, found)
    loads = {factor * result.largest for factor in shares}
    if isinstance(workload.arrivals, ClosedLoop):
        loads = {float(max(1, round(load))) for load in loads}
    rank, price = workload.target.percentile, hardware.price_per_hour
    points = [result.at_largest]
    for load in sorted(loads - {result.largest}):
        runs = [bench.run(load, seed) for seed in workload.seeds()]
        kept = [run for run in runs if run is not None]
        points.append(summed_up(load, kept, rank, price, share))
    return tuple(sorted(points, key=lambda point: point.load))
