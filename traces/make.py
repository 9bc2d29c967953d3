"""Record the shipped traces again: ``python traces/make.py [NAME ...]``.

Every trace is one `arborsim record` command, kept in ``manifest.json`` with the seed, the model and
the file's sha256.  Search and tokens are the same on every run on one machine; wall times differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from pathlib import Path

# One thread: tiny models gain nothing from more, and sums come out the same on every machine.
os.environ["OMP_NUM_THREADS"] = "1"

import pyarrow.parquet as pq

from arborsim.cli.app import main as arborsim
from arborsim.trace.columns import parquet_writer
from arborsim.trace.reader import TraceReader

HERE = Path(__file__).parent

#: What each trace shows, and the options of `arborsim record` that make it.
TRACES = {
    "chain-linear": (
        "long chains: programs of 120 lines, evaluated greedily line by line",
        "--model chain --search linear --lines 120 --episodes 9 "
        "--attention sparse --attention-top 160",
    ),
    "chain-tree": (
        "trees with backtracking: dynamic parallel tree search, noisy rewards",
        "--model chain --search dpts --set steps=150 --temperature 0.9 --noise 0.15 "
        "--dead-penalty 0.8 --attention sparse --attention-top 64 --lines 96 --episodes 8",
    ),
    "chain-vectors": (
        "short chains with queries, keys and values of all layers: for policies that rank per "
        "layer and KV head, and for the exact error of the attention output",
        "--model chain --search linear --lines 16 --episodes 2 --capture qkv --qkv-layers all "
        "--attention dense --attention-layers all",
    ),
    "game24-tot": (
        "Game of 24 on held-out puzzles: tree of thoughts, breadth first, own value estimate",
        "--model game24 --search tot-bfs --temperature 1 --episodes 80",
    ),
}


def pack(path: Path) -> None:
    """Compress a trace as far as zstd can: it is written once and read often."""
    packed, file = path.with_suffix(".packed"), pq.ParquetFile(path)
    with parquet_writer(packed, file.schema_arrow, level=22) as writer:
        for group in range(file.num_row_groups):
            writer.write_table(file.read_row_group(group))
    packed.replace(path)


def make(name: str) -> dict[str, object]:
    """Record one trace and describe it."""
    about, options = TRACES[name]
    path = HERE / f"{name}.parquet"
    relative = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    arguments = ["record", *shlex.split(options), "--out", str(relative), "--overwrite"]
    sys.argv = ["arborsim", *arguments]  # the trace's metadata quotes the command
    if arborsim(arguments) != 0:
        sys.exit(f"{name} could not be recorded")
    pack(path)
    reader = TraceReader(path)
    info = reader.info
    return {
        "about": about,
        "command": f"arborsim record {options} --out traces/{name}.parquet",
        "model": info.model,
        "seed": info.seed,
        "episodes": reader.num_episodes,
        "software": info.software,
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "licence": "Apache-2.0",
    }


def main() -> None:
    manifest_path = HERE / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    for name in sys.argv[1:] or TRACES:
        if name not in TRACES:
            sys.exit(f"no trace is called {name}; there are {', '.join(TRACES)}")
        manifest[name] = make(name)
        manifest_path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
