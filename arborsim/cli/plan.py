"""`arborsim plan`: which machines, policies and budgets serve a workload, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.api.choices import names
from arborsim.cli.command import argument, command, option
from arborsim.cli.options import (
    OutputOptions,
    calibration_option,
    json_option,
    output_option,
    run_option,
)
from arborsim.cli.progress import interrupted
from arborsim.cli.quick import QuickOptions
from arborsim.core.errors import UsageError
from arborsim.show.progress import PatientProgress

if TYPE_CHECKING:
    from arborsim.plan.plan import Planner
    from arborsim.plan.results import PlanResult
    from arborsim.plan.workload import Workload


@dataclass(frozen=True)
class WorkloadOptions:
    """Options that replace what the workload says."""

    gpu: list[str] = option(
        [],
        "GPUs by comma, in place of the workload's: names, or TOML files with numbers of the "
        "machine; repeatable.",
        "--gpu",
        "--gpus",
        complete="gpu",
    )
    load: float | None = option(None, "Size a fleet for this load.", shown="the workload's")
    calibration: list[str] = calibration_option()
    searches: int | None = run_option(None, "In place of the workload's.", min=1)
    warm_up: int | None = run_option(None, "In place of the workload's.", min=0)
    runs: int | None = run_option(None, "In place of the workload's.", min=1)

    @property
    def gpus(self) -> list[str]:
        """A file of the command line is relative to the working directory, not to the workload."""
        return [
            str(Path(gpu).resolve()) if gpu.endswith(".toml") or "/" in gpu else gpu
            for gpu in names(self.gpu)
        ]

    def workload(self, asked: Path | dict[str, Any]) -> Workload:
        """The workload of a file or its tables, changed by the options that were given."""
        from arborsim.plan.workload_file import read_workload, workload_of

        if isinstance(asked, Path):
            found = read_workload(asked, self.gpus, self.calibration)
        else:
            found = workload_of(asked, Path(), asked["name"], self.calibration)
        if self.load is not None:
            found = found.with_load(self.load)
        if (self.searches, self.warm_up, self.runs) == (None, None, None):
            return found
        searches = found.searches if self.searches is None else self.searches
        warm_up = min(found.warm_up, searches // 10) if self.warm_up is None else self.warm_up
        runs = found.runs if self.runs is None else self.runs
        return found.with_run_length(searches, warm_up, runs)


@dataclass(frozen=True)
class PlanOutput(OutputOptions):
    """What to print and to write."""

    out: Path | None = output_option(None, "Write results: .parquet, .json or .csv.")
    perfetto: Path | None = output_option(None, "Write one GPU's timeline for Perfetto.")
    report: Path | None = output_option(
        None,
        "Write one HTML page for a meeting: its loads and changed assumptions can take "
        "several times as long as the plan itself.",
    )
    explain: bool = output_option(False, "Also print every cost term of a candidate.", "--explain")
    candidate: int | None = output_option(
        None, "--explain, --perfetto: number in the table.", shown="recommended", min=0
    )
    json: bool = json_option()

    def check(self, *inputs: Path) -> None:
        from arborsim.plan.files import check_format

        if self.explain and self.json:
            raise UsageError("--explain prints tables: leave --json out")
        super().check(*inputs)
        if self.out is not None:
            check_format(self.out)


@command
def plan(
    workload: Path | None = argument(None, "Workload in TOML."),
    example: bool = option(False, "Print a workload with every key explained.", "--example"),
    given: WorkloadOptions = WorkloadOptions(),
    quick: QuickOptions = QuickOptions(),
    min_attention_kept: float | None = option(
        None, "Recommend policies that keep at least this share of attention.", min=0.0, max=1.0
    ),
    accuracy: list[Path] = option(
        [], "Log of arborsim live: how many answers are right; repeatable."
    ),
    min_accuracy: float | None = option(
        None, "Recommend policies with at least this share of right answers.", min=0.0, max=1.0
    ),
    jobs: int = run_option(1, "Processes; same results.", min=1),
    resume: bool = run_option(False, "Go on where Ctrl-C ended a plan.", "--resume"),
    output: PlanOutput = PlanOutput(),
) -> int:
    """Find out how much load each GPU, policy and budget carries, and which to take.

    Ask by a workload file, or by --model, --gpus, --p95 and --tree, --chain or --trace. For every
    candidate the largest load that meets the latency target is searched for by
    simulation. Shows it with latencies, utilisation, what runs out first and cost per search, and
    recommends one. Ctrl-C keeps what is done; exit code 130.
    """
    from arborsim.plan.files import read_accuracies
    from arborsim.plan.plan import Planner
    from arborsim.plan.recommend import Demanded

    if example:
        from arborsim.plan.workload_file import example_workload

        typer.echo(example_workload(), nl=False)
        return 0
    if workload is not None:
        quick.refuse(workload)
    asked = workload or quick.tables(given.gpus)
    if isinstance(asked, dict) and quick.write is not None:
        given.workload(asked)  # refuses what cannot be planned
        quick.save(asked)
        return 0
    if min_accuracy is not None and not accuracy:
        raise UsageError("--min-accuracy needs --accuracy: a log of arborsim live")
    output.check(*([workload] if workload else []))
    demanded = Demanded(min_attention_kept, min_accuracy)
    planner = Planner(given.workload(asked), demanded, read_accuracies(accuracy), jobs)
    if output.candidate is not None and output.candidate >= len(planner.candidates):
        raise UsageError(
            f"--candidate {output.candidate}: there are {len(planner.candidates)}, counted from 0"
        )
    # Finished candidates are kept next to the results until all are.
    base = output.out or Path("plan" if workload is None else workload.name)
    log = base.with_name(f"{base.name}.partial.jsonl")
    result = _run(planner, log, resume=resume, keep=output.out is not None)
    return 130 if result is None else _show(planner, result, output)


def _run(planner: Planner, path: Path, *, resume: bool, keep: bool) -> PlanResult | None:
    """The plan; None if it was interrupted, after what is done has been written.

    With `keep`, candidates are on the disk as soon as they are finished.
    """
    from arborsim.plan.files import PlanLog

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
        with PatientProgress(planner.work()) as progress:
            result = planner.run(progress.advance, log.add if keep else lambda candidate: None)
    except KeyboardInterrupt:
        if planner.finished:
            log.write(planner.finished.values())
            done = f"{len(planner.finished)} of {len(planner.candidates)} candidates"
            interrupted(f": {done} are in {path}; --resume goes on")
        else:
            path.unlink(missing_ok=True)
            interrupted(" before any candidate was finished")
        return None
    finally:
        log.close()
    path.unlink(missing_ok=True)
    return result


def _show(planner: Planner, result: PlanResult, output: PlanOutput) -> int:
    """Print and write what was asked for; fail if no candidate meets the target."""
    from arborsim.plan import files
    from arborsim.show.plan import print_plan
    from arborsim.show.terms import print_explained

    number = output.candidate
    chosen = result.recommendation.candidate if number is None else number
    if output.out is not None:
        files.write(result, output.out)
    if output.json:
        typer.echo(files.to_json(result))
    else:
        print_plan(result)
        if output.explain and chosen is not None:
            print_explained(result.candidates[chosen])
    if output.perfetto is not None and chosen is not None:
        from arborsim.plan.timeline import timeline, write_perfetto

        candidate = result.candidates[chosen]
        if candidate.largest is None:
            raise UsageError(
                f"--perfetto: {candidate.name} carries no load; choose another by --candidate"
            )
        write_perfetto(timeline(planner, candidate), output.perfetto)
        typer.echo(f"wrote {output.perfetto}", err=output.json)
    if output.out is not None:
        typer.echo(f"wrote {output.out}", err=output.json)
    if output.report is not None:
        if not _write_page(planner, result, output.report):
            return 130
        typer.echo(f"wrote {output.report}", err=output.json)
    if result.recommendation.candidate is None:
        raise UsageError(result.recommendation.text)
    return 0


def _write_page(planner: Planner, result: PlanResult, path: Path) -> bool:
    """Write the page; False if Ctrl-C left out what it shows beyond the plan."""
    from arborsim.plan.sensitivity import MOST_SEARCHES, detailed, work
    from arborsim.show.plan_page import PlanReport, write_plan_page

    try:
        with PatientProgress(work(result)) as progress:
            shown, found = detailed(planner, result, planner.jobs, progress.advance)
    except KeyboardInterrupt:
        write_plan_page(PlanReport(result), path)
        interrupted(f": {path} has the plan, but no loads, timeline or assumptions")
        return False
    workload = planner.workload
    how = (
        f"Each load is found by one run of {min(workload.searches, MOST_SEARCHES):,} searches with "
        f"the seed {workload.seed}. Longer searches are the same ones, stretched."
    )
    write_plan_page(PlanReport(shown, found, how), path)
    return True
