"""What one load of one candidate came to: times, utilisation, refusals and cost, over all runs.

Seconds, bytes, and searches per second, as in `arborsim.plan.results`.

What runs out first is space for searches, or time.  Space (HBM, host memory, the allowed number of
searches) limits how many searches have a place at a time; it is full at peaks long before it is
full on average.  Time (of compute, HBM bandwidth and PCIe) limits how fast those that have a place
go on.  Both have shares between 0 and 1, but a share of space says nothing about a share of time,
so what runs out is not simply the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from arborsim.machine.report import ServingReport, Utilisation
from arborsim.machine.tally import BusySeconds, PrefixTokens
from arborsim.plan.results import LoadPoint, Percentiles
from arborsim.plan.runs import Run
from arborsim.plan.statistics import (
    Estimate,
    cost_per_search,
    cost_per_solved,
    percentile,
    rate_interval,
)

SPACE = ("hbm", "host", "searches")
TIME = ("compute", "memory", "pcie_down", "pcie_up")
#: Space counts as having run out if searches are without a place for at least this share of their
#: time, or lose a place at least so often per search.  A single burst in a long run does not.
WAITING = 0.01


def runs_out(runs: Sequence[Run]) -> str:
    """What there is too little of first, over all runs of a load: a name of `SPACE` or `TIME`.

    It is the space that kept somebody waiting first, if waiting matters (`WAITING`); else what is
    in use for the largest share of the time (`mean_shares`).
    """
    lacking = {name for run in runs for name in run.report.first_s}
    if lacking and _wait(runs):
        return min(sorted(lacking), key=lambda name: _first_s(name, runs))
    used = mean_shares(runs)
    return max(TIME, key=lambda name: float(getattr(used, name)))


def _wait(runs: Sequence[Run]) -> bool:
    """Whether waiting matters; by Little's law, mean numbers of searches are as mean times."""
    queue = sum(run.queue for run in runs)
    there = queue + sum(run.concurrency for run in runs)
    preemptions = sum(run.preemptions for run in runs)
    measured = sum(len(run.arrival_s) + run.refused for run in runs)
    return queue >= WAITING * there > 0 or preemptions >= WAITING * measured > 0


def _first_s(name: str, runs: Sequence[Run]) -> float:
    """When it ran out, summed over the runs; where it did not, the run's end."""
    return sum(run.report.first_s.get(name, run.report.total_s) for run in runs)


def mean_shares(runs: Sequence[Run]) -> Utilisation:
    """`used_shares`: the mean over runs."""
    each = [used_shares(run.report) for run in runs]
    names = [field.name for field in fields(Utilisation)]
    return Utilisation(*(float(np.mean([getattr(one, name) for one in each])) for name in names))


def used_shares(report: ServingReport) -> Utilisation:
    """The report's shares, with prompts and recomputed tokens as time of computing.

    They are passes of their own between decode iterations, and computing bounds them.
    """
    if not report.total_s:
        return report.used
    passes = (report.busy.prefill_s + report.busy.recompute_s) / report.total_s
    return replace(report.used, compute=report.used.compute + passes)


def summed_up(
    load: float,
    runs: Sequence[Run],
    rank: float,
    price_per_hour: tuple[float, float] | None,
    solved: Estimate | None,
    arriving_per_s: float | None = None,
) -> LoadPoint:
    """Figures of a load over all runs.

    Parameters
    ----------
    load : float
    runs : sequence of Run
        At that load, at least one.
    rank : float
        The target's percentile.
    price_per_hour : tuple of float or None
        Lowest and highest, of the machine.
    solved : Estimate or None
        Share of searches with a correct answer.
    arriving_per_s : float or None
        Searches per second that arrive in the long run, which costs are per; None for what the runs
        finished.
    """
    arrival, admitted, first, finish, token = (
        np.concatenate([getattr(run, name) for run in runs])
        for name in ("arrival_s", "admitted_s", "first_token_s", "finish_s", "token_s")
    )
    measured = len(arrival) + sum(run.refused for run in runs)
    served = rate_interval([run.served_per_s for run in runs])
    refused = sum(run.refused for run in runs) / measured
    rate = served.value if arriving_per_s is None else (1 - refused) * arriving_per_s
    cost = _each(price_per_hour, rate)
    return LoadPoint(
        load=load,
        runs=len(runs),
        meets=all(run.meets for run in runs),
        at_percentile=percentile(finish - arrival, rank),
        served_per_s=served,
        search_s=Percentiles.of(finish - arrival),
        first_token_s=Percentiles.of(first - arrival),
        token_s=Percentiles.of(token),
        waiting_s=Percentiles.of(admitted - arrival),
        concurrency=_mean([run.concurrency for run in runs]),
        queue=_mean([run.queue for run in runs]),
        peak_concurrency=max(run.peak_concurrency for run in runs),
        used=mean_shares(runs),
        busy=_busy(runs),
        prefixes=_prefixes(runs),
        total_s=sum(run.report.total_s for run in runs),
        saturated=runs_out(runs),
        preemptions_per_1000=1000 * sum(run.preemptions for run in runs) / measured,
        refused_per_1000=1000 * refused,
        refusal=next((run.refusal for run in runs if run.refusal), ""),
        cost_per_1000=None if cost is None else (1000 * cost[0], 1000 * cost[1]),
        cost_per_solved=_per_solved(cost, solved),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _each(price_per_hour: tuple[float, float] | None, rate: float) -> tuple[float, float] | None:
    """Cost of a search at the lowest and the highest price."""
    if price_per_hour is None:
        return None
    low, high = (cost_per_search(price, rate) for price in price_per_hour)
    return low, high


def _per_solved(
    cost: tuple[float, float] | None, solved: Estimate | None
) -> tuple[Estimate, Estimate] | None:
    if cost is None or solved is None:
        return None
    return cost_per_solved(cost[0], solved), cost_per_solved(cost[1], solved)


def _busy(runs: Sequence[Run]) -> BusySeconds:
    names = [each.name for each in fields(BusySeconds)]
    return BusySeconds(*(sum(getattr(run.report.busy, name) for run in runs) for name in names))


def _prefixes(runs: Sequence[Run]) -> PrefixTokens:
    names = [each.name for each in fields(PrefixTokens)]
    each = [run.report.prefixes for run in runs]
    return PrefixTokens(*(sum(getattr(one, name) for one in each) for name in names))
