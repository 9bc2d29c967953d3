"""ETS's choice of leaves against all subsets, against SciPy, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage

from arborsim.core.errors import UsageError
from arborsim.searches import ROOT, Expansion, Leaf, make_search
from arborsim.searches.base import best_first
from arborsim.searches.ets import (
    CostTree,
    Program,
    cost_tree,
    keep_best,
    keep_by_tree,
    similar,
)
from arborsim.searches.levels import rebase_weights
from tests.search.bank import Bank, drive
from tests.search.ets_program import keep_by_program, objective
from tests.search.literal import printed

ROOT_LEAF = Leaf(ROOT, -1, 0, math.nan)


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> tuple[list[Leaf], list[Leaf], list[int], list[int]]:
    """(frontier, leaves best first, weights, clusters) of a random tree, up to `most` leaves."""
    frontier = [ROOT_LEAF]
    for node in range(1, draw(st.integers(2, 2 * most))):
        above = frontier[draw(st.integers(max(0, node - 8), node - 1))]
        score = draw(st.integers(0, 20)) / 20
        tokens = above.tokens + draw(st.integers(1, 9))
        frontier.append(Leaf(node, above.node, above.depth + 1, score, tokens=tokens))
    inner = {leaf.parent for leaf in frontier}
    leaves = best_first(leaf for leaf in frontier if leaf.node not in inner)[:most]
    weights = rebase_weights(leaves, draw(st.integers(1, 40)), 0.2)
    clusters = [draw(st.integers(0, 4)) for _ in leaves]
    return frontier, leaves, weights, clusters


lambdas = st.sampled_from([0.0, 0.3, 1.0, 1.45, 2.0, 6.0])


def worth(
    frontier: list[Leaf], leaves: list[Leaf], weights: list[int], kept: tuple[int, ...],
    lambda_b: float, lambda_d: float, clusters: list[int], by_token: bool,
) -> float:  # fmt: skip
    """Equation 4 with sets, as it is printed."""
    known = {leaf.node: leaf for leaf in frontier}

    def nodes(numbers: tuple[int, ...]) -> set[int]:
        found: set[int] = set()
        for number in numbers:
            node = leaves[number].node
            while node != -1:
                found.add(node)
                node = known[node].parent
        return found

    def size(numbers: tuple[int, ...]) -> int:
        if not by_token:
            return len(nodes(numbers))
        own = [known[n].tokens - known[known[n].parent].tokens for n in nodes(numbers) - {ROOT}]
        return sum(own)

    every = tuple(range(len(leaves)))
    return (
        sum(weights[i] for i in kept) / sum(weights)
        - lambda_b * size(kept) / size(every)
        + lambda_d * len({clusters[i] for i in kept}) / len(set(clusters))
    )


both = pytest.mark.parametrize("keep", [keep_by_program, keep_best])


@both
@settings(max_examples=40, deadline=None)
@given(trees(most=9), lambdas, lambdas, st.booleans())
def test_the_best_of_all_subsets_is_found(
    keep: Callable[..., list[int]], drawn: tuple, lambda_b: float, lambda_d: float, by_token: bool
) -> None:
    frontier, leaves, weights, clusters = drawn
    tree = cost_tree(frontier, leaves, weights, "token" if by_token else "node")
    kept = keep(tree, lambda_b, lambda_d, np.array(clusters))
    assert kept
    terms = (frontier, leaves, weights)
    rest = (lambda_b, lambda_d, clusters, by_token)
    best = max(
        worth(*terms, subset, *rest)
        for size in range(1, len(leaves) + 1)
        for subset in itertools.combinations(range(len(leaves)), size)
    )
    assert worth(*terms, tuple(kept), *rest) == pytest.approx(best, abs=1e-9)


def every_subset(tree: CostTree, lambda_b: float, lambda_d: float, clusters: np.ndarray) -> float:
    """The best objective of all 2^n - 1 sets of leaves, all at once, by bits."""
    count = len(tree.leaf)
    sets = (np.arange(1, 2**count)[:, None] >> np.arange(count)) & 1
    total = np.zeros(len(sets))
    below = np.zeros((len(tree.parent), count), dtype=int)
    for number, node in enumerate(tree.leaf):
        while node >= 0:
            below[node, number] = 1
            node = tree.parent[node]
    for node, mine in enumerate(below):
        total += (sets @ mine > 0) * (tree.weight[node] - lambda_b * tree.cost[node])
    labels = np.unique(clusters)
    for label in labels:
        total += lambda_d / len(labels) * (sets @ (clusters == label) > 0)
    return float(total.max())


@both
@settings(max_examples=60, deadline=None)
@given(trees(), lambdas, lambdas, st.sampled_from(["node", "token"]))
def test_up_to_fourteen_leaves(
    keep: Callable[..., list[int]], drawn: tuple, lambda_b: float, lambda_d: float, cost: str
) -> None:
    frontier, leaves, weights, clusters = drawn
    tree = cost_tree(frontier, leaves, weights, cost)
    of_leaf = np.array(clusters)
    kept = keep(tree, lambda_b, lambda_d, of_leaf)
    best = every_subset(tree, lambda_b, lambda_d, of_leaf)
    assert objective(tree, kept, lambda_b, lambda_d, of_leaf) == pytest.approx(best, abs=1e-9)


@st.composite
def large_trees(draw: st.DrawFn) -> tuple[CostTree, np.ndarray]:
    """Up to some 100 leaves in up to 30 clusters, which reach across branches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    near = draw(st.integers(1, 40))
    parent = [-1] + [int(rng.integers(max(0, i - near), i)) for i in range(1, 150)]
    leaf = np.array(sorted(set(range(150)) - set(parent)))
    weight = np.zeros(150)
    weight[leaf] = rng.integers(0, draw(st.integers(1, 12)) + 1, len(leaf)) + 1e-3
    cost = rng.integers(1, draw(st.integers(1, 9)) + 1, 150).astype(float)
    tree = CostTree(np.array(parent), leaf, weight / weight.sum(), cost / cost.sum())
    return tree, rng.integers(0, draw(st.integers(1, 30)), len(leaf))


