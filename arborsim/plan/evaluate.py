"""One candidate: whether it fits, the largest load that meets the target, and figures there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.machine.cost import CostModel
from arborsim.machine.places import ClosedLoop
from arborsim.machine.price import Price
from arborsim.machine.program import PricedProgram, SearchDemand
from arborsim.machine.terms import plan_name
from arborsim.plan.arrivals import ClientLoop
from arborsim.plan.demands import MixDemands
from arborsim.plan.largest import LargestLoad
from arborsim.plan.results import INFEASIBLE, MISSED, UNFIT, Alone, CandidateResult, LoadPoint
from arborsim.plan.runs import Bench, summed_up
from arborsim.plan.statistics import Estimate, solved_share
from arborsim.plan.workload import Candidate, Hardware, Workload

#: Terms that hide behind others, or behind each other; what is not hidden adds up.
HIDDEN = "hidden behind others"


def cost_terms(priced: PricedProgram, price: Price, alone_s: float) -> Mapping[str, float]:
    """Seconds of each cost term of one search; they add up to `alone_s`, what it takes by itself.

    Reading memory and computing hide behind each other (a roofline), and streaming and attention on
    the CPU behind both: what is hidden is the last term, and negative.
    """
    terms: dict[str, float] = defaultdict(float)
    for op in priced.ops:
        for term in price.op_terms(priced.info, op):
            terms[plan_name(term.name)] += term.seconds
    for name, term in price.iteration_terms(priced.info, priced.demand.pieces):
        terms[name] += term.seconds + term.hidden_s
    for chain in priced.chains:
        for leg in chain:
            name = "transfers to HBM" if leg.up else "transfers to DDR"
            terms[name] += price.transfer_s(leg.bytes, leg.up)
    terms[HIDDEN] = alone_s - sum(terms.values())
    return dict(terms)


def weights_too_large(workload: Workload, hardware: Hardware) -> str:
    """Why the model's weights alone leave no memory, which needs no search to know; "" if not."""
    geometry, gpus = workload.geometry, hardware.gpus
    usable = gpus * hardware.profile.usable_hbm_bytes
    if geometry.weight_bytes < usable:
        return ""
    return (
        f"{geometry.name} does not fit: its weights take {geometry.weight_bytes / 1e9:.2f} GB, and "
        f"{usable / 1e9:.2f} GB are usable; take larger or more GPUs"
    )


def _peak_kv_bytes(demand: SearchDemand) -> int:
    """HBM for keys and values of a search by itself."""
    last = demand.column("iterations") - 1
    held = demand.column("hbm_bytes") + last * demand.column("hbm_bytes_growth")
    return int(held.max(initial=0))


def too_large(workload: Workload, hardware: Hardware, found: MixDemands) -> str:
    """What the model and the smallest search need, against what the GPUs have."""
    geometry = workload.geometry
    options = replace(workload.serving, tensor_parallel=hardware.gpus)
    price = Price(CostModel(hardware.profile, geometry), options)
    workspace = hardware.gpus * price.workspace_bytes(found.demands, options.prefill_chunk)
    least = min(map(_peak_kv_bytes, found.demands), default=0)
    usable = hardware.gpus * hardware.profile.usable_hbm_bytes
    return (
        f"{geometry.name} does not fit: {geometry.weight_bytes / 1e9:.2f} GB of weights + "
        f"{workspace / 1e9:.2f} GB of activations + at least {least / 1e9:.2f} GB of keys and "
        f"values for one search, and {usable / 1e9:.2f} GB are usable; take larger or more GPUs"
    )


def too_many_refused(bench: Bench) -> str:
    """Why too many searches can never be served; "" if enough can."""
    engine, workload = bench.engine, bench.workload
    ddr_bytes = engine.price.cost.profile.ddr_bytes + workload.serving.nvme_bytes
    hbm = np.array([each.peak_hbm_bytes for each in engine.alone])
    ddr = np.array([priced.demand.peak_ddr_bytes for priced in engine.demands])
    refused = (hbm > engine.kv_bytes) | (ddr > ddr_bytes)
    worst = max(int(refused[drawn[workload.warm_up :]].sum()) for drawn in bench.drawn.values())
    if worst <= bench.allowed:
        return ""
    share = worst / (workload.searches - workload.warm_up)
    what, most, room = ("HBM", hbm.max(), engine.kv_bytes)
    if most <= room:
        what, most, room = "DDR", ddr.max(), ddr_bytes
    return (
        f"{share:.1%} of the searches never fit: the largest needs {most / 1e9:.2f} GB of {what} "
        f"for its keys and values, and there are {room / 1e9:.2f} GB; a smaller budget or more "
        "memory would serve them"
    )


