"""Runs of one candidate: a load and a seed in, what its searches met with out.

What runs out first is space for searches, or time.  Space (HBM, host memory, the allowed number of
searches) limits how many searches have a place at a time; it is full at peaks long before it is
full on average.  Time (of compute, HBM bandwidth and PCIe) limits how fast those that have a place
go on.  Both have shares between 0 and 1, but a share of space says nothing about a share of time,
so what runs out is not simply the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from arborsim.machine.clock import Command
from arborsim.machine.program import PIECE_COLUMNS
from arborsim.machine.report import SearchOutcome, ServingReport, Utilisation
from arborsim.machine.scheduler import Arrivals, ClosedLoop, Timed
from arborsim.machine.server import Server
from arborsim.machine.serving import ServingEngine, Watch, play_closed_form
from arborsim.products.generate.arrivals import ClientLoop
from arborsim.products.plan.demands import MixDemands
from arborsim.products.plan.results import LARGEST_ASSUMED, LoadPoint, Percentiles, Tokens
from arborsim.products.plan.statistics import (
    Estimate,
    cost_per_search,
    cost_per_solved,
    percentile,
    rate_interval,
    relative_error,
)
from arborsim.products.plan.target import Judge, Target, missable
from arborsim.products.plan.workload import Hardware, Workload

T = TypeVar("T")
#: A run shows a steady state only while fewer of its searches are in the machine than this share.
MOST_AT_ONCE = 1 / 3
#: The machine's rate counts as known up to this relative standard error (`relative_error`).
RATE_ERROR = 0.1


class Verdicts:
    """Judges measured searches while a run goes on, and ends it when all of them have ended.

    They are searches `first` to ``count - 1``, by arrival.  `ends_early` ends a run that is certain
    to miss the target.
    """

    def __init__(self, target: Target, first: int, count: int, ends_early: bool = True) -> None:
        self.first, self.count, self._ends_early = first, count, ends_early
        self._judges = [Judge(limits, first, count) for limits in target.groups]
        alone = len(self._judges) == 1
        #: Of all limits together: the goodput.
        self.good = self._judges[0] if alone else Judge(target.limits, first, count)
        self._all = self._judges if alone else [*self._judges, self.good]
        self.given_up = False
        self._ended = 0  # all before have ended

    @property
    def meets(self) -> bool:
        """Whether enough of the measured searches were within the limits."""
        return all(judge.met for judge in self._judges)

    def __call__(self, server: Server, command: Command, began_s: float) -> bool:
        searches, now = server.state.searches, server.state.clock.now
        for judge in self._all:
            judge.look(searches, now)
        if self._ends_early and any(judge.lost for judge in self._judges):
            self.given_up = True
            return True
        known = min(len(searches), self.count)
        while self._ended < known and searches[self._ended].ended:
            self._ended += 1
        return self._ended == self.count


@dataclass(frozen=True)
class Run:
    """One run."""

    meets: bool  #: whether enough of the measured searches were within the target's limits
    goodput: float  #: share of them that were within all limits
    measured: tuple[SearchOutcome, ...]  #: in order of arrival
    preemptions: int  #: of measured searches
    #: Over the time in which measured searches arrived, warm-up searches included.
    served_per_s: float
    concurrency: float
    queue: float
    peak_concurrency: int
    report: ServingReport
    seed: int = 0


class Bench:
    """A candidate's machine, ready for runs; refuses one that the model does not fit."""

    def __init__(self, workload: Workload, hardware: Hardware, found: MixDemands) -> None:
        self.workload, self.hardware = workload, hardware
        options = replace(workload.serving, tensor_parallel=hardware.gpus)
        self.engine = ServingEngine(found.demands, hardware.profile, workload.geometry, options)
        self.drawn = {seed: found.numbers(workload.draws(seed)) for seed in workload.seeds()}
        self._found, self._drawn_for = found, workload
        self._in_order: dict[tuple[int, int], list[int]] = {}  # what `_searches` has found
        demands = [each.demand for each in self.engine.demands]
        self._tokens = np.array([each.generated_tokens for each in demands])
        self._prompts = np.array([each.prompt_tokens for each in demands])

    def longer(self, times: int) -> Bench:
        """The same machine with longer runs, by a factor.

        They serve the same searches over and over: no others were recorded.
        """
        other, base = copy(self), self.workload
        other.workload = base.with_run_length(
            times * base.searches, times * base.warm_up, base.runs
        )
        other.drawn = {seed: np.tile(each, times) for seed, each in self.drawn.items()}
        other._in_order = {}
        return other

    @property
    def allowed(self) -> int:
        """Measured searches that may miss the strictest of the target's limits."""
        return min(self.missable())

    def missable(self) -> list[int]:
        """Measured searches that may miss limits which belong together (`Target.groups`)."""
        measured = self.workload.searches - self.workload.warm_up
        return [missable(limits, measured) for limits in self.workload.target.groups]

    def run(self, load: float, seed: int, also: Watch | None = None) -> Run:
        """Serve the seed's searches at a load, whether or not they meet the target.

        As many again follow them (`Workload.served`), so that the last ones do not meet a machine
        that empties; only measured ones count.  `also` is called after
        each command of the engine, too.
        """
        watch = self._watch(ends_early=False)
        return self._measured(self._served(load, seed, watch, also), watch, seed)

    def attempt(self, load: float, seed: int) -> Run | None:
        """The run if it meets the target; None, as soon as that is certain, if it does not."""
        watch = self._watch()
        report = self._served(load, seed, watch)
        run = None if watch.given_up else self._measured(report, watch, seed)
        return run if run is not None and run.meets else None

    def scout(self, load: float, seed: int, share: float) -> bool:
        """Whether the beginning of a run meets the target: a guess, for a share of the time."""
        watch = self._watch(share)
        self._served(load, seed, watch)
        return not watch.given_up and watch.meets

    def _searches(self, seed: int, count: int) -> list[int]:
        """Demands of the first `count` searches, and of as many behind them."""
        if (seed, count) not in self._in_order:
            known = min(count, self._drawn_for.searches)
            numbers = self._found.numbers(self._drawn_for.served(seed, known))
            self._in_order[seed, count] = np.resize(numbers, 2 * count).tolist()
        return self._in_order[seed, count]

    def _watch(self, share: float = 1.0, ends_early: bool = True) -> Verdicts:
        """Verdicts on this share of a run."""
        first, count = (int(share * n) for n in (self.workload.warm_up, self.workload.searches))
        return Verdicts(self.workload.target, first, count, ends_early)

    def _served(
        self, load: float, seed: int, watch: Verdicts, also: Watch | None = None
    ) -> ServingReport:
        """The first `watch.count` searches of a seed, and as many again, at a load."""
        numbers = self._searches(seed, watch.count)
        when = self.workload.arrivals.at(load, 2 * watch.count, seed)
        if isinstance(when, ClientLoop):
            assert when.clients is not None
            arrivals: Arrivals = ClosedLoop(when.clients, tuple(numbers), when.think_s)
        else:
            arrivals = Timed(tuple(zip(when.tolist(), numbers, strict=True)))

        def both(server: Server, command: Command, began_s: float) -> bool:
            assert also is not None
            also(server, command, began_s)
            return watch(server, command, began_s)

        return self.engine.run(
            arrivals, partial(play_closed_form, watch=watch if also is None else both)
        )

    def _measured(self, report: ServingReport, watch: Verdicts, seed: int) -> Run:
        measured = report.searches[watch.first : watch.count]
        return Run(
            watch.meets,
            watch.good.within / len(measured),
            tuple(measured),
            sum(s.preemptions for s in measured),
            *_occupation(report, measured[0].arrival_s, measured[-1].arrival_s),
            report,
            seed,
        )

    def tokens_of(self, numbers: Sequence[int], searches_per_s: float) -> Tokens:
        """Mean tokens of searches, by their demands; `searches_per_s` of them are paid for."""
        if not numbers:
            return Tokens(math.nan, math.nan, searches_per_s)
        prompt, generated = (float(n[numbers].mean()) for n in (self._prompts, self._tokens))
        return Tokens(prompt, generated, searches_per_s)

    def keeps_up_with(self, seed: int) -> tuple[float, bool]:
        """Searches per second that the machine finishes when it never lacks any.

        As many clients as a run of this length can hold in a steady state start one search after
        the other, without a pause.  Also whether some search had to wait for a place: if none did,
        more clients might get more done.
        """
        clients = max(1, int(self.workload.searches * MOST_AT_ONCE))
        searches = tuple(self._searches(seed, self.workload.searches))
        since: list[tuple[float, int]] = []

        def enough(server: Server, command: Command, began_s: float) -> bool:
            """Two thirds of the searches have ended; from the first third on it counts."""
            arrived = len(server.state.searches)
            if arrived >= 2 * clients and not since:
                since.append((server.state.clock.now, server.state.tally.tokens))
            return arrived >= 3 * clients

        report = self.engine.run(
            ClosedLoop(clients, searches), partial(play_closed_form, watch=enough)
        )
        begin_s, before = since[0] if since else (0.0, 0)
        # By tokens, not by searches that have ended: those under way are partly served.
        per_search = float(self._tokens[self.drawn[seed]].mean())
        seconds = report.total_s - begin_s
        if not per_search or not seconds:  # of prompts only
            ended = sum(search.finish_s >= 0 for search in report.searches)
            return ended / report.total_s, bool(report.first_s)
        return (report.tokens - before) / seconds / per_search, bool(report.first_s)

    def knows_rate(self, seed: int) -> bool:
        """Whether `keeps_up_with` saw enough searches to say that there is no larger rate.

        It sees a third of a run: that must be 100 searches, and more if few of them are far larger
        than the others.
        """
        seen = int(self.workload.searches * MOST_AT_ONCE)
        return relative_error(self._tokens[self.drawn[seed]], seen) <= RATE_ERROR


