"""Record banks of thoughts, and run every search on them: the figures of ``reports/search``.

    python benchmarks/searches.py record verifier-all --banks build/banks
    python benchmarks/searches.py run verifier-all --banks build/banks
    python benchmarks/searches_page.py

``record`` grows a bank with the reference model (minutes; it goes on after an interruption): all
searches at all widths and every setting that is swept find each thought that they ask for.
``run`` walks them, replays them, and puts a row per search into ``results.parquet`` in place of
the bank's rows there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.backends import RecordProgress, RecordRequest, RewardChoice, get_backend
from arborsim.play.episode import Cell, cells_of
from arborsim.products.choices import ChosenPolicies, budgets, policy_settings
from arborsim.products.search.results import SearchResult
from arborsim.products.search.run import SearchJob
from arborsim.searches.arms import REFERENCE, Arm, Recipe, arms_of, chosen_algorithms
from arborsim.searches.bank import read_bank
from arborsim.searches.walk import walk
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Capture

WIDTHS = (16, 64, 256)
LEVELS = ("beam-4", "beam-sqrt", "dvts-4", "dvts-sqrt", "rebase", "ets", "ets-kv", "tot-bfs")
#: ETS's paper takes the largest lambda_b in [1, 2] that costs no accuracy; 1 is the default.
LAMBDA_B = ("1.25", "1.5", "1.75", "2")
#: What the public code sets with lambda_b = 1, by width.
LAMBDA_D = {16: "1.5", 64: "1.4", 256: "1.45"}
GEOMETRY, PROFILE = "llama-3.1-8b", "h100"
FULL = "full"


@dataclass(frozen=True)
class Bank:
    """How one bank is recorded, and what runs on it.

    Attributes
    ----------
    model : str
    episodes : int
        Held-out problems, from the first.
    duplicates : bool
        Searches go on with thoughts that repeat a sibling, as ETS's paper does.
    record : dict of str to object
        Options of `arborsim.play.backends.RecordRequest`: the reward, the task.
    widths : tuple of int
    algorithms : tuple of str
    swept : tuple of str
        Other values of lambda_b that the searches in `sweeping` run at; ETS then also runs at the
        public code's lambda_d.
    sweeping : tuple of str
    policies : tuple of str
        Run under each of `budgets` for `managed` searches at width 16, besides full retention.
    managed, budgets, settings : tuple of str
    depth : int
        Most levels of a search; 0 for the searches' default.
    capture : Capture
    """

    model: str
    episodes: int
    duplicates: bool
    record: dict[str, Any] = field(default_factory=dict)
    widths: tuple[int, ...] = WIDTHS
    algorithms: tuple[str, ...] = ("all",)
    swept: tuple[str, ...] = ()
    sweeping: tuple[str, ...] = ("ets", "ets-kv")
    policies: tuple[str, ...] = ()
    managed: tuple[str, ...] = ("rebase", "ets")
    budgets: tuple[str, ...] = ("0.7", "0.5", "0.25")
    settings: tuple[str, ...] = ()
    depth: int = 0
    capture: Capture = Capture.TREE

    def arms(self) -> list[Arm]:
        """Every search that is compared."""
        found = [
            arm
            for width in self.widths
            for name in chosen_algorithms(self.algorithms)
            for arm in arms_of(name, [width], self.options)
        ]
        if self.swept:
            found += self._swept()
        return list(dict.fromkeys(found))

    @property
    def options(self) -> dict[str, str]:
        """What lets a search by levels go as deep as the bank does."""
        return {"depth": str(self.depth)} if self.depth else {}

    def _swept(self) -> list[Arm]:
        """ETS and ETS-KV at other values."""
        return [
            arm
            for width in self.widths
            for name, option, values in (
                *((name, "lambda_b", self.swept) for name in self.sweeping),
                ("ets", "lambda_d", (LAMBDA_D[width],)),
            )
            for value in values
            for arm in arms_of(name, [width], {option: value} | self.options, f"{option}={value}")
        ]


VERIFIER: dict[str, Any] = {
    "reward": RewardChoice("verifier"), "noise": 0.5, "dead_penalty": 0.5
}  # fmt: skip
VALUE: dict[str, Any] = {"reward": RewardChoice("value")}
WITHOUT_ATTENTION = ("arborkv", "streaming-llm", "random")

BANKS = {
    "verifier-all": Bank(
        "game24", 100, True, VERIFIER, swept=LAMBDA_B, policies=WITHOUT_ATTENTION,
        settings=("arborkv.use_attention=false", "arborkv.retain=sinks+tail"),
    ),
    "verifier-distinct": Bank("game24", 100, False, VERIFIER, swept=LAMBDA_B),
    "value-all": Bank("game24", 100, True, VALUE, swept=LAMBDA_B),
    "value-distinct": Bank("game24", 100, False, VALUE, swept=LAMBDA_B),
    "signals": Bank(
        "game24", 30, True, VERIFIER, (16,), ("rebase", "ets"),
        policies=("arborkv", "h2o", "streaming-llm", "random"), settings=("h2o.per=shared",),
        capture=Capture.SIGNALS,
    ),
    "chain": Bank(
        "chain", 60, True, VERIFIER | {"task_options": {"lines": 24, "lines_per_thought": 4}},
        (16,), LEVELS,
    ),
    "chain-deep": Bank(
        "chain", 60, True,
        VERIFIER | {"noise": 0.1, "task_options": {"lines": 40, "lines_per_thought": 1}},
        (16,), ("beam-4", "rebase", "ets", "ets-kv"), ("1.5", "2"), ("ets",), depth=48,
    ),
}  # fmt: skip


def record(name: str, folder: Path) -> None:
    """Grow one bank, or go on with it."""
    bank = BANKS[name]
    arms = {(arm.algorithm, arm.options): arm for arm in bank.arms()}
    request = RecordRequest(
        model=bank.model, out=folder / f"{name}.parquet", episodes=bank.episodes,
        temperature=1.0, capture=bank.capture, dedupe=not bank.duplicates, resume=True,
        bank=Recipe(arms=tuple(arms.values()), dedupe=not bank.duplicates),
        command=f"python benchmarks/searches.py record {name}", **bank.record,
    )  # fmt: skip
    before, shown = time.process_time(), 0

    def show(seen: RecordProgress) -> None:
        nonlocal shown
        if seen.episode == shown:
            return
        shown = seen.episode
        spent = time.process_time() - before
        print(f"{name}: {seen.episode} problems, {seen.thoughts} thoughts, {spent:.0f} s CPU",
              flush=True)  # fmt: skip

    folder.mkdir(parents=True, exist_ok=True)
    get_backend("torch").record(request, show)


#: What the page needs of a search, of all that is known (`SearchResult.flat`).
COLUMNS = (
    "episode", "algorithm", "swept", "width", "policy", "budget", "correct", "kv_tokens",
    "kv_tokens_with_prompt", "selections", "model_calls", "generated_tokens", "bank_misses",
    "peak_hbm_kv_bytes", "hbm_kv_byte_s", "peak_held_kv_bytes", "held_kv_byte_s", "total_s",
    "evicted_tokens", "rehydrated_tokens", "attention_kept",
)  # fmt: skip


def run(name: str, folder: Path, out: Path) -> None:
    """Run all searches of one bank and store their rows."""
    bank, path = BANKS[name], folder / f"{name}.parquet"
    machine = Machine(load_profile(PROFILE), load_geometry(GEOMETRY), "stage", 1, True)
    results: list[SearchResult] = []
    cpu_s: dict[str, float] = {}
    arms = bank.arms()
    groups = {f"width {w}": [a for a in arms if a.width == w and not a.swept] for w in bank.widths}
    groups["others"] = [a for a in arms if a.width not in bank.widths or a.swept]
    for what, group in groups.items():
        if group:
            cells = _cells([FULL], (), "1")
            found, cpu_s[what] = _timed(bank, path, group, cells, machine)
            results += found
    if bank.policies:
        group = [a for a in arms if a.algorithm in bank.managed and a.width == bank.widths[0]]
        cells = _cells(bank.policies, bank.settings, ",".join(bank.budgets))
        found, cpu_s["policies"] = _timed(
            bank, path, [a for a in group if not a.swept], cells, machine
        )
        results += found
    facts = _facts(bank, path, cpu_s) | {"candidate_tokens": _candidate_tokens(bank, path)}
    rows = [{"bank": name} | {key: r.flat()[key] for key in COLUMNS} for r in results]
    _store(out, name, rows, facts)
    print(f"{name}: {len(rows)} searches, CPU seconds {cpu_s}")


def _cells(names: Sequence[str], settings: Sequence[str], shares: str) -> list[Cell]:
    chosen = ChosenPolicies(names)
    return cells_of(chosen.build(policy_settings(chosen.names, settings)), budgets(shares))


def _timed(
    bank: Bank, path: Path, arms: list[Arm], cells: list[Cell], machine: Machine
) -> tuple[list[SearchResult], float]:
    before = time.process_time()
    job = SearchJob(path, arms, cells, machine, dedupe=not bank.duplicates)
    found = job.run()
    for note in job.notes():
        print(note)
    return found, round(time.process_time() - before, 1)


def _candidate_tokens(bank: Bank, path: Path) -> dict[int, list[int]]:
    """Own tokens of REBASE's candidates, summed over selections; by width, per problem.

    What is left of its KV size if no candidate had ancestors: what pruning cannot save.
    """
    reader = TraceReader(path)
    found: dict[int, list[int]] = {width: [] for width in bank.widths}
    for episode in range(reader.num_episodes):
        thoughts = read_bank(reader, episode)
        for width in bank.widths:
            (arm,) = arms_of(REFERENCE, [width], bank.options)
            done = walk(arm.make(), thoughts, not bank.duplicates)
            own = (done.tokens[node] for step in done.steps for node in step.candidates)
            found[width].append(sum(own))
    return found


def _facts(bank: Bank, path: Path, cpu_s: dict[str, float]) -> dict[str, Any]:
    """What the page says about a bank."""
    reader = TraceReader(path)
    info = reader.info
    return {
        "model": info.model, "task": info.task, "problems": reader.num_episodes,
        "duplicates": bank.duplicates, "widths": bank.widths, "policies": bank.policies,
        "budgets": bank.budgets, "managed": bank.managed, "settings": bank.settings,
        "reward": bank.record["reward"].name,
        "noise": bank.record.get("noise"), "dead_penalty": bank.record.get("dead_penalty"),
        "task_options": bank.record.get("task_options", {}), "algorithms": len(
            {arm.algorithm for arm in bank.arms()}),
        "geometry": GEOMETRY, "profile": PROFILE, "cpu_s": cpu_s, "seed": info.seed,
        "software": info.software, "python": platform.python_version(),
    }  # fmt: skip


def _store(out: Path, name: str, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Put a bank's rows in place of those there; banks stand in the order of `BANKS`."""
    known: dict[str, Any] = {}
    kept: list[dict[str, Any]] = []
    if out.exists():
        table = pq.read_table(out)
        known = json.loads(table.schema.metadata[b"arborsim"])
        kept = [row for row in table.to_pylist() if row["bank"] != name]
    known[name] = facts
    order = list(BANKS)
    merged = sorted([*kept, *rows], key=lambda row: order.index(row["bank"]))
    facts_in_order = {bank: known[bank] for bank in order if bank in known}
    made = pa.Table.from_pylist(merged).replace_schema_metadata(
        {"arborsim": json.dumps(facts_in_order)}
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(made, out, compression="zstd", compression_level=19)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record", "run"))
    parser.add_argument("names", nargs="+", choices=BANKS)
    parser.add_argument("--banks", type=Path, required=True, help="folder of the banks")
    parser.add_argument("--out", type=Path, default=Path("reports/search/results.parquet"))
    options = parser.parse_args()
    for name in options.names:
        if options.what == "record":
            import torch

            torch.set_num_threads(1)
            record(name, options.banks)
        else:
            run(name, options.banks, options.out)


if __name__ == "__main__":
    main()
