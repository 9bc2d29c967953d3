"""`arborsim plan`: which machines, policies and budgets serve a workload, and what that costs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.core.errors import UsageError
from arborsim.products.command import argument, command, option
from arborsim.products.interrupt import interrupted
from arborsim.products.options import (
    OutputOptions,
    calibration_option,
    json_option,
    output_option,
    run_option,
)
from arborsim.products.plan.quick_command import QuickOptions

if TYPE_CHECKING:
    from arborsim.products.plan.ask import Planning
    from arborsim.products.plan.files import PlanLog
    from arborsim.products.plan.plan import Planner
    from arborsim.products.plan.results import CandidateResult
    from arborsim.products.plan.workload import Workload


@dataclass(frozen=True)
class WorkloadOptions:
    """Options that replace what the workload says."""

    gpu: list[str] = option(
        [],
        "GPUs by comma, in place of the workload's: names, or TOML files with numbers of the "
        "machine; repeatable.",
        complete="gpu",
    )
    load: float | None = option(None, "Size a fleet for this load.", shown="the workload's")
    calibration: list[str] = calibration_option()
    allow_code: bool = option(
        False,
        "Import policies that the workload file names as package.module:Class.",
        "--allow-code",
    )
    searches: int | None = run_option(None, "In place of the workload's.", min=1)
    warm_up: int | None = run_option(None, "In place of the workload's.", min=0)
    runs: int | None = run_option(None, "In place of the workload's.", min=1)

    def fields(self) -> dict[str, Any]:
        """As arguments of `arborsim.plan`."""
        return {("gpus" if name == "gpu" else name): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class PlanOutput(OutputOptions):
    """What to print and to write."""

    out: Path | None = output_option(None, "Write results: .parquet, .json or .csv.", writes=True)
    perfetto: Path | None = output_option(
        None, "Write one GPU's timeline for Perfetto.", writes=True
    )
    report: Path | None = output_option(
        None,
        "Write one HTML page for a meeting: its loads and changed assumptions can take "
        "several times as long as the plan itself.",
        writes=True,
    )
    assumptions: bool = output_option(
        True,
        "--report: show what changes with the machine's numbers, which takes most of its time.",
        "--assumptions/--no-assumptions",
    )
    explain: bool = output_option(False, "Also print every cost term of a candidate.", "--explain")
    candidate: int | None = output_option(
        None, "--explain, --perfetto: number in the table.", shown="recommended", min=0
    )
    json: bool = json_option()

    def check_candidate(self, known: int) -> None:
        """Refuse a number that none of the `known` candidates has."""
        if self.candidate is not None and self.candidate >= known:
            raise UsageError(f"--candidate {self.candidate}: there are {known}, counted from 0")

    def check(self) -> None:
        from arborsim.core.tables import check_format

        if self.explain and self.json:
            raise UsageError("--explain prints tables: leave --json out")
        super().check()
        if self.out is not None:
            check_format(self.out)


#: A plan that seems to take longer says so after its first candidates.
_LONG_S = 30.0


@command
def plan(
    workload: Path | None = argument(None, "Workload in TOML."),
    example: bool = option(
        False,
        "Print a workload with every key explained; with --report, --out or --json plan it.",
        "--example",
    ),
    given: WorkloadOptions = WorkloadOptions(),
    quick: QuickOptions = QuickOptions(),
    min_attention_kept: float | None = option(
        None, "Recommend policies that keep at least this share of attention.", min=0.0, max=1.0
    ),
    answers: list[Path] = option(
        [], "Log of arborsim live: how many answers are right; repeatable."
    ),
    min_accuracy: float | None = option(
        None, "Recommend policies with at least this share of right answers.", min=0.0, max=1.0
    ),
    jobs: int | None = run_option(
        None, "Processes; same results.", shown="1; every core for --example", min=1
    ),
    resume: bool = run_option(False, "Go on where Ctrl-C ended a plan.", "--resume"),
    output: PlanOutput = PlanOutput(),
) -> int:
    """Find out how much load each GPU, policy and budget carries, and which to take.

    Ask by a workload file, or by --model, --gpu, --p95 and --tree, --chain or --trace. For every
    candidate the largest load that meets the latency target is searched for by
    simulation. Shows it with latencies, utilisation, what runs out first and cost per search, and
    recommends one. Ctrl-C keeps what is done; exit code 130.
    """
    source: Path | Workload | None = workload
    if example:
        if not (output.report or output.out or output.json):
            from arborsim.products.plan.workload_file import example_workload

            typer.echo(example_workload(), nl=False)
            return 0
        source, given = _example(workload, given, quick)
    elif workload is not None:
        quick.refuse(workload)
    elif _written(given, quick):
        return 0
    from arborsim.products.plan.ask import Planning

    output.check()
    planning = Planning(
        source, **given.fields(), **quick.asked, answers=answers, min_accuracy=min_accuracy,
        min_attention_kept=min_attention_kept,
        workers=jobs or (len(os.sched_getaffinity(0)) if example else 1),
    )  # fmt: skip
    output.check_candidate(len(planning.planner.candidates))
    # Finished candidates are kept next to the results until all are.
    base = output.out or Path("plan" if workload is None else workload.name)
    log = base.with_name(f"{base.name}.partial.jsonl")
    if not _run(planning, log, resume=resume, output=output):
        return 130
    return _show(planning, output, log)


def _written(given: WorkloadOptions, quick: QuickOptions) -> bool:
    """Refuse a question that cannot be planned; whether it was written to a file."""
    from arborsim.products.plan.ask import gpu_names, resized, workload_for

    tables = quick.tables(gpu_names(given.gpu))
    if quick.write is None:
        return False
    asked = given.fields()
    sizes = {name: asked.pop(name) for name in ("load", "searches", "warm_up", "runs")}
    resized(workload_for(None, **asked, **quick.asked), **sizes)
    quick.save(tables)
    return True


def _example(
    workload: Path | None, given: WorkloadOptions, quick: QuickOptions
) -> tuple[Workload, WorkloadOptions]:
    """The workload that `--example` prints, and the options that are still to be applied."""
    from arborsim.products.plan.ask import gpu_names
    from arborsim.products.plan.workload_file import example_workload, parse_workload

    if workload is not None:
        raise UsageError(f"--example is a workload of its own: leave {workload} out")
    quick.refuse(Path("--example"))
    gpus = gpu_names(given.gpu)
    found = parse_workload(example_workload(), Path(), "example", gpus, given.calibration)
    return found, replace(given, gpu=[], calibration=[])


def _run(planning: Planning, path: Path, *, resume: bool, output: PlanOutput) -> bool:
    """Whether the plan is complete; if it was interrupted, what is done has been written.

    Where results are written, candidates are on the disk as soon as they are finished.
    """
    from arborsim.products.plan.files import PlanLog

    planner, keep = planning.planner, output.out is not None
    log = PlanLog(path, planner.workload)
    if resume:
        planner.finished.update(log.resume())
    elif path.exists():
        raise UsageError(
            f"{path} holds an interrupted plan: go on with it by --resume, or delete it"
        )
    if keep:
        log.write(planner.finished.values())
    try:
        planning.run(progress=True, done=_Foretold(planner, log if keep else None, output))
    except KeyboardInterrupt:
        if planner.finished:
            log.write(planner.finished.values())
            done = f"{len(planner.finished)} of {len(planner.candidates)} candidates"
            interrupted(f": {done} are in {path}; --resume goes on")
        else:
            path.unlink(missing_ok=True)
            interrupted(" before any candidate was finished")
        return False
    finally:
        log.close()
    return True


class _Foretold:
    """Logs candidates as they are finished; after the first ones says how long the rest takes."""

    def __init__(self, planner: Planner, log: PlanLog | None, output: PlanOutput) -> None:
        self._planner, self._log, self._output = planner, log, output
        self._missing, self._began_s, self._done = len(planner.missing), time.monotonic(), 0

    def __call__(self, candidate: CandidateResult) -> None:
        from arborsim.products.plan.sensitivity import share_of_plan
        from arborsim.report.progress import duration

        if self._log is not None:
            self._log.add(candidate)
        self._done += 1
        if self._done != self._planner.jobs or self._done >= self._missing:
            return
        each_s = (time.monotonic() - self._began_s) / self._done
        left_s = each_s * (self._missing - self._done)
        pages = self._output.report is not None
        share = share_of_plan(self._planner.workload, self._output.assumptions)
        page_s = each_s * share if pages else 0.0
        if left_s + page_s > _LONG_S:
            page = f", and {duration(page_s)} for the page" if pages else ""
            typer.echo(
                f"arborsim: {self._done} of {self._missing} candidates took "
                f"{duration(each_s * self._done)}: about {duration(left_s)} for the others{page}",
                err=True,
            )


def _show(planning: Planning, output: PlanOutput, log: Path) -> int:
    """Print and write what was asked for; fail if no candidate meets the target.

    The log goes when what it holds has been written, or else printed.
    """
    results, number = planning.results(), output.candidate
    plan = results.raw
    chosen = plan.recommendation.candidate if number is None else number
    if output.out is not None:
        results.save(output.out)
        log.unlink(missing_ok=True)
    if output.json:
        typer.echo(results.to_json())
    else:
        results.print()
        if output.explain and chosen is not None:
            from arborsim.products.explain import print_explained

            print_explained(plan.candidates[chosen])
    log.unlink(missing_ok=True)
    if output.perfetto is not None and chosen is not None:
        from arborsim.products.plan.timeline import timeline, write_perfetto

        candidate = plan.candidates[chosen]
        if candidate.largest is None:
            raise UsageError(
                f"--perfetto: {candidate.name} carries no load; choose another by --candidate"
            )
        write_perfetto(timeline(planning.planner, candidate), output.perfetto)
        typer.echo(f"wrote {output.perfetto}", err=output.json)
    if output.out is not None:
        typer.echo(f"wrote {output.out}", err=output.json)
    if output.report is not None:
        try:
            results.report(output.report, progress=True, assumptions=output.assumptions)
        except KeyboardInterrupt:
            page = output.report
            return interrupted(f": {page} has the plan, but no loads, timeline or assumptions")
        typer.echo(f"wrote {output.report}", err=output.json)
    if plan.recommendation.candidate is None:
        raise UsageError(plan.recommendation.text)
    return 0