def _occupation(report: ServingReport, begin: float, end: float) -> tuple[float, float, float, int]:
    """Finished per second, mean searches in the machine and in the queue, the most in it."""
    times = np.array(
        [(s.arrival_s, s.admitted_s, s.finish_s) for s in report.searches if not s.refused],
        dtype=np.float64,
    ).reshape(-1, 3)
    arrived, admitted, finished = np.where(times < 0, np.inf, times).T  # -1: is still to come
    length = end - begin

    def mean(start: np.ndarray, stop: np.ndarray) -> float:
        overlap = np.minimum(stop, end) - np.maximum(start, begin)
        return float(np.maximum(overlap, 0.0).sum() / length) if length > 0 else 0.0

    moments = np.concatenate([admitted, finished])
    change = np.repeat([1, -1], [len(admitted), len(finished)])
    known = np.isfinite(moments)
    order = np.lexsort((change[known], moments[known]))
    inside = np.cumsum(change[known][order])
    done = float(((finished > begin) & (finished <= end)).sum())
    per_s = done / length if length > 0 else 0.0
    return per_s, mean(admitted, finished), mean(arrived, admitted), int(inside.max(initial=0))


TIME = ("compute", "memory", "pcie_down", "pcie_up")
#: Space counts as having run out if searches are without a place for at least this share of their
#: time, or lose a place at least so often per search.  A single burst in a long run does not.
WAITING = 0.01


