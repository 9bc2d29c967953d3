"""What all searches have in common, and single searches by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from arborsim.core.errors import UnknownName, UsageError
from arborsim.searches import ROOT, Leaf, Search, make_search, search_names, search_options
from arborsim.searches.base import best_answer, hopeless
from tests.search.bank import Bank, drive


def test_dfs_backtracks() -> None:
    run = drive(make_search("tot-dfs", threshold=0.2, relative=0.5), Bank(3))
    turns = [run.leaves[n].parent for n in run.order]
    assert any(parent != node for node, parent in zip(run.order, turns[1:], strict=False))


def test_dpts_fills_its_slots() -> None:
    assert drive(make_search("dpts"), Bank(1)).most_running == 4


def test_mcts_by_hand() -> None:
    """Two children of the root, 0.8 and 0.2; the better one's children are worth nothing."""
    search = make_search("mcts", children=2, exploration=1.0)
    root = Leaf(ROOT, -1, 0, math.nan)
    frontier = [root]

    def grow(node: int, score: float) -> int:
        (parent,) = search.expand(frontier, 1).children
        above = next(x for x in frontier if x.node == parent)
        frontier[frontier.index(above)] = replace(above, visits=above.visits + 1)
        frontier.append(Leaf(node, parent, above.depth + 1, score))
        return parent

    assert [grow(1, 0.8), grow(2, 0.2)] == [0, 0]
    # 0.8 + sqrt(ln 2 / 1) = 1.63 against 0.2 + 0.83 = 1.03
    assert grow(3, 0.0) == 1
    # (0.8 + 0) / 2 + sqrt(ln 3 / 2) = 1.14 against 0.2 + sqrt(ln 3 / 1) = 1.25
    assert grow(4, 0.0) == 2
    # 0.4 + sqrt(ln 4 / 2) = 1.23 against (0.2 + 0) / 2 + sqrt(ln 4 / 2) = 0.93
    assert grow(5, 0.0) == 1


def test_mcts_gives_up_what_it_never_comes_back_to() -> None:
    run = drive(make_search("mcts", children=2, steps=200, accept=2.0), Bank(3, depth=5))
    closed = {run.path[n] for n in run.dropped}
    dead = {run.path[n] for n in run.order if run.leaves[n].dead}
    inner = {p[:i] for p in run.path.values() for i in range(1, len(p))}
    assert dead
    # the whole tree was searched: all but the answers are given up, children before parents
    assert closed == dead | inner
    for n in run.dropped:
        if run.leaves[n].parent != ROOT:
            assert run.dropped.index(n) < run.dropped.index(run.leaves[n].parent)


@pytest.mark.parametrize("name", search_names())
@pytest.mark.parametrize("seed", range(10))
def test_a_bank_that_runs_out(name: str, seed: int) -> None:
    """Children that never come do not stall a search."""
    run = drive(make_search(name), Bank(seed, missing=0.4))
    assert set(run.answer) <= set(run.path)


def test_linear_is_one_chain() -> None:
    run = drive(make_search("linear"), Bank(0))
    assert [run.leaves[n].parent for n in run.order] == [0, *run.order[:-1]]
    assert run.answer == (run.order[-1],)


@pytest.mark.parametrize("name", search_names())
def test_contract(name: str) -> None:
    search = make_search(name)
    assert isinstance(search, Search)
    assert search.name == name
    assert search.slots >= 1


def test_unknown_names_are_explained() -> None:
    with pytest.raises(UnknownName, match="did you mean tot-dfs or tot-bfs"):
        make_search("tot-dsf")
    with pytest.raises(UnknownName, match=r"unknown option of dpts 'widht'.*did you mean width"):
        make_search("dpts", widht=3)
    with pytest.raises(UsageError, match="children must be an integer, not 'many'"):
        make_search("tot-bfs", children="many")
    with pytest.raises(UsageError, match="width must be at least 1"):
        make_search("dpts", width=0)
    assert make_search("dpts", width="2").slots == 2
    assert search_options("tot-bfs") == {
        "keep": 5, "children": 8, "levels": 0, "any_of": 1, "score": "last", "answer": "best",
    }  # fmt: skip


def test_helpers() -> None:
    root = Leaf(ROOT, -1, 0, float("nan"))
    frontier = [root, Leaf(1, 0, 1, 0.5), Leaf(2, 0, 1, 0.5), Leaf(3, 1, 2, 0.9)]
    assert hopeless(frontier, [2]) == (3, 1)
    assert hopeless(frontier, [3]) == (2,)
    assert best_answer([root]) == (ROOT,)
    assert best_answer(frontier) == (3,)
    assert best_answer([*frontier, Leaf(4, 0, 1, 0.1, finished=True)]) == (4,)


def test_no_framework_is_imported() -> None:
    code = "import sys, arborsim.searches; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
