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
from typing import TypeVar

import numpy as np

from arborsim.machine.report import ServingReport, Utilisation
from arborsim.plan.results import LoadPoint, Percentiles
from arborsim.plan.runs import Bench, Run
from arborsim.plan.statistics import (
    Estimate,
    cost_per_search,
    cost_per_solved,
    percentile,
    rate_interval,
)

T = TypeVar("T")
SPACE = ("hbm", "host", "searches")
TIME = ("compute", "memory", "pcie_down", "pcie_up")
#: Space counts as having run out if searches are without a place for at least this share of their
#: time, or lose a place at least so often per search.  A single burst in a long run does not.
WAITING = 0.01


def runs_out(runs: Sequence[Run]) -> str:
    """What there is too little of first, over all runs of a load: a name of `SPACE` or `TIME`.

    It is the space that kept a search waiting first, if waiting matters (`WAITING`); else what is
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
    bench: Bench,
    load: float,
    runs: Sequence[Run],
    solved: Estimate | None,
    arriving_per_s: float | None = None,
) -> LoadPoint:
    """Figures of a load over all runs.

    Parameters
    ----------
    runs : sequence of Run
        Of the bench at that load, at least one.
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
    price = bench.hardware.price_per_hour
    costs = () if price is None else tuple(cost_per_search(each, rate) for each in price)
    return LoadPoint(
        load=load,
        runs=len(runs),
        meets=all(run.meets for run in runs),
        at_percentile=percentile(finish - arrival, bench.workload.target.percentile),
        served_per_s=served,
        search_s=Percentiles.of(finish - arrival),
        first_token_s=Percentiles.of(first - arrival),
        token_s=Percentiles.of(token),
        waiting_s=Percentiles.of(admitted - arrival),
        concurrency=float(np.mean([run.concurrency for run in runs])),
        queue=float(np.mean([run.queue for run in runs])),
        peak_concurrency=max(run.peak_concurrency for run in runs),
        used=mean_shares(runs),
        busy=_total([run.report.busy for run in runs]),
        prefixes=_total([run.report.prefixes for run in runs]),
        total_s=sum(run.report.total_s for run in runs),
        saturated=runs_out(runs),
        preemptions_per_1000=1000 * sum(run.preemptions for run in runs) / measured,
        refused_per_1000=1000 * refused,
        refusal=next((run.refusal for run in runs if run.refusal), ""),
        cost_per_1000=_ends([1000 * cost for cost in costs]),
        cost_per_solved=_ends([cost_per_solved(cost, solved) for cost in costs if solved]),
    )


def _ends(values: Sequence[T]) -> tuple[T, T] | None:
    """The lowest and the highest; None without a price."""
    return (values[0], values[-1]) if values else None


def _total(records: Sequence[T]) -> T:
    """The sums of records of numbers, field by field."""
    names = [each.name for each in fields(records[0])]  # type: ignore[arg-type]
    return type(records[0])(*(sum(getattr(each, name) for each in records) for name in names))
