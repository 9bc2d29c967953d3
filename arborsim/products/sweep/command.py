"""`arborsim sweep`: a grid of replays and live runs, each cell computed once."""

from __future__ import annotations

from pathlib import Path

import typer

from arborsim.core.errors import UsageError
from arborsim.products.command import argument, command, option
from arborsim.products.interrupt import interrupted
from arborsim.products.options import json_option, output_option, run_option

#: Failures that are printed; `arborsim results` shows all.
_MOST = 5
#: More cells than this are foretold.
_MANY = 100_000


@command
def sweep(
    grid: Path | None = argument(None, "Grid in TOML."),
    example: bool = option(False, "Print a grid with every key explained.", "--example"),
    out: Path | None = output_option(None, "Folder for the cells."),
    jobs: int = run_option(1, "Processes; same cells.", min=1),
    on: str = run_option("local", "Where cells are computed: local or ray."),
    allow_code: bool = option(
        False,
        "Import policies and searches that the grid names as package.module:Class.",
        "--allow-code",
    ),
    address: str = run_option("", "--on ray: address of the cluster.", shown="one started here"),
    json: bool = json_option(),
) -> int:
    """Replay a grid of traces, policies, budgets and machines, and search it live.

    Every combination is a cell: a small Parquet file in the folder, named by what it depends on. A
    second run computes only what is missing; several may share a folder. Ctrl-C keeps the cells
    that are done; exit code 130. Exit code 1 if cells failed: these are records with their reason,
    and the next run tries them again.
    """
    from arborsim.report.words import counted, plain

    if example:
        from arborsim.products.sweep.grid import example_grid

        typer.echo(example_grid(), nl=False)
        return 0
    if grid is None:
        raise UsageError("name a grid; arborsim sweep --example prints one")
    if out is None:
        raise UsageError("--out is missing: the folder for the cells")
    from arborsim.products.sweep.ask import Sweeping

    sweeping = Sweeping(
        grid, out, on=on, workers=jobs, address=address, allow_code=allow_code,
        foretell=lambda cells: _foretell(cells, grid, out),
    )  # fmt: skip
    try:
        tally = sweeping.run(progress=True)
    except KeyboardInterrupt:
        done = sum(job in sweeping.folder for job in sweeping.jobs)
        whole = counted(len(sweeping.jobs), "cell")
        return interrupted(f": {out} holds {done:,} of {whole}; the same command goes on")
    for name, reason in tally.failures[:_MOST]:
        typer.echo(plain(f"failed: {name}: {reason}"), err=True)
    if len(tally.failures) > _MOST:
        typer.echo(f"and {len(tally.failures) - _MOST:,} more failures", err=True)
    if json:
        typer.echo(sweeping.results().to_json())
    else:
        made = ", ".join(
            f"{number:,} {status}" for status, number in sorted(tally.statuses.items())
        )
        there = f"{tally.there:,} were there" if tally.there else ""
        said = "; ".join(filter(None, (made, there)))
        typer.echo(f"{counted(len(sweeping.jobs), 'cell')} of {grid} in {out}: {said}")
        typer.echo(f"arborsim results {out} shows them")
    return int(bool(tally.failures))


def _foretell(cells: int, grid: Path, out: Path) -> None:
    """Say what a huge grid comes to, which may be a mistake, before it is begun."""
    from arborsim.core.units import quantity
    from arborsim.products.sweep.cells import FILE_BYTES

    if cells > _MANY:
        size = quantity("bytes", cells * FILE_BYTES)
        typer.echo(f"arborsim: {grid} has {cells:,} cells: about {size} in {out}", err=True)