def served_alone(bench: Bench) -> tuple[Alone, bool]:
    """Searches one after the other, and whether enough of them are within the limits."""
    engine, workload = bench.engine, bench.workload
    target = workload.target
    report = engine.run(ClosedLoop(1, tuple(range(len(engine.demands)))))
    drawn = np.concatenate([each[workload.warm_up :] for each in bench.drawn.values()])
    weights = np.bincount(drawn, minlength=len(engine.demands)) / len(drawn)
    served = np.array([not s.refused for s in report.searches])
    latency = np.array([each.seconds for each in engine.alone])
    token = np.array([s.per_token_s for s in report.searches])
    within = served & (latency <= (np.inf if target.search_s is None else target.search_s))
    within &= token <= (np.inf if target.token_s is None else target.token_s)
    terms: dict[str, float] = {}
    for weight, priced, seconds in zip(weights, engine.demands, latency, strict=True):
        for name, value in cost_terms(priced, engine.price, float(seconds)).items():
            terms[name] = terms.get(name, 0.0) + float(weight * value)

    def mean(values: list[float]) -> float:
        return float(weights @ np.array(values, dtype=np.float64))

    sources = [priced.demand for priced in engine.demands]
    alone = Alone(
        mean([each.seconds for each in engine.alone]),
        mean([each.peak_hbm_bytes for each in engine.alone]),
        mean([each.peak_ddr_bytes for each in sources]),
        mean([each.prompt_tokens for each in sources]),
        mean([each.generated_tokens for each in sources]),
        float(np.percentile(latency[drawn], target.percentile)),
        float(np.percentile(token[drawn], target.percentile)),
        terms,
    )
    return alone, float(weights @ within) >= target.percentile / 100 - 1e-9


def too_slow_alone(workload: Workload, alone: Alone) -> str:
    """By how much the target is missed, and what would be met."""
    target, missed = workload.target, []
    if target.search_s is not None and alone.at_percentile_s > target.search_s:
        missed.append(f"{alone.at_percentile_s:.3g} s per search, not {target.search_s:.3g} s")
    if target.token_s is not None and alone.token_at_percentile_s > target.token_s:
        missed.append(
            f"{1e3 * alone.token_at_percentile_s:.3g} ms per token, not "
            f"{1e3 * target.token_s:.3g} ms"
        )
    what = " and ".join(missed) or "a search that meets one limit misses the other"
    return f"even alone on the machine, {target.percentile:g}% of the searches take up to {what}"


def evaluate(workload: Workload, candidate: Candidate, found: MixDemands) -> CandidateResult:
    """Find the largest load of one candidate, whose hardware need not be the workload's.

    `found` holds the demands of the workload's searches under the candidate.
    """
    hardware = candidate.hardware
    result = _without(candidate, INFEASIBLE, found.infeasible)
    if found.infeasible:
        return result
    try:
        bench = Bench(workload, hardware, found)
    except UsageError:
        return replace(result, status=UNFIT, reason=too_large(workload, hardware, found))
    counts = np.bincount(np.concatenate(list(bench.drawn.values())), minlength=len(found.places))
    quality = found.quality(counts.astype(np.float64))
    result = replace(result, pool=bench.engine.pool, quality=quality)
    if why := too_many_refused(bench):
        return replace(result, status=UNFIT, reason=why)
    alone, meets = served_alone(bench)
    result = replace(result, alone=alone)
    if not meets:
        return replace(result, status=MISSED, reason=too_slow_alone(workload, alone))
    # What dropping tokens does to answers is not known, so a solved search has no cost.
    share = solved(workload, found.verdicts) if quality.exact else None
    return LargestLoad(bench, result, share).found()


def unfit(workload: Workload, candidate: Candidate) -> CandidateResult | None:
    """The candidate's result if not even the model's weights fit; None if they do."""
    why = weights_too_large(workload, candidate.hardware)
    return _without(candidate, UNFIT, why) if why else None


def _without(each: Candidate, status: str, reason: str) -> CandidateResult:
    """A result without any figures."""
    return CandidateResult(
        each.number, each.hardware.name, each.policy.name, each.budget_text, each.shown_recall,
        each.hardware.gpus, each.hardware.price_per_hour, status, reason,
    )  # fmt: skip


def solved(workload: Workload, verdicts: Iterable[tuple[int, int]]) -> Estimate | None:
    """Share of the mix's searches with a correct answer, from each one's entry and verdict."""
    right, judged = [0] * len(workload.mix), [0] * len(workload.mix)
    for entry, verdict in verdicts:
        judged[entry] += verdict >= 0
        right[entry] += verdict == 1
    return solved_share([entry.weight for entry in workload.mix], right, judged)


SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)


def load_curve(
    workload: Workload,
    hardware: Hardware,
    found: MixDemands,
    result: CandidateResult,
    shares: Sequence[float] = SHARES,
) -> tuple[LoadPoint, ...]:
    """Figures at shares of the largest load, rising; nothing for a candidate that has none.

    `result` was evaluated from `found`; its figures at the largest load are not computed again.
    Loads of a closed loop are whole numbers of clients, each of them once.
    """
    if result.largest is None or result.at_largest is None:
        return ()
    bench, share = Bench(workload, hardware, found), solved(workload, found.verdicts)
    loads = {factor * result.largest for factor in shares}
    if isinstance(workload.arrivals, ClientLoop):
        loads = {float(max(1, round(load))) for load in loads}
    points = [result.at_largest]
    for load in sorted(loads - {result.largest}):
        runs = [bench.run(load, seed) for seed in workload.seeds()]
        points.append(summed_up(bench, load, runs, share))
    return tuple(sorted(points, key=lambda point: point.load))
