"""The question of a plan: a mix of searches, arrivals, candidates, a target and prices.

Below it are the tables of a workload file: keys, types, ranges and defaults
(`arborsim.core.records`); `plan.workload_file.example_workload` explains every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import Duration, Seed, Text, one_of, parsed
from arborsim.core.tiers import RECALLS, Budget
from arborsim.machine.config import KV_DTYPES
from arborsim.machine.lookup import PriceRange, Prices
from arborsim.machine.machine import ServingOptions
from arborsim.machine.names import a_type
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.weights import WEIGHTS
from arborsim.memory.pages import MOST_PAGE_TOKENS
from arborsim.policies.base import Policy
from arborsim.products.calibrate.documents import Calibration
from arborsim.products.generate.arrivals import TRACE, Arrivals, beginning, draw_mix
from arborsim.products.generate.lengths import TreeSpec, write_generated
from arborsim.products.plan.target import KINDS, Target
from arborsim.trace.importers.request_logs import FORMATS
from arborsim.trace.reader import open_trace
from arborsim.trace.schema import Geometry

_SERVING = ServingOptions()
USUAL_BUDGETS = (Budget("0.5", share=0.5),)


@dataclass(frozen=True)
class Generated:
    """Searches that are drawn: how many distinct ones, and from which seed."""

    spec: TreeSpec
    searches: int
    seed: int


@dataclass(frozen=True)
class MixEntry:
    """One kind of search."""

    name: str  #: different for each entry
    weight: float  #: above 0; only the ratios of weights count
    source: Path | Generated  #: a trace, or what to draw one from
    #: How much of the prompt, from its beginning, all of these searches have in common, such as a
    #: system prompt; of a shorter prompt, all of it.
    shared_prompt_tokens: int = 0
    #: Whether its searches arrive one after the other as they were recorded, from one that the seed
    #: chooses on: requests have most blocks of their prompts in common with those shortly before.
    in_order: bool = False
    #: The log of requests that `source` was imported from, which lies in a folder of its own then.
    log: Path | None = None


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with its settings, under the name that tables use."""

    name: str
    policy: Policy


@dataclass(frozen=True)
class Hardware:
    """GPUs that serve together."""

    name: str
    profile: HardwareProfile  #: one GPU in its host
    gpus: int  #: how many share the model's weights and caches (tensor parallelism)
    #: Lowest and highest, of all of them; None without a price.
    price_per_hour: tuple[float, float] | None


def fewest_gpus(profile: HardwareProfile, geometry: Geometry) -> int | None:
    """The fewest GPUs, a power of two, whose HBM holds the model's weights; None if none do."""
    for gpus in (1, 2, 4, 8, 16, 32):
        held = geometry.weight_bytes_on(gpus, False)
        if geometry.heads % gpus == 0 and held < gpus * profile.usable_hbm_bytes:
            return gpus
    return None


@dataclass(frozen=True)
class Candidate:
    """One thing to compare: where to serve, and how to keep the cache."""

    hardware: Hardware
    policy: PolicyChoice
    budget: Budget | None  #: None for a policy that ignores budgets, which comes once
    recall: str  #: how DDR tokens are read
    number: int = 0  #: its place in a plan

    @property
    def budget_text(self) -> str:
        """For tables: "-" where there is none."""
        return "-" if self.budget is None else self.budget.text

    @property
    def offloads(self) -> bool:
        """Whether the policy may put tokens into DDR."""
        return any(tier.offloaded for tier in self.policy.policy.tiers)

    @property
    def shown_recall(self) -> str:
        """For tables: "-" where nothing is ever recalled."""
        return self.recall if self.offloads else "-"

    @property
    def recorded_as(self) -> tuple[str, str, str, str]:
        """Candidates that share this are served from the same demands.

        Only what DDR transfers find in flight depends on the machine.
        """
        where = self.hardware.profile.name if self.offloads else ""
        return self.policy.name, self.budget_text, self.shown_recall, where


@dataclass(frozen=True)
class Answered:
    """Problems whose answers, counted live, stand for those of the workload's searches."""

    task: Text
    search: Text
    model: Text
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task

    @property
    def text(self) -> str:
        options = "".join(f", {name} {value}" for name, value in sorted(self.options.items()))
        return f"{self.task}{options}, searched by {self.search} on {self.model}"


