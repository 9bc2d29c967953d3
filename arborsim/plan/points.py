"""Runs of one load, summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from arborsim.machine.tally import BusySeconds, PrefixTokens
from arborsim.plan.limits import mean_shares, runs_out
from arborsim.plan.load_point import LoadPoint, Percentiles
from arborsim.plan.runs import Run
from arborsim.plan.statistics import (
    Estimate,
    cost_per_search,
    cost_per_solved,
    percentile,
    rate_interval,
)


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
