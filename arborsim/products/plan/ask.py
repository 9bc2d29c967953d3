"""`arborsim.plan`: which machines, policies and budgets serve a load, and what that costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path, real_path
from arborsim.core.tables import made_by
from arborsim.products import choices
from arborsim.products.equivalent import equivalent
from arborsim.products.results import Results

if TYPE_CHECKING:
    import os

    import pandas as pd
    from rich.console import Console

    from arborsim.products.plan.plan import Planner
    from arborsim.products.plan.results import CandidateResult, PlanResult
    from arborsim.products.plan.workload import Workload
    from arborsim.report.table import Table

_LIBRARIES = ("numpy", "pandas", "pyarrow", "scipy", "simpy")
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


def plan(
    workload: str | os.PathLike[str] | Workload | None = None,
    *,
    gpus: str | Sequence[str] = (),
    model: str | None = None,
    rate: str | float | None = None,
    p95: str | float | None = None,
    p50: str | float | None = None,
    p99: str | float | None = None,
    tree: str | Mapping[str, Any] | None = None,
    chain: str | int | Mapping[str, Any] | None = None,
    trace: str | os.PathLike[str] | None = None,
    prompt: str | int | None = None,
    solved: float | None = None,
    policies: str | Sequence[str] | None = None,
    budgets: str | float | Sequence[str | float] | None = None,
    kv_dtype: str | None = None,
    weights: str | None = None,
    quick: bool = False,
    load: float | None = None,
    calibration: str | Sequence[str] = (),
    allow_code: bool = False,
    searches: int | None = None,
    warm_up: int | None = None,
    runs: int | None = None,
    answers: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    min_attention_kept: float | None = None,
    min_accuracy: float | None = None,
    workers: int = 1,
    progress: bool = False,
) -> PlanResults:
    """Find the load that GPUs, policies and budgets carry within a latency target, and its cost.

    Ask by a workload file, or without one by `model`, `gpus`, a percentile and what is searched.

    Parameters
    ----------
    workload : path or Workload, optional
        A workload in TOML (``arborsim plan --example`` prints one).
    gpus : str or sequence of str
        GPUs, names or TOML files; they take the place of the workload's.
    model, rate, p95, p50, p99, tree, chain, trace, prompt, solved, policies, budgets, kv_dtype, \
