"""What one load of one candidate came to: times, utilisation, refusals and cost, over all runs.

Seconds, bytes, and searches per second, as in `arborsim.plan.results`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.machine.report import Utilisation
from arborsim.machine.tally import BusySeconds, PrefixTokens
from arborsim.plan.statistics import Estimate


@dataclass(frozen=True)
class Percentiles:
    """Of some time over all measured searches, in seconds; NaN where there is none."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> Percentiles:
        """Percentiles of float64 ``[n]``, between neighbours linear."""
        if not len(values):
            return cls(float("nan"), float("nan"), float("nan"))
        return cls(*(float(value) for value in np.percentile(values, [50, 95, 99])))


@dataclass(frozen=True)
class LoadPoint:
    """A candidate at one load, over all runs; the warm-up is left out of everything but `used`.

    Attributes
    ----------
    load : float
        Offered, in `PlanResult.unit`: what arrives, not what is served.
    runs : int
        Seeds that were run.
    meets : bool
        Whether every run met the target.
    at_percentile : Estimate
        Seconds per search at the target's percentile, over the searches of all runs, with the
        interval of order statistics.
    served_per_s : Estimate
        Finished searches per second of the measured time: mean over runs.  In short runs less than
        what is offered, while the machine fills.
    search_s : Percentiles
        From arrival to answer.
    first_token_s : Percentiles
        From arrival to the first token.
    token_s : Percentiles
        A search's mean time per output token (of each of its sequences) after the first.
    waiting_s : Percentiles
        From arrival to admission.
    concurrency : float
        Mean number of searches in the machine, waiting ones left out.
    queue : float
        Mean number of searches that wait.
    peak_concurrency : int
    used : Utilisation
        Mean over runs; shares in [0, 1] (`arborsim.plan.limits.used_shares`).
    busy : BusySeconds
        Where the engine's time went; sums over runs, of `total_s`.
    prefixes : PrefixTokens
        Where searches found the tokens of shared prefixes; sums over runs.
    total_s : float
        Simulated seconds of all runs.
    saturated : str
        What ran out first, over all runs (`arborsim.plan.limits.runs_out`): hbm, host,
        searches, compute, memory, pcie_down or pcie_up.
    preemptions_per_1000, refused_per_1000 : float
        Per 1,000 searches.
    refusal : str
        Why the first refused search was refused; "" if none was.
    cost_per_1000 : tuple of float or None
        Lowest and highest price of 1,000 searches at this load; None if nobody named a price.
    cost_per_solved : tuple of Estimate or None
        The same for a solved search, each with the interval that the share of solved searches has;
        None if the traces do not know what was solved, or the policy drops tokens and no live runs
        say how many answers it gets right.
    """

    load: float
    runs: int
    meets: bool
    at_percentile: Estimate
    served_per_s: Estimate
    search_s: Percentiles
    first_token_s: Percentiles
    token_s: Percentiles
    waiting_s: Percentiles
    concurrency: float
    queue: float
    peak_concurrency: int
    used: Utilisation
    busy: BusySeconds
    prefixes: PrefixTokens
    total_s: float
    saturated: str
    preemptions_per_1000: float
    refused_per_1000: float
    refusal: str
    cost_per_1000: tuple[float, float] | None
    cost_per_solved: tuple[Estimate, Estimate] | None
