"""`arborsim.plan`: which machines, policies and budgets serve a load, and what that costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path, real_path
from arborsim.core.tables import made_by
from arborsim.products import choices
from arborsim.products.choices import Files
from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Options,
    Positive,
    Share,
    call,
    equivalent,
    listed,
)
from arborsim.products.options import Calibrations
from arborsim.products.plan.quick import QuestionOptions, QuickOptions
from arborsim.products.results import Results

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.products.plan.plan import Planner
    from arborsim.products.plan.results import CandidateResult, PlanResult
    from arborsim.products.plan.workload import Workload
    from arborsim.report.report import Report

_LIBRARIES = ("numpy", "pandas", "pyarrow", "scipy", "simpy")
AnyWorkload: TypeAlias = AnyPath | Annotated["Workload", Option()] | None
#: Columns of `PlanResults.summary`, where they are known.
_SUMMARY = (
    "number", "recommended", "hardware", "policy", "budget", "recall", "status", "reason", "gpus",
    "largest", "served_per_s_value", "search_s_p50", "search_s_p95", "search_s_p99", "saturated",
    "fleet_cost_per_solved_low_value", "fleet_cost_per_solved_high_value",
    "fleet_cost_per_1000_low", "fleet_cost_per_1000_high", "fleet_price_per_hour_low",
    "fleet_price_per_hour_high",
    "cost_per_1000_low", "cost_per_1000_high", "cost_per_solved_low_value",
    "cost_per_solved_high_value", "quality_attention_kept", "quality_accuracy_value",
    "quality_accuracy_low", "quality_accuracy_high", "fleet_gpus",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Options):
    """Options that replace what the workload says.

    Parameters
    ----------
    gpus
        GPUs by comma, in place of the workload's: names, or TOML files with numbers of the machine.
        Repeatable.
    load
        Size a fleet for this load.
    calibration
        Settings of policies from a calibration, a file or name, where the workload gives none.
        Repeatable.
    allow_code
        Import policies that the workload file names as package.module:Class.
    searches
        Searches per run, in place of the workload's.
    warm_up
        Searches before anything is measured, in place of the workload's.
    runs
        Runs per load, in place of the workload's.
    """

    gpus: Annotated[str | Sequence[str], Option("gpu", complete="gpu")] = ()
    load: Annotated[float | None, Option(shown="the workload's")] = None
    calibration: Calibrations = ()
    allow_code: bool = False
    searches: Annotated[Positive | None, Option(panel="Run")] = None
    warm_up: Annotated[Count | None, Option(panel="Run")] = None
    runs: Annotated[Positive | None, Option(panel="Run")] = None

    def resized(self, workload: Workload) -> Workload:
        """A workload with another load, or other runs, where they are given."""
        if self.load is not None:
            workload = workload.with_load(self.load)
        searches, warm_up, runs = self.searches, self.warm_up, self.runs
        if (searches, warm_up, runs) == (None, None, None):
            return workload
        searches = workload.searches if searches is None else searches
        warm_up = min(workload.warm_up, searches // 10) if warm_up is None else warm_up
        return workload.with_run_length(searches, warm_up, workload.runs if runs is None else runs)


@dataclass(frozen=True)
class PlanOptions(WorkloadOptions, QuickOptions):
    """Find out how much load each GPU, policy and budget carries, and which to take.

    Ask by a workload file, or by --model, --gpu, --p95 and --tree, --chain or --trace. For every
    candidate the largest load that meets the latency target is searched for by simulation. Shows it
    with latencies, utilisation, what runs out first and cost per search, and recommends one. Ctrl-C
    keeps what is done. Exit code 130.

    Parameters
    ----------
    workload
        Workload in TOML (arborsim plan --example prints one).
    min_attention_kept
        Recommend policies that keep at least this share of attention.
    answers
        Log of arborsim live, or a CSV table of answers that others counted: how many are right,
        and how long they are. Repeatable.
    min_accuracy
        Recommend policies with at least this share of right answers.
    workers
        Processes. Same results.
    progress
        Show progress on standard error.

    Returns
    -------
    PlanResults

    Examples
    --------
    >>> import arborsim
    >>> found = arborsim.plan(
    ...     model="llama-3.1-8b", gpus="l40s,h100", rate="20/min", p95="60s",
    ...     tree={"depth": 6, "width": 16, "thought": 80}, quick=True,
    ... )  # doctest: +SKIP
    """

    workload: AnyWorkload = None
    _: KW_ONLY
    answers: Files = ()
    min_attention_kept: Share | None = None
    min_accuracy: Share | None = None
    workers: Annotated[
        Positive | None,
        Option("jobs", panel="Run", shown="1; every core for --example", silent=True),
    ] = None
    progress: InPython = False

    def asked_workload(self) -> Workload:
        """The workload of a file, or of the question without one.

        Raises
        ------
        UsageError
            Both are given, or neither, or one is wrong.
        """
        from arborsim.products.plan.workload import Workload
        from arborsim.products.plan.workload_file import read_workload, workload_of

        named, given = gpu_names(self.gpus), self.workload
        calibrations = [str(each) for each in listed(self.calibration)]
        if self.rate is not None and self.load is not None:
            raise UsageError("rate and load say the same: keep one")
        if given is None:
            wanted = {"model": self.model, "gpus": named}
            if missing := [name for name, there in wanted.items() if not there]:
                raise UsageError(
                    f"{' and '.join(missing)} must be given: without a workload file, a plan asks "
                    "for model, gpus, a limit (p95='60s') and a tree, chain or trace"
                )
            tables = self.tables(named)
            return workload_of(tables, Path(), tables["name"], calibrations, allow_code=True)
        if self.asked:
            name, called = next(iter(self.asked)), getattr(given, "name", given)
            raise UsageError(f"{name} asks without a workload: {called} says it itself")
        if isinstance(given, Workload):
            changed = self.given(QuestionOptions)
            if named or calibrations or changed:
                names = ", ".join([*changed, *["gpus"] * bool(named)]) or "calibration"
                raise UsageError(f"{names}: change the Workload itself, or name a workload file")
            return given
        return read_workload(Path(given), named, calibrations, self.allow_code, self.replaced)

    def results(self) -> PlanResults:
        """Evaluate every candidate."""
        planning = Planning(self)
        planning.run()
        return planning.results()


plan = call("plan", PlanOptions)


class Planning:
    """A plan that was asked for, checked. Candidates that are finished survive an interruption."""

    def __init__(self, options: PlanOptions) -> None:
        from arborsim.products.plan.answers import problems_of, read_answers
        from arborsim.products.plan.plan import Planner
        from arborsim.products.plan.recommend import Demanded

        self._options = options
        kept, accuracy = options.min_attention_kept, options.min_accuracy
        for name, share in (("attention_kept", kept), ("accuracy", accuracy)):
            if share is not None and not 0 <= share <= 1:
                raise UsageError(f"min_{name} must be a share in [0, 1], not {share!r}")
        logs = [Path(each) for each in listed(options.answers)]
        found = options.asked_workload()
        if accuracy is not None and not logs and found.answers is None:
            raise UsageError("--min-accuracy needs --answers: a log of arborsim live")
        judged = read_answers(logs)
        self.planner = Planner(
            options.resized(found), Demanded(kept, accuracy),
            {key: each.right for key, each in judged.items()},
            {key: each.growth for key, each in judged.items() if each.growth != 1},
            problems_of(logs), options.workers or 1,
            unfinished={key: each.unfinished for key, each in judged.items() if each.unfinished},
        )  # fmt: skip

    def run(self, done: Callable[[CandidateResult], None] = lambda candidate: None) -> None:
        """Evaluate what is missing. `done` is called with each candidate that is finished."""
        from arborsim.report.progress import shown

        with shown(self._options.progress, self.planner.work()) as advance:
            self.planner.run(advance, done)

    def results(self) -> PlanResults:
        """The results of the candidates that are finished."""
        workload, result = self.planner.workload, self.planner.result()
        profiles = {each.profile.name: each.profile for each in workload.hardware}
        engines = {each.engine.name for each in profiles.values() if each.engine is not None}
        metadata = made_by(
            "plan", equivalent("plan", self._options), *_LIBRARIES,
            workload=result.workload,
            gpu=[each.name for each in workload.hardware],
            engine=sorted(engines),
            model=workload.geometry.name,
            weights_dtype=result.settings.get("weights", ""),
            kv_dtype=f"{8 * workload.geometry.kv_bytes_per_element}-bit",
            settings=result.settings,
            assumed=result.assumed,
            notes=result.notes,
            left_out=[],
            does_not_fit=[
                f"{each.name}: {each.reason}" for each in result.candidates
                if each.status == "does not fit"
            ],
            recommendation=_said(result),
        )  # fmt: skip
        return PlanResults(result, metadata, self.planner)


def gpu_names(given: str | Sequence[str]) -> list[str]:
    """GPUs that take the place of a workload's.

    A file that a caller names is relative to the working directory, not to the workload.
    """
    named = choices.names([str(each) for each in listed(given)])
    return [
        str(real_path(Path(gpu))) if gpu.endswith(".toml") or "/" in gpu else gpu for gpu in named
    ]


def _said(plan: PlanResult) -> str:
    return " ".join(plan.recommendation.answer) or plan.recommendation.text


class PlanResults(Results):
    """The load that each candidate carries, its cost, and which to take."""

    kind = "plan"
    raw: PlanResult

    def __init__(
        self, raw: PlanResult, metadata: Mapping[str, Any], planner: Planner | None = None
    ) -> None:
        super().__init__(raw, metadata)
        self._planner = planner  # None if the results come from a file

    @property
    def recommendation(self) -> str:
        """The machine to rent, its cost and its limit, or why nothing meets the target."""
        return _said(self.raw)

    def to_pandas(self) -> pd.DataFrame:
        """One row per candidate: GPU, policy, budget and recall mode.

        Main columns: `recommended`, `hardware`, `policy`, `budget`, `status`, `reason`,
        `largest` (load, in the workload's unit), `search_s_p95`, `cost_per_1000_low` and `_high`,
        `cost_per_solved_...`, `quality_attention_kept`, `used_hbm` and the other shares used.
        """
        from arborsim.products.plan.files import to_frame

        return to_frame(self.raw)

    def summary(self) -> pd.DataFrame:
        """The columns that decide, one row per candidate, in the order of the printed table.

        The recommended one comes first, the others by cost at the stated load. What does not meet
        the target comes last.
        """
        from arborsim.products.plan.costs import ranked

        frame = self.to_pandas()
        known = [name for name in _SUMMARY if name in frame]
        first = [row.number for row in ranked(self.raw)]
        order = [*first, *(number for number in frame["number"] if number not in first)]
        return frame[known].set_index("number", drop=False).loc[order].reset_index(drop=True)

    def to_json(self) -> str:
        from arborsim.products.plan.files import to_json

        return to_json(self.raw)

    def save(self, path: str | os.PathLike[str]) -> Path:
        from arborsim.core.documents import plain

        document = plain(replace(self.raw, timeline=None))
        # JSON in JSON: strict JSON has no NaN, which a plan needs.
        self.metadata["record"] = json.dumps(document)
        try:
            return super().save(path)
        finally:
            del self.metadata["record"]

    def report(
        self, path: str | os.PathLike[str], *, progress: bool = False, assumptions: bool = True
    ) -> Path:
        """Write one self-contained HTML page for a meeting.

        It shows loads, a timeline and changed assumptions, which can take several times as long as
        the plan itself. Results of a file have none of these.  Interrupted, the page is written
        without them. Without `assumptions` it leaves out the changed ones, which take the longest.

        Raises
        ------
        UsageError
            The page cannot be written.
        """
        from arborsim.products.plan.page import PlanReport, report_of
        from arborsim.products.plan.sensitivity import MOST_SEARCHES, detailed, work
        from arborsim.report.progress import shown
        from arborsim.report.report import write

        planner = self._planner
        if planner is None:
            return super().report(path)
        try:
            with shown(progress, work(self.raw, assumptions)) as advance:
                drawn, found = detailed(planner, self.raw, planner.jobs, advance, assumptions)
        except KeyboardInterrupt:
            super().report(path)
            raise
        count = min(planner.workload.searches, MOST_SEARCHES)
        how = (
            f"Each load is found by one run of {count:,} searches with the seed "
            f"{planner.workload.seed}: so few leave it uncertain by some "
            f"{100 / math.sqrt(count):.0f}%, ratios by less, as all numbers are tried on the same "
            "searches. Longer searches are the same ones, stretched."
        )
        path = output_path(path)
        write(report_of(PlanReport(drawn, found, how if found else "")), path)
        return path

    def describe(self) -> Report:
        from arborsim.products.plan.page import PlanReport, report_of

        return report_of(PlanReport(self.raw))

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> PlanResults:
        """The results in a file."""
        from arborsim.core.records import convert
        from arborsim.products.plan.results import PlanResult

        own = dict(metadata)
        document = json.loads(own.pop("record"))
        document.pop("timeline", None)
        return cls(convert(PlanResult, document, finite=False), own)
