"""A plan: all candidates of a workload evaluated, and one of them recommended."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from arborsim.planning.demands import Variant, VariantDemands, drawn, record_variants, variants
from arborsim.planning.evaluate import evaluate, solved
from arborsim.planning.provenance import assumed_numbers, cautions, settings_of
from arborsim.planning.recommend import Demanded, recommend
from arborsim.planning.results import CandidateResult, Fleet, PlanResult, Recommendation
from arborsim.planning.statistics import Estimate
from arborsim.planning.workload import Hardware, Workload
from arborsim.workers import in_order

Advance = Callable[[str, int], None]
_NOTHING_YET = Recommendation(None, "")


def _silent(what: str, units: int) -> None:
    """Progress that nobody looks at."""


@dataclass
class Planner:
    """Evaluates candidates one by one, so that what is done survives an interruption.

    Attributes
    ----------
    workload : Workload
    demanded : Demanded
        Quality that a recommendation needs.
    stated_load : float or None
        The load that a fleet is sized for; the workload's own if None.
    jobs : int
        Processes; results do not depend on it.
    finished : dict of int to CandidateResult
        Candidates that are done, by number; may be filled before `run` to go on with those.
    """

    workload: Workload
    demanded: Demanded = field(default_factory=Demanded)
    stated_load: float | None = None
    jobs: int = 1
    finished: dict[int, CandidateResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.variants = variants(self.workload)
        self._solved: Estimate | None = None

    @property
    def candidates(self) -> list[tuple[int, Hardware, Variant]]:
        """All of them, numbered in the workload's order."""
        pairs = [(h, v) for h in self.workload.hardware for v in self.variants]
        return [(number, *pair) for number, pair in enumerate(pairs)]

    @property
    def missing(self) -> list[tuple[int, Hardware, Variant]]:
        return [each for each in self.candidates if each[0] not in self.finished]

    def work(self) -> int:
        """Units of progress: searches recorded, and as many for each candidate evaluated."""
        places = len(drawn(self.workload))
        recorded = {id(variant) for _, _, variant in self.missing}
        return places * (len(recorded) + len(self.missing))

    def run(self, advance: Advance = _silent) -> PlanResult:
        """Evaluate what is missing, and recommend.

        Raises
        ------
        UsageError
            A trace cannot be read, or a process died.
        """
        with tempfile.TemporaryDirectory(prefix="arborsim-plan-") as folder:
            traces = self.workload.write_traces(Path(folder))
            for result in self._evaluated(traces, advance):
                self.finished[result.number] = result
        return self.result()

    def _evaluated(self, traces: Sequence[Path], advance: Advance) -> Iterator[CandidateResult]:
        units = len(drawn(self.workload))
        found = list(self._recorded(traces, advance))
        by_variant = {id(each.variant): each for each in found}
        tasks = [
            Task(self.workload, hardware, by_variant[id(variant)], number)
            for number, hardware, variant in self.missing
        ]
        for result in in_order(evaluate_task, tasks, min(self.jobs, len(tasks))):
            advance(f"{result.policy} on {result.hardware}", units)
            yield result

    def _recorded(self, traces: Sequence[Path], advance: Advance) -> Iterator[VariantDemands]:
        needed = {id(variant) for _, _, variant in self.missing}
        chosen = [variant for variant in self.variants if id(variant) in needed]
        for found in record_variants(self.workload, chosen, traces, self.jobs, advance):
            if not found.infeasible:
                self._solved = solved(self.workload, found)
            yield found

    def result(self) -> PlanResult:
        """The plan as far as it is finished."""
        load = self.stated_load if self.stated_load is not None else self.workload.arrivals.stated
        done = [self.finished[number] for number in sorted(self.finished)]
        target = self.workload.target
        plan = PlanResult(
            workload=self.workload.name,
            unit=self.workload.arrivals.unit,
            stated_load=load,
            percentile=target.percentile,
            search_limit_s=target.search_s,
            token_limit_s=target.token_s,
            currency=self.workload.prices.currency,
            searches=self.workload.searches,
            warm_up=self.workload.warm_up,
            runs=self.workload.runs,
            seed=self.workload.seed,
            candidates=tuple(replace(each, fleet=_fleet(each, load)) for each in done),
            recommendation=_NOTHING_YET,
            solved=self._solved,
            settings=settings_of(self.workload),
            assumed=assumed_numbers(self.workload),
            notes=cautions(self.workload, self.variants, done),
            complete=not self.missing,
        )
        return replace(plan, recommendation=recommend(plan, self.demanded))


@dataclass(frozen=True)
class Task:
    """One candidate, for a process of its own."""

    workload: Workload
    hardware: Hardware
    found: VariantDemands
    number: int


def evaluate_task(task: Task) -> CandidateResult:
    """`evaluate`, with one argument."""
    return evaluate(task.workload, task.hardware, task.found, task.number)


def _fleet(candidate: CandidateResult, load: float | None) -> Fleet | None:
    """Machines for a load, each with an equal part of it."""
    if load is None or candidate.largest is None or candidate.at_largest is None:
        return None
    machines = max(1, math.ceil(load / candidate.largest - 1e-9))
    price = candidate.price_per_hour
    hourly = None if price is None else (machines * price[0], machines * price[1])
    cost = candidate.at_largest.cost_per_1000
    if cost is not None:  # machines that are less busy cost the same, by the hour
        idle = machines * candidate.largest / load
        cost = (idle * cost[0], idle * cost[1])
    return Fleet(load, machines, machines * candidate.gpus, hourly, cost)