def runs_out(runs: Sequence[Run]) -> str:
    """The resource that runs out first, over all runs of a load.

    It is the space (hbm, host or searches) that kept a search waiting first, if waiting matters
    (`WAITING`); else what of `TIME` is in use for the largest share of it (`mean_shares`).
    """
    lacking = {name for run in runs for name in run.report.first_s}
    queue = sum(run.queue for run in runs)
    # By Little's law, mean numbers of searches are as mean times.
    waits = queue >= WAITING * (queue + sum(run.concurrency for run in runs)) > 0
    measured = sum(len(run.measured) for run in runs)
    preempted = sum(run.preemptions for run in runs) >= WAITING * measured > 0
    if lacking and (waits or preempted):

        def seconds(name: str) -> float:
            """Until it ran out; where it did not, the run's end counts."""
            return sum(run.report.first_s.get(name, run.report.total_s) for run in runs)

        return min(sorted(lacking), key=seconds)
    used = mean_shares(runs)
    return max(TIME, key=lambda name: float(getattr(used, name)))


def mean_shares(runs: Sequence[Run]) -> Utilisation:
    """`used_shares`: the mean over runs."""
    each = [used_shares(run.report) for run in runs]
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(Utilisation)):
        values = [getattr(one, name) for one in each]
        if isinstance(values[0], Mapping):  # by memory
            found[name] = {key: float(np.mean([v[key] for v in values])) for key in values[0]}
        else:
            found[name] = float(np.mean(values))
    return Utilisation(**found)


def used_shares(report: ServingReport) -> Utilisation:
    """The report's shares, with prompts and recomputed tokens as time of computing.

    Passes of their own between decode iterations are bound by computing; parts of prompts that join
    iterations are in the shares already.
    """
    if not report.total_s:
        return report.used
    busy = report.busy
    passes = (busy.prefill_s - report.joined_s + busy.recompute_s) / report.total_s
    # Measured kernels may compute faster than the share of the peak that a profile states.
    return replace(report.used, compute=min(1.0, report.used.compute + passes))


