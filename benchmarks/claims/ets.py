"""ETS's claims on deep trees: KV by depth and width, throughput, what the solver takes.

    python -m benchmarks.claims.ets --out reports/claims

Searches walk synthetic banks (`arborsim.products.generate.synthetic`), whose depth, width, rewards
and meanings are stated; those that are replayed are written to ``build/claims`` first.
Experiments:

``depth``    REBASE, ETS, ETS without clusters and beam search by depth, width and lambda_b
``ground``   the same at depth 10 and width 64, with one property of the banks changed at a time
``alone``    width 256, depth 10, Llemma-34B on an H100 NVL: one search at a time, replayed
``serving``  the same searches from 4 to 32 clients at once, as in the paper's table 2

What a search has given up is freed when the next level begins (`Freed`), as a radix cache does
under pressure.  Seconds are simulated but for `select_s`: CPU seconds of the search's own decisions
(clustering and the integer program), measured on one core.  About 15 minutes on one core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from arborsim.core.events import Event, Transition
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.machine.program import SearchDemand
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.memory.moves import Plan
from arborsim.play.episode import record_demand
from arborsim.policies.base import CacheView, Method, Policy
from arborsim.products.generate.lengths import LogNormal, fixed
from arborsim.products.generate.synthetic import BankSpec, SyntheticBank, write_synthetic
from arborsim.searches import Expansion
from arborsim.searches.arms import Arm, Recipe, arms_of
from arborsim.searches.bank import Thoughts, open_bank, read_bank
from arborsim.searches.base import Leaves
from arborsim.searches.visited import visited
from arborsim.searches.walk import Walk, walk
from benchmarks.claims import Row, Store, run

Setting = dict[str, bool | int | float | str]
BANKS = Path("build/claims")
SEED = 0
#: Steps of MATH solutions are some tens of tokens long; right answers are rare and hard to tell, so
#: that no search is right, or wrong, on all problems.
SPEC = BankSpec(
    fixed(200), LogNormal(50, 0.5, 512), fixed(10),
    truth=0.4, difficulty=0.5, right=0.1, wrong_answers=4,
)  # fmt: skip
DEPTHS = (3, 6, 10, 16, 4, 8, 13)
#: Problems by width: a search at width 256 costs as much as sixteen at width 16.
PROBLEMS = {16: 60, 64: 24, 256: 10}
LAMBDA_B = ("1", "1.5", "2")
#: What one bank of `ground` has in place of `SPEC`.
GROUND: dict[str, dict[str, Any]] = {
    "as it is": {},
    "reward correlation 0.5": {"reward_correlation": 0.5},
    "reward correlation 0.95": {"reward_correlation": 0.95},
    "rewards 0.5 wide": {"reward_spread": 0.5},
    "one meaning": {"meanings": 1},
    "16 meanings": {"meanings": 16},
    "each its own meaning": {"meanings": 0},
    "no common meanings": {"common": 0.0},
    "30% repeated": {"repeated": 0.3},
    "15% finish at every level": {"finished": (0.15,)},
}
MODEL, GPU, ENGINE = "llemma-34b", "h100-nvl", "sglang"
SERVED = 6  #: problems that are replayed
CLIENTS = (4, 8, 16, 32)
DRAWS = 4  #: runs of `SEARCHES` searches, drawn with replacement
SEARCHES = 32


def arms(width: int) -> list[Arm]:
    """The searches that are compared."""
    named = [("rebase", {}), *(("ets", {"lambda_b": value}) for value in LAMBDA_B)]
    named += [("ets-kv", {"lambda_b": value}) for value in ("1", "2")]
    named += [("beam-sqrt", {}), ("dvts-sqrt", {})]
    return [arm for name, given in named for arm in arms_of(name, [width], given)]


def name_of(arm: Arm) -> dict[str, Any]:
    return {"algorithm": arm.name, "lambda_b": float(dict(arm.options).get("lambda_b", 0))}


def walked(arm: Arm, bank: Thoughts) -> tuple[Walk, float]:
    """What a search did, and the CPU seconds of its decisions."""
    search, seconds = arm.make(), 0.0
    decide = search.expand

    def timed(frontier: Leaves, width: int) -> Expansion:
        nonlocal seconds
        begun = time.process_time()
        answer = decide(frontier, width)
        seconds += time.process_time() - begun
        return answer

    search.expand = timed  # type: ignore[method-assign]
    return walk(search, bank, False), seconds


def figures(done: Walk, select_s: float) -> dict[str, Any]:
    return {
        "kv_tokens": done.kv_tokens, "kv_tokens_with_prompt": done.kv_tokens_with_prompt,
        "selections": done.selections, "model_calls": done.model_calls,
        "generated_tokens": done.generated_tokens, "correct": done.correct, "select_s": select_s,
    }  # fmt: skip


def searched(spec: BankSpec, width: int, episodes: range) -> Iterator[Row]:
    for episode in episodes:
        bank = SyntheticBank.of(spec, SEED, episode)
        for arm in arms(width):
            yield {"episode": episode, **name_of(arm), **figures(*walked(arm, bank))}


@dataclass(frozen=True)
class Freed(Policy):
    """Keep every token of what the search has not given up; free the rest when a level begins."""

    name: ClassVar[str] = "freed"
    method: ClassVar[Method] = Method("-", place="evict", schedule="when thoughts are opened")
    bounded: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if not isinstance(event, Transition):
            return None
        nodes = view.tree.nodes
        given_up = np.array([nodes[n].pruned for n in range(len(nodes))])
        gone = given_up[view.tree.node_of_token.values] & (view.tier[0] != Tier.EVICTED)
        if not gone.any():
            return None
        tiers = view.tier.copy()
        tiers[:, gone] = Tier.EVICTED
        return Plan(tiers)


def served_arms() -> list[Arm]:
    """At the paper's width; those that its table 2 compares come first."""
    order = [("rebase", 0.0), ("ets", 2.0), ("beam-sqrt", 0.0), ("ets", 1.0), ("dvts-sqrt", 0.0)]
    named = {tuple(name_of(arm).values()): arm for arm in arms(256)}
    return [named[key] for key in order]