@dataclass(frozen=True)
class Workload:
    """Everything that a plan depends on."""

    name: str
    #: The model whose bytes and seconds are charged, whatever the traces were recorded on.
    geometry: Geometry
    mix: tuple[MixEntry, ...]
    arrivals: Arrivals
    #: The candidates are all their combinations.
    hardware: tuple[Hardware, ...]
    policies: tuple[PolicyChoice, ...]
    budgets: tuple[Budget, ...]
    recalls: tuple[str, ...]
    target: Target
    prices: Prices
    #: Where settings of `policies` come from that the workload does not set itself.
    calibrations: tuple[Calibration, ...] = ()
    #: How searches share a machine; `Hardware.gpus` takes the place of its `tensor_parallel`.
    serving: ServingOptions = _SERVING
    page_tokens: int = 1  #: tokens per KV page
    #: Read ancestors that the branches of a search share once per batch.
    tree_attention: bool = True
    searches: int = 1000  #: searches per run
    #: The first ones, which are served, but left out of all figures: they meet an empty machine.
    warm_up: int = 100
    runs: int = 3  #: repetitions with other draws; run i has the seed ``seed + i``
    seed: int = 0
    resolution: float = 0.02  #: of loads that are tried: the share by which they lie apart
    answers: Answered | None = None
    #: Machines that share the stated load; None for as many as it needs.
    replicas: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < self.searches:
            raise UsageError(
                f"warm_up = {self.warm_up} leaves none of the {self.searches} searches per run to "
                "measure"
            )
        if self.runs < 1:
            raise UsageError(f"runs must be at least 1, not {self.runs}")

    def candidates(self) -> list[Candidate]:
        """All combinations, in the order of the file."""
        kept = [
            (choice, budget)
            for choice in self.policies
            for budget in (self.budgets if choice.policy.uses_budget else (None,))
        ]
        return [
            Candidate(hardware, choice, budget, recall)
            for hardware, (choice, budget), recall in product(self.hardware, kept, self.recalls)
        ]

    def seeds(self) -> list[int]:
        """One per run."""
        return [self.seed + run for run in range(self.runs)]

    def write_traces(self, folder: Path) -> list[Path]:
        """The trace of each entry of the mix; generated ones are written into `folder`.

        What an earlier call wrote there is replaced.
        """
        paths = []
        for number, entry in enumerate(self.mix):
            if isinstance(entry.source, Path):
                paths.append(entry.source)
                continue
            made, path = entry.source, folder / f"generated-{number}.parquet"
            write_generated(made.spec, made.searches, made.seed, self.geometry, path, True)
            paths.append(path)
        return paths

    def episodes(self) -> list[int]:
        """Distinct searches of each entry of the mix."""
        return [
            open_trace(entry.source).num_episodes
            if isinstance(entry.source, Path)
            else entry.source.searches
            for entry in self.mix
        ]

    def draws(self, seed: int) -> np.ndarray:
        """Entry and episode of the searches of a run (`draw_mix`); the same for every candidate."""
        return self.served(seed, self.searches)[: self.searches]

    def served(self, seed: int, count: int) -> np.ndarray:
        """The first `count` searches of a run, and as many behind them; int64 ``[2 * count, 2]``.

        Those behind are the same ones again, where searches do not arrive in recorded order.
        """
        weights, sizes = [entry.weight for entry in self.mix], self.episodes()
        found = np.tile(draw_mix(weights, sizes, count, seed), (2, 1))
        for number, (entry, size) in enumerate(zip(self.mix, sizes, strict=True)):
            if entry.in_order:
                mine = np.flatnonzero(found[:, 0] == number)
                found[mine, 1] = (beginning(seed, size) + np.arange(len(mine))) % size
        return found

    @property
    def noun(self) -> str:
        """The word for arrivals: "requests" if all of it is from logs of those, else "searches"."""
        logs = [
            isinstance(each.source, Path) and open_trace(each.source).info.holds_requests
            for each in self.mix
        ]
        return "requests" if all(logs) else "searches"

    def with_load(self, load: float) -> Workload:
        """The same with another stated load, which a fleet is sized for, if it can be one."""
        return replace(self, arrivals=self.arrivals.with_load(load))

    def with_run_length(self, searches: int, warm_up: int, runs: int) -> Workload:
        """The same with shorter or longer runs, unless nothing would be left to measure."""
        return replace(self, searches=searches, warm_up=warm_up, runs=runs)


# ---------------------------------------------------------------- the tables of a file

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Above0 = Annotated[float, Meta(gt=0)]
Shares = float | tuple[float, ...]
Names = Annotated[tuple[Text, ...], Meta(min_length=1)]


def _refuse_twice(what: str, values: Sequence[object]) -> None:
    for number, value in enumerate(values):
        if value in values[:number]:
            raise UsageError(f"{what} names {value} twice")


@dataclass(frozen=True)
class ModelTable:
    name: Text
    kv_dtype: Annotated[str, a_type("a KV cache", KV_DTYPES)] | None = None
    weights: Annotated[str, a_type("weights", WEIGHTS)] | None = None


@dataclass(frozen=True)
class GeneratedTable:
    """The keys of `arborsim.products.generate.lengths.MOST` are distributions (`parse_counts`)."""

    prompt_tokens: Any
    thought_tokens: Any
    depth: Any = 1
    branching: Any = 1
    first: Any = None
    pruned: Shares = 0.0
    finished: Shares = 0.0
    parallel: Annotated[int, Meta(ge=0)] = 0
    rewards: Literal["none", "uniform"] = "none"
    solved: float | None = None
    searches: Annotated[int, Meta(ge=1, le=1_000_000)] = 64  # they are held in memory
    seed: Seed | None = None


