"""`arborsim plot`: results as a figure, in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.declare import Option, Written


def plot(
    results: Annotated[Path, Option(complete="results")],
    *,
    kind: Annotated[str, Option(complete="plot", shown="the usual one")] = "",
    metric: Annotated[str, Option(complete="metric", shown="the first known")] = "",
    out: Annotated[Written | None, Option(panel="Output")] = None,
    dark: Annotated[bool, Option(panel="Output")] = False,
) -> None:
    """Draw results: in the terminal, as a page, or as an image.

    A replay's Pareto shows memory against attention kept or time, a search's accuracy against KV
    size, a plan's cost against latency, and a live run's cliff accuracy by budget.

    Parameters
    ----------
    results
        Results: the file of --out, or the log of a live run.
    kind
        pareto, heat, cliff, width or load, as the results allow.
    metric
        What a replay is drawn by: right, kept, error, time or memory.
    out
        Write a page (.html) or an image (.svg, .png) in place of drawing here.
    dark
        An image light on dark.
    """
    from arborsim.products.kinds import load_results
    from arborsim.products.plot.plots import plots_of
    from arborsim.report.images import check_format, print_plots, write

    if out is not None:
        check_format(out)
        check_writable(out, "--out")
    if dark and (out is None or out.suffix == ".html"):
        raise UsageError("--dark: only for --out FILE.svg or .png; a page follows its reader")
    found = load_results(results)
    made = plots_of(found.describe(), kind, metric)
    if out is None:
        print_plots(made)
        return
    said = found.metadata
    write(made, out, dark=dark, command=said.get("command", ""), settings=said.get("settings", {}))
    print(f"wrote {out}")
