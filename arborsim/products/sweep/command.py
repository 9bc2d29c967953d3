"""`arborsim sweep` and `arborsim results`: a grid of replays and live runs, and what it found."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable, real_path
from arborsim.products.declare import Written
from arborsim.products.options import Json, ReportOptions, check_ending
from arborsim.products.sweep.ask import CellOptions, Sweeping, SweepOptions

#: Failures that are printed; `arborsim results` shows all.
_MOST = 5
#: Of more cells than this nothing is shown: they would be read for it.
_MOST_SHOWN = 2_000
#: More cells than this are foretold.
_MANY = 100_000


def sweep(options: SweepOptions, *, example: bool = False, json: Json = False) -> int:
    """Compute what is missing, and say how it went; returns the exit code.

    Parameters
    ----------
    example
        Print a grid with every key explained.
    json
        Print JSON instead of tables.
    """
    from arborsim.report.words import counted, plain

    grid, out = options.grid, options.out
    if example:
        from arborsim.products.sweep.grid import example_grid

        print(example_grid(), end="")
        return 0
    if not grid:
        raise UsageError("name a grid; arborsim sweep --example prints one")
    if not out:
        raise UsageError("--out is missing: the folder for the cells")
    foretell = functools.partial(_foretell, grid, out)
    sweeping = Sweeping(replace(options, progress=True), foretell)
    try:
        tally = sweeping.run()
    except KeyboardInterrupt:
        done = sum(job in sweeping.folder for job in sweeping.jobs)
        whole = counted(len(sweeping.jobs), "cell")
        said = f": {out} holds {done:,} of {whole}; the same command goes on"
        raise KeyboardInterrupt(said) from None
    for name, reason in tally.failures[:_MOST]:
        print(plain(f"failed: {name}: {reason}"), file=sys.stderr)
    if len(tally.failures) > _MOST:
        print(f"and {len(tally.failures) - _MOST:,} more failures", file=sys.stderr)
    if json:
        print(sweeping.results().to_json())
    else:
        if 0 < len(sweeping.jobs) <= _MOST_SHOWN:
            sweeping.results().print()
        made = [f"{number:,} {status}" for status, number in sorted(tally.statuses.items())]
        there = f"{tally.there:,} were there" if tally.there else ""
        said = "; ".join(filter(None, (", ".join(made), there)))
        print(f"{counted(len(sweeping.jobs), 'cell')} of {grid} in {out}: {said}")
        print(f"arborsim results {out} filters and groups them; --report writes a page")
    return int(bool(tally.failures))


def _foretell(grid: object, out: object, cells: int) -> None:
    """Say what a huge grid comes to, which may be a mistake, before it is begun."""
    from arborsim.core.units import quantity
    from arborsim.products.sweep.cells import FILE_BYTES

    if cells > _MANY:
        size = quantity("bytes", cells * FILE_BYTES)
        print(f"arborsim: {grid} has {cells:,} cells: about {size} in {out}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class CellOutput(ReportOptions, panel="Output"):
    """Files to write, and what to print.

    Parameters
    ----------
    csv
        Write the rows as CSV.
    parquet
        Write the rows as Parquet.
    """

    csv: Written | None = None
    parquet: Written | None = None

    def check_folder(self, folder: Path) -> None:
        """Refuse, before the work, what cannot be written, and files among the cells."""
        from arborsim.core.tables import check_format
        from arborsim.products.sweep.cells import PARTS

        for name, path in self.files.items():
            check_ending(path, name, ".html" if name == "--report" else name.replace("--", "."))
            check_writable(path, name)
            for own in (folder / part for part in PARTS):
                if real_path(own) in real_path(path).parents:
                    raise UsageError(f"{name} {path}: {own} is for cells: choose another name")
            if path.suffix != ".html":
                check_format(path)


def results(options: CellOptions, output: CellOutput) -> None:
    """Read the cells, then write and print what was asked for."""
    from arborsim.core.tables import write_table

    output.check_folder(Path(options.folder))
    found = options.results()
    rows = found.summary() if options.by else found.to_pandas()
    for path in (output.csv, output.parquet):
        if path is not None:
            write_table(rows, path, found.metadata)
    output.print(found)
