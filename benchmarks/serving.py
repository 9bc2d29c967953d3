"""How fast the serving engine is: simulated tokens per second, and seconds per event.

Run on one core: ``python benchmarks/serving.py [--quick] [--out reports/benchmarks/serving.json]``.

Demands are recorded from the shipped traces for Llama-3.1-8B on an H100.  As many clients as
searches are to be served at once start one search after the other.  Memory has no limit, so that
all are served, except where "half the memory" is said: half of what the searches need at their
peaks, so that some lose their places.  A *phase* is what happens to one search: the end of a
piece, a pass, a decision, the start of a transfer, a wait.  A *step* is what the engine does at
once: a run of iterations up to the next end of a piece, in which several pieces may end, a pass, or
a wait.  Seconds are of the processor; each figure is the median of several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine, ServingOptions
from arborsim.machine.program import SearchDemand
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.policies.registry import build
from tests.helpers.demands import record_demands

TRACES = Path(__file__).parents[1] / "traces"
CASES = (
    ("chain-linear", "full", "1", "stage"),
    ("chain-tree", "full", "1", "stage"),
    ("chain-tree", "h2o per=shared", "0.5", "stage"),
    ("chain-tree", "arborkv", "0.6", "stage"),
    ("chain-tree", "hierarchy", "0.5", "stage"),
    ("chain-tree", "hierarchy", "0.5", "stream"),
)
CONCURRENT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
UNLIMITED = 1 << 60


def demands(trace: str, policy: str, budget: str, recall: str) -> tuple[list[SearchDemand], float]:
    """Those of the trace's episodes, and the seconds that recording them took."""
    machine = Machine(load_profile("h100"), load_geometry("llama-3.1-8b"), recall=recall)
    start = time.perf_counter()
    path = TRACES / f"{trace}.parquet"
    name, *settings = policy.split()
    built = build(name, dict(each.split("=") for each in settings))
    found = list(record_demands(path, built, Budget.parse(budget), machine))
    return found, time.perf_counter() - start


def measure(
    recorded: Sequence[SearchDemand], clients: int, tokens: int, rounds: int, half: bool = False
) -> dict[str, object]:
    """Serve about `tokens` tokens to `clients` clients, several times."""
    machine = (load_profile("h100"), load_geometry("llama-3.1-8b"), ServingOptions())
    engine = ServingEngine(recorded, *machine, kv_bytes=UNLIMITED)
    if half:
        peak = sum(alone.peak_hbm_bytes for alone in engine.alone) / len(recorded)
        engine = ServingEngine(recorded, *machine, kv_bytes=round(clients * peak / 2))
    mean = sum(demand.generated_tokens for demand in recorded) / len(recorded)
    count = max(clients, round(tokens / mean))
    arrivals = ClosedLoop(clients, tuple(i % len(recorded) for i in range(count)))
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        report = engine.run(arrivals)
        taken.append(time.process_time() - start)
    seconds = statistics.median(taken)
    return {
        "clients": clients,
        "searches": count,
        "tokens": report.tokens,
        "iterations": report.iterations,
        "steps": report.events,
        "preemptions": report.preemptions,
        "seconds": [round(value, 4) for value in (seconds, min(taken), max(taken))],
        "tokens_per_s": round(report.tokens / seconds),
        "us_per_step": round(1e6 * seconds / report.events, 2),
        "us_per_phase": round(1e6 * seconds / _phases(recorded, arrivals), 2),
    }


def _phases(recorded: Sequence[SearchDemand], arrivals: ClosedLoop) -> int:
    """Phases of these searches."""
    return sum(len(recorded[demand].ops) for demand in arrivals.searches)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    chosen = parser.parse_args(arguments)
    tokens, rounds = (200_000, 3) if chosen.quick else (1_000_000, 5)
    figures: dict[str, object] = {"python": platform.python_version(), "rounds": rounds}
    print(f"{'demands':48} {'clients':>7} {'tokens/s':>11} {'us/step':>9} {'us/phase':>9}")
    for case in CASES:
        recorded, seconds = demands(*case)
        name = " ".join(case)
        phases = sum(len(demand.ops) for demand in recorded)
        rows = []
        concurrent = CONCURRENT if case[1] in ("full", "h2o per=shared") else (64,)
        for clients, half in [*((n, False) for n in concurrent), (64, True)]:
            row = measure(recorded, clients, tokens, rounds, half)
            rows.append(row)
            said = f"{name}, half the memory" if half else name
            print(
                f"{said:48} {clients:7} {row['tokens_per_s']:11,} {row['us_per_step']:9} "
                f"{row['us_per_phase']:9}"
            )
            sys.stdout.flush()
        figures[name] = {
            "record_s": round(seconds, 2),
            "episodes": len(recorded),
            "phases": phases,
            "bytes": sum(demand.nbytes for demand in recorded),
            "runs": rows,
        }
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