@dataclass(frozen=True)
class MixTable:
    name: Text | None = None
    weight: Above0 = 1.0
    shared_prompt_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    trace: Text | None = None
    log: Text | None = None
    generated: GeneratedTable | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.trace, self.log, self.generated)) != 1:
            raise UsageError("it needs one of trace, log and generated")


@dataclass(frozen=True)
class ArrivalsTable:
    kind: Literal["poisson", "recorded", "closed-loop"]
    rate_per_s: Above0 | None = None
    file: Text | None = None
    format: Annotated[str, one_of("format", (*FORMATS, TRACE))] | None = None
    scale: Above0 | None = None
    clients: Count | None = None
    think_s: Annotated[float, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        owners = {"rate_per_s": "poisson", "clients": "closed-loop", "think_s": "closed-loop"}
        for key in ("rate_per_s", "file", "format", "scale", "clients", "think_s"):
            owner = owners.get(key, "recorded")
            paced = key == "rate_per_s" and self.kind == "recorded"  # faster, or slower
            if getattr(self, key) is not None and owner != self.kind and not paced:
                raise UsageError(f'{key} belongs to kind = "{owner}", not to "{self.kind}"')


@dataclass(frozen=True)
class PolicyTable:
    use: Text
    name: Text | None = None
    set: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CandidatesTable:
    gpus: Names
    hosts: Names = ("",)
    tensor_parallel: Annotated[tuple[Count, ...], Meta(min_length=1)] | Literal["auto"] = (1,)
    replicas: Count | None = None
    policies: Annotated[tuple[Text | PolicyTable, ...], Meta(min_length=1)] = ("full",)
    calibrations: Names = ()
    budgets: Annotated[tuple[Annotated[Budget, parsed(Budget.stated)], ...], Meta(min_length=1)] = (
        USUAL_BUDGETS
    )
    recalls: Annotated[
        tuple[Annotated[str, one_of("recall mode", RECALLS)], ...], Meta(min_length=1)
    ] = ("stage",)

    def __post_init__(self) -> None:
        for name in ("gpus", "hosts", "tensor_parallel", "calibrations", "recalls"):
            if not isinstance(getattr(self, name), str):
                _refuse_twice(name, getattr(self, name))
        _refuse_twice("budgets", [each.tokens or each.share for each in self.budgets])


Rank = Annotated[float, Meta(gt=0, lt=100)]


@dataclass(frozen=True)
class TargetTable:
    """Limits; `token` is `tpot` by an older name."""

    percentile: Rank | Mapping[str, Rank] = 95.0
    search: Duration | None = None
    ttft: Duration | None = None
    tpot: Duration | None = None
    token: Duration | None = None

    def __post_init__(self) -> None:
        if self.tpot is not None and self.token is not None:
            raise UsageError("tpot and token are the same limit: keep tpot")
        if {self.search, self.ttft, self.tpot, self.token} == {None}:
            raise UsageError(
                'it needs ttft = "500 ms", tpot = "40 ms", search = "60 s", or several'
            )
        for key in self.ranks:
            if key not in KINDS:
                raise UnknownName("limit of percentile", key, KINDS)

    @property
    def ranks(self) -> Mapping[str, float]:
        """Percentiles of single limits."""
        return self.percentile if isinstance(self.percentile, Mapping) else {}

    def target(self) -> Target:
        """The target, with 95% for limits without a percentile."""
        usual = 95.0 if isinstance(self.percentile, Mapping) else self.percentile
        tpot = self.token if self.tpot is None else self.tpot
        limits = Target(usual, self.search, tpot, self.ttft, dict(self.ranks)).limits
        first = limits[0].percentile
        own = {each.kind: each.percentile for each in limits if each.percentile != first}
        return Target(first, self.search, tpot, self.ttft, own)


@dataclass(frozen=True)
class PricesTable:
    file: Text | None = None
    currency: Text | None = None
    per_hour: Mapping[str, PriceRange] = field(default_factory=dict)


@dataclass(frozen=True)
class LayoutTable:
    """Keys of ``[serving]`` in addition to the fields of `ServingOptions`."""

    engine: Text = "vllm"
    page_size: Annotated[int, Meta(ge=1, le=MOST_PAGE_TOKENS)] = 1
    tree_attention: bool = True


@dataclass(frozen=True)
class WorkloadTable:
    """The whole file."""

    model: ModelTable
    mix: Annotated[tuple[MixTable, ...], Meta(min_length=1)]
    arrivals: ArrivalsTable
    candidates: CandidatesTable
    target: TargetTable
    prices: PricesTable = PricesTable()
    answers: Answered | None = None
    serving: Mapping[str, Any] = field(default_factory=dict)
    name: Text | None = None
    seed: Seed = 0
    searches: Count = Workload.searches
    warm_up: Annotated[int, Meta(ge=0, le=10_000_000)] = Workload.warm_up
    runs: Count = Workload.runs
    resolution: Annotated[float, Meta(ge=0.001, le=0.5)] = Workload.resolution


#: Options that ``[serving]`` sets; the others belong to a candidate, or to how runs are shown.
_APART = ("tensor_parallel", "series_points")
SERVING = tuple(each.name for each in fields(ServingOptions) if each.name not in _APART)
