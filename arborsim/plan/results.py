"""What a plan found: frozen records, from one load of one candidate up to the recommendation.

Seconds, bytes, and searches per second; nothing here is rounded.  A figure that nobody knows is
None, or NaN inside an `Estimate`.  Every record holds plain values and can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from arborsim.machine.options import KvPool
from arborsim.machine.report import Utilisation
from arborsim.machine.tally import BusySeconds, PrefixTokens, ServingSeries
from arborsim.plan.statistics import Estimate


@dataclass(frozen=True)
class Slice:
    """Something that the machine did, or a search went through.

    Attributes
    ----------
    start_s, end_s : float
    kind : str
        waiting, prefill, recompute, policy, decode (a search takes part in iterations), swap (a
        search has lost its place), down, up (PCIe).
    search : int
        Number in order of arrival; -1 for what concerns the whole batch.
    amount : int
        Tokens or bytes; sequences for decode.
    """

    start_s: float
    end_s: float
    kind: str
    search: int
    amount: int = 0


@dataclass(frozen=True)
class Timeline:
    """The course of one run on one machine.

    Attributes
    ----------
    candidate : int
    load : float
    seed : int
    until_s : float
        What comes later is left out.
    slices : tuple of Slice
        By start.
    series : ServingSeries
        Memory and batch over the whole run.
    """

    candidate: int
    load: float
    seed: int
    until_s: float
    slices: tuple[Slice, ...]
    series: ServingSeries


#: What `CandidateResult.status` may be.
MET = "met"  # some load meets the target
MISSED = "missed"  # not even a search alone on the machine does
INFEASIBLE = "infeasible"  # the policy cannot keep to the budget, or the demand cannot be described
UNFIT = "does not fit"  # the model, or one search, does not fit the memory


@dataclass(frozen=True)
class Quality:
    """What is known about what a policy does to the searches; shares in [0, 1].

    Attributes
    ----------
    attention_kept : float or None
        Mean over the mix of the recorded attention on readable tokens; None if some trace holds no
        attention.  It says nothing certain about answers.
    peak_kept : float
        Tokens in HBM at the peak, against all tokens of the search.
    evicted, quantised, offloaded, recomputed : float
        Tokens moved so, per token of the search; a token can move several times.
    accuracy : Estimate or None
        Share of correct answers of live runs under this policy and budget, if they were given.
    """

    attention_kept: float | None
    peak_kept: float
    evicted: float
    quantised: float
    offloaded: float
    recomputed: float
    accuracy: Estimate | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing was dropped or rounded: answers are those of full retention."""
        return not self.evicted and not self.quantised


@dataclass(frozen=True)
class Alone:
    """One search by itself on the idle machine: means over the mix as it is drawn.

    Attributes
    ----------
    seconds, peak_hbm_bytes, peak_ddr_bytes : float
    prompt_tokens, generated_tokens : float
    at_percentile_s, token_at_percentile_s : float
        Seconds at the target's percentile over the drawn searches: no load does better.
    terms_s : mapping of str to float
        Seconds of each cost term.
    """

    seconds: float
    peak_hbm_bytes: float
    peak_ddr_bytes: float
    prompt_tokens: float
    generated_tokens: float
    at_percentile_s: float
    token_at_percentile_s: float
    terms_s: Mapping[str, float] = field(default_factory=dict)


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
        Mean over runs; shares in [0, 1] (`arborsim.plan.load_point.used_shares`).
    busy : BusySeconds
        Where the engine's time went; sums over runs, of `total_s`.
    prefixes : PrefixTokens
        Where searches found the tokens of shared prefixes; sums over runs.
    total_s : float
        Simulated seconds of all runs.
    saturated : str
        What ran out first, over all runs (`arborsim.plan.load_point.runs_out`): hbm, host,
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


@dataclass(frozen=True)
class Fleet:
    """Machines that serve a stated load, each an equal part of it.

    Attributes
    ----------
    load : float
        In `PlanResult.unit`.
    machines, gpus : int
        Machines, and GPUs of all of them.
    price_per_hour : tuple of float or None
        Lowest and highest, of all of them.
    cost_per_1000 : tuple of float or None
        Per 1,000 searches at this load, idle time included.
    """

    load: float
    machines: int
    gpus: int
    price_per_hour: tuple[float, float] | None
    cost_per_1000: tuple[float, float] | None


