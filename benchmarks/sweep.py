"""How fast a sweep of 1,000 cells is, on processes of this machine and on Ray.

Run on two cores: ``python benchmarks/sweep.py [--out sweep.json]``; without Ray, only the former.

Cells are as small as they can be, a search of about 30 tokens each, so that what is measured is
what a cell costs beyond its replay: parameters there, a file back, locked, written and on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # as processes of this machine have it

import arborsim
from arborsim.core.installed import versions
from arborsim.machine.lookup import load_geometry
from arborsim.products.generate.lengths import TreeSpec, parse_counts, write_generated
from arborsim.products.sweep.ask import Sweeping, SweepOptions

#: 201 cells for each GPU: a policy with 10 settings under 20 budgets, and full retention.
GRID: dict[str, Any] = {
    "traces": "tiny.parquet",
    "policies": [{"use": "streaming-llm", "set": {"sinks": list(range(10))}}],
    "budgets": [round(0.5 + 0.02 * step, 2) for step in range(20)],
    "gpus": ["h100", "h200", "l40s", "a100-80", "rtx4090"],
}


def measured(folder: Path, on: str, workers: int, gpus: int) -> dict[str, Any]:
    """Seconds of a sweep, of the processor here and in processes, and of a second sweep."""
    grid = {**GRID, "traces": str(folder / "tiny.parquet"), "gpus": GRID["gpus"][:gpus]}
    out = folder / f"{on}-{workers}"
    began_s, before_s = time.perf_counter(), _processor_s()
    tally = Sweeping(SweepOptions(grid, out, on=on, workers=workers)).run()
    wall_s, processor_s = time.perf_counter() - began_s, _processor_s() - before_s
    began_s = time.perf_counter()
    again = Sweeping(SweepOptions(grid, out, on=on, workers=workers)).run()
    assert (tally.made, again.made) == (201 * gpus, 0)
    return {
        "on": on, "workers": workers, "wall_s": wall_s, "processor_s": processor_s,
        "cells_per_s": tally.made / wall_s, "again_s": time.perf_counter() - began_s,
    }  # fmt: skip


def _processor_s() -> float:
    """Of this process and of those that have ended; Ray's are not among them."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)


def read(folder: Path) -> float:
    """Seconds that reading and comparing the cells takes."""
    began_s = time.perf_counter()
    arborsim.results(folder).to_pandas()
    return time.perf_counter() - began_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--gpus", type=int, default=5, help="201 cells for each of them")
    chosen = parser.parse_args(arguments)
    places = ["local", *(["ray"] if find_spec("ray") else [])]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        spec = TreeSpec(*(parse_counts(tokens, "tokens") for tokens in (8, 4, 2, 2)))
        geometry = load_geometry("llama-3.1-8b")
        write_generated(spec, 1, 0, geometry, folder / "tiny.parquet")
        runs = [measured(folder, on, workers, chosen.gpus) for on in places for workers in (1, 2)]
        same = len({_contents(folder / f"{run['on']}-{run['workers']}") for run in runs}) == 1
        figures = {
            "python": platform.python_version(), "versions": versions("numpy", "pyarrow", "ray"),
            "cells": 201 * chosen.gpus, "runs": runs, "same_bytes": same,
            "results_s": read(folder / "local-1"),
            "bytes": sum(path.stat().st_size for path in (folder / "local-1").rglob("*.parquet")),
        }  # fmt: skip
    text = json.dumps(figures, indent=2)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(f"{text}\n")


def _contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*.parquet")))


if __name__ == "__main__":
    main()
