"""`arborsim plan`: which machines, policies and budgets serve a workload, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.plan.plan import Planner
    from arborsim.plan.results import PlanResult
    from arborsim.plan.workload import Workload

_OUTPUT, _RUN = "Output", "Run"


def plan(
    workload: Annotated[
        Path | None, typer.Argument(help="Workload in TOML.", show_default=False)
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a workload with every key explained.")
    ] = False,
    gpu: Annotated[
        list[str],
        typer.Option(help="In place of the workload's GPUs: names or TOML files; repeatable."),
    ] = [],
    load: Annotated[
        float | None,
        typer.Option(help="Size a fleet for this load [default: the workload's]."),
    ] = None,
    min_attention_kept: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Recommend policies that keep at least this share of attention."
        ),
    ] = None,
    calibration: Annotated[
        list[str],
        typer.Option(
            help="Settings of policies from a calibration: a file or name; the workload's own win; "
            "repeatable. Numbers of the machine: --gpu FILE."
        ),
    ] = [],
    accuracy: Annotated[
        list[Path],
        typer.Option(help="Log of arborsim live: how many answers are right; repeatable."),
    ] = [],
    min_accuracy: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Recommend policies that are right at least so often."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes; same results.", rich_help_panel=_RUN)
    ] = 1,
    searches: Annotated[
        int | None, typer.Option(min=1, help="In place of the workload's.", rich_help_panel=_RUN)
    ] = None,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="In place of the workload's.", rich_help_panel=_RUN)
    ] = None,
    runs: Annotated[
        int | None, typer.Option(min=1, help="In place of the workload's.", rich_help_panel=_RUN)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where Ctrl-C ended a plan.", rich_help_panel=_RUN),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Also print every cost term of a candidate.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    candidate: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="--explain, --perfetto: number in the table [default: recommended].",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write results: .parquet, .json or .csv.", rich_help_panel=_OUTPUT),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write one GPU's timeline for Perfetto.", rich_help_panel=_OUTPUT),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write one HTML page for a meeting: its loads and changed assumptions can take "
            "several times as long as the plan itself.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_OUTPUT),
    ] = False,
) -> int:
    """Find out how much load each GPU, policy and budget carries, and which to take.

    For every candidate the largest load that meets the latency target is searched for by
    simulation. Shows it with latencies, utilisation, what runs out first and cost per search, and
    recommends one. Ctrl-C keeps what is done; exit code 130.
    """
    from arborsim.plan.log import read_accuracies
    from arborsim.plan.plan import Planner
    from arborsim.plan.recommend import Demanded

    if example:
        from arborsim.plan.workload_file import example_workload

        typer.echo(example_workload(), nl=False)
        return 0
    if workload is None:
        raise UsageError("name a workload in TOML; arborsim plan --example prints one")
    if min_accuracy is not None and not accuracy:
        raise UsageError("--min-accuracy needs --accuracy: a log of arborsim live")
    if explain and json:
        raise UsageError("--explain prints tables: leave --json out")
    _check_outputs(workload, out, perfetto, report)
    asked = _workload(workload, gpu, calibration, load, (searches, warm_up, runs))
    planner = Planner(
        asked,
        Demanded(min_attention_kept, min_accuracy),
        read_accuracies(accuracy),
        jobs,
    )
    if candidate is not None and candidate >= len(planner.candidates):
        raise UsageError(
            f"--candidate {candidate}: there are {len(planner.candidates)}, counted from 0"
        )
    result = _run(planner, _partial(workload, out), resume=resume, keep=out is not None)
    if result is None:
        return 130
    return _show(planner, result, candidate, out, perfetto, report, explain=explain, json=json)


def _workload(
    path: Path,
    gpus: list[str],
    calibrations: list[str],
    load: float | None,
    lengths: tuple[int | None, ...],
) -> Workload:
    """The workload, with what options put in the place of its own."""
    from arborsim.plan.workload_file import read_workload

    found = read_workload(path, [_from_here(gpu) for gpu in gpus], calibrations)
    if load is not None:
        found = found.with_load(load)
    searches, warm_up, runs = lengths
    if lengths != (None, None, None):
        searches = found.searches if searches is None else searches
        if warm_up is None:
            warm_up = min(found.warm_up, searches // 10)
        found = found.with_run_length(searches, warm_up, found.runs if runs is None else runs)
    return found


def _from_here(gpu: str) -> str:
    """A file of the command line is relative to the working directory, not to the workload."""
    return str(Path(gpu).resolve()) if gpu.endswith(".toml") or "/" in gpu else gpu


def _partial(workload: Path, out: Path | None) -> Path:
    """Where finished candidates are kept until all are."""
    base = out if out is not None else Path(workload.name)
    return base.with_name(f"{base.name}.partial.jsonl")


def _check_outputs(
    workload: Path, out: Path | None, perfetto: Path | None, report: Path | None
) -> None:
    """Outputs can be written, and overwrite neither the workload nor each other."""
    from arborsim.cli.options import check_output
    from arborsim.plan.export import check_format

    given = {workload.resolve()}
    for path, option in ((out, "--out"), (perfetto, "--perfetto"), (report, "--report")):
        if path is None:
            continue
        check_output(path, option)
        if path.resolve() in given:
            raise UsageError(f"{option} {path}: that file was given already; choose another name")
        given.add(path.resolve())
    if out is not None:
        check_format(out)


def _run(planner: Planner, path: Path, *, resume: bool, keep: bool) -> PlanResult | None:
    """The plan; None if it was interrupted, after what is done has been written.

    With `keep`, candidates are on the disk as soon as they are finished.
    """
    from arborsim.cli.progress import PatientProgress
    from arborsim.plan.log import PlanLog

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
            typer.echo(
                f"arborsim: interrupted: {len(planner.finished)} of {len(planner.candidates)} "
                f"candidates are in {path}; --resume goes on",
                err=True,
            )
        else:
            path.unlink(missing_ok=True)
            typer.echo("arborsim: interrupted before any candidate was finished", err=True)
        return None
    finally:
        log.close()
    path.unlink(missing_ok=True)
    return result


def _show(
    planner: Planner,
    result: PlanResult,
    candidate: int | None,
    out: Path | None,
    perfetto: Path | None,
    report: Path | None,
    *,
    explain: bool,
    json: bool,
) -> int:
    """Print and write what was asked for; fail if no candidate meets the target."""
    from arborsim.cli.plan_explain import print_explained
    from arborsim.cli.plan_tables import print_plan
    from arborsim.plan import export

    chosen = result.recommendation.candidate if candidate is None else candidate
    if out is not None:
        export.write(result, out)
    if json:
        typer.echo(export.to_json(result))
    else:
        print_plan(result)
        if explain and chosen is not None:
            print_explained(result.candidates[chosen])
    if perfetto is not None and chosen is not None:
        if result.candidates[chosen].largest is None:
            raise UsageError(
                f"--perfetto: {result.candidates[chosen].name} carries no load; choose another by "
                "--candidate"
            )
        from arborsim.plan.timeline import timeline, write_perfetto

        write_perfetto(timeline(planner, result.candidates[chosen]), perfetto)
        typer.echo(f"wrote {perfetto}", err=json)
    if out is not None:
        typer.echo(f"wrote {out}", err=json)
    if report is not None:
        from arborsim.cli.plan_report import write_report

        if not write_report(planner, result, report):
            return 130
        typer.echo(f"wrote {report}", err=json)
    if result.recommendation.candidate is None:
        raise UsageError(result.recommendation.text)
    return 0
