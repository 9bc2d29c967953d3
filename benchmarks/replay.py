"""How fast traces are replayed, on generated traces of the sizes that matter.

Run on one core: ``python benchmarks/replay.py [--quick] [--out reports/benchmarks/replay.json]``.

- `epikv` over 1,000,000 tokens in episodes of 32k tokens (no attention column);
- `h2o` over 200,000 tokens in episodes of 2k tokens with dense attention, against the time pyarrow
  alone needs to decode the columns that are read;
- peak memory with few and with many episodes;
- start-up time of the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.budget import Budget
from arborsim.hardware.lookup import load_geometry, load_profile
from arborsim.policies.registry import build
from arborsim.replay import Machine, Replay
from arborsim.trace.schema import Capture, Kind, TraceInfo
from arborsim.trace.writer import TraceWriter

PROMPT = 256
STRUCTURE = ["episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth",
             "position", "token", "entropy", "reward", "correct"]  # fmt: skip


def generate(path: Path, episodes: int, tokens: int, attention: bool) -> Path:
    """A linear trace with random signals, written by the trace writer."""
    geometry = load_geometry("llama-3.1-8b")
    info = TraceInfo(
        geometry, model="generated", task="random", search="linear", capture=Capture.SIGNALS,
        attention="dense" if attention else "none",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    generated = tokens - PROMPT
    rows = tokens + 3  # a transition, a boundary, an answer
    kind = np.full(rows, Kind.TOKEN, dtype=np.int8)
    kind[:PROMPT], kind[PROMPT] = Kind.PREFILL, Kind.TRANSITION
    kind[-2:] = Kind.BOUNDARY, Kind.ANSWER
    is_token = (kind == Kind.PREFILL) | (kind == Kind.TOKEN)
    node = np.where(np.arange(rows) < PROMPT, 0, 1)
    iteration = np.zeros(rows, dtype=np.int32)
    iteration[PROMPT + 1 : -2] = np.arange(1, generated + 1)
    iteration[-2:] = generated
    empty = pa.nulls(rows, pa.list_(pa.float16()))

    def lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    def masked(values: np.ndarray) -> pa.Array:
        full = np.zeros(rows, dtype=np.int32)
        full[is_token] = values
        return pa.array(full, mask=~is_token)

    with TraceWriter(path, info, overwrite=True) as writer:
        for _ in range(episodes):
            change = rng.gamma(4.0, 1.0, (tokens, geometry.layers)).astype(np.float16)
            per_token = np.where(is_token, geometry.layers, 0)
            columns = {
                "time_s": np.arange(rows) * 1e-3, "kind": kind, "iteration": iteration,
                "node": node, "parent": node - 1, "depth": node,
                "position": masked(np.arange(tokens)), "token": masked(np.arange(tokens) % 1000),
                "logprob": pa.nulls(rows, pa.float32()), "entropy": pa.nulls(rows, pa.float32()),
                "reward": pa.nulls(rows, pa.float32()), "text": pa.nulls(rows, pa.string()),
                "correct": pa.nulls(rows, pa.bool_()), "embedding": empty,
                "hidden_change": lists(change.ravel(), per_token), "key_variance": empty,
                "value_variance": empty, "lag_key": empty, "lag_value": empty, "key_sketch": empty,
            }  # fmt: skip
            if attention:
                lengths = np.zeros(rows, dtype=np.int64)
                lengths[is_token] = np.arange(1, tokens + 1)
                row = rng.uniform(0.5, 1.5, int(lengths.sum())).astype(np.float32)
                row /= np.repeat(
                    np.add.reduceat(row, np.cumsum(lengths[is_token]) - lengths[is_token]),
                    lengths[is_token],
                )
                columns["attention"] = lists(row.astype(np.float16), lengths)
            writer.write_episode(columns)
    return path


def decode_s(path: Path, columns: list[str]) -> float:
    """Seconds pyarrow alone takes to decode `columns`, row group by row group, one thread."""
    start = time.perf_counter()
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        file.read_row_group(group, columns=columns, use_threads=False)
    return time.perf_counter() - start


def replay_s(
    path: Path, policy: str, budget: str, quality: bool, count: int | None = None
) -> float:
    """Seconds to replay `path` under one policy, everything included."""
    start = time.perf_counter()
    job = Replay(
        [path], [build(policy)], [Budget.parse(budget)],
        Machine(load_profile("h100"), load_geometry("llama-3.1-8b")), quality=quality, count=count,
    )  # fmt: skip
    job.run()
    return time.perf_counter() - start


def peak_mib(path: Path, episodes: int) -> float:
    """Peak resident memory of a process that replays this many episodes under epikv."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", str(path), str(episodes)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


def help_s() -> float:
    """Median seconds of `arborsim --help`."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "arborsim.cli.app", "--help"], check=True, capture_output=True
        )
        times.append(time.perf_counter() - start)
    return sorted(times)[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--peak", nargs=2, metavar=("TRACE", "EPISODES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        replay_s(Path(options.peak[0]), "epikv", "2048", False, int(options.peak[1]))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    scale = 10 if options.quick else 1
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    figures: dict[str, object] = {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "pyarrow", "simpy")},
        "cores": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        long_episodes = max(1, 31 // scale)
        path = generate(Path(folder) / "long.parquet", long_episodes, 32_768, attention=False)
        tokens = long_episodes * 32_768
        seconds = replay_s(path, "epikv", "2048", quality=True)
        alone = decode_s(path, [*STRUCTURE, "hidden_change"])
        figures["epikv"] = {
            "tokens": tokens, "seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds),
            "pyarrow_decode_s": round(alone, 2),
        }  # fmt: skip
        figures["peak_mib"] = {
            str(n): round(peak_mib(path, n)) for n in sorted({1, long_episodes // 4, long_episodes})
            if n
        }  # fmt: skip
        path.unlink()
        short_episodes = max(1, 100 // scale)
        path = generate(Path(folder) / "short.parquet", short_episodes, 2000, attention=True)
        rounds = []
        for _ in range(3):
            alone = decode_s(path, [*STRUCTURE, "attention"])
            for quality in (False, True):
                rounds.append((quality, replay_s(path, "h2o", "0.25", quality), alone))
        for quality in (False, True):
            mine = sorted((s / a, s, a) for q, s, a in rounds if q == quality)[1]
            figures[f"h2o{'_with_attention_kept' if quality else ''}"] = {
                "tokens": short_episodes * 2000, "seconds": round(mine[1], 2),
                "pyarrow_decode_s": round(mine[2], 2), "ratio": round(mine[0], 2),
            }  # fmt: skip
    figures["help_s"] = round(help_s(), 3)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
