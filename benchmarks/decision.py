"""How long one decision of ArborKV takes: ``python benchmarks/decision.py``.

A synthetic tree of 4,096 blocks and 500,000 tokens; one `Transition`, on one core.  `usual` is a
search that has trimmed its blocks before and moves to another leaf; `worst` shrinks every block
at once.
"""

from __future__ import annotations

import os
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np

from arborsim.events import Transition
from arborsim.policies.arborkv import ArborKV
from arborsim.policies.base import CacheView, Policy
from arborsim.tree import ThoughtTree


def synthetic_view(nodes: int, tokens: int, seed: int = 0) -> CacheView:
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
    held = tree.num_tokens
    return CacheView(
        np.zeros((1, held), np.int8), {"attention": rng.random(held)}, tree, (nodes - 1,),
        int(tree.sizes[0]), held, tokens, 32_000,
    )  # fmt: skip


def decision_s(policy: Policy, view: CacheView, repeats: int) -> float:
    """Seconds of the fastest of `repeats` transitions."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        policy.decide(view, Transition(view.leaves, ()))
        times.append(time.perf_counter() - start)
    return min(times)


def transition_ms(nodes: int = 4096, tokens: int = 500_000, repeats: int = 15) -> dict[str, float]:
    """Milliseconds of one transition: ``{"usual": ..., "worst": ...}``."""
    view = synthetic_view(nodes, tokens)
    worst = decision_s(ArborKV(lambda_distance=1.0, r_min=0.3), view, repeats)
    plan = ArborKV().decide(view, Transition(view.leaves, ()))
    assert plan is not None
    moved = CacheView(
        plan.tiers, view.scores, view.tree, (nodes - 100,), view.prompt_tokens,
        view.budget_tokens, view.iterations, view.vocabulary,
    )  # fmt: skip
    usual = decision_s(ArborKV(), moved, repeats)
    return {"usual": 1e3 * usual, "worst": 1e3 * worst}


if __name__ == "__main__":
    for name, milliseconds in transition_ms().items():
        print(f"{name}: {milliseconds:.1f} ms")
