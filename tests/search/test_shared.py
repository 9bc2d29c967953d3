"""Trees that are grown for searches hand out to each search what it asks for, without a miss."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.searches import ROOT, Leaf, Search, make_search, search_names
from arborsim.searches.bank import Bank
from arborsim.searches.growing import Dense, SharedTree
from arborsim.searches.walk import walk
from arborsim.trace.schema import End


class Grown:
    """A driver whose thoughts are drawn as they are opened, and the tree that it has grown."""

    def __init__(self, search: Search, seed: int, depth: int = 4) -> None:
        self.rng, self.depth = random.Random(seed), depth
        self.leaf: list[Leaf] = [Leaf(ROOT, -1, 0, math.nan, twin=ROOT)]
        self.said: dict[tuple[int, str], int] = {}
        self.dropped: list[int] = []
        self.most_running = 0
        self._grow(search)

    def _grow(self, search: Search) -> None:
        frontier = {ROOT: self.leaf[ROOT]}
        running: dict[int, int] = {}  # node -> iteration of its last token
        now = 0
        while True:
            wish = search.expand(list(frontier.values()), search.slots - len(running))
            for node in wish.dropped:
                del frontier[node]
            self.dropped += wish.dropped
            if wish.done:
                break
            for node, count in wish.children.items():
                assert frontier[node].expandable
                for _ in range(count):
                    new = self._thought(node)
                    running[new.node] = now + new.tokens - self.leaf[node].tokens
                up = frontier[node]
                frontier[node] = replace(up, visits=up.visits + count)
            assert len(running) <= search.slots
            self.most_running = max(self.most_running, len(running))
            now = min(running.values())
            for node in [n for n, end in running.items() if end == now]:
                del running[node]
                frontier[node] = self.leaf[node]
        assert not running, "a tree is over when all of its thoughts are"
        self.answer = search.answers(list(frontier.values()))

    def _thought(self, parent: int) -> Leaf:
        up, rng = self.leaf[parent], self.rng
        finished = up.depth + 1 >= self.depth or rng.random() < 0.1
        dead = not finished and rng.random() < 0.1
        node = len(self.leaf)
        said = rng.choice("abcdefgh")  # what is said decides nothing but who repeats whom
        tokens, score = rng.randint(1, 4), round(rng.random(), 2)
        twin = self.said.setdefault((parent, said), node)
        leaf = Leaf(
            node, parent, up.depth + 1, score, finished, dead, 0, up.tokens + tokens,
            np.array([rng.random() for _ in range(4)]),
            rng.choice("xyz") if finished else None, said, rng.random(), -rng.random(), twin,
        )  # fmt: skip
        self.leaf.append(leaf)
        return leaf

    def bank(self) -> Bank:
        leaves: Any = self.leaf
        tokens = [leaf.tokens - (0 if leaf.node == ROOT else leaves[leaf.parent].tokens)
                  for leaf in leaves]  # fmt: skip
        ends = {(True, False): End.FINISHED, (False, True): End.DEAD, (False, False): End.NONE}
        children: list[list[int]] = [[] for _ in leaves]
        for leaf in leaves[1:]:
            children[leaf.parent].append(leaf.node)
        return Bank(
            episode=None,  # type: ignore[arg-type]
            parent=[leaf.parent for leaf in leaves],
            depth=[leaf.depth for leaf in leaves],
            tokens=[7, *tokens[1:]],
            complete=[True] * len(leaves),
            score=[leaf.score for leaf in leaves],
            end=[ends[leaf.finished, leaf.dead] for leaf in leaves],
            answer=[leaf.answer for leaf in leaves],
            verdict=[leaf.answer == "x" if leaf.finished else None for leaf in leaves],
            twin=[leaf.twin for leaf in leaves],
            children=[tuple(below) for below in children],
            judged=True,
            embedding={leaf.node: leaf.embedding for leaf in leaves[1:]},
            text=[leaf.text for leaf in leaves],
            entropy=[leaf.entropy for leaf in leaves],
            logprob=[leaf.logprob for leaf in leaves],
        )


def widths(name: str) -> dict[str, int]:
    if name in ("best-of-n", "self-consistency", "weighted-vote"):
        return {"n": 6}
    return {"width": 6} if name.startswith(("beam", "dvts", "rebase", "ets")) else {}


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.sampled_from([1, 5, 64]), dedupe=st.booleans())
def test_every_search_finds_all_that_it_asks_for(seed: int, slots: int, dedupe: bool) -> None:
    names = search_names()
    searches = [make_search(name, **widths(name)) for name in names]
    shared = SharedTree(searches, slots, dedupe)
    grown = Grown(shared, seed)
    assert grown.most_running <= slots
    bank = grown.bank()
    used = {0}
    for name in names:
        alone = walk(make_search(name, **widths(name)), bank, dedupe)
        assert alone.bank_misses == 0
        used |= set(alone.bank_node)
    assert used == set(range(len(grown.leaf))), "a thought was drawn that no search asked for"


def test_what_one_search_asked_for_is_not_drawn_again_for_another() -> None:
    one = Grown(SharedTree([make_search("rebase", width=8)]), 3)
    two = Grown(SharedTree([make_search("rebase", width=8) for _ in range(2)]), 3)
    assert len(one.leaf) == len(two.leaf)
    wide = Grown(SharedTree([make_search("best-of-n", n=n) for n in (4, 8, 16)]), 3)
    assert sum(leaf.parent == ROOT for leaf in wide.leaf) == 16


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    def draw() -> list[Leaf]:
        searches = [make_search(name, **widths(name)) for name in ("ets", "dpts", "mcts")]
        return Grown(SharedTree(searches, 7), 11).leaf

    assert draw() == draw()


def test_a_tree_for_searches_says_what_it_needs() -> None:
    assert SharedTree([make_search("ets")]).uses_embeddings
    assert not SharedTree([make_search("rebase")]).uses_embeddings
    with pytest.raises(UsageError, match="run at once"):
        SharedTree([make_search("rebase")], slots=0)


@pytest.mark.parametrize("slots", [1, 3, 50])
@pytest.mark.parametrize("seed", range(3))
def test_a_dense_tree_has_all_children(slots: int, seed: int) -> None:
    grown = Grown(Dense((5, 3, 2), slots=slots), seed, depth=4)
    below = Counter(leaf.parent for leaf in grown.leaf[1:])
    for leaf in grown.leaf:
        expected = {0: 5, 1: 3, 2: 2}.get(leaf.depth, 0) if leaf.expandable else 0
        assert below[leaf.node] == expected
    assert sorted(grown.dropped) == list(range(1, len(grown.leaf)))
    at = {node: i for i, node in enumerate(grown.dropped)}
    for leaf in grown.leaf[1:]:  # nothing is given up before what is below it
        assert leaf.parent == ROOT or at[leaf.node] < at[leaf.parent]
    assert set(grown.answer) == {leaf.node for leaf in grown.leaf if leaf.finished}
    scores = [grown.leaf[node].score for node in grown.answer]
    assert scores == sorted(scores, reverse=True)


def test_a_dense_tree_goes_on_with_its_last_number() -> None:
    grown = Grown(Dense((4, 2), depth=3), 1, depth=9)
    below = Counter(leaf.parent for leaf in grown.leaf[1:])
    assert {below[x.node] for x in grown.leaf if x.depth == 2 and x.expandable} == {2}
    assert max(leaf.depth for leaf in grown.leaf) == 3


@pytest.mark.parametrize("one_at_once", [True, False])
def test_a_dense_tree_holds_few_paths(one_at_once: bool) -> None:
    """Deepest first: of 4^5 leaves, one child per level and its siblings are alive."""
    most = 0

    class Watched(Dense):
        def expand(self, frontier: Any, width: int) -> Any:
            nonlocal most
            wish = super().expand(frontier, width)
            most = max(most, len(frontier) - len(wish.dropped))
            return wish

    Grown(Watched((4,) * 5, slots=1 if one_at_once else 16), 5, depth=9)
    assert most <= (1 + 5 if one_at_once else 5 * 16)


def test_impossible_trees() -> None:
    too_many = r"100,100,100 children to depth 3 may be 1\.01e\+06 thoughts"
    with pytest.raises(UsageError, match=too_many):
        Dense((100, 100, 100))
    assert Dense((8,), depth=3).largest == 8 + 64 + 512
    for wrong in ({"children": ()}, {"children": (0,)}, {"slots": 0}, {"depth": -1}):
        with pytest.raises(UsageError, match="1 or more"):
            Dense(**wrong)
