"""Results of a plan: frozen records, from one load of one candidate to the recommendation.

Seconds, bytes, and searches per second; nothing here is rounded.  A figure that is not known is
None, or NaN inside an `Estimate`.  Every record holds plain values and can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from arborsim.core.measurements import check_share
from arborsim.machine.fidelity import Evidence
from arborsim.machine.machine import KvPool
from arborsim.machine.names import title
from arborsim.machine.report import BusySeconds, PrefixTokens, ServingSeries, Utilisation
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.target import Target, Times


@dataclass(frozen=True)
class Slice:
    """Something that the machine did, or a search went through."""

    start_s: float
    end_s: float
    #: One of waiting, prefill, recompute, policy, decode (a search takes part in iterations), swap
    #: (a search has lost its place), down, up (PCIe).
    kind: str
    search: int  #: number in order of arrival; -1 for what concerns the whole batch
    amount: int = 0  #: tokens or bytes; sequences for decode


@dataclass(frozen=True)
class Timeline:
    """The course of one run on one machine."""

    candidate: int
    load: float
    seed: int
    until_s: float  #: what comes later is left out
    slices: tuple[Slice, ...]  #: by start
    series: ServingSeries  #: memory and batch over the whole run


#: What `CandidateResult.status` may be.
MET = "met"  # some load meets the target
MISSED = "missed"  # not even a search alone on the machine does
INFEASIBLE = "infeasible"  # the policy cannot keep to the budget, or the demand cannot be described
UNFIT = "does not fit"  # the model, or one search, does not fit the memory
TOO_FEW = "too few replicas"  # the stated number of machines does not carry the stated load
#: A `CandidateResult.limited_by`: no limit was seen, so the load is no bound in either direction.
RUN_LENGTH = "run length"


@dataclass(frozen=True)
class Quality:
    """Effects of a policy on the searches, as far as they are known; shares in [0, 1]."""

    attention_kept: float | None  #: recorded attention on readable tokens; None if unrecorded
    peak_kept: float  #: tokens in HBM at the peak, against all tokens of the search
    #: Tokens moved so, per token of the search; a token can move several times.
    evicted: float
    quantised: float
    offloaded: float
    recomputed: float
    accuracy: Estimate | None = None  #: share of correct answers of live runs, if there are any
    kept_note: str = ""  #: why attention kept is not known although a trace holds attention
    unread: float = 0.0  #: share of searches in which a plan left held tokens unread
    unfinished: Estimate | None = None  #: share of answers that were cut off, where it was counted
    growth: float = 1.0  #: tokens of answers over those of full retention

    def __post_init__(self) -> None:
        """Refuses shares that no policy can have."""
        for name in ("attention_kept", "peak_kept", "unread"):
            check_share(getattr(self, name), name.replace("_", " "), "a plan's quality")

    @property
    def exact(self) -> bool:
        """Whether nothing was dropped, rounded or left unread: answers are full retention's."""
        return not (self.evicted or self.quantised or self.unread)


