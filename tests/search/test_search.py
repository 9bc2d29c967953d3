"""Searches against literal re-implementations, on random banks."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from arborsim.errors import UnknownName, UsageError
from arborsim.search import ROOT, Leaf, Search, make_search, search_names, search_options
from arborsim.search.base import best_answer, hopeless
from tests.search.bank import Bank, drive

SEEDS = range(25)


def literal_bfs(bank: Bank, keep: int, children: int) -> tuple[list, list]:
    """Yao et al., Algorithm 1; returns (all thoughts in order, kept states at the end)."""
    states, thoughts, scores = [()], [], {}
    while any(s == () or not bank.child(s)[1] for s in states):
        candidates = []
        for s in states:
            if s != () and bank.child(s)[1]:
                candidates.append(s)
                continue
            for k in range(children):
                thoughts.append((*s, k))
                candidates.append((*s, k))
        for s in candidates:
            scores[s] = bank.child(s)[0]
        alive = [s for s in candidates if not bank.child(s)[2]]
        states = sorted(alive, key=lambda s: (-scores[s], thoughts.index(s)))[:keep]
        if not states:
            break
    return thoughts, states


@pytest.mark.parametrize("seed", SEEDS)
def test_bfs(seed: int) -> None:
    bank = Bank(seed, depth=3)
    run = drive(make_search("tot-bfs", keep=3, children=4), bank)
    thoughts, states = literal_bfs(bank, 3, 4)
    assert sorted(run.path[n] for n in run.order) == sorted(thoughts)
    best = max(states, key=lambda s: bank.child(s)[0])
    assert bank.child(run.path[run.answer[0]])[0] == bank.child(best)[0]
    given_up = {run.path[n] for n in run.dropped}
    ancestors = {s[:i] for s in states for i in range(len(s) + 1)}
    assert given_up == set(thoughts) - ancestors


def literal_dfs(bank: Bank, threshold: float, relative: float, children: int, steps: int,
                propose: int) -> list:  # fmt: skip
    """Yao et al., Algorithm 2, recursive; thoughts in order, stops at value >= 0.9 at an end."""
    thoughts: list = []

    class Stop(Exception):
        pass

    def visit(state: tuple, value: float) -> None:
        waiting: list = []
        made = 0
        while True:
            if not waiting:
                if made == children:
                    return
                for _ in range(min(propose, children - made)):
                    if len(thoughts) == steps:
                        raise Stop
                    child = (*state, made)
                    made += 1
                    thoughts.append(child)
                    score, finished, dead = bank.child(child)
                    if finished and score >= 0.9:
                        raise Stop
                    bar = max(threshold, relative * value)
                    if score >= bar and not finished and not dead:
                        waiting.append(child)
            if waiting:
                best = max(waiting, key=lambda c: (bank.child(c)[0], -c[-1]))
                waiting.remove(best)
                visit(best, bank.child(best)[0])

    with contextlib.suppress(Stop):
        visit((), 0.0)
    return thoughts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("propose", [1, 3])
def test_dfs(seed: int, propose: int) -> None:
    bank = Bank(seed)
    options = {"threshold": 0.2, "relative": 0.5, "children": 3, "steps": 60, "propose": propose}
    run = drive(make_search("tot-dfs", **options), bank)
    assert [run.path[n] for n in run.order] == literal_dfs(bank, 0.2, 0.5, 3, 60, propose)
    assert run.most_running == 1


def test_dfs_backtracks() -> None:
    run = drive(make_search("tot-dfs", threshold=0.2, relative=0.5), Bank(3))
    turns = [run.leaves[n].parent for n in run.order]
    assert any(parent != node for node, parent in zip(run.order, turns[1:], strict=False))


def literal_dpts(bank: Bank, width: int, steps: int) -> list:
    """The rules of Ding et al., one completed thought at a time."""
    c, most = 1 / math.sqrt(2), 3
    reward: dict = {}
    opened = {(): 0}
    running: list = []  # thoughts in order of opening
    on: list = [None] * width  # the state whose child a slot decodes
    role = ["exploit"] * ((width + 1) // 2) + ["explore"] * (width // 2)
    follow: list = [None] * width
    lost: set = set()
    thoughts: list = []

    def below(s: tuple) -> list:
        return [r for p, r in reward.items() if len(p) > len(s) and p[: len(s)] == s]

    def ucb(s: tuple) -> float:
        seen = below(s)
        mean = sum(seen) / len(seen) if seen else 0.0
        own = reward.get(s, mean)
        return mean + c * math.sqrt(1 + len(below(s[:-1]))) * own / (1 + len(seen))

    while True:
        for slot in sorted(range(width), key=lambda i: follow[i] is None):
            if on[slot] is not None or len(thoughts) >= steps:
                continue
            states = [
                s for s in opened
                if s == () or (s in reward and not bank.child(s)[1] and s not in lost)
            ]  # fmt: skip
            states.sort(key=lambda s: -1 if s == () else thoughts.index(s))
            pick, follow[slot] = follow[slot], None
            if pick is None or pick not in states:
                others = [i for i in range(width) if i != slot and (on[i] is not None or follow[i])]
                exploiting = sum(role[i] == "exploit" for i in others)
                role[slot] = "exploit" if exploiting < (width + 1) // 2 else "explore"
                fresh = [s for s in states if opened[s] == 0]
                room = [s for s in states if opened[s] < (max(most, width) if s == () else most)]
                if role[slot] == "exploit" and fresh:
                    pick = max(fresh, key=lambda s: reward.get(s, -math.inf))
                elif room:
                    pick = max(room, key=ucb)
                else:
                    continue
            thought = (*pick, opened[pick])
            opened[pick] += 1
            opened[thought] = 0
            thoughts.append(thought)
            running.append(thought)
            on[slot] = pick
        if not running:
            return thoughts
        thought = running.pop(0)
        score, finished, dead = bank.child(thought)
        reward[thought] = score
        if finished and score >= 0.9:
            return thoughts
        # Slots on the same state are interchangeable: the first of them takes the result.
        slot = on.index(thought[:-1])
        on[slot] = None
        if dead:
            lost.add(thought)
        if finished or dead:
            continue
        mean = sum(reward.values()) / len(reward)
        warm = len(reward) >= 5
        if role[slot] == "exploit":
            if warm and score < 0.8 * mean:
                lost.add(thought)
            else:
                follow[slot] = thought
        elif warm and score > 0.8 * mean:
            role[slot], follow[slot] = "exploit", thought


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [1, 4])
def test_dpts(seed: int, width: int) -> None:
    bank = Bank(seed)
    run = drive(make_search("dpts", width=width, steps=50), bank)
    assert [run.path[n] for n in run.order] == literal_dpts(bank, width, 50)
    assert run.most_running <= width


def test_dpts_fills_its_slots() -> None:
    assert drive(make_search("dpts"), Bank(1)).most_running == 4


def literal_mcts(bank: Bank, width: int, children: int, steps: int, w: float = 1.0) -> list:
    """UCT from its definition, all statistics counted anew for each choice."""
    thoughts: list = []
    complete: list = []

    def inside(s: tuple, some: list) -> list:
        return [t for t in some if t[: len(s)] == s]

    def uct(s: tuple) -> float:
        rewards = [bank.child(t)[0] for t in inside(s, complete)]
        n = len(inside(s, thoughts))
        return sum(rewards) / len(rewards) + w * math.sqrt(
            math.log(len(inside(s[:-1], thoughts))) / n
        )

    def places(s: tuple) -> list:
        """States at or below s that may have another child, found depth first."""
        if s != () and (s not in complete or any(bank.child(s)[1:])):
            return []
        mine = [t for t in thoughts if len(t) == len(s) + 1 and t[: len(s)] == s]
        if len(mine) < children:
            return [s]
        return [p for t in mine for p in places(t)]

    while True:
        while len(thoughts) < steps and len(thoughts) - len(complete) < width and places(()):
            s: tuple = ()
            while s not in places(s):
                below = [t for t in thoughts if t[:-1] == s and places(t)]
                s = max(below, key=lambda t: (uct(t), -thoughts.index(t)))
            made = sum(t[:-1] == s for t in thoughts)
            thoughts.append((*s, made))
        if len(thoughts) == len(complete):
            return thoughts
        complete.append(thoughts[len(complete)])
        reward, finished, _ = bank.child(complete[-1])
        if finished and reward >= 0.9:
            return thoughts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [1, 4])
def test_mcts(seed: int, width: int) -> None:
    bank = Bank(seed, depth=4)
    run = drive(make_search("mcts", width=width, children=2, steps=40), bank)
    assert [run.path[n] for n in run.order] == literal_mcts(bank, width, 2, 40)
    assert run.most_running <= width
    finished = [n for n in run.order if run.leaves[n].finished and n in run.seen]
    if finished:
        best = max(run.leaves[n].score for n in finished)
        assert run.leaves[run.answer[0]].score == best


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
    with pytest.raises(UsageError, match="1 or more"):
        make_search("dpts", width=0)
    assert make_search("dpts", width="2").slots == 2
    assert search_options("tot-bfs") == {"keep": 5, "children": 8, "levels": 0, "any_of": 1}


def test_helpers() -> None:
    root = Leaf(ROOT, -1, 0, float("nan"))
    frontier = [root, Leaf(1, 0, 1, 0.5), Leaf(2, 0, 1, 0.5), Leaf(3, 1, 2, 0.9)]
    assert hopeless(frontier, [2]) == (3, 1)
    assert hopeless(frontier, [3]) == (2,)
    assert best_answer([root]) == (ROOT,)
    assert best_answer(frontier) == (3,)
    assert best_answer([*frontier, Leaf(4, 0, 1, 0.1, finished=True)]) == (4,)


def test_no_framework_is_imported() -> None:
    code = "import sys, arborsim.search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
