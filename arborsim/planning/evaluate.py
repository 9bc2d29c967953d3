"""One candidate: whether it fits, the largest load that meets the target, and figures there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from arborsim.errors import UsageError
from arborsim.hardware.cost import CostModel
from arborsim.planning.arrivals import ClosedLoop as ClosedArrivals
from arborsim.planning.demands import VariantDemands, drawn
from arborsim.planning.load_point import LoadPoint
from arborsim.planning.points import summed_up
from arborsim.planning.results import INFEASIBLE, MET, MISSED, UNFIT, Alone, CandidateResult
from arborsim.planning.runs import MOST_AT_ONCE, Bench, Run
from arborsim.planning.saturation import ClientGrid, Grid, RateGrid, largest
from arborsim.planning.statistics import Estimate, mean_interval, solved_share
from arborsim.planning.terms import cost_terms
from arborsim.planning.workload import Hardware, Workload
from arborsim.serving.demand import SearchDemand
from arborsim.serving.options import ClosedLoop
from arborsim.serving.pricing import Pricing
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

_IDLE = 0.01  # a load at which so much of the time is busy counts as none
_FIRST_GUESS = 0.8  # of what the machine finishes at most
_SCOUT = 0.25  # of a run, to find out where to begin
_SCOUTED = 400  # searches that a run has before its beginning tells anything


def evaluate(
    workload: Workload, hardware: Hardware, found: VariantDemands, number: int = 0
) -> CandidateResult:
    """Find the largest load of one candidate.

    Parameters
    ----------
    workload : Workload
    hardware : Hardware
        Need not be one of the workload's.
    found : VariantDemands
        The demands of the workload's searches under the candidate's variant.
    number : int
        The candidate's place in a plan.
    """
    variant = found.variant
    result = CandidateResult(
        number, hardware.name, variant.policy.name, variant.budget.text, variant.shown_recall,
        hardware.gpus, hardware.price_per_hour, INFEASIBLE, found.infeasible,
    )  # fmt: skip
    if found.infeasible:
        return result
    try:
        bench = Bench(workload, hardware, found)
    except UsageError:
        return replace(result, status=UNFIT, reason=_too_large(workload, hardware, found))
    result = replace(
        result, pool=bench.engine.pool, quality=found.quality(_draw_counts(workload, found))
    )
    if why := _refused(workload, bench):
        return replace(result, status=UNFIT, reason=why)
    alone, meets = _alone(workload, bench)
    result = replace(result, alone=alone)
    if not meets:
        return replace(result, status=MISSED, reason=_too_slow_alone(workload, alone))
    assert result.quality is not None
    # What dropping tokens does to answers is not known, so a solved search has no cost.
    share = solved(workload, found) if result.quality.exact else None
    return _Saturation(workload, bench, result, share).found()


def machines_for(load: float, largest_load: float) -> int:
    """How many machines share a load so that none has more than the largest."""
    return max(1, math.ceil(load / largest_load - 1e-9))


def _draw_counts(workload: Workload, found: VariantDemands) -> np.ndarray:
    """How often each recorded search is drawn in all runs; float64 ``[places]``."""
    counts = np.zeros(len(found.places))
    for seed in workload.seeds():
        counts += np.bincount(found.numbers(workload.draws(seed)), minlength=len(counts))
    return counts


def solved(workload: Workload, found: VariantDemands) -> Estimate | None:
    """Share of the mix's searches with a correct answer, as recorded."""
    verdicts = [recorded.demand.info.solved for recorded in found.recorded]
    return _share_solved(workload, found.places, verdicts)


def recorded_solved(workload: Workload, traces: Sequence[Path]) -> Estimate | None:
    """`solved`, from the traces themselves (`Workload.write_traces`)."""
    places, verdicts = drawn(workload), []
    for entry, number in places:
        (episode,) = TraceReader(traces[entry]).episodes((), start=number, stop=number + 1)
        answers = episode.correct[episode.kind == Kind.ANSWER]
        verdicts.append(int(answers[-1]) if len(answers) else -1)
    return _share_solved(workload, places, verdicts)


def _share_solved(
    workload: Workload, places: Sequence[tuple[int, int]], verdicts: Sequence[int]
) -> Estimate | None:
    right, judged = [0] * len(workload.mix), [0] * len(workload.mix)
    for (entry, _), verdict in zip(places, verdicts, strict=True):
        judged[entry] += verdict >= 0
        right[entry] += verdict == 1
    return solved_share([entry.weight for entry in workload.mix], right, judged)


def _too_large(workload: Workload, hardware: Hardware, found: VariantDemands) -> str:
    """What the model and the smallest search need, against what the GPUs have."""
    geometry = workload.geometry
    options = replace(workload.serving, tensor_parallel=hardware.gpus)
    pricing = Pricing(CostModel(hardware.profile, geometry), options)
    workspace = hardware.gpus * pricing.workspace_bytes(found.demands, options.prefill_chunk)
    least, usable = (
        _least_kv_bytes(found.demands),
        hardware.gpus * hardware.profile.usable_hbm_bytes,
    )
    return (
        f"{geometry.name} does not fit: {geometry.weight_bytes / 1e9:.2f} GB of weights + "
        f"{workspace / 1e9:.2f} GB of activations + at least {least / 1e9:.2f} GB of keys and "
        f"values for one search, and {usable / 1e9:.2f} GB are usable; take larger or more GPUs"
    )


def _least_kv_bytes(demands: list[SearchDemand]) -> int:
    """HBM for keys and values of the search that needs the least."""

    def peak(demand: SearchDemand) -> int:
        last = demand.column("iterations") - 1
        held = demand.column("hbm_bytes") + last * demand.column("hbm_bytes_growth")
        return int(held.max(initial=0))

    return min((peak(demand) for demand in demands), default=0)


