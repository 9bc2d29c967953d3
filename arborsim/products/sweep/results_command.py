"""`arborsim results`: the cells of a sweep, filtered, grouped, exported, as a page."""

from __future__ import annotations

from pathlib import Path

import typer

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable, real_path
from arborsim.products.command import argument, command, option
from arborsim.products.options import check_ending, json_option, output_option


@command
def results(
    folder: Path = argument(..., "Folder of arborsim sweep --out."),
    where: list[str] = option([], "Cells to take: policy=h2o,snapkv; repeatable."),
    by: list[str] = option([], "Parameters that groups share: policy,budget.", shown="cells"),
    csv: Path | None = output_option(None, "Write the rows as CSV.", writes=True),
    parquet: Path | None = output_option(None, "Write the rows as Parquet.", writes=True),
    report: Path | None = output_option(None, "Write a self-contained HTML page.", writes=True),
    json: bool = json_option(),
) -> None:
    """Show what a sweep found: cells, or groups of them.

    Cells are compared with full retention on the same trace and machine. --csv and --parquet write
    the groups of --by, else the cells with all their columns.
    """
    from arborsim.core.tables import check_format, write_table
    from arborsim.products.sweep.ask import results as read
    from arborsim.products.sweep.cells import PARTS

    files = {"--csv": csv, "--parquet": parquet, "--report": report}
    for name, path in files.items():
        if path is not None:
            check_ending(path, name, ".html" if name == "--report" else name.replace("--", "."))
            check_writable(path, name)
            for own in (folder / part for part in PARTS):
                if real_path(own) in real_path(path).parents:
                    raise UsageError(f"{name} {path}: {own} is for cells: choose another name")
            if path.suffix != ".html":
                check_format(path)
    found = read(folder, where=where, by=by)
    rows = found.summary() if by else found.to_pandas()
    for path in (csv, parquet):
        if path is not None:
            write_table(rows, path, found.metadata)
    if report is not None:
        found.report(report)
    if json:
        typer.echo(found.to_json())
        return
    found.print()
    for path in filter(None, files.values()):
        typer.echo(f"wrote {path}")
