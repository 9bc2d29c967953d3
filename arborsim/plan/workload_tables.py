"""The tables of a workload file: keys, types, ranges and defaults (`arborsim.core.records`).

`arborsim.plan.workload_file.example_workload` explains every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from msgspec import Meta

from arborsim.core.errors import UsageError
from arborsim.core.records import Duration, Seed, Text, one_of, parsed
from arborsim.core.tiers import RECALLS, Budget
from arborsim.machine.config import KV_DTYPES
from arborsim.machine.lookup import PriceRange
from arborsim.machine.options import ServingOptions
from arborsim.plan.arrivals import TRACE
from arborsim.plan.workload import Workload, check_run_length
from arborsim.trace.importers.requests import FORMATS

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Above0 = Annotated[float, Meta(gt=0)]
Shares = float | tuple[float, ...]
Names = Annotated[tuple[Text, ...], Meta(min_length=1)]


def _budget(value: object) -> Budget:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a budget: 2048, or 0.25")
    return Budget.parse(str(value))


def _refuse_twice(what: str, values: Sequence[object]) -> None:
    for number, value in enumerate(values):
        if value in values[:number]:
            raise UsageError(f"{what} names {value} twice")


@dataclass(frozen=True)
class ModelTable:
    name: Text
    kv_dtype: Annotated[str, one_of("type of a KV cache", KV_DTYPES)] | None = None


@dataclass(frozen=True)
class GeneratedTable:
    """The keys of `_COUNTS` are distributions (`parse_counts`)."""

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
    generated: GeneratedTable | None = None

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.generated is None):
            raise UsageError("it needs either trace or generated")


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
            if getattr(self, key) is not None and owner != self.kind:
                raise UsageError(f'{key} belongs to kind = "{owner}", not to "{self.kind}"')
        if self.kind == "recorded" and self.file is None:
            raise UsageError("file is missing")


@dataclass(frozen=True)
class PolicyTable:
    use: Text
    name: Text | None = None
    set: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CandidatesTable:
    gpus: Names
    hosts: Names = ("",)
    tensor_parallel: Annotated[tuple[Count, ...], Meta(min_length=1)] = (1,)
    policies: Annotated[tuple[Text | PolicyTable, ...], Meta(min_length=1)] = ("full",)
    calibrations: Names = ()
    budgets: Annotated[tuple[Annotated[Budget, parsed(_budget)], ...], Meta(min_length=1)] = (
        Budget("0.5", share=0.5),
    )
    recalls: Annotated[
        tuple[Annotated[str, one_of("recall mode", RECALLS)], ...], Meta(min_length=1)
    ] = ("stage",)

    def __post_init__(self) -> None:
        for name in ("gpus", "hosts", "tensor_parallel", "calibrations", "recalls"):
            _refuse_twice(name, getattr(self, name))
        _refuse_twice("budgets", [each.tokens or each.share for each in self.budgets])


@dataclass(frozen=True)
class TargetTable:
    percentile: Annotated[float, Meta(gt=0, lt=100)]
    search: Duration | None = None
    token: Duration | None = None

    def __post_init__(self) -> None:
        if self.search is None and self.token is None:
            raise UsageError('it needs search = "60 s", token = "100 ms", or both')


@dataclass(frozen=True)
class PricesTable:
    file: Text | None = None
    currency: Text | None = None
    per_hour: Mapping[str, PriceRange] = field(default_factory=dict)


@dataclass(frozen=True)
class LayoutTable:
    """What ``[serving]`` says in addition to the fields of `ServingOptions`."""

    page_size: Count = 1
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
    serving: Mapping[str, Any] = field(default_factory=dict)
    name: Text | None = None
    seed: Seed = 0
    searches: Count = Workload.searches
    warm_up: Annotated[int, Meta(ge=0, le=10_000_000)] = Workload.warm_up
    runs: Count = Workload.runs

    def __post_init__(self) -> None:
        check_run_length(self.searches, self.warm_up, self.runs)


#: Options that ``[serving]`` sets; the others belong to a candidate, or to how runs are shown.
SERVING = tuple(
    each.name for each in fields(ServingOptions)
    if each.name not in ("tensor_parallel", "series_points")
)  # fmt: skip
