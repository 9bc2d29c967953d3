"""Literal re-implementations of the policies that choose pages to read (see `oracles`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from arborsim.policies.base import Policy
from arborsim.policies.methods.pages import FreeKV, Quest
from tests.helpers.slow_world import DDR, HBM, SlowWorld
from tests.policies.oracles import Nothing


class SlowPages(Nothing):
    """Pages are lists of tokens; bounds are looked up anew, channel by channel."""

    pin_prompt = False

    def __init__(self, page: int) -> None:
        self.page = page
        self.pages: list[list[int]] = []
        self.last: dict[int, list[int]] = {}  # of a node: the page its newest token is in
        self.gone_on: set[int] = set()  # nodes whose last page a child has taken over
        self.seen = 0

    def prefill(self, world: SlowWorld) -> None:
        self.watch(world)
        self.decide(world)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        self.decide(world)

    def transition(self, world: SlowWorld) -> None:
        self.decide(world)

    def decide(self, world: SlowWorld) -> None:
        raise NotImplementedError

    def watch(self, world: SlowWorld) -> None:
        for token in range(self.seen, len(world.node)):
            node, parent = world.node[token], world.parent[world.node[token]]
            if node not in self.last and parent in self.last and parent not in self.gone_on:
                self.gone_on.add(parent)
                self.last[node] = self.last[parent]
            if node not in self.last or len(self.last[node]) == self.page:
                self.last[node] = []
                self.pages.append(self.last[node])
            self.last[node].append(token)
        self.seen = len(world.node)

    def page_of(self, token: int) -> int:
        return next(i for i, page in enumerate(self.pages) if token in page)

    def pages_of(self, tokens: list[int]) -> list[int]:
        return sorted({self.page_of(token) for token in tokens})

    def heads(self, world: SlowWorld, group: int, token: int) -> list[list[float]]:
        """Queries that read the group."""
        of_layer = world.episode.head_attention.query(token).tolist()
        kv_heads = world.groups // len(of_layer)
        layer, size = group // kv_heads, len(of_layer[0]) // kv_heads
        return of_layer[layer][group % kv_heads * size :][:size]

    def bound(self, world: SlowWorld, group: int, query: list[float], page: int) -> float:
        keys = []
        for token in self.pages[page]:
            of_layer = world.episode.keys[token].tolist()
            keys.append(of_layer[group // len(of_layer[0])][group % len(of_layer[0])])
        total = 0.0
        for c, q in enumerate(query):
            channel = [key[c] for key in keys]
            total += max(q * min(channel), q * max(channel))
        return round(total, 9)

    def take(
        self, score: dict[int, float], must: list[int], room: int, held: dict[int, int]
    ) -> list[int]:
        """Pages in order of score until one does not fit; `held` are their tokens on the paths."""
        taken = list(must)
        room -= sum(held[page] for page in must)
        others = [page for page in score if page not in must]
        for page in sorted(others, key=lambda p: (-score[p], -self.newest[p])):
            if held[page] > room:
                break
            room -= held[page]
            taken.append(page)
        return taken

    def look(self, world: SlowWorld) -> tuple[list[int], dict[int, int]]:
        """Tokens on the active paths, and how many of them each page holds."""
        stream = world.active_tokens()
        held: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        for token in stream:
            page = self.page_of(token)
            held[page] = held.get(page, 0) + 1
            self.newest[page] = token
        return stream, held


class SlowQuest(SlowPages):
    """Everything stays, the best pages are read; the first layers read everything."""

    def __init__(self, page: int, dense: int = 2) -> None:
        super().__init__(page)
        self.dense = dense

    def decide(self, world: SlowWorld) -> None:
        world.unread = [set() for _ in range(world.groups)]
        stream, held = self.look(world)
        if len(stream) <= world.budget:
            return
        layers = world.episode.info.qkv_layers
        for group in range(world.groups):
            if layers[group * len(layers) // world.groups] < self.dense:
                continue
            score: dict[int, float] = {}
            must = self.pages_of([t for t in world.block(0) if self.pin_prompt])
            for leaf in world.leaves:
                path = world.path(leaf)
                must.append(self.page_of(path[-1]))
                for page in self.pages_of(path):
                    best = max(
                        self.bound(world, group, q, page)
                        for q in self.heads(world, group, path[-1])
                    )
                    score[page] = max(best, score.get(page, -math.inf))
            taken = self.take(score, sorted(set(must)), world.budget, held)
            read = {t for t in stream if self.page_of(t) in taken}
            world.unread[group] = set(range(len(world.node))) - read


class SlowFreeKV(SlowPages):
    """Pages without a protected token are in DDR; the best of them are read."""

    def decide(self, world: SlowWorld) -> None:
        if len(world.node) <= world.budget:
            return
        stream, held = self.look(world)
        safe: set[int] = set()
        quarter = world.budget // 4
        for leaf in world.leaves:
            path = world.path(leaf)
            safe |= set(path[: min(128, quarter) + self.pin_prompt * world.prompt])
            safe |= set(path[-max(1, max(1, min(128, quarter)) // len(world.leaves)) :])
        stays = self.pages_of(sorted(safe))
        here = [t for t in stream if self.page_of(t) in stays]
        world.unread = []
        for group in range(world.groups):
            for token in range(len(world.node)):
                world.tiers[group][token] = HBM if token in here else DDR
            score: dict[int, float] = {}
            for leaf in world.leaves:
                path = world.path(leaf)
                own = [page for page in self.pages_of(path) if page not in stays]
                for page, mass in self.mass(world, group, path[-1], own).items():
                    score[page] = max(mass, score.get(page, -math.inf))
            taken = self.take(score, [], world.budget - len(here), held)
            read = {t for t in stream if self.page_of(t) in (*taken, *stays)}
            world.unread.append(set(range(len(world.node))) - read)

    def mass(self, world: SlowWorld, group: int, newest: int, own: list[int]) -> dict[int, float]:
        found = dict.fromkeys(own, 0.0)
        heads = self.heads(world, group, newest)
        for query in heads:
            bound = {p: self.bound(world, group, query, p) * math.sqrt(len(query)) for p in own}
            top = max(bound.values(), default=0.0)
            weight = {p: math.exp(b - top) for p, b in bound.items()}
            total = sum(weight.values())
            for page in own:
                found[page] += weight[page] / total
        return {page: mass / len(heads) for page, mass in found.items()}


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "quest": (Quest(page=4), lambda: SlowQuest(4)),
    "quest-sparse": (Quest(page=5, dense=0), lambda: SlowQuest(5, dense=0)),
    "freekv": (FreeKV(page=3), lambda: SlowFreeKV(3)),
}
