"""One candidate: whether it fits, the largest load that meets the target, and figures there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.tiers import DDR, MEMORIES
from arborsim.machine.config import with_types
from arborsim.machine.program import Op
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.machine.state import chunk_tokens
from arborsim.machine.terms import check_explained, plan_name
from arborsim.products.generate.arrivals import ClientLoop
from arborsim.products.plan.costs import without_costs
from arborsim.products.plan.demands import MixDemands, solved
from arborsim.products.plan.largest import LargestLoad
from arborsim.products.plan.results import (
    INFEASIBLE,
    MISSED,
    RUN_LENGTH,
    UNFIT,
    Alone,
    CandidateResult,
    LoadPoint,
)
from arborsim.products.plan.runs import Bench, few_distinct, summed_up
from arborsim.products.plan.target import KINDS, Times
from arborsim.products.plan.workload import Candidate, Hardware, Workload, fewest_gpus

#: Terms that hide behind others, or behind each other; what is not hidden adds up.
HIDDEN = "hidden behind others"


def cost_terms(engine: ServingEngine, number: int) -> Mapping[str, float]:
    """Seconds of each cost term of one of the engine's searches by itself.

    Reading memory and computing hide behind each other (a roofline), and streaming and attention on
    the CPU behind both: what is hidden is the last term, and negative.  Each term comes from what
    the search asks for, and what it takes from serving it (`ServingEngine.alone`); raises
    `ResultError` if these differ (`check_explained`).
    """
    priced, price, alone = engine.demands[number], engine.price, engine.alone[number]
    terms: dict[str, float] = defaultdict(float)
    hidden_s = 0.0
    part = chunk_tokens(engine.options, price.engine)
    for op in priced.ops:
        prompt = op[0] == Op.PREFILL  # as it is served: in parts, if the engine does so
        info = priced.info
        of_op = price.prompt_terms(info, op[1], part) if prompt else price.op_terms(info, op)
        for term in of_op:
            terms[plan_name(term.name)] += term.seconds
    for name, term in price.iteration_terms(priced.info, priced.demand.pieces):
        terms[name] += term.seconds + term.hidden_s
        hidden_s += term.hidden_s
    behind_s = -alone.waited_s  # transfers hide as far as nothing waits for them
    for chain in priced.chains:
        for leg in chain:
            away = MEMORIES[leg.memory]
            name = f"transfers from {away}" if leg.up else f"transfers to {away}"
            name = "transfers to HBM" if leg.up and leg.memory == DDR else name
            terms[name] += (seconds := price.transfer_s(leg.bytes, leg.up, leg.memory))
            behind_s += seconds
    terms[HIDDEN] = -(hidden_s + behind_s)
    whose = f"{priced.info.policy}, episode {priced.info.episode} of {priced.info.trace}"
    check_explained(sum(terms.values()), alone.seconds, whose)
    return dict(terms)


def too_many_refused(bench: Bench) -> str:
    """Why too many searches can never be served; "" if enough can."""
    engine, workload = bench.engine, bench.workload
    ddr_bytes = engine.price.cost.profile.ddr_bytes + workload.serving.nvme_bytes
    hbm = np.array([each.peak_hbm_bytes for each in engine.alone])
    ddr = np.array([priced.demand.peak_ddr_bytes for priced in engine.demands])
    refused = (hbm > engine.kv_bytes) | (ddr > ddr_bytes)
    rooms = [("HBM", hbm, engine.kv_bytes), ("DDR", ddr, ddr_bytes)]
    for memory in engine.price.cost.profile.memories:
        own = [each.demand.peak_stored_bytes.get(memory.number, 0) for each in engine.demands]
        rooms.append((memory.name, np.array(own), memory.bytes))
        refused |= rooms[-1][1] > memory.bytes
    worst = max(int(refused[drawn[workload.warm_up :]].sum()) for drawn in bench.drawn.values())
    if worst <= bench.allowed:
        return ""
    share = worst / (workload.searches - workload.warm_up)
    what, peaks, room = next(each for each in rooms if each[1].max() > each[2])
    most = peaks.max()
    return (
        f"{share:.1%} of the searches never fit: the largest needs {most / 1e9:.2f} GB of {what} "
        f"for its keys and values, and there are {room / 1e9:.2f} GB; a smaller budget or more "
        "memory would serve them"
    )


def served_alone(bench: Bench) -> tuple[Alone, dict[int, Misses]]:
    """Searches one after the other; and by seed, how many of its measured ones miss the target.

    Each seed is judged by itself, as it is together with others: every run must meet the target.
    """
    engine, workload = bench.engine, bench.workload
    target, joint = workload.target, workload.target.groups
    report = engine.run(ClosedLoop(1, tuple(range(len(engine.demands)))))
    by_seed = {seed: each[workload.warm_up :] for seed, each in bench.drawn.items()}
    drawn = np.concatenate(list(by_seed.values()))
    weights = np.bincount(drawn, minlength=len(engine.demands)) / len(drawn)
    latency = np.array([each.seconds for each in engine.alone])
    token = np.array([s.per_token_s for s in report.searches])
    first = np.array([s.to_first_token_s for s in report.searches])
    pairs = zip(report.searches, map(Times, latency, first, token), strict=True)
    misses = np.array(
        [
            [s.refused != "" or not all(limit.allows(each) for limit in limits) for limits in joint]
            for s, each in pairs
        ]
    )
    terms: dict[str, float] = defaultdict(float)
    for number, weight in enumerate(weights.tolist()):
        for name, value in cost_terms(engine, number).items():
            terms[name] += float(weight * value)

    def at_percentile(seconds: np.ndarray, kind: str) -> float:
        """The result of the slowest seed."""
        each = (np.percentile(seconds[mine], target.of(kind)) for mine in by_seed.values())
        return float(max(each))

    def mean(values: list[float]) -> float:
        return float(weights @ np.array(values, dtype=np.float64))

    sources = [priced.demand for priced in engine.demands]
    alone = Alone(
        mean([each.seconds for each in engine.alone]),
        mean([each.peak_hbm_bytes for each in engine.alone]),
        mean([each.peak_ddr_bytes for each in sources]),
        mean([each.prompt_tokens for each in sources]),
        mean([each.generated_tokens for each in sources]),
        at_percentile(latency, "search"),
        at_percentile(token, "tpot"),
        dict(terms),
        {
            memory.name: mean([each.peak_stored_bytes.get(memory.number, 0) for each in sources])
            for memory in engine.price.cost.profile.memories
        },
        at_percentile(first, "ttft"),
    )
    counts = {seed: misses[mine].sum(axis=0).tolist() for seed, mine in by_seed.items()}
    return alone, {
        seed: max((Misses(*each) for each in zip(own, bench.missable(), strict=True)), key=_beyond)
        for seed, own in counts.items()
    }


class Misses(NamedTuple):
    """Searches that miss limits which belong together, and how many may."""

    missed: int
    allowed: int


def _beyond(misses: Misses) -> int:
    """By how many a seed misses its target, where that is above 0."""
    return misses.missed - misses.allowed


def too_slow_alone(bench: Bench, alone: Alone, misses: Mapping[int, Misses]) -> str:
    """By how much the target is missed, in which seed, and what would be met."""
    workload = bench.workload
    target, missed = workload.target, []
    for limit in target.limits:
        if (value := getattr(alone.at_percentiles, limit.kind)) > limit.seconds:
            kind = KINDS[limit.kind]
            taken, allowed_s = (f"{kind.per_s * s:.3g} {kind.unit}" for s in (value, limit.seconds))
            missed.append(f"{taken} {kind.per}, not {allowed_s}")
    what = " and ".join(missed) or "a search that meets one limit misses the other"
    said = f"even alone on the machine, {target.strictest:g}% of the searches take up to {what}"
    if min(map(_beyond, misses.values())) > 0:
        return said
    seed, (count, allowed) = max(misses.items(), key=lambda pair: _beyond(pair[1]))
    return (
        f"{said} in seed {seed}, where {count} of {workload.searches - workload.warm_up} miss it "
        f"and {allowed} may{few_distinct(workload, bench.drawn)}"
    )


def evaluate(
    workload: Workload, candidate: Candidate, found: MixDemands, longer: bool = True
) -> CandidateResult:
    """Find the largest load of one candidate, whose hardware need not be the workload's.

    `found` holds the demands of the workload's searches under the candidate.  Where the runs are
    too short to see a limit, `longer` ones are made of the same searches, over and over.
    """
    hardware = candidate.hardware
    result = _without(candidate, INFEASIBLE, found.infeasible)
    if found.infeasible:
        return result
    try:
        bench = Bench(workload, hardware, found)
    except UsageError as error:
        return replace(result, status=UNFIT, reason=str(error))
    counts = np.bincount(np.concatenate(list(bench.drawn.values())), minlength=len(found.origins))
    quality = found.quality(counts.astype(np.float64))
    result = replace(result, pool=bench.engine.pool, quality=quality)
    if why := too_many_refused(bench):
        return replace(result, status=UNFIT, reason=why)
    alone, misses = served_alone(bench)
    result = replace(result, alone=alone)
    if max(map(_beyond, misses.values())) > 0:
        return replace(result, status=MISSED, reason=too_slow_alone(bench, alone, misses))
    # What dropping tokens does to answers is not known, so a solved search has no cost.
    share = solved(workload, found.verdicts) if quality.exact else None
    tries = [bench, *(bench.longer(times) for times in _longer(bench, longer))]
    for own in tries:
        best = LargestLoad(own, result, share, own is not bench).found(own is tries[-1])
        if best.limited_by != RUN_LENGTH:
            break
    return best


#: Runs in which no limit was seen are lengthened up to this many times, and as long as a load takes
#: no more searches than this in all seeds together.
_LONGEST, _MOST_SERVED = 8, 20_000


def _longer(bench: Bench, longer: bool) -> list[int]:
    """How many times as long runs are, one try after the other.

    The first is long enough to know the machine's rate (`Bench.knows_rate`), if any is.
    """
    workload, seeds = bench.workload, bench.workload.seeds()
    most = min(_LONGEST, _MOST_SERVED // (workload.searches * workload.runs)) if longer else 1
    tries = [times for times in (2, 4, 8) if times <= most]
    if isinstance(workload.arrivals, ClientLoop):
        return tries
    knows = [
        times for times in tries if all(bench.longer(times).knows_rate(seed) for seed in seeds)
    ]
    return knows or tries[-1:]


def unfit(workload: Workload, candidate: Candidate) -> CandidateResult | None:
    """The candidate's result if not even the model's weights fit; None if they do.

    That is known before any search is recorded.
    """
    geometry, hardware = workload.geometry, candidate.hardware
    usable = hardware.gpus * hardware.profile.usable_hbm_bytes
    if geometry.weight_bytes < usable:
        return None
    reason = (
        f"{geometry.name} does not fit: its weights take {geometry.weight_bytes / 1e9:.2f} GB, and "
        f"{usable / 1e9:.2f} GB are usable; {_remedy(geometry, hardware)}"
    )
    return _without(candidate, UNFIT, reason)


def _remedy(geometry: Geometry, hardware: Hardware) -> str:
    """The option that makes a model's weights fit."""
    enough = fewest_gpus(hardware.profile, geometry)
    found = [f"--tp {enough} shares it among {enough} GPUs"] if enough else []
    for name in ("fp8", "int4"):
        smaller = with_types(geometry, name, "")
        if smaller.weight_bytes < 0.9 * geometry.weight_bytes:
            fewer = fewest_gpus(hardware.profile, smaller)
            if fewer is not None and (enough is None or fewer < enough):
                gpus = f" --tp {fewer}" if fewer != hardware.gpus else ""
                found.append(f"--weights {name}{gpus} takes {smaller.weight_bytes / 1e9:.0f} GB")
                break
    return " or ".join(found) or "take larger GPUs"


