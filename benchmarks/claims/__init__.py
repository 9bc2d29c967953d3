"""Simulated experiments for the claims of a paper: one module per paper, one Parquet file each.

::

    python -m benchmarks.claims.hierarchy --out reports/claims

A module names its experiments and runs them through `run`; each of its cells (an experiment with
settings) is a call that returns rows, and a finished cell is kept, so a run goes on where the last
one stopped::

    def experiments(store: Store) -> None:
        for beta in (0.3, 0.5, 0.7):
            setting = {"policy": "hierarchy", "beta": beta}
            store.cell("table-12", setting, lambda: rows_of(setting))

    if __name__ == "__main__":
        run("hierarchy", experiments)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pandas as pd

from arborsim.core.tables import made_by, read_table, write_table

Row = Mapping[str, Any]
Value = bool | int | float | str


class Store:
    """The rows of a paper's experiments, in ``PAPER.parquet`` of a folder.

    A row has the column ``experiment``, those of its cell's settings, and what the cell returned
    (an episode or seed, and figures).  `again` names experiments whose stored rows are dropped
    first.
    """

    def __init__(self, paper: str, folder: Path, again: Iterable[str] = ()) -> None:
        self.path = folder / f"{paper}.parquet"
        self._about = made_by("raw results", f"python -m benchmarks.claims.{paper}", "numpy")
        self.rows: list[dict[str, Any]] = []
        self._settings: dict[str, set[str]] = {}
        if self.path.exists():
            stored, _ = read_table(self.path)
            known = (
                {key: value for key, value in row.items() if not _missing(value)}
                for row in stored.to_dict("records")
            )
            self.rows = [row for row in known if row["experiment"] not in set(again)]

    def has(self, experiment: str, setting: Mapping[str, Value]) -> bool:
        """Whether the cell is finished."""
        cell = {"experiment": experiment, **setting}
        return any(all(row.get(key) == cell[key] for key in cell) for row in self.rows)

    def cell(
        self, experiment: str, setting: Mapping[str, Value], make: Callable[[], Iterable[Row]]
    ) -> None:
        """Run a cell and store its rows, unless it is finished.

        `make` returns a row per episode or seed, at least one; a row's figures must not be named
        like settings.  All cells of an experiment have settings of the same names.
        """
        if self._settings.setdefault(experiment, set(setting)) != set(setting):
            raise ValueError(f"{experiment}: settings {sorted(setting)} differ from earlier cells'")
        if self.has(experiment, setting):
            return
        begun = time.perf_counter()
        made = [{"experiment": experiment, **setting, **row} for row in make()]
        if not made or any(row[key] != setting[key] for row in made for key in setting):
            raise ValueError(f"{experiment} {dict(setting)}: no rows, or they change a setting")
        self.rows += made
        self.write()
        took = time.perf_counter() - begun
        print(f"{experiment} {dict(setting)}: {len(made)} rows, {took:.1f} s", flush=True)

    def write(self) -> None:
        """Write the file, whole or not at all."""
        frame = pd.DataFrame(self.rows).sort_values("experiment", kind="stable")
        write_table(frame, self.path, self._about)


def _missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def run(
    paper: str, experiments: Callable[[Store], None], arguments: list[str] | None = None
) -> None:
    """The command line of a paper's module."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/claims"))
    parser.add_argument(
        "--again", action="append", default=[], metavar="EXPERIMENT",
        help="drop the stored rows of this experiment and run it anew; may be given again",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    experiments(Store(paper, options.out, options.again))