@settings(max_examples=40, deadline=None)
@given(large_trees(), lambdas, st.sampled_from([0.3, 1.0, 1.45, 6.0]))
def test_reducing_keeps_the_optimum(
    drawn: tuple[CostTree, np.ndarray], lambda_b: float, lambda_d: float
) -> None:
    tree, clusters = drawn
    by_program = keep_by_program(tree, lambda_b, lambda_d, clusters)
    reduced = keep_best(tree, lambda_b, lambda_d, clusters)
    terms = (lambda_b, lambda_d, clusters)
    assert reduced == sorted(set(reduced))
    assert reduced
    expected = objective(tree, by_program, *terms)
    assert objective(tree, reduced, *terms) == pytest.approx(expected, abs=1e-9)


def test_what_is_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    solve = Program.solve

    def watched(program: Program) -> np.ndarray:
        found = solve(program)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(Program, "solve", watched)
    # Two branches of two leaves; each leaf weighs less than 6/7, what it costs.
    weight = np.array([0, 0, 0, 3, 3, 1, 1]) / 8
    parent, leaf = np.array([-1, 0, 0, 1, 1, 2, 2]), np.array([3, 4, 5, 6])
    tree = CostTree(parent, leaf, weight, np.full(7, 1 / 7))
    # A cluster per branch: within one, the heavier leaf covers it, and nothing is left to choose.
    assert keep_best(tree, 6.0, 6.0, np.array([1, 1, 2, 2])) == [0, 2]
    assert sizes == []
    # Clusters across branches: which branch goes is known only for both clusters together.
    assert keep_best(tree, 6.0, 6.0, np.array([1, 2, 1, 2])) == [0, 1]
    assert sizes == [9]


def test_an_inner_node_does_not_stand_in_for_a_leaf() -> None:
    """Leaf 1 costs more than inner node 2, but less than 2 with any of its leaves."""
    cost = np.array([1, 5, 1, 10, 10]) / 27
    weight = np.array([0, 0.2, 0, 0.4, 0.4])
    tree = CostTree(np.array([-1, 0, 0, 2, 2]), np.array([1, 3, 4]), weight, cost)
    assert keep_best(tree, 6.0, 0.0, np.array([1, 2, 3])) == [0]
    assert keep_by_program(tree, 6.0, 0.0, np.array([1, 2, 3])) == [0]


