"""`arborsim replay`: what each policy costs and keeps, on recorded searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from arborsim.cli import options
from arborsim.cli.command import command, option
from arborsim.cli.progress import PatientProgress, interruptible
from arborsim.core.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from arborsim.policies.base import Policy
    from arborsim.run.results import ReplayResult


@dataclass(frozen=True)
class ReplayOutput(options.OutputOptions):
    """What to print and to write."""

    out: Path | None = options.output_option(None, "Write results to this Parquet file.")
    view: str = options.output_option(
        "auto", "table (all figures), matrix (a line per policy) or auto."
    )
    explain: bool = options.output_option(
        False, "Also print every term of each policy's time.", "--explain"
    )
    json: bool = options.json_option()

    def check(self, *inputs: Path) -> None:
        from arborsim.show.replay import VIEWS

        if self.view not in VIEWS:
            raise UnknownName("view", self.view, VIEWS)
        if self.explain and self.json:
            raise UsageError("--explain prints tables: leave --json out")
        super().check(*inputs)


@command
def replay(
    traces: list[Path] = options.traces_argument(),
    policies: options.PolicyOptions = options.PolicyOptions(),
    calibration: list[str] = options.calibration_option(),
    oracle: bool = option(True, "Also replay the offline optimum, and show the gap to it."),
    job: options.JobOptions = options.JobOptions(),
    machine: options.MachineOptions = options.MachineOptions(),
    event_by_event: bool = options.expert_option(
        False, "One simulated event per decode iteration (slow check)."
    ),
    keep_matrices: bool = options.expert_option(
        False,
        "A prefill that needs attention matrices holds all layers' (output_attentions).",
        "--keep-matrices",
    ),
    output: ReplayOutput = ReplayOutput(),
) -> None:
    """Replay traces under KV-cache policies.

    Shows peak memory by tier, what was evicted, offloaded and recomputed, where the time went and
    the share of attention kept, all against full retention (policy `full`, which is added).
    """
    from arborsim.run.replay import Replay
    from arborsim.run.results import ORACLE
    from arborsim.show.provenance import replay_settings

    output.check(*traces)
    chosen = policies.names(oracle=oracle)
    settings = _calibrated(options.policy_settings(chosen, policies.set_), calibration, traces)
    made = options.build_policies(settings)
    simulated = machine.machine(
        traces, event_by_event=event_by_event, explain=output.explain, keep_matrices=keep_matrices
    )
    request = Replay(
        traces,
        [*_references(made, traces, bound=oracle and job.quality), *made],
        policies.budgets(),
        simulated,
        pictures=output.report is not None,
        optional=frozenset(chosen if policies.every else {ORACLE} - set(chosen)),
        **job.fields(),
    )
    readers = request.open()
    request.settings = replay_settings(request, readers)
    with interruptible(), PatientProgress(request.work(readers)) as progress:
        result = request.run(progress.advance)
    _show(result, output)


def _calibrated(
    settings: dict[str, dict[str, str]], calibrations: list[str], traces: list[Path]
) -> dict[str, dict[str, str]]:
    """Settings from calibrations, where the user has not set others."""
    if not calibrations:
        return settings
    from arborsim.calibrate.documents import apply, read_calibration
    from arborsim.trace.reader import TraceReader

    layers = {str(path): TraceReader(path).info.geometry.layers for path in traces}
    return apply(settings, [read_calibration(name) for name in calibrations], layers)


def _references(policies: list[Policy], traces: list[Path], bound: bool) -> Iterator[Policy]:
    """Full retention, then the oracles that are wanted and that a trace can serve.

    One for each kind of groups that the policies decide for: each bounds its own kind.
    """
    from arborsim.policies.registry import build
    from arborsim.run.results import BASELINE, ORACLE
    from arborsim.signals.scores import GROUPINGS
    from arborsim.trace.reader import TraceReader

    names = {policy.name for policy in policies}
    if BASELINE not in names:
        yield build(BASELINE)
    if not bound:
        return
    kinds = {policy.grouping for policy in policies if policy.uses_budget}
    readers = [TraceReader(path) for path in traces]
    for per in GROUPINGS:
        oracle = build(ORACLE, {"per": per})
        wanted = per in kinds or (not kinds and per == GROUPINGS[0])
        given = any(oracle.label == policy.label for policy in policies)
        if wanted and not given and any(all(map(r.has, oracle.reads())) for r in readers):
            yield oracle


def _show(result: ReplayResult, output: ReplayOutput) -> None:
    """Write and print what was asked for."""
    from arborsim.show.replay import print_replay, to_frame, to_json

    if output.out is not None:
        to_frame(result).to_parquet(output.out, index=False)
    if output.report is not None:
        from arborsim.show.replay_page import write_report

        write_report(result, output.report)
    if output.json:
        typer.echo(to_json(result))
        return
    print_replay(result, view=output.view)
    if output.explain:
        from arborsim.show.terms import print_terms

        print_terms(result.episodes)
    for path in output.files.values():
        typer.echo(f"wrote {path}")
