"""How fast traces are replayed, on generated traces of the sizes that matter.

Run on one core: ``python benchmarks/replay.py [--quick] [--out reports/benchmarks/replay.json]``.

- every policy that reads no attention: 1,000,000 tokens in episodes of 32k;
- every policy that reads attention: 200,000 tokens in episodes of 2k with dense rows, and 1,000,000
  in episodes of 32k with sparse rows, against the time pyarrow alone needs to decode the columns
  that are read, measured right before, and the policy's rule by hand (`benchmarks/by_hand.py`; a
  share of these tokens by default);
- peak memory with few and with many episodes;
- traces of 1,000 and 10,000 generated searches: making and replaying them (`--no-long` leaves out);
- what every command takes of the processor: its ``--help``, and the smallest call that works.

Policies that rank per layer and head need recorded vectors and are not among these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pyarrow.parquet as pq
from by_hand import RULES, hand_s
from generate import columns_read, generate

from arborsim.core.errors import ArborsimError
from arborsim.core.observations import Signal
from arborsim.core.settings import settings_of
from arborsim.core.tiers import Budget
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, build
from arborsim.products.replay.run import Replay
from arborsim.trace.schema import PER_LAYER

BUDGET = "2048"
LONG, SHORT = 32_768, 2_000
ROOT = Path(__file__).resolve().parents[1]
BANK = ROOT / "tests" / "golden" / "bank.parquet"
GRID = 'traces = "{traces}/chain-vectors.parquet"\npolicies = ["h2o"]\nbudgets = [0.5]\n'
#: By command, the arguments of a call that does little; None for those that run a model, or long.
SMALLEST: dict[str, str | None] = {
    "arborsim": None,
    "replay": "{traces}/chain-vectors.parquet --policy h2o --budget 0.5 --out run.parquet",
    "search": "{bank} --algorithm beam-4 --width 8 --policy full",
    "plan": "--example",
    "sweep": "grid.toml --out cells-{time}",
    "results": "cells-0",
    "record": None,
    "live": None,
    "validate": None,
    "plot": "run.parquet",
    "compare": "run.parquet run.parquet",
    "inspect": "{traces}/chain-vectors.parquet",
    "generate": "--searches 1 --out drawn.parquet --overwrite",
    "policies": "",
    "hardware": "",
    "models": "",
    "schema": "replay",
    "tune": None,
    "calibrate": None,
    "doctor": "",
    "import": "tot {traces}/logs/tot.json tot.parquet --overwrite",
}
COLUMNS = (*PER_LAYER, Signal.KEY_SKETCH)
ATTENTION = {Signal.ATTENTION, Signal.EVICTION_TIME}


def variants() -> dict[str, Policy]:
    """Every policy that these traces serve, by label.

    Those that rank per head are in their shared form if they have one, and RaaS counts by medians.
    """
    found = {}
    for name in available():
        policy = build(name)
        choices = {f.name: made.choices for f, made in settings_of(type(policy))}
        settings = {"per": "shared"} if "shared" in choices.get("per", ()) else {}
        settings |= {"variant": "median"} if name == "raas" else {}
        made = build(name, settings)
        if name != "oracle" and made.reads() <= {*COLUMNS, *ATTENTION}:
            said = [f"{key}={value}" for key, value in settings.items() if made != policy]
            found[" ".join([name, *said])] = made
    return found


def decode_s(path: Path, columns: list[str]) -> float:
    """What pyarrow alone takes to decode `columns`, row group by row group: CPU s, one thread."""
    start = time.process_time()
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        file.read_row_group(group, columns=columns, use_threads=False)
    return time.process_time() - start


def replay_s(
    path: Path, policy: Policy, budget: str = BUDGET, quality: bool = False,
    count: int | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the processor to replay `path` under one policy, and the simulated machine's part.

    Everything is included; the machine's are bytes, transfers and time.
    """
    machine = Machine(load_profile("h100"), load_geometry("llama-3.1-8b"))
    job = Replay([path], [policy], [Budget.parse(budget)], machine, quality=quality, count=count)
    with simulating() as spent:
        start = time.process_time()
        job.run()
        seconds = time.process_time() - start
    return seconds, spent[0] / seconds


@contextmanager
def simulating() -> Iterator[list[float]]:
    """Seconds of the processor that simulated executors take meanwhile, as the only entry."""
    spent, began = [0.0], list[float]()

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*given: Any, **named: Any) -> Any:
            began.append(time.process_time())
            found = call(*given, **named)
            since = began.pop()
            if not began:  # not called by another of them
                spent[0] += time.process_time() - since
            return found

        return inside

    kept = {name: getattr(SimulatedExecutor, name) for name in ("advance", "apply", "finish")}
    for name, call in kept.items():
        setattr(SimulatedExecutor, name, timed(call))
    try:
        yield spent
    finally:
        for name, call in kept.items():
            setattr(SimulatedExecutor, name, call)


def signals_of(policy: Policy) -> tuple[str, ...]:
    """The per-layer columns it reads."""
    return tuple(signal.value for signal in COLUMNS if signal in policy.reads())


