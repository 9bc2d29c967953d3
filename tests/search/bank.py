"""An endless random bank, and the driver loop of `arborsim.searches.base`, for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from arborsim.searches import ROOT, Leaf, Search


@dataclass
class Bank:
    """Thoughts whose reward and end depend on the seed and their path alone.

    `missing` is the share of children that the bank does not have; rewards have so many `digits`:
    with one, many are equal.
    """

    seed: int
    depth: int = 6
    missing: float = 0.0
    digits: int = 2
    _known: dict[tuple[int, ...], tuple[float, bool, bool]] = field(
        default_factory=dict, init=False, repr=False
    )

    def child(self, path: tuple[int, ...]) -> tuple[float, bool, bool]:
        """(reward, finished, dead) of the thought at `path`, a tuple of child numbers."""
        if path not in self._known:
            self._known[path] = self._draw(path)
        return self._known[path]

    def _draw(self, path: tuple[int, ...]) -> tuple[float, bool, bool]:
        rng = random.Random(repr((self.seed, path)))
        finished = len(path) >= self.depth or rng.random() < 0.05
        return round(rng.random(), self.digits), finished, not finished and rng.random() < 0.05

    def tokens(self, path: tuple[int, ...]) -> int:
        """The thought's own tokens."""
        return random.Random(repr((self.seed, path, "tokens"))).randint(1, 9)

    def embedding(self, path: tuple[int, ...]) -> np.ndarray:
        """One of five directions, and a little of the thought's own."""
        rng = random.Random(repr((self.seed, path, "embedding")))
        direction = np.eye(5)[rng.randrange(5)]
        return direction + np.array([rng.gauss(0, 0.05) for _ in range(5)])

    def text(self, path: tuple[int, ...]) -> str:
        """What the thought at `path` would answer, if it were finished."""
        return random.Random(repr((self.seed, path, "answer"))).choice("abc")

    def has(self, path: tuple[int, ...]) -> bool:
        return random.Random(repr((self.seed, path, "there"))).random() >= self.missing


@dataclass
class Run:
    """What a search did."""

    leaves: dict[int, Leaf]
    path: dict[int, tuple[int, ...]]
    order: list[int]  # nodes in order of opening
    dropped: list[int]
    answer: tuple[int, ...]
    most_running: int
    seen: list[int]  # nodes that the search was shown and did not give up


def drive(search: Search, bank: Bank, limit: int = 2000) -> Run:
    """Run a search on a bank; thoughts that run together complete in order of opening."""
    leaves = {ROOT: Leaf(ROOT, -1, 0, float("nan"))}
    path: dict[int, tuple[int, ...]] = {ROOT: ()}
    frontier, running, dropped = [ROOT], [], []
    asked = {ROOT: 0}
    most = 0
    for _ in range(limit):
        seen = [replace(leaves[n], visits=asked[n]) for n in frontier]
        wish = search.expand(seen, search.slots - len(running))
        assert not set(wish.dropped) & set(dropped), "dropped twice"
        assert set(wish.dropped) <= set(frontier), "dropped what it was not shown"
        assert ROOT not in wish.dropped
        assert sum(wish.children.values()) <= search.slots - len(running), "too wide"
        dropped += wish.dropped
        frontier = [n for n in frontier if n not in wish.dropped]
        if wish.done:
            break
        for node, count in wish.children.items():
            assert node in frontier, "expanded what it gave up"
            assert leaves[node].expandable, "expanded what cannot be"
            for _ in range(count):
                step = (*path[node], asked[node])
                if bank.has(step):
                    new = len(path)
                    path[new] = step
                    running.append(new)
                    reward, finished, dead = bank.child(step)
                    leaves[new] = Leaf(
                        new, node, len(step), reward, finished, dead, 0,
                        leaves[node].tokens + bank.tokens(step), bank.embedding(step),
                        bank.text(step) if finished else None,
                    )  # fmt: skip
                    asked[new] = 0
                    asked[node] += 1
        most = max(most, len(running))
        if not running:
            break
        ready = list(running) if search.synchronous else running[:1]
        running = [n for n in running if n not in ready]
        frontier += ready
    else:
        raise AssertionError("the search never ended")
    seen = [replace(leaves[n], visits=asked[n]) for n in frontier]
    return Run(leaves, path, sorted(path)[1:], dropped, search.answers(seen), most, frontier)