weights, quick
        The question without a file, as `arborsim.products.plan.quick.quick_tables` describes them:
        ``rate="20/min"``, ``p95="60s"``, ``tree={"depth": 6, "width": 16, "thought": 80}``.
    load : float, optional
        Size a fleet for this load, in place of the workload's.
    calibration : str or sequence of str
        Calibrations whose settings hold where the workload gives none.
    allow_code : bool
        Let the workload file name policies by ``package.module:Class``, which imports them.
    searches, warm_up, runs : int, optional
        Length and number of runs, in place of the workload's.
    answers : path or sequence of paths
        Logs of `arborsim live`: how many answers are right under each policy and budget.
    min_attention_kept, min_accuracy : float, optional
        Recommend policies that keep this share of attention, that get this share of answers right.
    workers : int
        Processes; results do not depend on it.
    progress : bool
        Show progress on standard error.

    Returns
    -------
    PlanResults

    Raises
    ------
    ArborsimError
        A name, number, file or combination of arguments that cannot work, in one line.

    Examples
    --------
    >>> import arborsim
    >>> found = arborsim.plan(
    ...     model="llama-3.1-8b", gpus="l40s,h100", rate="20/min", p95="60s",
    ...     tree={"depth": 6, "width": 16, "thought": 80}, quick=True,
    ... )  # doctest: +SKIP
    """
    planning = Planning(**locals())
    planning.run(progress=progress)
    return planning.results()


class Planning:
    """What `plan` is asked for, checked; candidates that are finished survive an interruption.

    Takes the arguments of `plan`.
    """

    def __init__(
        self,
        workload: str | os.PathLike[str] | Workload | None = None,
        *,
        gpus: str | Sequence[str] = (),
        load: float | None = None,
        calibration: str | Sequence[str] = (),
        allow_code: bool = False,
        searches: int | None = None,
        warm_up: int | None = None,
        runs: int | None = None,
        answers: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        min_attention_kept: float | None = None,
        min_accuracy: float | None = None,
        workers: int = 1,
        progress: bool = False,
        **asked: Any,
    ) -> None:
        from arborsim.products.plan.answers import problems_of, read_accuracies
        from arborsim.products.plan.plan import Planner
        from arborsim.products.plan.recommend import Demanded

        given = {name: value for name, value in locals().items() if name not in ("self", "asked")}
        self._command = equivalent("plan", plan, given | asked)
        choices.at_least(1, workers=workers, searches=searches, runs=runs)
        choices.at_least(0, warm_up=warm_up)
        for name, share in (("attention_kept", min_attention_kept), ("accuracy", min_accuracy)):
            if share is not None and not 0 <= share <= 1:
                raise UsageError(f"min_{name} must be a share in [0, 1], not {share!r}")
        logs = [Path(each) for each in choices.listed(answers)]
        found = workload_for(
            workload, gpus=gpus, calibration=calibration, allow_code=allow_code, **asked
        )
        if min_accuracy is not None and not logs and found.answers is None:
            raise UsageError("--min-accuracy needs --answers: a log of arborsim live")
        found = resized(found, load=load, searches=searches, warm_up=warm_up, runs=runs)
        demanded = Demanded(min_attention_kept, min_accuracy)
        self.planner = Planner(found, demanded, read_accuracies(logs), problems_of(logs), workers)

    def run(
        self,
        *,
        progress: bool = False,
        done: Callable[[CandidateResult], None] = lambda candidate: None,
    ) -> None:
        """Evaluate what is missing; `done` is called with each candidate that is finished."""
        from arborsim.report.progress import shown

        with shown(progress, self.planner.work()) as advance:
            self.planner.run(advance, done)

    def results(self) -> PlanResults:
        """Of the candidates that are finished."""
        workload, result = self.planner.workload, self.planner.result()
        profiles = {each.profile.name: each.profile for each in workload.hardware}
        engines = {each.engine.name for each in profiles.values() if each.engine is not None}
        metadata = made_by(
            "plan", self._command, *_LIBRARIES,
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


def workload_for(
    workload: str | os.PathLike[str] | Workload | None,
    *,
    gpus: str | Sequence[str] = (),
    calibration: str | Sequence[str] = (),
    allow_code: bool = False,
    **asked: Any,
) -> Workload:
    """The workload of a file, or of a question without one (`plan`).

    Raises
    ------
    UsageError
        Both are given, or neither, or one is wrong.
    """
    from arborsim.products.plan.quick import quick_tables
    from arborsim.products.plan.workload import Workload
    from arborsim.products.plan.workload_file import read_workload, workload_of

    quick = {name: value for name, value in asked.items() if value not in (None, False)}
    named = gpu_names(gpus)
    calibrations = [str(each) for each in choices.listed(calibration)]
    if workload is None:
        if missing := [
            name for name in ("model", "gpus") if not (quick | {"gpus": named}).get(name)
        ]:
            raise UsageError(
                f"{' and '.join(missing)} must be given: without a workload file, a plan asks for "
                "model, gpus, a percentile (p95='60s') and a tree, chain or trace"
            )
        tables = quick_tables(gpus=named, **quick)
        return workload_of(tables, Path(), tables["name"], calibrations, allow_code=True)
    if quick:
        name = next(iter(quick))
        raise UsageError(f"{name} asks without a workload: {_called(workload)} says it itself")
    if isinstance(workload, Workload):
        if named or calibrations:
            raise UsageError("gpus and calibration go with a workload file: change the Workload")
        return workload
    return read_workload(Path(workload), named, calibrations, allow_code)


def _called(workload: Any) -> str:
    return str(getattr(workload, "name", workload))


def gpu_names(given: str | Sequence[str]) -> list[str]:
    """GPUs that take the place of a workload's.

    A file that a caller names is relative to the working directory, not to the workload.
    """
    named = choices.names([str(each) for each in choices.listed(given)])
    return [
        str(real_path(Path(gpu))) if gpu.endswith(".toml") or "/" in gpu else gpu for gpu in named
    ]


def resized(
    workload: Workload,
    *,
    load: float | None = None,
    searches: int | None = None,
    warm_up: int | None = None,
    runs: int | None = None,
) -> Workload:
    """A workload with another load, or other runs, where they are given."""
    if load is not None:
        workload = workload.with_load(load)
    if (searches, warm_up, runs) == (None, None, None):
        return workload
    searches = workload.searches if searches is None else searches
    warm_up = min(workload.warm_up, searches // 10) if warm_up is None else warm_up
    return workload.with_run_length(searches, warm_up, workload.runs if runs is None else runs)


def _said(plan: PlanResult) -> str:
    return " ".join(plan.recommendation.answer) or plan.recommendation.text


class PlanResults(Results):
    """The load that each candidate carries, its cost, and which to take.

    Attributes
    ----------
    raw : PlanResult
        The records that tables and pages are made of.  They may change between versions.
    """

    kind = "plan"
    raw: PlanResult

    def __init__(
        self, raw: PlanResult, metadata: Mapping[str, Any], planner: Planner | None = None
    ) -> None:
        super().__init__(metadata)
        self.raw = raw
        self._planner = planner  # None if the results come from a file

    @property
    def recommendation(self) -> str:
        """What to rent, what it costs and what limits it, or why nothing meets the target."""
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

        The recommended one comes first, the others by cost at the stated load; what does not meet
        the target comes last.
        """
        from arborsim.products.plan.results import ranked

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
        the plan itself; results of a file have none of these.  Interrupted, the page is written
        without them; without `assumptions` it leaves out the changed ones, which take the longest.

        Raises
        ------
        UsageError
            The page cannot be written.
        """
        from arborsim.products.plan.page import PlanReport, write_plan_page
        from arborsim.products.plan.sensitivity import MOST_SEARCHES, detailed, work
        from arborsim.report.progress import shown

        path, planner = output_path(path), self._planner
        if planner is None:
            write_plan_page(PlanReport(self.raw), path)
            return path
        try:
            with shown(progress, work(self.raw, assumptions)) as advance:
                drawn, found = detailed(planner, self.raw, planner.jobs, advance, assumptions)
        except KeyboardInterrupt:
            write_plan_page(PlanReport(self.raw), path)
            raise
        count = min(planner.workload.searches, MOST_SEARCHES)
        how = (
            f"Each load is found by one run of {count:,} searches with the seed "
            f"{planner.workload.seed}: so few leave it uncertain by some "
            f"{100 / math.sqrt(count):.0f} %, ratios by less, as all numbers are tried on the same "
            "searches. Longer searches are the same ones, stretched."
        )
        write_plan_page(PlanReport(drawn, found, how if found else ""), path)
        return path

    def print(self, console: Console | None = None) -> None:
        from arborsim.products.plan.printed import print_plan

        print_plan(self.raw, console)

    def _tables(self) -> Iterable[tuple[str, Table[Any]]]:
        from arborsim.products.plan.tables import tables

        if self.raw.met():
            yield self.recommendation, tables(self.raw)[0]

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> PlanResults:
        """The results in a file."""
        from arborsim.core.records import convert
        from arborsim.products.plan.results import PlanResult

        own = dict(metadata)
        document = json.loads(own.pop("record"))
        document.pop("timeline", None)
        return cls(convert(PlanResult, document, finite=False), own)