def _without(each: Candidate, status: str, reason: str) -> CandidateResult:
    """A result without any figures."""
    names = each.hardware.name, each.policy.name, each.budget_text, each.shown_recall
    price = each.hardware.price_per_hour
    return CandidateResult(each.number, *names, each.hardware.gpus, price, status, reason)


SHARES = (0.4, 0.7, 0.9, 1.0, 1.1)


def load_curve(
    workload: Workload,
    hardware: Hardware,
    found: MixDemands,
    result: CandidateResult,
    shares: Sequence[float] = SHARES,
) -> tuple[LoadPoint, ...]:
    """Figures at shares of the largest load, rising; nothing for a candidate that has none.

    `result` was evaluated from `found`. Its figures at the largest load, and at its part of the
    stated load, are points of the curve and not computed again.
    Loads of a closed loop are whole numbers of clients, each of them once.
    """
    if result.largest is None or result.at_largest is None:
        return ()
    bench, share = Bench(workload, hardware, found), solved(workload, found.verdicts)
    bench = bench.longer(max(1, result.searches // workload.searches))
    loads = {factor * result.largest for factor in shares}
    if isinstance(workload.arrivals, ClientLoop):
        loads = {float(max(1, round(load))) for load in loads}
    points = [result.at_largest]
    if result.at_stated is not None and result.at_stated.load != result.largest:
        points.append(result.at_stated)
    for load in sorted(loads - {point.load for point in points}):
        runs = [bench.run(load, seed) for seed in workload.seeds()]
        point = summed_up(bench, load, runs, share)
        points.append(point if result.at_largest.cost_per_1000 else without_costs(point))
    return tuple(sorted(points, key=lambda point: point.load))