@cache
def bank_file() -> Path:
    path = BANKS / "ets-served.parquet"
    if not path.exists():
        BANKS.mkdir(parents=True, exist_ok=True)
        recipe = Recipe(arms=tuple(served_arms()), dedupe=False)
        write_synthetic(SPEC, recipe, SERVED, SEED, load_geometry(MODEL), path)
    return path


def machine(tree_attention: bool) -> Machine:
    profile = load_profile(GPU, None, ENGINE)
    return Machine(profile, load_geometry(MODEL), tree_attention=tree_attention)


@cache
def replayed(arm: Arm, tree_attention: bool) -> tuple[list[Row], list[SearchDemand]]:
    """Figures of each problem alone on the machine, and what it asks of one that others use."""
    reader = open_bank(bank_file())
    rows: list[Row] = []
    demands = []
    for episode in range(SERVED):
        bank = read_bank(reader, episode, embeddings=True)
        done, select_s = walked(arm, bank)
        demand, measured = record_demand(
            visited(done, bank.bare), Freed(), Budget.parse("1"), machine(tree_attention)
        )
        rows.append({
            "episode": episode, **figures(done, select_s), "total_s": measured.time.total_s,
            "peak_hbm_kv_bytes": measured.peak_hbm_kv_bytes,
        })  # fmt: skip
        demands.append(demand)
    return rows, demands


def together(arm: Arm, tree_attention: bool, clients: int) -> Iterator[Row]:
    """Runs of many searches; the draws are the same for all algorithms."""
    _, demands = replayed(arm, tree_attention)
    chosen = machine(tree_attention)
    engine = ServingEngine(demands, chosen.profile, load_geometry(MODEL))
    for draw in range(DRAWS):
        drawn = np.random.default_rng(draw).integers(SERVED, size=SEARCHES).tolist()
        report = engine.run(ClosedLoop(clients, tuple(drawn)))
        yield {
            "episode": draw, "searches_per_s": SEARCHES / report.total_s,
            "total_s": report.total_s, "tokens": report.tokens,
            "preemptions": report.preemptions, "limited_by": report.saturated,
            "peak_hbm_kv_bytes": report.peak_hbm_bytes, "pool_bytes": engine.kv_bytes,
        }  # fmt: skip


def experiments(store: Store) -> None:
    """All cells, those that decide most first."""
    for depth in DEPTHS[:4]:
        for width, count in PROBLEMS.items():
            depth_cell(store, depth, width, 0, count // 2)
    first, *others = served_arms()
    for arm in (first, others[0]):
        serving_cells(store, arm)
    for varied, change in GROUND.items():
        setting: Setting = {"varied": varied, "depth": 10, "width": 64}
        store.cell("ground", setting, partial(searched, replace(SPEC, **change), 64, range(8)))
    for arm in (first, others[0]):
        alone_cell(store, arm, True)
    for arm in others[1:]:
        serving_cells(store, arm)
    for depth in DEPTHS:
        for width, count in PROBLEMS.items():
            depth_cell(store, depth, width, 0, count // 2)
            depth_cell(store, depth, width, count // 2, count - count // 2)


def depth_cell(store: Store, depth: int, width: int, first: int, count: int) -> None:
    spec = replace(SPEC, depth=fixed(depth))
    setting: Setting = {"depth": depth, "width": width, "first": first}
    store.cell("depth", setting, partial(searched, spec, width, range(first, first + count)))


def alone_cell(store: Store, arm: Arm, tree_attention: bool) -> None:
    setting: Setting = {**name_of(arm), "tree_attention": tree_attention}
    store.cell("alone", setting, lambda: replayed(arm, tree_attention)[0])


def serving_cells(store: Store, arm: Arm) -> None:
    alone_cell(store, arm, False)
    for clients in CLIENTS:
        setting: Setting = {**name_of(arm), "tree_attention": False, "clients": clients}
        store.cell("serving", setting, partial(together, arm, False, clients))


if __name__ == "__main__":
    run("ets", experiments)