def _refused(workload: Workload, bench: Bench) -> str:
    """Why too many searches can never be served; "" if enough can."""
    engine = bench.engine
    ddr_bytes = engine.pricing.cost.profile.ddr_bytes + workload.serving.nvme_bytes
    hbm = np.array([each.peak_hbm_bytes for each in engine.alone])
    ddr = np.array([priced.source.peak_ddr_bytes for priced in engine.demands])
    refused = (hbm > engine.kv_bytes) | (ddr > ddr_bytes)
    worst = max(int(refused[drawn[workload.warm_up :]].sum()) for drawn in bench.drawn.values())
    if worst <= bench.allowed:
        return ""
    share = worst / (workload.searches - workload.warm_up)
    what, most, room = ("HBM", hbm.max(), engine.kv_bytes)
    if hbm.max() <= engine.kv_bytes:
        what, most, room = "DDR", ddr.max(), ddr_bytes
    return (
        f"{share:.1%} of the searches never fit: the largest needs {most / 1e9:.2f} GB of {what} "
        f"for its keys and values, and there are {room / 1e9:.2f} GB; a smaller budget or more "
        "memory would serve them"
    )


def _alone(workload: Workload, bench: Bench) -> tuple[Alone, bool]:
    """Searches one after the other, and whether enough of them are within the limits."""
    engine, target = bench.engine, workload.target
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
        for name, value in cost_terms(priced, engine.pricing, float(seconds)).items():
            terms[name] = terms.get(name, 0.0) + float(weight * value)

    def mean(values: list[float]) -> float:
        return float(weights @ np.array(values, dtype=np.float64))

    sources = [priced.source for priced in engine.demands]
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


def _too_slow_alone(workload: Workload, alone: Alone) -> str:
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


class _Saturation:
    """The search for the largest load, run by run, and the figures at it."""

    def __init__(
        self, workload: Workload, bench: Bench, result: CandidateResult, share: Estimate | None
    ) -> None:
        self._workload = workload
        self._bench = bench
        self._result = result
        self._solved = share
        self._closed = isinstance(workload.arrivals, ClosedArrivals)
        self._grid: Grid = ClientGrid() if self._closed else RateGrid()
        self._last: dict[int, tuple[int, Run]] = {}  # seed -> k, its last run that met the target

    def found(self) -> CandidateResult:
        seeds = self._workload.seeds()
        borders: list[int] = []
        beyond: list[int] = []
        limits: list[str] = []
        for seed in seeds:
            low, high, why = self._range(seed)
            guess = borders[-1] if borders else self._guess(seed, low, high)
            border, over = largest(self._meets(seed), low, high, guess)
            if border == low:
                return self._never()
            borders.append(border)
            beyond.append(over)
            limits.append(why if over == high else "target")
        k, runs = self._confirmed(min(borders))
        if not runs:
            return self._never()
        loads = [self._grid.load(each) for each in borders]
        point = self._point(self._grid.load(k), runs)
        return replace(
            self._result,
            status=MET,
            largest=self._grid.load(k),
            largest_by_seed=tuple(loads),
            spread=mean_interval(loads),
            refuted=self._grid.load(min(beyond)),
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
        runs = [self._bench.run(load, seed) for seed in self._workload.seeds()]
        return self._point(load, [run for run in runs if run is not None])

    def _range(self, seed: int) -> tuple[int, int, str]:
        """A k that meets the target, one that does not, and why that one does not."""
        if self._closed:
            most = self._workload.searches * MOST_AT_ONCE
            return -1, self._grid.below(most) + 1, "run length"
        rate, full = self._bench.keeps_up_with(seed)
        alone = self._result.alone
        assert alone is not None
        low = self._grid.below(_IDLE / alone.seconds)
        return low, max(low + 1, self._grid.below(rate) + 1), "throughput" if full else "run length"

    def _guess(self, seed: int, low: int, high: int) -> int:
        """Where to begin: where the beginning of the run seems to have its border."""
        if self._closed:
            first = (low + high) // 2
        else:
            first = self._grid.below(_FIRST_GUESS * self._grid.load(high))
        if self._workload.searches < _SCOUTED:
            return first

        def meets(k: int) -> bool:
            return self._bench.scout(self._grid.load(k), seed, _SCOUT)

        return largest(meets, low, high, first)[0]

    def _meets(self, seed: int) -> Callable[[int], bool]:
        def meets(k: int) -> bool:
            run = self._bench.run(self._grid.load(k), seed, whole=False)
            if run is None or not run.meets:
                return False
            # Later ones are closer to the border, and it is only there that a run is looked at.
            self._last[seed] = (k, run)
            return True

        return meets

    def _confirmed(self, k: int) -> tuple[int, list[Run]]:
        """All runs at the largest load that meets the target in every one of them, from k down."""
        for lower in range(k, k - 20, -1):
            if self._closed and lower < 0:
                break
            runs = [self._run(lower, seed) for seed in self._workload.seeds()]
            if all(run.meets for run in runs):
                return lower, runs
        return k, []

    def _run(self, k: int, seed: int) -> Run:
        known, run = self._last.get(seed, (None, None))
        if run is None or known != k:
            run = self._bench.run(self._grid.load(k), seed)
        assert run is not None
        return run

    def _point(self, load: float, runs: list[Run]) -> LoadPoint:
        price, rank = self._result.price_per_hour, self._workload.target.percentile
        return summed_up(load, runs, rank, price, self._solved, None if self._closed else load)

    def _never(self) -> CandidateResult:
        """Alone, enough searches meet the target; beside others, at any load, they do not."""
        return replace(
            self._result,
            status=MISSED,
            reason="searches meet the target alone, but not beside any others",
        )
