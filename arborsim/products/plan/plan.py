"""A plan: all candidates of a workload evaluated, and one of them recommended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.core.outputs import scratch
from arborsim.core.workers import unfold
from arborsim.machine.fidelity import evidence
from arborsim.products.plan.answers import counted
from arborsim.products.plan.costs import fleet_for, without_costs
from arborsim.products.plan.demands import (
    MixDemands,
    RecordedSearch,
    Recording,
    Unit,
    drawn,
    origin_of,
    record,
    record_unit,
    recorded_facts,
    solved_by_entry,
    with_longer_answers,
)
from arborsim.products.plan.evaluate import evaluate, unfit
from arborsim.products.plan.provenance import (
    assumed_numbers,
    bases_of_seconds,
    cautions,
    lengthened,
    longer_answers,
    rests_on_assumed,
    settings_of,
    short_prompts,
)
from arborsim.products.plan.recommend import Demanded, recommend
from arborsim.products.plan.results import CandidateResult, LoadPoint, PlanResult, Recommendation
from arborsim.products.plan.statistics import Estimate, Solved, cost_per_solved, solved_share
from arborsim.products.plan.workload import Candidate, Workload

Advance = Callable[[str, int], None]
_LENGTHS = ("searches", "warm_up", "runs", "seed")  # of a workload, for its results
_NOTHING_YET = Recommendation(None, "")
#: Demands are kept for a closer look at some candidates as long as they take no more than this.
_KEPT_BYTES = 256_000_000
#: Searches per run and seed that are served while one is recorded, all runs of a candidate counted.
_SERVED_PER_UNIT = 5


@dataclass(frozen=True)
class Task:
    """One candidate to evaluate, in a process of its own."""

    workload: Workload
    candidate: Candidate
    found: MixDemands


def work_on(item: Unit | Task) -> list[RecordedSearch] | str | CandidateResult:
    """Record some searches, or evaluate a candidate."""
    if isinstance(item, Unit):
        return record_unit(item)
    return evaluate(item.workload, item.candidate, item.found)


@dataclass
class Planner:
    """Evaluates candidates one by one, so that what is done survives an interruption.

    Refuses a model whose weights fit none of the machines.
    """

    workload: Workload
    demanded: Demanded = field(default_factory=Demanded)  #: quality that a recommendation needs
    #: Share of correct answers by policy and budget, from live runs, and of unfinished ones.
    accuracies: dict[tuple[str, str], Estimate] = field(default_factory=dict)
    unfinished: dict[tuple[str, str], Estimate] = field(default_factory=dict, kw_only=True)
    #: Tokens of answers over those of full retention, by policy and budget, where they differ.
    growth: dict[tuple[str, str], float] = field(default_factory=dict)
    answers_of: str = ""  #: task and model of these runs: ``"chain by arborsim-chain"``
    jobs: int = 1  #: processes; results do not depend on it
    #: Candidates that are done, by number; may be filled before `run`, which then goes on.
    finished: dict[int, CandidateResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        distinct: dict[object, Candidate] = {}
        for each in self.workload.candidates():  # recall modes that change nothing make one
            distinct.setdefault((each.hardware.name, each.recorded_as), each)
        #: All, numbered in the workload's order.
        self.candidates = [replace(each, number=n) for n, each in enumerate(distinct.values())]
        counts = counted(self.workload).items()  # what the user's own logs say comes first
        self.accuracies = {key: share for key, share in counts if share} | self.accuracies
        if (about := self.workload.answers) is not None and not self.answers_of:
            self.answers_of = f"{about.task} by {about.model}"
        self._kept: dict[object, MixDemands] = {}
        self._kept_bytes = 0
        self._assumed: dict[int, str] = {}  # by number, what its seconds rest on
        self._solved: list[Solved] = []
        self._short: tuple[str, ...] = ()
        # What cannot hold the model's weights is known before anything is served.
        found = [unfit(self.workload, each) for each in self.candidates]
        known = {each.number: each for each in found if each is not None}
        if found and len(known) == len(found):
            largest = max(
                self.candidates,
                key=lambda each: each.hardware.gpus * each.hardware.profile.usable_hbm_bytes,
            )
            raise UsageError(
                "no machine of the workload can hold the model; the largest is "
                f"{largest.hardware.name}: {known[largest.number].reason}"
            )
        self.finished |= known

    @property
    def missing(self) -> list[Candidate]:
        return [each for each in self.candidates if each.number not in self.finished]

    def work(self) -> int:
        """Units of progress: searches recorded, and for each candidate those that it serves.

        Units take about as long as each other, so that the time left can be told from them.
        """
        recorded = {each.recorded_as for each in self.missing}
        return len(drawn(self.workload)) * len(recorded) + self._serving * len(self.missing)

    @property
    def _serving(self) -> int:
        """Units of work of a candidate that is evaluated."""
        return max(1, self.workload.runs * self.workload.searches // _SERVED_PER_UNIT)

    def run(
        self,
        advance: Advance = lambda what, units: None,
        done: Callable[[CandidateResult], None] = lambda result: None,
    ) -> PlanResult:
        """Evaluate what is missing, and recommend.

        `advance` is called with what was worked on, and units of `work`; `done` with each candidate
        as soon as it is finished, in any order.
        """
        with self._traces() as traces:
            facts = recorded_facts(self.workload, traces)
            verdicts = ((each.entry, each.solved) for each in facts)
            self._solved = solved_by_entry(self.workload, verdicts)
            self._short = tuple(short_prompts(self.workload, facts))
            for result in self._evaluated(traces, advance):
                self.finished[result.number] = result
                done(result)
        return self.result()

    @contextmanager
    def _traces(self) -> Iterator[list[Path]]:
        """One per entry of the mix; generated ones are there meanwhile."""
        with scratch("arborsim-plan-") as folder:
            yield self.workload.write_traces(folder)

    def _evaluated(self, traces: Sequence[Path], advance: Advance) -> Iterator[CandidateResult]:
        """Candidates as they are done: they follow as soon as their searches are recorded."""
        recordings: dict[object, Recording] = {}
        for each in self.missing:
            if each.recorded_as not in recordings:
                recordings[each.recorded_as] = Recording(self.workload, each, traces)
        tasks: deque[Task] = deque()

        def next_item() -> Unit | Task:
            waiting = (each for each in recordings.values() if not each.exhausted)
            recording = None if tasks else next(waiting, None)
            return tasks.popleft() if recording is None else recording.next_unit()

        workers = min(self.jobs, len(self.missing))
        for item, result in unfold(work_on, next_item, workers if workers > 1 else 0):
            if isinstance(item, Task):
                assert isinstance(result, CandidateResult)
                advance(f"{result.policy} on {result.hardware}", self._serving)
                yield result
                continue
            assert not isinstance(result, CandidateResult)
            advance(f"replaying {item.candidate.policy.name}", len(item.episodes))
            key = item.candidate.recorded_as
            recordings[key].add(item, result)
            if recordings[key].complete:
                found = recordings.pop(key).joined()
                size = sum(demand.nbytes for demand in found.demands)
                if self._kept_bytes + size <= _KEPT_BYTES:
                    self._kept_bytes += size
                    self._kept[key] = found
                served = (each for each in self.missing if each.recorded_as == key)
                tasks.extend(Task(self.workload, e, self._answered(e, found)) for e in served)

    def demands_of(self, number: int) -> MixDemands:
        """The demands of a candidate's searches; recorded again if they were not kept."""
        candidate = self.candidates[number]
        if candidate.recorded_as not in self._kept:
            with self._traces() as traces:
                self._kept[candidate.recorded_as] = record(self.workload, candidate, traces)
        return self._answered(candidate, self._kept[candidate.recorded_as])

    def _answered(self, candidate: Candidate, found: MixDemands) -> MixDemands:
        """The demands, with answers as long as they were counted under the candidate's policy."""
        growth = self.growth.get((candidate.policy.name, candidate.budget_text), 1.0)
        return found if found.infeasible else with_longer_answers(found, growth)

    def result(self) -> PlanResult:
        """The plan as far as it is finished."""
        load = self.workload.arrivals.stated
        done = [self._dressed(self.finished[number], load) for number in sorted(self.finished)]
        target = self.workload.target
        weights = [entry.weight for entry in self.workload.mix]
        plan = PlanResult(
            workload=self.workload.name,
            unit=self.workload.arrivals.unit.replace("searches", self.workload.noun),
            noun=self.workload.noun,
            stated_load=load,
            percentile=target.percentile,
            search_limit_s=target.search_s,
            token_limit_s=target.token_s,
            first_token_limit_s=target.first_token_s,
            percentiles=target.percentiles,
            currency=self.workload.prices.currency,
            **{name: getattr(self.workload, name) for name in _LENGTHS},
            candidates=tuple(done),
            recommendation=_NOTHING_YET,
            solved=solved_share(weights, self._solved) if self._solved else None,
            solved_origin=origin_of(self._solved),
            answers_of=self.answers_of,
            settings={**settings_of(self.workload), **bases_of_seconds(self.workload)},
            assumed=assumed_numbers(self.workload),
            notes=(
                *cautions(self.workload, done, self._solved, self.answers_of),
                *self._short,
                *lengthened(self.workload, done),
                *longer_answers(done, self.growth),
            ),
            complete=not self.missing,
        )
        found = recommend(plan, self.demanded)
        if (best := found.candidate) is not None and plan.complete:
            if best not in self._assumed:
                chosen = self.candidates[best]
                said = rests_on_assumed(self.workload, chosen, self.demands_of(best))
                self._assumed[best] = said
            noted = (self._assumed[best],) if self._assumed[best] else ()
            found = replace(found, unknown=(*found.unknown, *noted))
        return replace(plan, recommendation=found)

    def _dressed(self, candidate: CandidateResult, load: float | None) -> CandidateResult:
        """With what does not depend on its own runs: its fleet, accuracy and evidence."""
        if candidate.is_open:
            points = (candidate.at_largest, candidate.at_stated)
            at_largest, at_stated = (each and without_costs(each) for each in points)
            candidate = replace(candidate, at_largest=at_largest, at_stated=at_stated)
        accuracy = self.accuracies.get((candidate.policy, candidate.budget))
        if candidate.quality is not None and accuracy is not None:
            key = candidate.policy, candidate.budget
            quality = replace(
                candidate.quality,
                accuracy=accuracy,
                unfinished=self.unfinished.get(key),
                growth=self.growth.get(key, 1.0),
            )
            candidate = replace(
                candidate,
                quality=quality,
                at_largest=_judged(candidate.at_largest, accuracy),
                at_stated=_judged(candidate.at_stated, accuracy),
            )
        fleet = fleet_for(candidate, load, self.workload.replicas)
        hardware = self.candidates[candidate.number].hardware
        rests_on = evidence(hardware.profile, self.workload.geometry, hardware.gpus)
        return replace(candidate, fleet=fleet, evidence=rests_on)


def _judged(point: LoadPoint | None, accuracy: Estimate) -> LoadPoint | None:
    """With the cost of a solved search at this share of right answers."""
    if point is None or point.cost_per_1000 is None:
        return point
    low, high = (cost_per_solved(each / 1000, accuracy) for each in point.cost_per_1000)
    return replace(point, cost_per_solved=(low, high))