def against_decoding(
    path: Path, policies: dict[str, Policy], attention: str, budget: str, rounds: int, length: int
) -> dict[str, object]:
    """Replay time of each policy over pyarrow's decoding time, without and with the meter.

    Also, without it, what its rule takes by hand, over the same.
    """
    figures: dict[str, object] = {}
    tokens = Budget.parse(budget).in_tokens(length)
    for name, policy in policies.items():
        columns = columns_read(signals_of(policy), attention)
        for quality in (False, True):
            taken = []
            for _ in range(rounds):
                alone = decode_s(path, columns)
                try:
                    mine, machine = replay_s(path, policy, budget, quality)
                except ArborsimError as error:  # a floor above this budget
                    print(f"{attention:7} {name}: {error}", file=sys.stderr)
                    break
                by_hand = 0.0
                if policy.name in RULES and not quality:
                    by_hand = hand_s(path, attention, policy.name, tokens)
                taken.append((mine / alone, mine, alone, machine, by_hand))
            if not taken:
                continue
            ratio, mine, alone, machine, by_hand = sorted(taken)[rounds // 2]
            label = name + ("+attention-kept" if quality else "")
            figures[label] = row = {
                "seconds": round(mine, 2), "pyarrow_decode_s": round(alone, 2),
                "ratio": round(ratio, 2), "machine_share": round(machine, 2),
            }  # fmt: skip
            if by_hand:
                row["by_hand"] = round(by_hand / alone, 2)
            print(f"{attention:7} {label:32} {figures[label]}", file=sys.stderr)
    return figures


def attention_free(
    path: Path, policies: dict[str, Policy], tokens: int
) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for name, policy in policies.items():
        alone = decode_s(path, columns_read(signals_of(policy), "none"))
        try:
            seconds, machine = replay_s(path, policy)
        except ArborsimError as error:  # a floor above this budget
            print(f"none    {name}: {error}", file=sys.stderr)
            continue
        figures[name] = {
            "tokens": tokens, "seconds": round(seconds, 2),
            "tokens_per_s": round(tokens / seconds), "machine_share": round(machine, 2),
            "ratio": round(seconds / alone, 2),
        }  # fmt: skip
        if policy.name in RULES:
            by_hand = hand_s(path, "none", policy.name, int(BUDGET))
            figures[name]["by_hand"] = round(by_hand / alone, 2)
        print(f"none    {name:32} {figures[name]}", file=sys.stderr)
    return figures


def peak_mib(path: Path, episodes: int) -> float:
    """Peak resident memory of a process that replays this many episodes under epikv."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", str(path), str(episodes)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


def command(folder: Path, *arguments: str) -> tuple[float, float]:
    """Seconds of the processor that `arborsim` takes in `folder`, and its peak memory in MiB.

    On Linux a process counts what this one held when it started it: measure memory early.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "arborsim.cli.app", *arguments],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"arborsim {' '.join(arguments)}: {said.decode()}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def long_traces(folder: Path, sizes: list[int]) -> list[dict[str, object]]:
    """Making traces of many searches, and replaying them with full retention."""
    rows: list[dict[str, object]] = []
    for searches in sizes:
        made_s, _ = command(
            folder, "generate", "--searches", str(searches), "--out", "many.parquet", "--overwrite"
        )
        position = pq.read_table(folder / "many.parquet", columns=["position"])["position"]
        tokens = len(position) - position.null_count
        replayed_s, mib = command(
            folder, "replay", "many.parquet", "--policy", "full", "--no-quality", "--model",
            "llama-3.1-8b",
        )  # fmt: skip
        rows.append({
            "searches": searches, "tokens": tokens, "generate_cpu_s": round(made_s, 1),
            "replay_cpu_s": round(replayed_s, 1), "peak_mib": round(mib),
        })  # fmt: skip
        print(f"long    {rows[-1]}", file=sys.stderr)
    return rows


def starts(folder: Path, times: int = 3) -> dict[str, dict[str, object]]:
    """Seconds of the processor by command: the least of as many `times`."""
    (folder / "grid.toml").write_text(GRID.format(traces=ROOT / "traces"))
    found: dict[str, dict[str, object]] = {}
    for name, call in SMALLEST.items():
        row: dict[str, object] = {}
        shown = () if name == "arborsim" else (name,)
        row["help_s"] = round(min(command(folder, *shown, "--help")[0] for _ in range(times)), 2)
        if call is not None:
            taken = []
            for each in range(times):
                words = call.format(traces=ROOT / "traces", bank=BANK, time=each).split()
                taken.append(command(folder, name, *words)[0])
            row["call"] = call.format(traces="traces", bank="BANK", time=0)
            row["call_s"] = round(min(taken), 2)
        found[name] = row
        print(f"start   {name:10} {row}", file=sys.stderr)
    return found


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
    parser.add_argument("--no-long", action="store_true", help="no traces of many searches")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--peak", nargs=2, metavar=("TRACE", "EPISODES"), help=argparse.SUPPRESS)
    parser.add_argument("policies", nargs="*", help="names; all that the traces serve by default")
    options = parser.parse_args()
    if options.peak:
        path, count = Path(options.peak[0]), int(options.peak[1])
        replay_s(path, build("epikv"), count=count)
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)  # see `command`
        return
    scale = 10 if options.quick else 1
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    chosen = {
        name: policy
        for name, policy in variants().items()
        if not options.policies or policy.name in options.policies
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
        if not options.no_long:  # first: see `command`
            figures["long"] = long_traces(Path(folder), [1000 // scale, 10_000 // scale])
        path = generate(Path(folder) / "long.parquet", long_episodes, LONG, "none", signals)
        replay_s(path, build("full"), count=1)  # imports and caches are warm from here on
        figures["attention_free"] = attention_free(path, free, long_episodes * LONG)
        if "epikv" in chosen:
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
            "policies": against_decoding(path, readers, "dense", "0.25", options.rounds, SHORT),
        }  # fmt: skip
        path.unlink()
        path = generate(Path(folder) / "sparse.parquet", long_episodes, LONG, "sparse", signals)
        figures["sparse"] = {
            "tokens": long_episodes * LONG, "budget": BUDGET,
            "policies": against_decoding(path, readers, "sparse", BUDGET, options.rounds, LONG),
        }  # fmt: skip
        figures["starts"] = starts(Path(folder))
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
