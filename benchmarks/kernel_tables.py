"""The tables of measured kernels that are shipped, from PyPI's ``aiconfigurator-core``.

``python -m benchmarks.kernel_tables FOLDER`` makes them.  They leave out experts of models that few
run, and more than 8 of expert parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arborsim.core.outputs import write_text
from arborsim.machine.aiconfigurator import engines, read, selection
from arborsim.machine.kernels import write_tables

NOTICE = """\
Measured times of GPU kernels, from {source}
Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.
Licensed under the Apache License, Version 2.0; a copy is in the file LICENSE of arborsim, and at
http://www.apache.org/licenses/LICENSE-2.0

The Parquet files in this folder are changed: columns and rows were selected, columns and types
renamed, repeated measurements reduced to their median and kernels of one shape to the fastest,
milliseconds turned into seconds and rounded to 11 significant bits.
`python -m benchmarks.kernel_tables FOLDER` makes them.

Versions of the engines that were measured:

{versions}
"""


def ship(folder: Path) -> Iterator[Path]:
    """Write the tables that come with arborsim, and the notice; yields each file."""
    measured = []
    for system, gpu in selection().systems.items():
        for engine in engines(system):
            imported = read(system, engine)
            tables = dict(imported.tables)
            for key in [key for key in tables if key[0] == "experts"]:
                tables[key] = _run_by_many(tables[key])
            tables = {key: rows for key, rows in tables.items() if len(rows)}
            path = folder / f"{gpu}-{engine}.parquet"
            write_tables(path, tables, imported.header)
            yield path
            by_version: dict[str, list[str]] = {}
            for table, version in imported.versions.items():
                by_version.setdefault(version, []).append(table)
            said = "; ".join(f"{each} ({', '.join(of)})" for each, of in by_version.items())
            measured.append(f"{path.name}: {said}")
            source = imported.header["source"]
    notice = NOTICE.format(source=source, versions="\n".join(measured))
    write_text(folder / "NOTICE", notice)
    yield folder / "NOTICE"


def _run_by_many(experts: Any) -> Any:
    """Rows of experts of widespread models, on up to 8 GPUs, of a table (pandas)."""
    shape = experts[["in_features", "out_features", "experts", "experts_per_token"]]
    known = shape.apply(tuple, axis=1).isin(list(selection().experts.values()))
    return experts[known & (experts["expert_parallel"] <= 8)]


if __name__ == "__main__":
    for made in ship(Path(sys.argv[1])):
        print(f"{made}: {made.stat().st_size / 1e3:,.0f} kB")