@dataclass(frozen=True)
class Alone:
    """One search by itself on the idle machine: means over the mix as it is drawn."""

    seconds: float
    peak_hbm_bytes: float
    peak_ddr_bytes: float
    prompt_tokens: float
    generated_tokens: float
    #: Seconds at the target's percentile, of the slowest seed: no load does better.
    at_percentile_s: float
    token_at_percentile_s: float
    terms_s: Mapping[str, float] = field(default_factory=dict)  #: seconds of each cost term
    #: The most in each memory below DDR, in bytes: means like the others
    peak_stored_bytes: Mapping[str, float] = field(default_factory=dict)
    first_token_at_percentile_s: float = math.nan

    @property
    def at_percentiles(self) -> Times:
        return Times(
            self.at_percentile_s, self.first_token_at_percentile_s, self.token_at_percentile_s
        )


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of some time over all measured searches, in seconds; NaN where there is none."""

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
class Tokens:
    """Tokens of a load: means over its searches."""

    prompt: float
    generated: float
    searches_per_s: float  #: that are paid for, in the long run

    @property
    def output_per_s(self) -> float:
        return self.searches_per_s * self.generated


@dataclass(frozen=True)
class LoadPoint:
    """A candidate at one load, over all runs; the warm-up is left out of everything but `used`."""

    load: float  #: offered, in `PlanResult.unit`: what arrives, not what is served
    runs: int  #: seeds that were run
    meets: bool  #: whether every run met the target
    at_percentile: Estimate  #: seconds per search at the target's percentile, over all runs
    #: Finished searches per second of the measured time, mean over runs: less than what is offered
    #: while the machine fills.
    served_per_s: Estimate
    search_s: Percentiles  #: from arrival to answer
    first_token_s: Percentiles  #: from arrival to the first token
    token_s: Percentiles  #: a search's mean time per output token after the first
    waiting_s: Percentiles  #: from arrival to admission
    concurrency: float  #: mean number of searches in the machine, waiting ones left out
    queue: float  #: mean number of searches that wait
    peak_concurrency: int
    used: Utilisation  #: mean over runs; shares in [0, 1] (`plan.runs.used_shares`)
    busy: BusySeconds  #: where the engine's time went; sums over runs, of `total_s`
    prefixes: PrefixTokens  #: where searches found the tokens of shared prefixes; sums over runs
    total_s: float  #: simulated seconds of all runs
    saturated: str  #: a name of `plan.words.RESOURCES` (`plan.runs.runs_out`)
    #: Per 1,000 searches.
    preemptions_per_1000: float
    refused_per_1000: float
    refusal: str  #: why the first refused search was refused; "" if none was
    #: At the lowest and the highest price, if seconds are right (`paid` widens it).
    cost_per_1000: tuple[float, float] | None
    #: Of one solved search, with the interval of the share of solved ones; None if that is unknown,
    #: as of a policy that drops tokens and whose answers no live run counted.
    cost_per_solved: tuple[Estimate, Estimate] | None
    #: Factors of its seconds at the least and the most that is plausible for seconds of the policy
    #: in the engine, where these are assumed and may be more than `LARGEST_ASSUMED` of all
    assumed: tuple[float, float] = (1.0, 1.0)
    #: Seconds at each limit's own percentile, by field of `plan.target.Times`.
    reached_s: Mapping[str, float] = field(default_factory=dict)
    goodput: float = math.nan  #: share of measured searches within all limits of the target
    tokens: Tokens | None = None

    @property
    def per_user_s(self) -> float:
        """Output tokens per second that one user sees: of a search's median time per token."""
        return 1 / self.token_s.p50 if self.token_s.p50 > 0 else math.nan

    @property
    def input_share(self) -> float:
        """The part of the machine's busy time that prompts take, prompts computed again included.

        Costs of input and output tokens divide the machine's price by it.
        """
        total_s = self.busy.total_s
        return (self.busy.prefill_s + self.busy.recompute_s) / total_s if total_s else math.nan


#: The share of assumed seconds up to which they are left as they are
LARGEST_ASSUMED = 0.01


@dataclass(frozen=True)
class Fleet:
    """Machines that serve a stated load, each an equal part of it."""

    load: float  #: in `PlanResult.unit`
    #: Machines, and GPUs of all of them.
    machines: int
    gpus: int
    price_per_hour: tuple[float, float] | None  #: lowest and highest, of all of them
    #: Per 1,000 searches at this load, idle time included.
    cost_per_1000: tuple[float, float] | None
    #: Per solved search, as in `LoadPoint`.
    cost_per_solved: tuple[Estimate, Estimate] | None = None
    stated: bool = False  #: whether the number of machines was given, whatever they carry


