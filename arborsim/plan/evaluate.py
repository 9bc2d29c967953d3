"""One candidate: whether it fits, the largest load that meets the target, and figures there.

The largest load is found run by run, then confirmed.  Loads in searches per second lie 2% apart
(`Workload.resolution`); numbers of clients are whole, and 2% apart where that is more than one.
Candidates that are compared are therefore tried at the same loads, with the same arrivals and
searches: where one meets the target at all loads at which another does, its largest load is no
smaller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import NormalDist

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.machine.places import ClosedLoop
from arborsim.machine.price import Price
from arborsim.machine.program import PricedProgram
from arborsim.machine.terms import plan_name
from arborsim.plan.arrivals import ClientLoop
from arborsim.plan.demands import MixDemands, solved
from arborsim.plan.results import (
    INFEASIBLE,
    MET,
    MISSED,
    UNFIT,
    Alone,
    CandidateResult,
    LoadPoint,
    machines_for,
)
from arborsim.plan.runs import MOST_AT_ONCE, Bench, Run, summed_up
from arborsim.plan.statistics import Estimate, rate_interval
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
    latency = np.array([each.seconds for each in engine.alone])
    token = np.array([s.per_token_s for s in report.searches])
    within = [
        not s.refused and target.allows(each.seconds, s.per_token_s)
        for s, each in zip(report.searches, engine.alone, strict=True)
    ]
    terms: dict[str, float] = defaultdict(float)
    for weight, priced, seconds in zip(weights, engine.demands, latency, strict=True):
        for name, value in cost_terms(priced, engine.price, float(seconds)).items():
            terms[name] += float(weight * value)

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
        dict(terms),
    )
    return alone, float(weights @ within) >= target.percentile / 100 - 1e-9


def too_slow_alone(workload: Workload, alone: Alone) -> str:
    """By how much the target is missed, and what would be met."""
    target, missed = workload.target, []
    if target.search_s is not None and alone.at_percentile_s > target.search_s:
        missed.append(f"{alone.at_percentile_s:.3g} s per search, not {target.search_s:.3g} s")
    token_s = alone.token_at_percentile_s
    if target.token_s is not None and token_s > target.token_s:
        missed.append(f"{1e3 * token_s:.3g} ms per token, not {1e3 * target.token_s:.3g} ms")
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
    except UsageError as error:
        return replace(result, status=UNFIT, reason=str(error))
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
    """The candidate's result if not even the model's weights fit; None if they do.

    That is known before any search is recorded.
    """
    geometry, hardware = workload.geometry, candidate.hardware
    usable = hardware.gpus * hardware.profile.usable_hbm_bytes
    if geometry.weight_bytes < usable:
        return None
    return _without(candidate, UNFIT, (
        f"{geometry.name} does not fit: its weights take {geometry.weight_bytes / 1e9:.2f} GB, and "
        f"{usable / 1e9:.2f} GB are usable; take larger or more GPUs"
    ))  # fmt: skip


def _without(each: Candidate, status: str, reason: str) -> CandidateResult:
    """A result without any figures."""
    return CandidateResult(
        each.number, each.hardware.name, each.policy.name, each.budget_text, each.shown_recall,
        each.hardware.gpus, each.hardware.price_per_hour, status, reason,
    )  # fmt: skip


SHARES = (0.4, 0.7, 0.9, 1.0, 1.1)


def load_curve(
    workload: Workload,
    hardware: Hardware,
    found: MixDemands,
    result: CandidateResult,
    shares: Sequence[float] = SHARES,
) -> tuple[LoadPoint, ...]:
    """Figures at shares of the largest load, rising; nothing for a candidate that has none.

    `result` was evaluated from `found`; its figures at the largest load, and at its part of the
    stated load, are points of the curve and not computed again.
    Loads of a closed loop are whole numbers of clients, each of them once.
    """
    if result.largest is None or result.at_largest is None:
        return ()
    bench, share = Bench(workload, hardware, found), solved(workload, found.verdicts)
    loads = {factor * result.largest for factor in shares}
    if isinstance(workload.arrivals, ClientLoop):
        loads = {float(max(1, round(load))) for load in loads}
    points = [result.at_largest]
    if result.at_stated is not None and result.at_stated.load != result.largest:
        points.append(result.at_stated)
    for load in sorted(loads - {point.load for point in points}):
        runs = [bench.run(load, seed) for seed in workload.seeds()]
        points.append(summed_up(bench, load, runs, share))
    return tuple(sorted(points, key=lambda point: point.load))


_WIDEST = 32  # steps of the grid
_MOST_CLIENTS = 1_000_000
_RATES = (6e-18, 1.6e17)  # searches per second: what any machine serves lies well between


@cache
def rates(resolution: float) -> tuple[float, ...]:
    """Searches per second, 1 among them, that lie a share of `resolution` apart."""
    step = 1 + resolution
    least, most = (int(math.log(each) / math.log(step)) for each in _RATES)
    return tuple(step**k for k in range(least, most))


@cache
def clients(resolution: float) -> tuple[float, ...]:
    """Whole numbers from 1 on, a share of `resolution` apart where that is more than one."""
    found = [1.0]
    while found[-1] < _MOST_CLIENTS:
        found.append(max(found[-1] + 1, float(math.floor(found[-1] * (1 + resolution)))))
    return tuple(found)


def below(loads: Sequence[float], load: float) -> int:
    """Which of `rates` or `clients` is the largest that is not above `load`; -1 for none."""
    return bisect_right(loads, load) - 1


def largest(meets: Callable[[int], bool], low: int, high: int, start: int) -> tuple[int, int]:
    """The last k at which something holds that holds up to some k and not beyond; and the next.

    Goes from `start` in growing steps until it has passed the border, then halves: the closer the
    start to the border, the fewer questions.  `meets` is asked about each k at most once, and only
    between `low`, at which it holds, and `high`, at which it does not.
    """
    width, k, rose, turned = 1, start, None, False
    while high - low > 1:
        k = (low + high) // 2 if turned else min(max(k, low + 1), high - 1)
        rises = meets(k)
        low, high = (k, high) if rises else (low, k)
        turned = turned or rose not in (None, rises)
        rose = rises
        k += width if rises else -width
        width = min(2 * width, _WIDEST)
    return low, high


_IDLE = 0.01  # a load that keeps a machine busy for this share of the time counts as none
_FIRST_GUESS = 0.8  # of what the machine finishes at most
_SCOUT = 0.25  # of a run, to find out where to begin
_SCOUTED = 400  # searches that a run has before its beginning tells anything


class LargestLoad:
    """The search for the largest load, run by run, and the figures at it.

    `result` has `alone`; what is found is added to it.  `solved` is the share of searches with a
    correct answer, if solved ones have a cost.
    """

    def __init__(self, bench: Bench, result: CandidateResult, solved: Estimate | None) -> None:
        self._bench, self._workload = bench, bench.workload
        self._result, self._solved = result, solved
        self._closed = isinstance(bench.workload.arrivals, ClientLoop)
        grid = clients if self._closed else rates
        self._loads = grid(bench.workload.resolution)
        self._last: dict[int, tuple[int, Run]] = {}  # seed -> k, its last run that met the target

    def found(self) -> CandidateResult:
        """The result with its largest load and the figures there, or why there is none."""
        borders: list[int] = []
        beyond, limits = [], []
        for seed in self._workload.seeds():
            low, high, why = self._range(seed)
            guess = borders[-1] if borders else self._guess(seed, low, high)
            border, over = largest(partial(self._meets, seed), low, high, guess)
            if border == low:
                return self._never()
            borders.append(border)
            beyond.append(over)
            limits.append(why if over == high else "target")
        k, runs = self._confirmed(min(borders))
        if not runs:
            return self._never()
        loads = [self._loads[each] for each in borders]
        point = self._point(self._loads[k], runs)
        return replace(
            self._result,
            status=MET,
            largest=self._loads[k],
            largest_by_seed=tuple(loads),
            spread=rate_interval(loads),
            refuted=self._loads[min(beyond)],
            limited_by=limits[int(np.argmin(borders))],
            at_largest=point,
            at_stated=self._at_stated(point),
        )

    def _at_stated(self, at_largest: LoadPoint) -> LoadPoint | None:
        """One machine of as many as the stated load needs, with its part of it."""
        stated = self._workload.arrivals.stated
        if stated is None:
            return None
        load = stated / machines_for(stated, at_largest.load)
        if self._closed:
            load = float(max(1, round(load)))
        if load == at_largest.load:
            return at_largest
        return self._point(load, [self._bench.run(load, seed) for seed in self._workload.seeds()])

    def _range(self, seed: int) -> tuple[int, int, str]:
        """A k that meets the target, one that does not, and why that one does not."""
        if self._closed:
            most = self._workload.searches * MOST_AT_ONCE
            return -1, below(self._loads, most) + 1, "run length"
        rate, full = self._bench.keeps_up_with(seed)
        alone = self._result.alone
        assert alone is not None
        low = below(self._loads, _IDLE / alone.seconds)
        why = "throughput" if full and self._bench.knows_rate(seed) else "run length"
        return low, max(low + 1, below(self._loads, rate) + 1), why

    def _guess(self, seed: int, low: int, high: int) -> int:
        """Where to begin: where the beginning of the run seems to have its border."""
        first = (low + high) // 2
        if not self._closed:
            first = below(self._loads, self._expected(self._loads[high]))
        if self._workload.searches < _SCOUTED:
            return first

        def meets(k: int) -> bool:
            return self._bench.scout(self._loads[k], seed, _SCOUT)

        return largest(meets, low, high, first)[0]

    def _expected(self, full_per_s: float) -> float:
        """About the rate that meets the target, of a machine that finishes `full_per_s` at most.

        A search takes longer with every other one that is in the machine: alone what it takes alone
        (`result.alone`), and with as many as a run can hold what Little's law says.  So the target
        tells how many others it allows.  Where the rate is m per search's stay, an arriving search
        meets Poisson(m) others, of which the target's percentile counts.
        """
        alone, target = self._result.alone, self._workload.target
        assert alone is not None
        pairs = ((target.search_s, alone.at_percentile_s),
                 (target.token_s, alone.token_at_percentile_s))  # fmt: skip
        slower = min(limit / taken for limit, taken in pairs if limit is not None and taken > 0)
        most = max(2, int(self._workload.searches * MOST_AT_ONCE))
        each = (most / full_per_s / alone.seconds - 1) / (most - 1)  # slower by, per other search
        ceiling = _FIRST_GUESS * full_per_s
        if each <= 0 or slower <= 1:
            return ceiling
        z = NormalDist().inv_cdf(target.percentile / 100)
        others = (slower - 1) / each
        met = ((math.sqrt(z * z + 4 * others) - z) / 2) ** 2
        return min(ceiling, met / (alone.seconds * (1 + met * each)))

    def _meets(self, seed: int, k: int) -> bool:
        run = self._bench.attempt(self._loads[k], seed)
        if run is not None:
            # Later ones are closer to the border: only there is a run looked at again.
            self._last[seed] = (k, run)
        return run is not None

    def _confirmed(self, k: int) -> tuple[int, list[Run]]:
        """All runs at the largest load that meets the target in every one of them, from k down."""
        for lower in range(k, max(k - 20, -1), -1):
            runs = [
                self._last[seed][1]
                if seed in self._last and self._last[seed][0] == lower
                else self._bench.run(self._loads[lower], seed)
                for seed in self._workload.seeds()
            ]
            if all(run.meets for run in runs):
                return lower, runs
        return k, []

    def _point(self, load: float, runs: list[Run]) -> LoadPoint:
        return summed_up(self._bench, load, runs, self._solved, None if self._closed else load)

    def _never(self) -> CandidateResult:
        reason = "searches meet the target alone, but not together with others"
        return replace(self._result, status=MISSED, reason=reason)