@settings(max_examples=60, deadline=None)
@given(trees(), lambdas, st.sampled_from(["node", "token"]))
def test_tree_pass_equals_the_program(drawn: tuple, lambda_b: float, cost: str) -> None:
    frontier, leaves, weights, _ = drawn
    tree = cost_tree(frontier, leaves, weights, cost)
    one = np.zeros(len(leaves), dtype=int)  # one cluster, worth nothing
    by_program = keep_by_program(tree, lambda_b, 0.0, one)
    by_tree = keep_by_tree(tree, lambda_b)
    found = objective(tree, by_tree, lambda_b)
    assert found == pytest.approx(objective(tree, by_program, lambda_b), abs=1e-9)
    assert found == pytest.approx(every_subset(tree, lambda_b, 0.0, one), abs=1e-9)


def two_families() -> tuple[list[Leaf], list[Leaf]]:
    """The root's children 1 and 2; leaves 3, 4, 5 below 1 and leaf 6 below 2."""
    frontier = [ROOT_LEAF, Leaf(1, 0, 1, 0.5, tokens=4), Leaf(2, 0, 1, 0.5, tokens=10)]
    for node, parent, score in ((3, 1, 0.9), (4, 1, 0.8), (5, 1, 0.7), (6, 2, 0.6)):
        frontier.append(Leaf(node, parent, 2, score, tokens=frontier[parent].tokens + 2))
    return frontier, frontier[3:]


def test_keeping_by_hand() -> None:
    frontier, leaves = two_families()
    tree = cost_tree(frontier, leaves, [4, 3, 2, 1], "node")  # seven nodes
    # Leaf 6 weighs 1/10 and costs two nodes of its own; leaf 5 weighs 2/10 and costs one.
    assert keep_by_tree(tree, 0.0) == [0, 1, 2, 3]
    assert keep_by_tree(tree, 0.3) == [0, 1, 2, 3]
    assert keep_by_tree(tree, 0.4) == [0, 1, 2]
    assert keep_by_tree(tree, 1.5) == [0, 1]
    assert keep_by_tree(tree, 9.0) == [0]  # one at least
    # 4 + 10 + 4 * 2 = 22 tokens, of which leaf 6 costs 12 and leaf 5 two.
    tree = cost_tree(frontier, leaves, [4, 3, 2, 1], "token")
    assert tree.cost * 22 == pytest.approx([0, 4, 10, 2, 2, 2, 2])
    assert keep_by_tree(tree, 0.18) == [0, 1, 2, 3]
    assert keep_by_tree(tree, 0.19) == [0, 1, 2]


@both
def test_coverage_counts_a_cluster_once_any_member_stays(keep: Callable[..., list[int]]) -> None:
    """The printed constraint (z <= x of every member) would give nothing for one member."""
    frontier, leaves = two_families()
    tree = cost_tree(frontier, leaves, [4, 3, 2, 1], "node")
    apart = np.array([1, 1, 1, 2])
    assert keep(tree, 2.0, 0.0, apart) == [0, 1]
    assert keep(tree, 2.0, 1.0, apart) == [0, 1, 3]
    # so strict that one of each cluster is all that is left: covering both is worth 1
    assert keep(tree, 2.9, 2.0, apart) == [0, 3]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30))
def test_clusters_are_scipys(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(6, 12))[rng.integers(0, 6, count)] + 0.15 * rng.normal(size=(count, 12))
    expected = fcluster(linkage(rows, method="average", metric="cosine"), 0.05, "distance")
    np.testing.assert_array_equal(similar(rows, 0.05), expected)


def test_clusters_by_hand() -> None:
    # 1 - cos: 0 between the first two (length does not count), 0.0198 to the third, 1 to the last
    rows = np.array([[1.0, 0.0], [3.0, 0.0], [1.0, 0.2], [0.0, 1.0]])
    a, b, c, d = similar(rows, 0.05)
    assert a == b == c != d
    a, b, c, _ = similar(rows, 0.01)
    assert a == b != c
    zero = similar(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), 0.05)
    assert len(set(zero.tolist())) == 3
    # repeats are one cluster even where nothing else may be
    thirds = np.random.default_rng(0).normal(size=(5, 33))
    again = similar(np.concatenate([thirds, thirds, 7 * thirds]), 0.0).reshape(3, 5)
    assert (again == again[0]).all()
    assert len(set(again[0].tolist())) == 5


