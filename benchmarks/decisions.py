"""What one decision costs: every policy over 32,768 cached tokens, and ArborKV on a large tree.

Run on one core: ``python benchmarks/decisions.py [--out reports/benchmarks/decisions.json]``.

Scores are already accumulated; what is timed is `Policy.decide`, from view to plan, with one token
more in HBM than the budget allows (policies that decide at intervals: at one of them).  Policies
that rank per layer and head have 16 cache groups here, each of 32,768 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Decode, Event, Prefill, TokenRun, Transition
from arborsim.core.observations import Observations
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.registry import available, build
from arborsim.products.calibrate.policy_cost import GROUPS, SHAPE, random_scores

TOKENS = 32_768
PROMPT = 256
#: Redundancy compares every key with every other, a covariance is a product per key and query head
SHORTER = {"rkv": 4_096, "expected-attention": 4_096}
REPEATS = 15


def chain_view(policy: Policy, seed: int = 0) -> CacheView:
    """All tokens of one chain in HBM, one more than the budget allows; random scores."""
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append((0,), PROMPT)
    tree.open(1, 0)
    tokens = SHORTER.get(policy.name, TOKENS)
    tree.append((1,), tokens - PROMPT)
    tree.activate((1,))
    return _view(policy, tree, (1,), tokens - 1, np.random.default_rng(seed))


def tree_view(policy: Policy, nodes: int = 4096, tokens: int = 500_000, seed: int = 0) -> CacheView:
    """A random tree of closed blocks of similar size, everything in HBM, the last node active."""
    rng = np.random.default_rng(seed)
    tree = ThoughtTree()
    mean = tokens // nodes
    for node in range(nodes):
        tree.open(node, int(rng.integers(max(0, node - 64), node)) if node else -1)
        tree.append([node], int(rng.integers(mean // 2, mean + mean // 2 + 1)))
        block = tree.nodes[node]
        block.closed = node < nodes - 1
        block.reward, block.entropy = float(rng.random()), float(3 * rng.random())
    tree.activate((nodes - 1,))
    return _view(policy, tree, (nodes - 1,), tree.num_tokens, rng)


def transitions_ms(nodes: int = 4096, tokens: int = 500_000) -> dict[str, float]:
    """ArborKV's Transition: after an earlier one has trimmed the blocks, and all at once."""
    worst = build("arborkv", {"lambda_distance": "1.0", "r_min": "0.3"})
    view = tree_view(worst, nodes, tokens)
    slow = milliseconds(worst, view, Transition(view.leaves))
    usual = build("arborkv")
    plan = usual.decide(view, Transition(view.leaves))
    assert plan is not None
    moved = replace(view, tier=plan.tiers, leaves=(nodes - 100,))
    fast = milliseconds(usual, moved, Transition(moved.leaves))
    return {"usual_ms": round(fast, 2), "every_block_shrinks_ms": round(slow, 2)}


def _view(
    policy: Policy, tree: ThoughtTree, leaves: tuple[int, ...], budget: int,
    rng: np.random.Generator,
) -> CacheView:  # fmt: skip
    groups, tokens = GROUPS[policy.grouping], tree.num_tokens
    return CacheView(
        tier=np.zeros((groups, tokens), dtype=np.int8),
        scores=random_scores(policy, tokens, rng),
        tree=tree,
        leaves=leaves,
        prompt_tokens=tree.num_node_tokens(0),
        budget_tokens=budget,
        iterations=TOKENS - TOKENS % 128,
        vocabulary=128_256,
        shape=SHAPE,
    )


def milliseconds(policy: Policy, view: CacheView, event: Event) -> float:
    """Median time of one decision."""
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < 2000:
        start = time.perf_counter()
        policy.decide(view, event)
        taken.append(1e3 * (time.perf_counter() - start))
    return sorted(taken)[len(taken) // 2]


def decides(policy: Policy, view: CacheView, event: Event) -> bool:
    """Whether there is anything to decide; tree policies pin a chain's one block whole."""
    try:
        return policy.decide(view, event) is not None
    except BudgetInfeasible:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("policies", nargs="*", help="names; all by default")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    run = TokenRun((1,), 1, np.zeros(1, dtype=np.int32), Observations(1))
    rows = {}
    for name in options.policies or available():
        policy = build(name)
        view = chain_view(policy)
        event: Event = Decode(run)
        if not decides(policy, view, event):
            event = Prefill(run)
        decided = decides(policy, view, event)
        rows[name] = {
            "fused": policy.fused,
            "groups": GROUPS[policy.grouping],
            "tokens": view.num_tokens,
            "decision_ms": round(milliseconds(policy, view, event), 3) if decided else None,
        }
        print(f"{name:24} {rows[name]}", file=sys.stderr)
    figures = {"tokens": TOKENS, "policies": rows}
    if not options.policies or "arborkv" in options.policies:
        figures["arborkv_transition"] = {"nodes": 4096, "tokens": 500_000, **transitions_ms()}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
