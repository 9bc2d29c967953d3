"""Experiments for the claims of ArborKV (arXiv:2605.22106) that need no answers.

::

    python -m benchmarks.claims.arborkv --out reports/claims

``trees``: searches grown by DPTS with the paper's branching, depth and tokens of a thought, and
drawn rewards, replayed as Llama-3.1-8B in FP16 on an RTX 4090.  The paper does not say how many
thoughts an expansion writes: one, three (what the slope of its table 2 comes to) and five (its
branching factor) are run.  ``program``: tokens by Eq. 2 against the optimum of the program that it
is derived from.  ``ablations``: the variants of tables 3, 4, 7 and 8 replayed on the
shipped trace of searches of the `chain` model.  ``live``: where the seconds of live searches go
(needs torch).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import TokenRun
from arborsim.core.tiers import Budget, Tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.moves import Moves
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult, get_backend
from arborsim.play.controller import Meter
from arborsim.play.episode import Cell, play_episode
from arborsim.play.meters import UNMEASURED, Quality
from arborsim.policies.registry import build
from arborsim.products.calibrate.documents import read_calibration
from arborsim.searches import ROOT, Leaf, ask, make_search
from arborsim.trace.importers.searches import Thought, ThoughtBatch, WrittenSearch
from arborsim.trace.importers.sources import Contents
from arborsim.trace.importers.sources import write_trace as write_searches
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Capture, TraceInfo
from benchmarks.claims import Row, Store, run
from benchmarks.quality_arms import BUSHY

GPU, MODEL = "rtx4090", "llama-3.1-8b"
PROMPT = 256  # tokens; the paper does not say
THOUGHT = 128  # T_node
#: Branching and depth of the paper's two configurations.
SHAPES = {"S": (3, 6), "L": (5, 8)}
#: Searches of each; they differ little.
S_TREES, L_TREES = 5, 1
LIVE_SEARCHES = 4
SCRATCH = Path("build/claims")  # traces, made anew where they are missing
#: Generated trees hold no attention: blocks keep sinks and tails, MSVE goes by v and u.
BLIND = {"use_attention": "false", "retain": "sinks+tail"}

#: Trimmed only under pressure, all variants use up the same budget.
PRESSED = {"only_under_pressure": "true"}

#: Table 3, as settings (`arborsim policies arborkv`).
SIGNALS: dict[str, dict[str, str]] = {
    "no v": {"use_value": "false"},
    "no u": {"use_certainty": "false"},
    "no a": {"use_attention": "false"},
    "no sibling coordination": {"eta": "1"},
    "TAE only": {"msve": "false"},
    "MSVE only": {"lambda_distance": "0"},
}
#: Table 7.
INSIDE: dict[str, dict[str, str]] = {
    "tail only": {"retain": "tail", "pin_prompt": "false"},
    "sinks + tail": {"retain": "sinks+tail", "pin_prompt": "false"},
    "sinks + tail + heavy hitters": {"pin_prompt": "false"},
}


# --- trees of the paper's shape ---


@dataclass(frozen=True)
class Shape:
    """Trees of one configuration: `thoughts` of `THOUGHT` tokens each."""

    config: str
    thoughts: int

    def grow(self, seed: int) -> WrittenSearch:
        """A search that DPTS grew, one leaf at a time.

        A thought's value is its parent's plus normal noise (0.15), held to [0, 1].
        """
        branching, depth = SHAPES[self.config]
        rng = np.random.default_rng((seed, self.thoughts, depth))
        search = make_search("dpts", width=1, children=branching, steps=self.thoughts, accept=2.0)
        frontier = {ROOT: Leaf(ROOT, -1, 0, math.nan)}
        batches: list[ThoughtBatch] = []
        count = 0
        while not (wish := ask(search, frontier, 1)).done and (wish.children or wish.dropped):
            for node in wish.dropped:
                del frontier[node]
            thoughts = []
            for parent in wish.children:
                above = frontier[parent]
                frontier[parent] = _with(above, visits=above.visits + 1)
                score = 0.6 if parent == ROOT else above.score
                score = float(np.clip(score + rng.normal(0, 0.15), 0, 1))
                count += 1
                level = above.depth + 1
                frontier[count] = Leaf(count, parent, level, score, finished=level == depth)
                thoughts.append(Thought(parent, THOUGHT, score))
            # What is given up was complete before these thoughts began.
            if wish.dropped and batches:
                batches[-1] = ThoughtBatch(batches[-1].thoughts, wish.dropped)
            if thoughts:
                batches.append(ThoughtBatch(thoughts))
        return WrittenSearch(PROMPT, batches)


def _with(leaf: Leaf, visits: int) -> Leaf:
    return Leaf(leaf.node, leaf.parent, leaf.depth, leaf.score, leaf.finished, visits=visits)


@cache
def grown(shape: Shape, count: int) -> TraceReader:
    """A trace of `count` such searches."""
    path = SCRATCH / f"config-{shape.config}-{shape.thoughts}x{count}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    info = TraceInfo(
        geometry=load_geometry(MODEL), model="none: lengths and values are drawn",
        task="generated", search="dpts", capture=Capture.TREE,
        extra={"generated": True, "token_ids": "unknown", "times": "unknown"},
    )  # fmt: skip
    searches = tuple(shape.grow(seed) for seed in range(count))
    write_searches(Contents(searches, (), count), info, path, overwrite=True)
    return TraceReader(path)


# --- replays ---


class OnPath(Meter):
    """How much of the active path is gone when it is read."""

    def __init__(self) -> None:
        self.missing = 0.0  # sum over generated tokens of the share of the older path that is gone
        self.tokens = 0
        self.switches = self.broken = 0  # turns away from the newest block; with a token gone
        self._last: tuple[int, ...] = (ROOT,)

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        for leaf in run.leaves:
            path = tree.path(leaf)
            older = path[path < tier.shape[1]]
            gone = float((tier[0][older] == Tier.EVICTED).mean()) if len(older) else 0.0
            self.missing += gone * run.steps
            self.tokens += run.steps
            if leaf not in self._last and tree.nodes[leaf].parent not in self._last:
                self.switches += 1
                self.broken += gone > 0
        self._last = run.leaves


def replayed(
    reader: TraceReader, policy: str, settings: dict[str, str], budget: str, machine: Machine
) -> Iterator[Row]:
    """A row per search of a trace under one policy and budget."""
    cell = Cell(build(policy, settings), Budget.parse(budget))
    quality = Quality.of(reader, output_error=False)
    reads = cell.policy.reads() | ({rows} if (rows := quality.rows("shared")) else set())
    for episode in reader.episodes(frozenset(reads), who=policy):
        seen = OnPath()
        row: dict[str, Any] = {"episode": episode.index, "full_tokens": episode.num_tokens}
        try:
            played = play_episode(
                episode, cell, SimulatedExecutor.of(machine, cell.policy, episode.info),
                quality=quality if quality.attention else UNMEASURED, meters=[seen],
            )  # fmt: skip
        except BudgetInfeasible:
            yield row | {"infeasible": True}
            continue
        m = played.measured
        held = np.array(m.series.hbm_kv_bytes, dtype=float)
        path = max(len(played.controller.tree.path(n)) for n in range(len(played.controller.tree)))
        row |= {
            "infeasible": False, "fits": m.fits, "longest_path": path,
            "peak_tokens": m.peak_hbm_kv_tokens, "peak_kv_bytes": m.peak_hbm_kv_bytes,
            "needed_bytes": m.needed_hbm_bytes, "weight_bytes": m.weight_bytes,
            "usable_bytes": m.usable_hbm_bytes, "generated_tokens": m.generated_tokens,
            "total_s": m.time.total_s, "decode_s": m.time.decode_s, "policy_s": m.time.policy_s,
            "rehydration_s": m.time.rehydration_s, "rehydrations": m.rehydrations,
            "rehydrated_tokens": m.rehydrated_tokens, "decisions": m.decisions,
            "token_s": m.time.decode_s / m.generated_tokens,
            "path_missing": seen.missing / max(seen.tokens, 1), "switches": seen.switches,
            "switches_broken": seen.broken,
            "largest_drop": float(np.max(held[:-1] - held[1:], initial=0) / m.peak_hbm_kv_bytes),
        }  # fmt: skip
        if m.rehydrated_tokens:
            row["rehydrated_token_s"] = m.time.rehydration_s / m.rehydrated_tokens
        if quality.attention:
            row["attention_kept"] = played.attention_kept
        yield row


def trees(store: Store) -> None:
    machine = Machine(load_profile(GPU), load_geometry(MODEL))

    def cell(
        config: str, expansions: int, per: int, label: str, policy: str,
        settings: dict[str, str], budget: str, count: int,
    ) -> None:  # fmt: skip
        setting: dict[str, bool | int | float | str] = {
            "config": config, "expansions": expansions, "thoughts_per_expansion": per,
            "label": label, "budget": budget,
        }  # fmt: skip
        shape = Shape(config, expansions * per)
        store.cell(
            "trees", setting,
            lambda: replayed(grown(shape, count), policy, settings, budget, machine),
        )  # fmt: skip

    compared: dict[str, tuple[str, dict[str, str]]] = {
        "arborkv": ("arborkv", BLIND),
        "arborkv, no rehydration": ("arborkv", BLIND | {"rehydrate": "false"}),
        "arborkv, only under pressure": ("arborkv", BLIND | PRESSED),
        "arborkv, no rehydration, only under pressure": (
            "arborkv",
            BLIND | PRESSED | {"rehydrate": "false"},
        ),
        "streaming-llm": ("streaming-llm", {}),
    }
    for per in (1, 3):
        cell("S", 64, per, "full", "full", {}, "1", S_TREES)
        for budget in ("0.25", "0.5"):
            for label in compared if per == 3 else ("arborkv", "arborkv, only under pressure"):
                policy, settings = compared[label]
                cell("S", 64, per, label, policy, settings, budget, S_TREES)
    for label, changed in SIGNALS.items():
        if label != "no a":  # there is none
            cell("S", 64, 3, label, "arborkv", BLIND | changed, "0.25", S_TREES)
    for label in ("MSVE only", "TAE only", "no sibling coordination"):
        settings = BLIND | SIGNALS[label] | PRESSED
        cell("S", 64, 3, f"{label}, only under pressure", "arborkv", settings, "0.25", S_TREES)
    printed = BLIND | {"boundary_trims_path": "true"}
    cell("S", 64, 3, "arborkv, Algorithm 2 as printed", "arborkv", printed, "0.25", S_TREES)
    for expansions, per in ((64, 3), (128, 3), (256, 1), (256, 3), (128, 5), (256, 5)):
        cell("L", expansions, per, "full", "full", {}, "1", L_TREES)
        if expansions == 256 and per > 1:
            cell("L", expansions, per, "arborkv", "arborkv", BLIND, "0.25", L_TREES)
    for budget in ("0.25", "0.5", "0.6"):  # what the card can hold lies between the last two
        label = "arborkv, only under pressure"
        cell("L", 256, 3, label, *compared[label], budget, L_TREES)
    for model in (MODEL, "qwen2.5-7b"):
        store.cell("models", {"model": model, "label": "full"}, lambda m=model: _charged_as(m))


def _charged_as(model: str) -> Iterator[Row]:
    machine = Machine(load_profile(GPU), load_geometry(model))
    return replayed(grown(Shape("S", 192), S_TREES), "full", {}, "1", machine)


# --- the program that Eq. 2 is derived from ---


def program(store: Store) -> None:
    """``max sum w_i log k_i`` under a budget, against ``k_i`` in proportion to ``w_i n_i``."""
    for lengths in ("equal", "16 to 128"):
        store.cell("program", {"lengths": lengths}, lambda lengths=lengths: _programs(lengths))


def _programs(lengths: str) -> Iterator[Row]:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        blocks = 64
        sizes = np.full(blocks, 64.0) if lengths == "equal" else rng.uniform(16, 128, blocks)
        weights = np.exp(rng.normal(0, 1, blocks))
        budget = 0.25 * sizes.sum()
        best, by_ratio = (_capped(w, sizes, budget) for w in (weights, weights * sizes))
        loss = float(weights @ (np.log(best) - np.log(by_ratio)) / weights.sum())
        yield {
            "seed": seed, "moved_share": float(np.abs(best - by_ratio).sum() / 2 / budget),
            "loss_nats": loss,
        }  # fmt: skip


def _capped(weights: np.ndarray, sizes: np.ndarray, budget: float) -> np.ndarray:
    """``min(n, w / lambda)``, with lambda such that the budget is used up."""
    low, high = 0.0, float((sizes / weights).max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(sizes, weights * middle).sum() < budget else (low, middle)
        )
    return np.asarray(np.minimum(sizes, weights * high))


# --- searches of the chain model ---

#: Eight searches with attention: DPTS, 96 program lines, trees of 4.5 paths.
TRACE = Path("traces/chain-tree.parquet")
#: A path and its prompt are half of that; of a quarter of the tree they would be nearly all.
ABLATED = "0.4"


def variants() -> dict[str, tuple[str, dict[str, str]]]:
    """Policies of the ablations."""
    own = read_calibration("chain-msve").policies["arborkv"]
    theta = {name: str(value) for name, value in own.items()}
    found = {"arborkv": ("arborkv", {}), "arborkv, theta of chain": ("arborkv", theta)}
    found |= {label: ("arborkv", changed) for label, changed in (SIGNALS | INSIDE).items()}
    found["arborkv, only under pressure"] = ("arborkv", PRESSED)
    for label, changed in SIGNALS.items():
        found[f"{label}, only under pressure"] = ("arborkv", changed | PRESSED)
    found["arborkv, no rehydration"] = ("arborkv", {"rehydrate": "false"})
    alone = {"rehydrate": "false"} | PRESSED
    found["arborkv, no rehydration, only under pressure"] = ("arborkv", alone)
    found["arborkv, Algorithm 2 as printed"] = ("arborkv", {"boundary_trims_path": "true"})
    for name in ("h2o", "streaming-llm", "thinkv"):
        own = {"per": "shared"} if name == "h2o" else {}  # the traces have no vectors
        found[name] = (name, own)
        found[f"{name}, tree as one sequence"] = (name, own | {"adaptation": "flat"})
    return found


def ablations(store: Store) -> None:
    machine = Machine(load_profile(GPU), load_geometry(MODEL))
    for label, (policy, settings) in variants().items():
        store.cell(
            "ablations", {"label": label, "budget": ABLATED},
            lambda p=policy, s=settings: replayed(TraceReader(TRACE), p, s, ABLATED, machine),
        )  # fmt: skip


def calibration(store: Store) -> None:
    """What the shipped calibration of theta found."""
    found = read_calibration("chain-msve").evidence
    store.cell("calibration", {"model": "chain"}, lambda: [{k: found[k] for k in ("auc", "lost")}])


class _Kept:
    """Takes the results of live searches."""

    def __init__(self) -> None:
        self.results: list[LiveResult] = []

    def began(self, facts: LiveFacts, episodes: int) -> None: ...

    def running(self, episode: int, what: str, tokens: int) -> None: ...

    def wants(self, episode: int, cell: Cell) -> bool:
        return True

    def full_tokens(self, episode: int) -> int:
        return 0

    def finished(self, result: LiveResult) -> None:
        self.results.append(result)


def live(store: Store) -> None:
    """Searches of ``arborkv-ablations``, one at a time, so that its seconds are its own."""
    store.cell("live", {"model": "chain"}, lambda: list(_timed(LIVE_SEARCHES)))


def _timed(searches: int) -> Iterable[Row]:
    import torch

    torch.set_num_threads(1)
    kept = _Kept()
    arms = (("full", "1"), ("arborkv", "0.5"), ("arborkv", "0.25"))
    cells = tuple(Cell(build(policy, {}), Budget.parse(budget)) for policy, budget in arms)
    get_backend("torch").live(LiveRequest(cells=cells, episodes=searches, **BUSHY), kept)
    for result in kept.results:
        row: dict[str, Any] = {
            "label": result.policy, "budget": result.budget, "episode": result.episode,
            "full_tokens": result.full_tokens, "infeasible": bool(result.infeasible),
        }  # fmt: skip
        if not result.infeasible:
            m = result.measured
            row |= {
                "correct": result.correct, "generated_tokens": m.generated_tokens,
                "peak_tokens": m.peak_hbm_kv_tokens, "total_s": m.time.total_s,
                "decode_s": m.time.decode_s, "policy_s": m.time.policy_s,
                "rehydration_s": m.time.rehydration_s, "rehydrations": m.rehydrations,
                "rehydrated_tokens": m.rehydrated_tokens, "decisions": m.decisions,
                "token_s": m.time.decode_s / m.generated_tokens,
            }  # fmt: skip
            if m.rehydrated_tokens:
                row["rehydrated_token_s"] = m.time.rehydration_s / m.rehydrated_tokens
        yield row


def experiments(store: Store) -> None:
    program(store)
    trees(store)
    ablations(store)
    calibration(store)
    live(store)


if __name__ == "__main__":
    run("arborkv", experiments)
