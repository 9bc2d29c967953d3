"""How fast traces are replayed, on generated traces of the sizes that matter.

Run on one core: ``python benchmarks/replay.py [--quick] [--out reports/benchmarks/replay.json]``.

- every policy that reads no attention: 1,000,000 tokens in episodes of 32k;
- every policy that reads attention: 200,000 tokens in episodes of 2k with dense rows, and 1,000,000
  in episodes of 32k with sparse rows, against the time pyarrow alone needs to decode the columns
  that are read, measured right before (a share of these tokens by default);
- peak memory with few and with many episodes;
- start-up time of the command line.

Policies that rank per layer and head need recorded vectors and are not among these.
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

import pyarrow.parquet as pq
from generate import columns_read, generate

from arborsim.core.errors import ArborsimError
from arborsim.core.observations import Signal
from arborsim.core.settings import settings_of
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, build
from arborsim.run.replay import Replay
from arborsim.trace.schema import PER_LAYER

BUDGET = "2048"
LONG, SHORT = 32_768, 2_000
COLUMNS = (*PER_LAYER, Signal.KEY_SKETCH)
ATTENTION = {Signal.ATTENTION, Signal.EVICTION_TIME}


def variants() -> dict[str, Policy]:
    """Every policy that these traces serve; per head ones in their shared form if they have one."""
    found = {}
    for name in available():
        policy = build(name)
        choices = {f.name: made.choices for f, made in settings_of(type(policy))}
        if "shared" in choices.get("per", ()):
            policy = build(name, {"per": "shared"})
        if name != "oracle" and policy.reads() <= {*COLUMNS, *ATTENTION}:
            found[name] = policy
    return found


def decode_s(path: Path, columns: list[str]) -> float:
    """Seconds pyarrow alone takes to decode `columns`, row group by row group, one thread."""
    start = time.perf_counter()
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        file.read_row_group(group, columns=columns, use_threads=False)
    return time.perf_counter() - start


def replay_s(
    path: Path, policy: Policy, budget: str = BUDGET, quality: bool = False,
    count: int | None = None,
) -> float:  # fmt: skip
    """Seconds to replay `path` under one policy, everything included."""
    machine = Machine(load_profile("h100"), load_geometry("llama-3.1-8b"))
    job = Replay([path], [policy], [Budget.parse(budget)], machine, quality=quality, count=count)
    start = time.perf_counter()
    job.run()
    return time.perf_counter() - start


def signals_of(policy: Policy) -> tuple[str, ...]:
    """The per-layer columns it reads."""
    return tuple(signal.value for signal in COLUMNS if signal in policy.reads())


def against_decoding(
    path: Path, policies: dict[str, Policy], attention: str, budget: str, rounds: int
) -> dict[str, object]:
    """Replay time of each policy over pyarrow's decoding time, without and with the meter."""
    figures: dict[str, object] = {}
    for name, policy in policies.items():
        columns = columns_read(signals_of(policy), attention)
        for quality in (False, True):
            taken = []
            for _ in range(rounds):
                alone = decode_s(path, columns)
                try:
                    mine = replay_s(path, policy, budget, quality)
                except ArborsimError as error:  # a floor above this budget
                    print(f"{attention:7} {name}: {error}", file=sys.stderr)
                    break
                taken.append((mine / alone, mine, alone))
            if not taken:
                continue
            ratio, mine, alone = sorted(taken)[rounds // 2]
            label = name + ("+attention-kept" if quality else "")
            figures[label] = {
                "seconds": round(mine, 2), "pyarrow_decode_s": round(alone, 2),
                "ratio": round(ratio, 2),
            }  # fmt: skip
            print(f"{attention:7} {label:32} {figures[label]}", file=sys.stderr)
    return figures


def attention_free(path: Path, policies: dict[str, Policy], tokens: int) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name, policy in policies.items():
        try:
            seconds = replay_s(path, policy)
        except ArborsimError as error:  # a floor above this budget
            print(f"none    {name}: {error}", file=sys.stderr)
            continue
        figures[name] = {
            "tokens": tokens, "seconds": round(seconds, 2),
            "tokens_per_s": round(tokens / seconds),
        }  # fmt: skip
        print(f"none    {name:32} {figures[name]}", file=sys.stderr)
    return figures


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
    parser.add_argument(
        "--rounds", type=int, default=1, help="of the policies that read attention; the median"
    )
    parser.add_argument(
        "--attention-share", type=float, default=0.1,
        help="share of the tokens that policies that read attention replay: cost per token is the "
        "same for every episode",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--peak", nargs=2, metavar=("TRACE", "EPISODES"), help=argparse.SUPPRESS)
    parser.add_argument("policies", nargs="*", help="names; all that the traces serve by default")
    options = parser.parse_args()
    if options.peak:
        path, count = Path(options.peak[0]), int(options.peak[1])
        replay_s(path, build("epikv"), count=count)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    scale = 10 if options.quick else 1
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    chosen = {
        name: policy
        for name, policy in variants().items()
        if not options.policies or name in options.policies
    }
    readers = {name: p for name, p in chosen.items() if p.reads() & ATTENTION}
    free = {name: p for name, p in chosen.items() if name not in readers}
    signals = tuple(sorted({s for policy in chosen.values() for s in signals_of(policy)}))
    long_episodes, short_episodes = max(1, 31 // scale), max(1, 100 // scale)
    figures: dict[str, object] = {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "pyarrow", "simpy")},
        "cores": 1,
        "budget_tokens": int(BUDGET),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = generate(Path(folder) / "long.parquet", long_episodes, LONG, "none", signals)
        replay_s(path, build("full"), count=1)  # imports and caches are warm from here on
        figures["attention_free"] = attention_free(path, free, long_episodes * LONG)
        figures["peak_mib"] = {
            str(n): round(peak_mib(path, n))
            for n in sorted({1, long_episodes // 4, long_episodes}) if n
        }  # fmt: skip
        path.unlink()
        short_episodes = max(1, round(options.attention_share * short_episodes))
        long_episodes = max(1, round(options.attention_share * long_episodes))
        path = generate(Path(folder) / "short.parquet", short_episodes, SHORT, "dense", signals)
        figures["dense"] = {
            "tokens": short_episodes * SHORT, "budget": "0.25",
            "policies": against_decoding(path, readers, "dense", "0.25", options.rounds),
        }  # fmt: skip
        path.unlink()
        path = generate(Path(folder) / "sparse.parquet", long_episodes, LONG, "sparse", signals)
        figures["sparse"] = {
            "tokens": long_episodes * LONG, "budget": BUDGET,
            "policies": against_decoding(path, readers, "sparse", BUDGET, options.rounds),
        }  # fmt: skip
    figures["help_s"] = round(help_s(), 3)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
