"""ArborKV on real depth-first trees: what their shape asks of a cache, what policies make of it.

    python -m benchmarks.claims.trees --out reports/claims

Reads GPT-4's searches of 20 mini crosswords, which are no part of this project: put
``infoss_dfs_prune.json`` and ``infoss_dfs_no_prune.json`` (folder ``logs/crosswords`` of
github.com/princeton-nlp/tree-of-thought-llm) into ``build/claims``.  Only figures are kept of them.
The logs have of each thought its word alone, and no prompt, so lengths are set: 128 tokens a
thought, the most that the paper allows (T_node), or those of the words; prompts of 512 tokens.

``shape``     depth, branching, returns, and how much of what a thought builds on was off the
              active path just before, of these trees and of searches that come with arborsim
``policies``  the policies that read no attention, on the paper's GPU and model, by budget

About 7 minutes on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Decode, Prefill, TokenRun, Transition
from arborsim.core.tiers import Budget, Tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.moves import Moves
from arborsim.play.controller import Meter
from arborsim.play.episode import Cell, play_episode
from arborsim.policies.registry import build
from arborsim.products.traces.describe import episode_facts
from arborsim.trace.episode import Episode, play
from arborsim.trace.importers.sources import Description, read_list, trace_info, write_trace
from arborsim.trace.importers.tot import TotLog
from arborsim.trace.reader import TraceReader
from benchmarks.claims import Row, Store, run

ROOT = Path(__file__).resolve().parents[2]
LOGS = Path("build/claims")
#: The program's searches, with and without giving up states that have an impossible word.
SEARCHES = {"pruned": "infoss_dfs_prune.json", "not pruned": "infoss_dfs_no_prune.json"}
#: Searches of the reference models that come with arborsim.
RECORDED = {"dpts on chain": "chain-tree.parquet", "tot-bfs on game24": "game24-tot.parquet"}
#: Tokens of a thought; 0: its word's.
LENGTHS = {"128": 128, "word": 0}
PROMPT_TOKENS = 512
GPU, MODEL = "rtx4090", "llama-3.1-8b"
#: Without attention: blocks by their search value, and tails inside them.
ARBOR = {"use_attention": "false", "retain": "sinks+tail"}
PINNED = {"pin_prompt": "true"}
#: Policy and settings by label.
POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "full": ("full", {}),
    "arborkv": ("arborkv", ARBOR),
    "arborkv, no rehydration": ("arborkv", {**ARBOR, "rehydrate": "false"}),
    "arborkv, as printed": ("arborkv", {**ARBOR, "boundary_trims_path": "true"}),
    "arborkv, under pressure only": ("arborkv", {**ARBOR, "only_under_pressure": "true"}),
    "least recent blocks": ("streaming-llm", {**PINNED, "adaptation": "path"}),
    "window over the tree": ("streaming-llm", {**PINNED, "adaptation": "flat"}),
    "random on the path": ("random", {"adaptation": "path"}),
    "random over the tree": ("random", {"adaptation": "flat"}),
}
_FEW = ("full", "arborkv", "least recent blocks")
_VARIANTS = (
    "arborkv, as printed", "arborkv, no rehydration", "arborkv, under pressure only",
    "random on the path",
)  # fmt: skip
#: Search, length, policies, and budgets in shares of each tree; the first ones decide most.  What
#: ranks all tokens of a tree at every token takes five seconds a search.
GRID: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("pruned", "128", _FEW, ("0.25", "0.1", "0.5")),
    ("pruned", "128", ("window over the tree",), ("0.25",)),
    ("not pruned", "128", _FEW, ("0.25",)),
    ("pruned", "word", _FEW, ("0.5", "0.9")),
    ("pruned", "128", ("random over the tree",), ("0.25",)),
    ("pruned", "128", _VARIANTS, ("0.25", "0.1")),
    ("pruned", "128", (*_FEW, "random on the path"), ("0.15", "0.75", "0.9")),
)


@cache
def searches(name: str, length: str) -> tuple[Episode, ...]:
    """The episodes of one of `SEARCHES`."""
    log = LOGS / SEARCHES[name]
    if not log.exists():
        raise SystemExit(
            f"{log} is missing: the top of benchmarks/claims/trees.py says whose it is"
        )
    reading = TotLog(prompt_tokens=PROMPT_TOKENS, thought_tokens=LENGTHS[length])
    contents = read_list(log, reading.search_of)
    about = Description("tot", "crosswords", "tot-dfs", f"{length} a thought", {}, {})
    trace = LOGS / f"{log.stem}-{length}.parquet"
    write_trace(
        contents, trace_info(log, about, contents, load_geometry(MODEL)), trace, overwrite=True
    )
    return tuple(TraceReader(trace).episodes())


class Paths(Meter):
    """Of every visit that returns to a block further up: what of its path was in HBM.

    One leaf at a time, as depth-first searches have it.
    """

    def __init__(self) -> None:
        self._leaf = 0
        self._recomputed = 0  # tokens, since the last visit
        self.returns = self.served_whole = 0
        #: Tokens of the paths above the thoughts that followed returns, and of these the ones that
        #: were recomputed, and that were gone
        self.path_tokens = self.recomputed_tokens = self.missing_tokens = 0

    def moved(self, moves: Moves, tier: np.ndarray, reads: np.ndarray | None = None) -> None:
        back = moves.target == Tier.HBM
        self._recomputed += int(np.count_nonzero(tier[0, moves.token[back]] == Tier.EVICTED))

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        (leaf,) = run.leaves
        if leaf == self._leaf:  # the thought goes on
            return
        above = tree.ancestors(leaf)[:-1]
        if above[-1] != self._leaf:
            ids = np.concatenate([tree.tokens(node) for node in above])
            missing = int(np.count_nonzero(tier[0, ids] == Tier.EVICTED))
            self.returns += 1
            self.served_whole += not missing and not self._recomputed
            self.path_tokens += len(ids)
            self.recomputed_tokens += self._recomputed
            self.missing_tokens += missing
        self._leaf, self._recomputed = leaf, 0


def replayed(name: str, length: str, policy: str, budget: str) -> Iterator[Row]:
    """Every search under a policy; a budget that cannot hold one is a row that says so."""
    kind, settings = POLICIES[policy]
    made = build(kind, settings)
    machine = Machine(load_profile(GPU), load_geometry(MODEL))
    for episode in searches(name, length):
        paths = Paths()
        executor = SimulatedExecutor.of(machine, made, episode.info)
        cell = Cell(made, Budget.parse("1" if policy == "full" else budget))
        try:
            measured = play_episode(episode, cell, executor, meters=[paths]).measured
        except BudgetInfeasible:
            yield {"episode": episode.index, "feasible": False}
            continue
        yield {
            "episode": episode.index,
            "feasible": True,
            "tokens": episode.num_tokens,
            "peak_tokens": measured.peak_hbm_kv_tokens,
            "peak_gb": measured.peak_hbm_kv_bytes / 1e9,
            "byte_seconds": measured.hbm_byte_seconds,
            "total_s": measured.time.total_s,
            "rehydration_s": measured.time.rehydration_s,
            "rehydrations": measured.rehydrations,
            "rehydrated_tokens": measured.rehydrated_tokens,
            "rehydrated_share": measured.rehydrated_tokens / episode.num_tokens,
            "evicted_tokens": measured.evicted_tokens,
            "returns": paths.returns,
            "returned_path_tokens": paths.path_tokens,
            "served_whole": paths.served_whole / paths.returns,
            "recomputed_share": paths.recomputed_tokens / paths.path_tokens,
            "missing_share": paths.missing_tokens / paths.path_tokens,
        }


def shape(episode: Episode) -> Row:
    """What a tree looks like, and what its search comes back to.

    `off_path_share` is the share of the tokens on the paths of new thoughts that were on no active
    path just before: what a cache that keeps the active paths alone must compute again.
    """
    facts = episode_facts(episode)
    tree = ThoughtTree()
    leaves: tuple[int, ...] = (0,)
    visits = off_visits = needed = off = 0
    levels: list[int] = []
    for event in play(episode):
        if isinstance(event, Prefill | Decode):
            if isinstance(event, Prefill):
                tree.open(0, -1)
            tree.append(event.run.leaves, event.run.steps)
        elif isinstance(event, Transition):
            before = tree.on_path(leaves)
            opened = dict(event.opened)
            for node, parent in event.opened:
                tree.open(node, parent)
            known = np.arange(len(tree)) < len(before)
            for leaf in event.leaves:
                on_path = tree.on_path([leaf])[: len(before)]
                away = on_path & ~before
                visits += 1
                off_visits += bool(tree.sizes[: len(before)][away].any())
                needed += int(tree.sizes[known][on_path].sum())
                off += int(tree.sizes[known][away].sum())
                start = opened.get(leaf, leaf)
                if len(leaves) == 1 and start != leaves[0] and start in tree.ancestors(leaves[0]):
                    levels.append(int(tree.depths[leaves[0]] - tree.depths[start]))
            leaves = event.leaves
    total = int(tree.sizes.sum())
    return {
        "episode": episode.index,
        "nodes": facts.nodes,
        "depth": facts.depth,
        "branching": facts.branching,
        "visits": visits,
        "returns": facts.revisits,
        "return_share": facts.revisits / visits,
        "levels": float(np.mean(levels)) if levels else 0.0,
        "tree_tokens": total,
        "longest_path_tokens": facts.longest_path_tokens,
        "longest_path_share": facts.longest_path_tokens / total,
        "off_path_visits": off_visits / visits,
        "off_path_share": off / needed,
    }


def experiments(store: Store) -> None:
    for name in SEARCHES:
        for length in LENGTHS:
            setting = {"search": name, "length": length}
            store.cell("shape", setting, lambda n=name, k=length: map(shape, searches(n, k)))
    for name, file in RECORDED.items():
        reader = TraceReader(ROOT / "traces" / file)
        setting = {"search": name, "length": "recorded"}
        store.cell("shape", setting, lambda r=reader: map(shape, r.episodes()))
    for name, length, policies, budgets in GRID:
        for policy in policies:
            for budget in ("1",) if policy == "full" else budgets:
                cell = {"search": name, "length": length, "policy": policy, "budget": budget}
                store.cell("policies", cell, lambda c=cell: replayed(*c.values()))


if __name__ == "__main__":
    run("trees", experiments)
