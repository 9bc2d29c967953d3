"""`arborsim replay`: what each policy costs and keeps, on recorded searches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.core.errors import UsageError
from arborsim.run.aggregate import BASELINE, ORACLE

if TYPE_CHECKING:
    from arborsim.policies.base import Policy
    from arborsim.run.replay import Replay
    from arborsim.trace.reader import TraceReader


def replay(
    traces: Annotated[list[Path], typer.Argument(help="Trace files.", show_default=False)],
    policy: Annotated[
        list[str],
        typer.Option(help="Policies by comma, or 'all'; repeatable. `full` is added to compare."),
    ] = ["full"],  # noqa: B006 (typer copies defaults)
    budget: Annotated[
        list[str],
        typer.Option(help="Tokens (2048) or share of the full peak (0.25), by comma; repeatable."),
    ] = ["0.5"],  # noqa: B006
    gpu: Annotated[str, typer.Option(help="GPU profile: a name or a TOML file.")] = "h100",
    host: Annotated[str, typer.Option(help="Host to put the GPU into: a name or file.")] = "",
    model: Annotated[
        str,
        typer.Option(
            help="Model to charge bytes and seconds for: a name or config.json [default: recorded]."
        ),
    ] = "",
    kv_dtype: Annotated[
        str, typer.Option(help="Type of its cache: fp8, bf16, ... [default: the model's].")
    ] = "",
    recall: Annotated[
        str, typer.Option(help="How DDR tokens are read: stage, stream, near or ondemand.")
    ] = "stage",
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.", min=1)] = 1,
    tree_attention: Annotated[
        bool, typer.Option(help="Read ancestors that branches share once per batch.")
    ] = True,
    set_: Annotated[
        list[str], typer.Option("--set", help="name=value or policy.name=value; repeatable.")
    ] = [],  # noqa: B006
    calibration: Annotated[
        list[str], typer.Option(help="Settings from a calibration: a file or name; repeatable.")
    ] = [],  # noqa: B006
    first: Annotated[int, typer.Option(help="First episode.", min=0)] = 0,
    episodes: Annotated[int, typer.Option(help="Episodes per trace [default: all].", min=0)] = 0,
    quality: Annotated[
        bool, typer.Option(help="Measure attention kept (reads the largest column).")
    ] = True,
    skip_infeasible: Annotated[
        bool,
        typer.Option(
            "--skip-infeasible", help="Leave out a policy whose budget is too small for a trace."
        ),
    ] = False,
    oracle: Annotated[
        bool, typer.Option(help="Also replay the offline optimum, and show the gap to it.")
    ] = True,
    workers: Annotated[
        int, typer.Option(help="Processes that share the episodes; same results.", min=1)
    ] = 1,
    event_by_event: Annotated[
        bool, typer.Option(help="One simulated event per decode iteration (slow check).")
    ] = False,
    keep_matrices: Annotated[
        bool,
        typer.Option(
            "--keep-matrices",
            help="A prefill that needs attention matrices holds all layers' (output_attentions).",
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print every term of each policy's time.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write results to this Parquet file.")] = None,
    view: Annotated[
        str, typer.Option(help="table (all figures), matrix (a line per policy) or auto.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
) -> None:
    """Replay traces under KV-cache policies.

    Shows peak memory by tier, what was evicted, offloaded and recomputed, where the time went and
    the share of attention kept, all against full retention.
    """
    from arborsim.cli.machine import check_recall, geometry_of
    from arborsim.cli.options import build_policies, chosen_names, names, policy_settings
    from arborsim.cli.progress import PatientProgress
    from arborsim.core.budget import Budget
    from arborsim.core.errors import UnknownName
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine
    from arborsim.run.replay import Replay
    from arborsim.show.export import to_frame, to_json
    from arborsim.show.table import VIEWS, print_tables

    check_recall(recall)
    if view not in VIEWS:
        raise UnknownName("view", view, VIEWS)
    if explain and json:
        raise UsageError("--explain prints tables: leave --json out")
    _check_outputs(traces, out, report)
    chosen = chosen_names(",".join(policy))
    every = "all" in names(",".join(policy))
    if every and not oracle:
        chosen = [name for name in chosen if name != ORACLE]
    optional = set(chosen) if every else {ORACLE} - set(chosen)
    settings = policy_settings(chosen, set_)
    if calibration:
        settings = _calibrated(settings, calibration, traces)
    policies = _with_references(build_policies(settings), traces, bound=oracle and quality)
    budgets = [Budget.parse(text) for text in names(",".join(budget))]
    if not budgets:
        raise UsageError("--budget names no budget")
    machine = Machine(
        load_profile(gpu, host or None),
        geometry_of(model, kv_dtype, traces),
        recall,
        page_size,
        tree_attention,
        event_by_event,
        explain,
        keep_matrices,
    )
    job = Replay(
        traces,
        policies,
        budgets,
        machine,
        quality=quality,
        first=first,
        count=episodes or None,
        pictures=report is not None,
        optional=frozenset(optional),
        skip_infeasible=skip_infeasible,
        workers=workers,
    )
    readers = job.open()
    job.settings = _settings(job, readers)
    try:
        with PatientProgress(job.work(readers)) as progress:
            result = job.run(progress.advance)
    except KeyboardInterrupt:
        typer.echo("arborsim: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    if out is not None:
        to_frame(result).to_parquet(out, index=False)
    if report is not None:
        from arborsim.show.html import write_report

        write_report(result, report)
    if json:
        typer.echo(to_json(result))
        return
    print_tables(result, view=view)
    if explain:
        from arborsim.show.explain import print_terms

        print_terms(result.episodes)
    for path in (out, report):
        if path is not None:
            typer.echo(f"wrote {path}")


def _calibrated(
    settings: dict[str, dict[str, str]], calibrations: list[str], traces: list[Path]
) -> dict[str, dict[str, str]]:
    """Settings from calibrations, where the user has not set others."""
    from arborsim.calibrate.load import apply, read_calibration
    from arborsim.trace.reader import TraceReader

    layers = {str(path): TraceReader(path).info.geometry.layers for path in traces}
    return apply(settings, [read_calibration(name) for name in calibrations], layers)


def _with_references(policies: list[Policy], traces: list[Path], bound: bool) -> list[Policy]:
    """Full retention leads, to compare with; the oracle follows if a trace can serve it."""
    from arborsim.core.observations import Signal
    from arborsim.policies.registry import build
    from arborsim.trace.reader import TraceReader

    names = {policy.name for policy in policies}
    first = [] if BASELINE in names else [build(BASELINE)]
    wanted = bound and ORACLE not in names
    if wanted and any(TraceReader(path).has(Signal.ATTENTION) for path in traces):
        first.append(build(ORACLE))
    return [*first, *policies]


def _check_outputs(traces: list[Path], out: Path | None, report: Path | None) -> None:
    """Outputs can be written, and overwrite neither a trace nor each other."""
    from arborsim.cli.options import check_output

    check_output(out, "--out")
    check_output(report, "--report")
    given = {path.resolve() for path in traces}
    for path, option in ((out, "--out"), (report, "--report")):
        if path is not None and path.resolve() in given:
            raise UsageError(f"{option} {path}: that file was given already; choose another name")
        if path is not None:
            given.add(path.resolve())


def _settings(job: Replay, readers: list[TraceReader]) -> dict[str, str]:
    """Everything that determines the result, for the report's appendix."""
    import hashlib
    from importlib.metadata import version

    from arborsim import __version__
    from arborsim.cli.machine import machine_settings
    from arborsim.policies.registry import values_of

    settings = {
        **machine_settings(job.machine, [reader.info.geometry for reader in readers]),
        "attention matrices held": "of all layers" if job.machine.keep_matrices else "of one layer",
        "versions": ", ".join(
            [f"arborsim {__version__}"]
            + [f"{name} {version(name)}" for name in ("numpy", "pyarrow", "simpy")]
        ),
    }
    for reader in readers:
        info = reader.info
        digest = hashlib.sha256()
        with reader.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        settings[f"trace {reader.path.name}"] = (
            f"{info.task}, {info.search}, recorded on {info.model} (seed {info.seed}), "
            f"sha256 {digest.hexdigest()[:16]}"
        )
    for policy in job.policies:
        values = ", ".join(f"{key} {value}" for key, value in values_of(policy).items())
        settings[f"policy {policy.name}"] = values or "no parameters"
    return settings
