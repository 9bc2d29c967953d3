"""`arborsim plot`: results as a figure, in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path

import typer

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.command import argument, command, option
from arborsim.products.options import output_option


@command
def plot(
    results: Path = argument(
        ..., "Results: the file of --out, or the log of a live run.", complete="results"
    ),
    kind: str = option(
        "",
        "pareto, heat, cliff, width or load, as the results allow.",
        complete="plot",
        shown="the usual one",
    ),
    metric: str = option(
        "",
        "What a replay is drawn by: right, kept, error, time or memory.",
        complete="metric",
        shown="the first known",
    ),
    out: Path | None = output_option(
        None, "Write a page (.html) or an image (.svg, .png) in place of drawing here.", writes=True
    ),
    dark: bool = output_option(False, "An image light on dark.", "--dark"),
) -> None:
    """Draw results: in the terminal, as a page, or as an image.

    A replay's Pareto shows memory against attention kept or time, a search's accuracy against KV
    size, a plan's cost against latency, and a live run's cliff accuracy by budget.
    """
    from arborsim.products.plot.plots import plots_of
    from arborsim.products.results import load_results
    from arborsim.report.images import check_format, print_plots, write

    if out is not None:
        check_format(out)
        check_writable(out, "--out")
    if dark and (out is None or out.suffix == ".html"):
        raise UsageError("--dark: only for --out FILE.svg or .png; a page follows its reader")
    found = load_results(results)
    made = plots_of(found.kind, found.raw, kind, metric)
    if out is None:
        print_plots(made)
        return
    said = found.metadata
    write(made, out, dark=dark, command=said.get("command", ""),
                settings=said.get("settings", {}))  # fmt: skip
    typer.echo(f"wrote {out}")
