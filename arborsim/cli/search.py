"""`arborsim search`: every search algorithm on the same recorded thoughts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.core.errors import UsageError
from arborsim.search import search_names

if TYPE_CHECKING:
    from arborsim.bank.job import SearchJob
    from arborsim.cli.search_report import Page

_SEARCH = "Searches"
_MACHINE = "Policies and machine"
_OUTPUT = "Output"


def search(
    bank: Annotated[
        Path,
        typer.Argument(
            help="A trace with thoughts for several searches (record --bank).", show_default=False
        ),
    ],
    algorithm: Annotated[
        list[str],
        typer.Option(
            help=f"By comma, or 'all'; repeatable: {', '.join(search_names())}.",
            rich_help_panel=_SEARCH,
        ),
    ] = ["rebase,ets"],  # noqa: B006 (typer copies defaults)
    width: Annotated[
        str,
        typer.Option(
            help="Thoughts that run together at first, by comma: N chains, beams or slots; "
            "tot-bfs keeps 5 states, each gets width // 5 children.",
            rich_help_panel=_SEARCH,
        ),
    ] = "16",
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="name=value of searches (or ets.lambda_b=1.5 of one) or policies; repeatable.",
            rich_help_panel=_SEARCH,
        ),
    ] = [],  # noqa: B006
    sweep: Annotated[
        str,
        typer.Option(
            help="One option, several values: lambda_b=1,1.25,1.5,1.75,2 also names the one that "
            "ETS's paper would take.",
            rich_help_panel=_SEARCH,
        ),
    ] = "",
    keep_duplicates: Annotated[
        bool,
        typer.Option(
            "--keep-duplicates",
            help="Go on with thoughts that repeat a sibling.",
            rich_help_panel=_SEARCH,
        ),
    ] = False,
    first: Annotated[int, typer.Option(help="First problem.", min=0)] = 0,
    episodes: Annotated[int, typer.Option(help="Problems [default: all].", min=0)] = 0,
    policy: Annotated[
        list[str],
        typer.Option(help="Policies by comma, or 'all'; repeatable.", rich_help_panel=_MACHINE),
    ] = ["full"],  # noqa: B006
    budget: Annotated[
        list[str],
        typer.Option(
            help="Tokens (2048) or share of each search's own tokens (0.25), by comma.",
            rich_help_panel=_MACHINE,
        ),
    ] = ["0.5"],  # noqa: B006
    gpu: Annotated[
        str,
        typer.Option(help="GPU profile: a name or a TOML file.", rich_help_panel=_MACHINE),
    ] = "h100",
    host: Annotated[
        str,
        typer.Option(help="Host to put the GPU into: a name or file.", rich_help_panel=_MACHINE),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="Model to charge bytes and seconds for: a name or config.json "
            "[default: recorded].",
            rich_help_panel=_MACHINE,
        ),
    ] = "",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Type of its cache: fp8, bf16, ... [default: the model's].",
            rich_help_panel=_MACHINE,
        ),
    ] = "",
    recall: Annotated[
        str,
        typer.Option(
            help="How DDR tokens are read: stage, stream, near or ondemand.",
            rich_help_panel=_MACHINE,
        ),
    ] = "stage",
    page_size: Annotated[
        int, typer.Option(help="Tokens per KV page.", min=1, rich_help_panel=_MACHINE)
    ] = 1,
    tree_attention: Annotated[
        bool,
        typer.Option(
            help="Read ancestors that branches share once per batch.", rich_help_panel=_MACHINE
        ),
    ] = True,
    quality: Annotated[
        bool,
        typer.Option(
            help="Measure attention kept, where the bank holds attention.",
            rich_help_panel=_MACHINE,
        ),
    ] = True,
    skip_infeasible: Annotated[
        bool,
        typer.Option(
            "--skip-infeasible",
            help="Leave out what a budget is too small for.",
            rich_help_panel=_MACHINE,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write a row per search to a .parquet, .csv or .json file.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a self-contained HTML page.", rich_help_panel=_OUTPUT),
    ] = None,
    trees: Annotated[
        str,
        typer.Option(
            help="Problems whose trees the page shows, by comma [default: the first that all "
            "searches solve, that some do and that none does].",
            rich_help_panel=_OUTPUT,
        ),
    ] = "",
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            "--workers",
            min=1,
            help="Processes that share the problems; same results.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 1,
) -> int:
    """Run search algorithms on a bank of recorded thoughts.

    Each walks the same thoughts, as it would have met them live, and is then replayed on a
    simulated GPU.  Shows accuracy, KV size, memory, model calls, tokens and time, against REBASE.
    """
    from arborsim.bank.job import SearchJob
    from arborsim.cli import search_setup as setup
    from arborsim.cli.machine import check_recall, geometry_of
    from arborsim.cli.options import names
    from arborsim.cli.search_report import check_report, page_of
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine

    check_recall(recall)
    setup.check_out(out, bank)
    check_report(report, bank, out)
    page = page_of(report, trees)
    algorithms = names(",".join(algorithm))
    chosen = setup.Chosen.of(algorithms, setup.widths_of(width), ",".join(policy), set_, sweep)
    machine = Machine(
        load_profile(gpu, host or None), geometry_of(model, kv_dtype, [bank]), recall, page_size,
        tree_attention,
    )  # fmt: skip
    if machine.geometry:
        setup.check_fits(machine.profile, machine.geometry)
    arms, policies, left_out = chosen.serve(bank)
    cells = setup.cells_of(policies, names(",".join(budget)))
    if not arms or not cells:
        raise UsageError(f"nothing is left to run: {'; '.join(left_out)}")
    job = SearchJob(
        bank,
        arms,
        cells,
        machine,
        quality=quality,
        dedupe=not keep_duplicates,
        first=first,
        count=episodes or None,
        skip_infeasible=skip_infeasible,
        workers=jobs,
    )
    return _run(job, left_out, out, page)


def _run(job: SearchJob, left_out: list[str], out: Path | None, page: Page | None) -> int:
    """Run with a bar, print and write; Ctrl-C keeps the problems that are done."""
    from rich.console import Console

    from arborsim.bank.results import rows_of
    from arborsim.bank.sweep import verdicts
    from arborsim.cli import search_setup as setup
    from arborsim.cli.machine import machine_notes
    from arborsim.cli.progress import PatientProgress
    from arborsim.show.search_table import print_searches
    from arborsim.show.terminal import plain

    reader = job.open()
    if page:
        page.check(job.chosen(reader))
    interrupted = False
    try:
        with PatientProgress(job.work(reader)) as progress:
            job.run(progress.advance)
    except KeyboardInterrupt:
        interrupted = True
    results, left_out = job.ordered(), [*left_out, *job.notes()]
    print_searches(rows_of(results), setup.heading(job, reader, results))
    console = Console(highlight=False)
    for line in (*verdicts(results), *machine_notes(job.machine, results), *left_out):
        console.print(plain(line), markup=False)
    if out is not None and (results or not interrupted):
        setup.write(results, out)
        typer.echo(f"wrote {out}")
    if page and results:
        interrupted = not page.write(job, reader, results, left_out, interrupted)
        typer.echo(f"wrote {page.path}")
    if interrupted:
        done = len({r.episode for r in results})
        of = len(job.chosen(reader))
        typer.echo(f"arborsim: interrupted: {done} of {of} problems are in the results", err=True)
        return 130
    return 0
