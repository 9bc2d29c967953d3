"""`arborsim plan --report`: what the page shows beyond the plan, computed and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from arborsim.plan.plan import Planner
    from arborsim.plan.results import PlanResult
    from arborsim.plan.workload import Workload


def write_report(planner: Planner, result: PlanResult, path: Path) -> bool:
    """Write the page; False if Ctrl-C left out what it shows beyond the plan."""
    from arborsim.cli.progress import PatientProgress
    from arborsim.plan.details import detailed, work
    from arborsim.show.plan_page import PlanReport, write_plan_page

    try:
        with PatientProgress(work(result)) as progress:
            shown, found = detailed(planner, result, planner.jobs, progress.advance)
    except KeyboardInterrupt:
        write_plan_page(PlanReport(result), path)
        typer.echo(
            f"arborsim: interrupted: {path} has the plan, but no loads, timeline or assumptions",
            err=True,
        )
        return False
    write_plan_page(PlanReport(shown, found, how(planner.workload)), path)
    return True


def how(workload: Workload) -> str:
    """How the sensitivities were found."""
    from arborsim.plan.sensitivity import MOST_SEARCHES

    count = min(workload.searches, MOST_SEARCHES)
    return (
        f"Each load is found by one run of {count:,} searches with the seed {workload.seed}. "
        "Longer searches are the same ones, stretched."
    )