def test_ets_prunes_then_shares_all_of_the_width() -> None:
    frontier, leaves = two_families()
    frontier = [
        Leaf(x.node, x.parent, x.depth, x.score, visits=(3, 3, 1, 0, 0, 0, 0)[i], tokens=x.tokens,
             embedding=np.eye(2)[int(x.node == 6)])
        for i, x in enumerate(frontier)
    ]  # fmt: skip
    # with e^(-1/2) = 0.607: ceil(16 / 2.197) = 8, ceil(8 / 1.974) = 5, ceil(3 / 1.607) = 2, 1
    assert rebase_weights(leaves, 16, 0.2) == [8, 5, 2, 1]
    # leaf 5 weighs 2/16 and costs 1/7: it goes; leaf 6 weighs 1/16 and costs 2/7
    kept = make_search("ets-kv", lambda_b=1.0).expand(frontier, 16)
    assert kept.children == {3: 10, 4: 6}  # ceil(16 / 1.607) = 10
    assert kept.dropped == (5, 6, 2)
    # its cluster is worth 1/2: leaf 6 stays; ceil(16 / 1.830) = 9, ceil(7 / 1.368) = 6, 1
    wide = make_search("ets", lambda_b=1.0, lambda_d=1.0).expand(frontier, 16)
    assert wide.children == {3: 9, 4: 6, 6: 1}
    assert wide.dropped == (5,)


@pytest.mark.parametrize("name", ["ets", "ets-kv"])
@pytest.mark.parametrize("seed", range(5))
def test_ets_is_rebase_where_nothing_costs(name: str, seed: int) -> None:
    bank = Bank(seed, depth=4)
    free = drive(make_search(name, lambda_b=0), bank)
    rebase = drive(make_search("rebase"), bank)
    assert [free.path[n] for n in free.order] == [rebase.path[n] for n in rebase.order]


@pytest.mark.parametrize("name", ["ets", "ets-kv"])
@pytest.mark.parametrize("seed", range(6))
def test_every_level_keeps_a_best_set_and_shares_the_width(name: str, seed: int) -> None:
    search = make_search(name, width=9, lambda_b=1.5)
    expand, keep = search.expand, search.keep
    levels, choices = [], []

    def watched_expand(frontier: list[Leaf], width: int) -> Expansion:
        levels.append((frontier, expand(frontier, width)))
        return levels[-1][1]

    def watched_keep(tree: CostTree, leaves: list[Leaf]) -> list[int]:
        choices.append((leaves, keep(tree, leaves)))
        return choices[-1][1]

    search.expand, search.keep = watched_expand, watched_keep
    drive(search, Bank(seed, depth=4))
    for (frontier, found), (leaves, kept) in zip(levels, choices, strict=False):
        left = 9 - sum(leaf.finished for leaf in frontier)
        weights = printed([leaf.score for leaf in leaves], left) if len(leaves) > 1 else [left]
        clusters = [0] * len(leaves)
        if len(leaves) > 1 and name == "ets":
            rows = np.array([leaf.embedding for leaf in leaves])
            clusters = fcluster(linkage(rows, "average", "cosine"), 0.05, "distance").tolist()
        terms = (1.5, 1.0 if name == "ets" else 0.0, clusters, False)
        best = max(
            worth(frontier, leaves, weights, subset, *terms)
            for size in range(1, len(leaves) + 1)
            for subset in itertools.combinations(range(len(leaves)), size)
        )
        mine = worth(frontier, leaves, weights, tuple(kept), *terms)
        assert mine == pytest.approx(best, abs=1e-9)
        survivors = [leaves[i] for i in kept]
        shares = printed([x.score for x in survivors], left) if len(kept) > 1 else [left]
        expected = {x.node: n for x, n in zip(survivors, shares, strict=True) if n}
        assert found.children == expected
        gone = {x.node for x in leaves} - set(expected)
        assert gone <= set(found.dropped)
    assert len(choices) >= 2
    assert any(len(kept) < len(leaves) for leaves, kept in choices)


def test_ets_without_embeddings_says_what_to_do() -> None:
    frontier, _ = two_families()
    frontier[0] = Leaf(ROOT, -1, 0, math.nan, visits=2)
    with pytest.raises(UsageError, match=r"thought \d has no embedding.*ets-kv"):
        make_search("ets").expand(frontier, 16)
    assert make_search("ets", lambda_d=0).expand(frontier, 16).children
    assert not make_search("ets", lambda_d=0).uses_embeddings
    assert make_search("ets").uses_embeddings