@dataclass(frozen=True)
class CandidateResult:
    """One combination of GPU, policy, budget and recall."""

    number: int  #: its place in `PlanResult.candidates`
    #: Names; the budget is "-" for a policy that ignores budgets.
    hardware: str
    policy: str
    budget: str
    recall: str
    gpus: int  #: GPUs of one machine
    price_per_hour: tuple[float, float] | None  #: lowest and highest, of one machine
    status: str  #: `MET`, `MISSED`, `INFEASIBLE`, `UNFIT` or `TOO_FEW`
    reason: str = ""  #: one line that says why it is not `MET`; "" if it is
    quality: Quality | None = None
    alone: Alone | None = None
    pool: KvPool | None = None  #: how the memory for keys and values comes about
    largest: float | None = None  #: the largest offered load at which every run meets the target
    largest_by_seed: tuple[float, ...] = ()  #: the same run by run; `largest` is the smallest
    spread: Estimate | None = None  #: mean of `largest_by_seed` with Student's interval
    refuted: float | None = None  #: the next load up, which `limited_by` rules out
    #: "target" if some run missed it at `refuted`, "throughput" if the machine finishes no more
    #: however long searches may take, or "run length" if runs are too short to show more. Only for
    #: "target" was `refuted` served.
    limited_by: str = ""
    searches: int = 0  #: per run: as many as the plan's, or more where these saw no limit
    at_largest: LoadPoint | None = None
    at_stated: LoadPoint | None = None  #: of one machine of the fleet, at its part of that load
    curve: tuple[LoadPoint, ...] = ()  #: points beyond the largest load, too; only for some
    fleet: Fleet | None = None  #: for the stated load
    evidence: Evidence | None = None  #: what its seconds rest on; None if that was not looked up

    @property
    def error(self) -> float | None:
        """The median error of its seconds, as a share; None if it is not known."""
        return None if self.evidence is None else self.evidence.error

    @property
    def is_open(self) -> bool:
        """Whether no limit was seen, so that no number of machines, and no cost, is known."""
        return self.limited_by == RUN_LENGTH

    @property
    def gpu(self) -> str:
        """The GPU, in its host, as people write it."""
        gpu, _, host = self.hardware.removeprefix(f"{self.gpus}x ").partition("+")
        return title(gpu) + (f" in {host}" if host else "")

    @property
    def machine(self) -> str:
        """One machine: ``"H100"``, ``"4 H100"``."""
        return self.gpu if self.gpus == 1 else f"{self.gpus} {self.gpu}"

    @property
    def shown_point(self) -> LoadPoint | None:
        """One machine at its part of the stated load, or else at its largest."""
        return self.at_stated or self.at_largest

    @property
    def name(self) -> str:
        """Policy, budget, recall mode and machine in one line."""
        budget = "" if self.budget == "-" else f" at {self.budget}"
        recall = "" if self.recall == "-" else f" ({self.recall})"
        return f"{self.policy}{budget}{recall} on {self.machine}"


@dataclass(frozen=True)
class Recommendation:
    """The answer in words; the numbers are those of the candidates that it names."""

    candidate: int | None  #: None if none meets the target
    text: str  #: one plain paragraph that goes with the answer: why it, and the nearest alternative
    alternative: int | None = None
    unknown: tuple[str, ...] = ()  #: what the plan does not know, each one sentence
    #: Three lines: what to rent at which cost, what an hour costs, what limits it and would change
    #: that. Empty if no candidate meets the target.
    answer: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  #: sentences that can change the decision, the first most


@dataclass(frozen=True)
class PlanResult:
    """All candidates of a workload, and what to make of them."""

    workload: str  #: its name
    unit: str  #: of every load: "searches/s", "requests/s" or "clients"
    stated_load: float | None  #: the load that the workload, or the user, states
    percentile: float
    #: The target: limits that `percentile` of the searches must be within.
    search_limit_s: float | None
    token_limit_s: float | None
    currency: str
    #: Per run; the runs have the seeds from `seed` on.
    searches: int
    warm_up: int
    runs: int
    seed: int
    candidates: tuple[CandidateResult, ...]  #: in the workload's order
    recommendation: Recommendation
    solved: Estimate | None = None  #: share of searches with a correct answer, full retention's
    solved_origin: str = ""  #: of that: "stated", "recorded", "stated and recorded" or ""
    answers_of: str = ""  #: task and model of the live runs whose answers were counted
    timeline: Timeline | None = None  #: of the recommended candidate at its largest load
    #: Everything that determines the result, for the appendix: versions, files, options.
    settings: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()  #: numbers of the profiles that are assumed
    notes: tuple[str, ...] = ()  #: what to know about the figures
    #: False if the plan was interrupted: `candidates` are those that were finished.
    complete: bool = True
    first_token_limit_s: float | None = None
    percentiles: Mapping[str, float] = field(default_factory=dict)  #: as `Target` has them
    noun: str = "searches"  #: or "requests", where the log is of those

    @property
    def target(self) -> Target:
        limits = self.search_limit_s, self.token_limit_s, self.first_token_limit_s
        return Target(self.percentile, *limits, self.percentiles)

    def met(self) -> list[CandidateResult]:
        """Candidates that some load meets the target with."""
        return [each for each in self.candidates if each.status == MET]

    def named(self) -> list[CandidateResult]:
        """The recommended candidate and its alternative, as far as there are any."""
        found = self.recommendation
        numbers = () if found.candidate is None else (found.candidate, found.alternative)
        return [each for number in numbers for each in self.candidates if each.number == number]