def summed_up(
    bench: Bench,
    load: float,
    runs: Sequence[Run],
    solved: Estimate | None,
) -> LoadPoint:
    """Figures of a load over all runs of it, at least one.

    `solved` is the share of searches with a correct answer.  At every load, costs are the price
    over the searches that arrive and are not refused; of clients, who wait for their answers, over
    those that the runs finished.
    """
    measured = [search for run in runs for search in run.measured]
    refusals = [search.refused for search in measured if search.refused]
    latency, first_token, token, waiting = (
        np.array([getattr(s, name) for s in measured if not s.refused], dtype=np.float64)
        for name in ("latency_s", "to_first_token_s", "per_token_s", "waiting_s")
    )
    times = {"search": latency, "ttft": first_token, "tpot": token}
    target = bench.workload.target
    served = rate_interval([run.served_per_s for run in runs])
    refused = len(refusals) / len(measured)
    closed = isinstance(bench.workload.arrivals, ClientLoop)
    rate = served.value if closed else (1 - refused) * load
    price = bench.hardware.price_per_hour
    costs = () if price is None else tuple(cost_per_search(each, rate) for each in price)
    return LoadPoint(
        load=load,
        runs=len(runs),
        meets=all(run.meets for run in runs),
        at_percentile=percentile(latency, target.of("search")),
        reached_s={
            limit.kind: float(np.percentile(each, limit.percentile)) if len(each) else math.nan
            for limit in target.limits
            for each in [times[limit.kind]]
        },
        goodput=float(np.mean([run.goodput for run in runs])),
        tokens=bench.tokens_of([each.demand for each in measured if not each.refused], rate),
        served_per_s=served,
        search_s=Percentiles.of(latency),
        first_token_s=Percentiles.of(first_token),
        token_s=Percentiles.of(token),
        waiting_s=Percentiles.of(waiting),
        concurrency=float(np.mean([run.concurrency for run in runs])),
        queue=float(np.mean([run.queue for run in runs])),
        peak_concurrency=max(run.peak_concurrency for run in runs),
        used=mean_shares(runs),
        busy=_total([run.report.busy for run in runs]),
        prefixes=_total([run.report.prefixes for run in runs]),
        total_s=sum(run.report.total_s for run in runs),
        saturated=runs_out(runs),
        preemptions_per_1000=1000 * sum(run.preemptions for run in runs) / len(measured),
        refused_per_1000=1000 * refused,
        refusal=next(iter(refusals), ""),
        cost_per_1000=_ends([1000 * cost for cost in costs]),
        cost_per_solved=_ends([cost_per_solved(cost, solved) for cost in costs if solved]),
        assumed=_assumed(bench, runs),
    )


def _assumed(bench: Bench, runs: Sequence[Run]) -> tuple[float, float]:
    """Factors of the runs' seconds for what is assumed of the policy in the engine."""
    built = bench.engine.price.from_operations(bench.engine.demands[0].info.policy)
    if built is None:
        return 1.0, 1.0
    # Iterations in which a sequence decides: at most as many as single ones do.
    pieces = np.concatenate([each.demand.pieces for each in bench.engine.demands])
    counts, decided = (pieces[:, PIECE_COLUMNS.index(n)] for n in ("iterations", "decided"))
    decides = float(counts @ (decided > 0)) / max(1, int(counts.sum()))
    least_s = simulated_s = most_s = 0.0
    for report in (run.report for run in runs):
        decisions = decides * report.tokens
        deciding = min(report.iterations, decisions)
        found = built.range_s(report.iterations, deciding, decisions, report.busy.policy_s)
        least_s, simulated_s, most_s = (
            a + b for a, b in zip((least_s, simulated_s, most_s), found, strict=True)
        )
    total_s = sum(run.report.busy.total_s for run in runs)
    if not total_s or most_s <= LARGEST_ASSUMED * total_s:
        return 1.0, 1.0
    return 1 + (least_s - simulated_s) / total_s, 1 + (most_s - simulated_s) / total_s


_IN_TAIL = 5  # distinct searches beyond the percentile, below which a verdict is luck of the draw


def few_distinct(workload: Workload, drawn: Mapping[int, np.ndarray]) -> str:
    """A remark if so few distinct searches were drawn that one more or less decides; else ""."""
    count = len(np.unique(np.concatenate(list(drawn.values()))))
    beyond = (100 - workload.target.strictest) / 100
    if count * beyond >= _IN_TAIL:
        return ""
    return f"; few distinct searches ({count:,}): draw more ({math.ceil(_IN_TAIL / beyond):,})"


def _ends(values: Sequence[T]) -> tuple[T, T] | None:
    """The lowest and the highest; None without a price."""
    return (values[0], values[-1]) if values else None


def _total(records: Sequence[T]) -> T:
    """The sums of records of numbers, field by field."""
    names = [each.name for each in fields(records[0])]  # type: ignore[arg-type]
    return type(records[0])(*(sum(getattr(each, name) for each in records) for name in names))