@dataclass(frozen=True)
class CandidateResult:
    """One combination of GPU, policy, budget and recall.

    Attributes
    ----------
    number : int
        Its place in `PlanResult.candidates`.
    hardware, policy, budget, recall : str
        Names; the budget is "-" for a policy that ignores budgets.
    gpus : int
        GPUs of one machine.
    price_per_hour : tuple of float or None
        Lowest and highest, of one machine.
    status : str
        `MET`, `MISSED`, `INFEASIBLE` or `UNFIT`.
    reason : str
        One line that says why it is not `MET`; "" if it is.
    quality : Quality or None
    alone : Alone or None
    pool : KvPool or None
        How the memory for keys and values comes about.
    largest : float or None
        The largest offered load that every run was found to meet the target at.
    largest_by_seed : tuple of float
        The same run by run, whose spread is luck: ``largest`` is the smallest of them.
    spread : Estimate or None
        Mean of `largest_by_seed` with Student's interval.
    refuted : float or None
        The next load up, which `limited_by` rules out; the truth lies between.
    limited_by : str
        Why there is no larger load: "target" if some run missed it at `refuted`; "throughput" if
        the machine finishes no more, however long searches may take; or "run length" if runs are
        too short to show more.  Only for "target" was `refuted` served.
    at_largest : LoadPoint or None
        Figures at the largest load.
    at_stated : LoadPoint or None
        Figures of one machine of the fleet, at its part of the stated load.
    curve : tuple of LoadPoint
        Points from a small load to beyond the largest, by load; only for some candidates.
    fleet : Fleet or None
        For the stated load.
    """

    number: int
    hardware: str
    policy: str
    budget: str
    recall: str
    gpus: int
    price_per_hour: tuple[float, float] | None
    status: str
    reason: str = ""
    quality: Quality | None = None
    alone: Alone | None = None
    pool: KvPool | None = None
    largest: float | None = None
    largest_by_seed: tuple[float, ...] = ()
    spread: Estimate | None = None
    refuted: float | None = None
    limited_by: str = ""
    at_largest: LoadPoint | None = None
    at_stated: LoadPoint | None = None
    curve: tuple[LoadPoint, ...] = ()
    fleet: Fleet | None = None

    @property
    def name(self) -> str:
        """All that tells it from the others, in one line."""
        budget = "" if self.budget == "-" else f" at {self.budget}"
        recall = "" if self.recall == "-" else f" ({self.recall})"
        return f"{self.policy}{budget}{recall} on {self.hardware}"


@dataclass(frozen=True)
class Recommendation:
    """What to rent, in words; the numbers are those of the candidates that it names.

    Attributes
    ----------
    candidate : int or None
        None if none meets the target.
    text : str
        One plain paragraph: what, why, and the nearest alternative.
    alternative : int or None
    unknown : tuple of str
        What the plan does not know, each one sentence.
    """

    candidate: int | None
    text: str
    alternative: int | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanResult:
    """All candidates of a workload, and what to make of them.

    Attributes
    ----------
    workload : str
        Its name.
    unit : str
        Of every load: "searches/s" or "clients".
    stated_load : float or None
        The load that the workload, or the user, states.
    percentile : float
    search_limit_s, token_limit_s : float or None
        The target.
    currency : str
    searches, warm_up, runs, seed : int
        Per run; the runs have the seeds from `seed` on.
    candidates : tuple of CandidateResult
        In the workload's order.
    recommendation : Recommendation
    solved : Estimate or None
        Share of the mix's searches with a correct answer under full retention, as recorded.
    timeline : Timeline or None
        Of the recommended candidate at its largest load.
    settings : mapping of str to str
        Everything that determines the result, for the appendix: versions, files, options.
    assumed : tuple of str
        Numbers of the profiles that nobody measured or published.
    notes : tuple of str
        What to know about the figures.
    complete : bool
        False if the plan was interrupted: `candidates` are those that were finished.
    """

    workload: str
    unit: str
    stated_load: float | None
    percentile: float
    search_limit_s: float | None
    token_limit_s: float | None
    currency: str
    searches: int
    warm_up: int
    runs: int
    seed: int
    candidates: tuple[CandidateResult, ...]
    recommendation: Recommendation
    solved: Estimate | None = None
    timeline: Timeline | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True

    def met(self) -> list[CandidateResult]:
        """Candidates that some load meets the target with."""
        return [each for each in self.candidates if each.status == MET]


def machines_for(load: float, largest_load: float) -> int:
    """How many machines share a load so that none has more than the largest."""
    return max(1, math.ceil(load / largest_load - 1e-9))


def fleet_for(candidate: CandidateResult, load: float | None) -> Fleet | None:
    """Machines for a load, each with an equal part of it."""
    if load is None or candidate.largest is None or candidate.at_largest is None:
        return None
    machines = machines_for(load, candidate.largest)
    price = candidate.price_per_hour
    hourly = None if price is None else (machines * price[0], machines * price[1])
    cost = candidate.at_largest.cost_per_1000
    if cost is not None:  # machines that are less busy cost the same, by the hour
        idle = machines * candidate.largest / load
        cost = (idle * cost[0], idle * cost[1])
    return Fleet(load, machines, machines * candidate.gpus, hourly, cost)
