"""What one step of ETS costs at width 256, and what PuLP with CBC takes for the same problems.

Run on one core: ``python benchmarks/ets.py [--out reports/benchmarks/ets.json]``.  It needs PuLP,
which nothing else here does: ``pip install pulp``.

Problems are the levels of searches that REBASE and ETS grow at width 256, with rewards that follow
their parent's, as a process reward model's do, and embeddings like mean hidden states: one common
direction, what the path is about, the step's idea (some come up again and again, in all branches)
and its wording.  A step weighs the leaves, clusters their embeddings and solves the program.  For
PuLP, which ETS uses, the program is written as the paper prints it, one row per inner node and leaf
below it, with the coverage of clusters in its intended form.  All solutions have to be worth the
same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import scipy

from arborsim.searches import ROOT, Leaf, make_search
from arborsim.searches.base import best_first
from arborsim.searches.ets import CostTree, cost_tree, keep_best, similar
from arborsim.searches.levels import rebase_weights
from tests.search.ets_program import keep_by_program, objective

WIDTH = 256
DEPTH = 10
CUT = 0.05
#: (lambda_b, lambda_d): the ends and the middle of the paper's sweep, and the public code at 256.
LAMBDAS = ((1.0, 1.0), (1.5, 1.0), (2.0, 1.0), (1.0, 1.45))
#: Length of an embedding: the BERT of the paper, and the hidden state of an 8B model.
SIZES = (768, 4096)


@dataclass
class Problem:
    """One level of a search."""

    frontier: list[Leaf]
    leaves: list[Leaf]
    tree: CostTree
    embeddings: np.ndarray
    lambda_b: float
    lambda_d: float


@dataclass
class Thoughts:
    """Thoughts that a model might have: their rewards, lengths and embeddings."""

    rng: np.random.Generator
    size: int

    def __post_init__(self) -> None:
        self.common = self.rng.normal(size=self.size)

    def ideas(self) -> np.ndarray:
        """What steps of one depth may be about, as ``[ideas, size]``."""
        return self.rng.normal(size=(150, self.size))

    def below(self, parent: Leaf, node: int, ideas: np.ndarray) -> Leaf:
        rng = self.rng
        about = 0.0 if parent.embedding is None else 0.2 * parent.embedding.astype(np.float64)
        common = rng.random() < 0.8  # an idea that comes up again and again, or a new one
        idea = ideas[min(rng.geometric(0.03), len(ideas)) - 1] if common else 0.0
        new = 0.0 if common else rng.normal(size=self.size)
        wording = 0.15 * rng.normal(size=self.size)
        embedding = 1.5 * self.common + about + 0.6 * (idea + new) + wording
        before = 0.6 if parent.node == ROOT else parent.score
        return Leaf(
            node, parent.node, parent.depth + 1,
            score=float(np.clip(before + 0.15 * rng.normal(), 0.0, 1.0)),
            finished=parent.depth >= 4 and rng.random() < 0.15,
            tokens=parent.tokens + int(rng.integers(20, 120)),
            embedding=embedding.astype(np.float16),
        )  # fmt: skip


def levels(name: str, thoughts: Thoughts, **options: float) -> Iterator[list[Leaf]]:
    """What a search of that name is shown, level by level from the second on."""
    search = make_search(name, width=WIDTH, depth=DEPTH, **options)
    nodes = [Leaf(ROOT, -1, 0, math.nan)]
    alive = [ROOT]
    while True:
        frontier = [nodes[n] for n in alive]
        wish = search.expand(frontier, WIDTH)
        if frontier[-1].depth >= 2 and not wish.done:
            yield frontier
        if wish.done:
            return
        given_up = set(wish.dropped)
        alive = [n for n in alive if n not in given_up]
        ideas = thoughts.ideas()
        for parent, count in wish.children.items():
            nodes[parent] = replace(nodes[parent], visits=count)
            for _ in range(count):
                alive.append(len(nodes))
                nodes.append(thoughts.below(nodes[parent], len(nodes), ideas))


def problems(seeds: int) -> Iterator[Problem]:
    for seed in range(seeds):
        lambda_b, lambda_d = LAMBDAS[seed % len(LAMBDAS)]
        size = SIZES[seed // len(LAMBDAS) % len(SIZES)]
        for name in ("rebase", "ets"):
            options = {"lambda_b": lambda_b, "lambda_d": lambda_d} if name == "ets" else {}
            thoughts = Thoughts(np.random.default_rng(seed), size)
            for frontier in levels(name, thoughts, **options):
                leaves = best_first(x for x in frontier if x.visits == 0 and x.expandable)
                left = WIDTH - sum(leaf.finished for leaf in frontier)
                weights = rebase_weights(leaves, left, 0.2)
                tree = cost_tree(frontier, leaves, weights, "node")
                embeddings = np.array([x.embedding for x in leaves], dtype=np.float64)
                yield Problem(frontier, leaves, tree, embeddings, lambda_b, lambda_d)


def keep_by_pulp(
    tree: CostTree, lambda_b: float, lambda_d: float, of_leaf: np.ndarray
) -> list[int]:
    """The program of appendix B.2 row by row, solved by CBC."""
    import pulp

    labels = np.unique(of_leaf).tolist()
    leaves = tree.leaf.tolist()
    keep = [pulp.LpVariable(f"keep{i}", cat="Binary") for i in range(len(tree.parent))]
    cover = {k: pulp.LpVariable(f"cover{k}", cat="Binary") for k in labels}
    below: dict[int, list[int]] = {}
    for leaf in leaves:
        node = int(tree.parent[leaf])
        while node >= 0:
            below.setdefault(node, []).append(leaf)
            node = int(tree.parent[node])
    program = pulp.LpProblem("ets", pulp.LpMaximize)
    gain = (tree.weight - lambda_b * tree.cost).tolist()
    program += pulp.lpSum(g * x for g, x in zip(gain, keep, strict=True)) + pulp.lpSum(
        lambda_d / len(labels) * z for z in cover.values()
    )
    for node, under in below.items():
        for leaf in under:
            program += keep[node] >= keep[leaf]
        program += keep[node] <= pulp.lpSum(keep[leaf] for leaf in under)
    for k, z in cover.items():
        members = [keep[leaf] for leaf, c in zip(leaves, of_leaf, strict=True) if c == k]
        program += z <= pulp.lpSum(members)
    program += pulp.lpSum(keep[leaf] for leaf in leaves) >= 1
    program.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=0, gapAbs=0, threads=1))
    return [number for number, leaf in enumerate(leaves) if keep[leaf].value() > 0.5]


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median milliseconds, and the result."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        taken.append(1e3 * (time.perf_counter() - start))
    return median(taken), result


def measure(problem: Problem) -> dict[str, Any]:
    """One problem by all ways.

    Raises
    ------
    RuntimeError
        They do not agree on what the best set is worth.
    """
    lambdas = (problem.lambda_b, problem.lambda_d)
    search = make_search("ets", width=WIDTH, lambda_b=lambdas[0], lambda_d=lambdas[1])
    step_ms, _ = timed(lambda: search.expand(problem.frontier, WIDTH), 3)
    cluster_ms, clusters = timed(lambda: similar(problem.embeddings, CUT), 3)
    ways: dict[str, tuple[Callable[..., list[int]], int]] = {
        "reduced": (keep_best, 3), "highs": (keep_by_program, 1), "pulp": (keep_by_pulp, 1)
    }  # fmt: skip
    row: dict[str, Any] = {"step_ms": step_ms, "cluster_ms": cluster_ms}
    worth = {}
    for name, (way, repeats) in ways.items():
        row[f"{name}_ms"], kept = timed(lambda w=way: w(problem.tree, *lambdas, clusters), repeats)
        worth[name] = objective(problem.tree, kept, *lambdas, clusters)
    if max(worth.values()) - min(worth.values()) > 1e-9:
        raise RuntimeError(f"the ways to solve one problem disagree: {worth}")
    row |= {
        "leaves": len(problem.leaves), "nodes": len(problem.tree.parent),
        "clusters": len(np.unique(clusters)), "size": problem.embeddings.shape[1],
        "depth": problem.frontier[-1].depth,
    }  # fmt: skip
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(key: str) -> float:
        return round(median(row[key] for row in rows), 2)

    keys = ("step_ms", "cluster_ms", "reduced_ms", "highs_ms", "pulp_ms")
    worst = {key: round(quantiles((row[key] for row in rows), n=20)[-1], 2) for key in keys}
    # With PuLP a step clusters as here, and solves its way.
    steps = [row["step_ms"] - row["reduced_ms"] + row["pulp_ms"] for row in rows]
    by_size = {
        str(size): round(median(row["step_ms"] for row in rows if row["size"] == size), 2)
        for size in sorted({row["size"] for row in rows})
    }
    return {
        "problems": len(rows),
        **{key: middle(key) for key in ("leaves", "nodes", "clusters")},
        "median": {key: middle(key) for key in keys},
        "percentile_95": worst,
        "step_ms_by_size": by_size,
        "pulp_step_ms": round(median(steps), 2),
        "solve_ratio": round(median(row["pulp_ms"] / row["reduced_ms"] for row in rows), 1),
        "step_ratio": round(
            median(s / row["step_ms"] for s, row in zip(steps, rows, strict=True)), 1
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--searches", type=int, default=8, help="pairs of searches to grow")
    options = parser.parse_args()
    try:
        import pulp
    except ImportError:
        sys.exit("benchmarks/ets.py compares with PuLP, which is not installed: pip install pulp")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = []
    for problem in problems(options.searches):
        if not rows:
            measure(problem)  # imports
        rows.append(measure(problem))
        print(len(rows), {k: round(v, 1) for k, v in rows[-1].items()}, file=sys.stderr)
    figures = {
        "python": platform.python_version(),
        "versions": {"numpy": np.__version__, "scipy": scipy.__version__, "pulp": pulp.__version__},
        "width": WIDTH,
        **summary(rows),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
