"""`arborsim replay`: what each policy costs and keeps, on recorded searches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from arborsim.core.errors import UnknownName, UsageError
from arborsim.products import options
from arborsim.products.command import command, option
from arborsim.products.interrupt import interruptible

if TYPE_CHECKING:
    from arborsim.products.replay.ask import ReplayResults


@dataclass(frozen=True)
class ReplayOutput(options.OutputOptions):
    """What to print and to write."""

    out: Path | None = options.output_option(
        None, "Write results: .parquet, .csv or .json.", writes=True
    )
    view: str = options.output_option(
        "auto", "table (all figures), matrix (a line per policy), pareto or auto."
    )
    explain: bool = options.output_option(
        False, "Also print every term of each policy's time.", "--explain"
    )
    json: bool = options.json_option()

    def check(self) -> None:
        from arborsim.core.tables import check_format
        from arborsim.products.replay.tables import VIEWS

        if self.view not in (views := (*VIEWS, "pareto")):
            raise UnknownName("view", self.view, views)
        if self.explain and self.json:
            raise UsageError("--explain prints tables: leave --json out")
        if self.out is not None:
            check_format(self.out)
        super().check()


@command
def replay(
    traces: list[Path] = options.traces_argument(),
    policies: options.PolicyOptions = options.PolicyOptions(),
    calibration: list[str] = options.calibration_option(),
    full: bool = option(True, "Also replay full retention, to compare."),
    oracle: bool = option(True, "Also replay the offline optimum, and show the gap to it."),
    answers: list[Path] = option([], "Log of arborsim live, whose right answers are shown."),
    equal: str = option(
        "", "Compare at equal memory, not budgets: peak or byte-seconds.", shown="equal budgets"
    ),
    reference: str = option(
        "",
        "With --equal: the memory is what this policy takes at --budget.",
        complete="policy",
        shown="that share of full retention's",
    ),
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
    the share of attention kept, all against full retention (policy `full`), and the right answers
    that live runs of the same settings gave.
    """
    from arborsim.products.replay.ask import replay as run

    output.check()
    with interruptible():
        results = run(
            traces, **policies.fields(), calibration=calibration, full=full, oracle=oracle,
            answers=answers, equal=equal, reference=reference,
            **job.fields(),
            **machine.fields(), pictures=output.report is not None, explain=output.explain,
            event_by_event=event_by_event, keep_matrices=keep_matrices, progress=True,
        )  # fmt: skip
    _show(results, output)


def _show(results: ReplayResults, output: ReplayOutput) -> None:
    """Write and print what was asked for."""
    if output.out is not None:
        results.save(output.out)
    if output.report is not None:
        results.report(output.report)
    if output.json:
        typer.echo(results.to_json())
        return
    results.print(view=output.view)
    if output.explain:
        from arborsim.products.explain import print_terms

        print_terms(results.raw.episodes)
    for path in output.files.values():
        typer.echo(f"wrote {path}")
