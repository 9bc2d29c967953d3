"""Literal re-implementations of the policies that rank per layer or KV head (see `oracles`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from arborsim.policies.base import Policy
from arborsim.policies.methods.arkv import ARKV, ARKVOrigin, ARKVQuant
from arborsim.policies.methods.attention import H2O
from arborsim.policies.methods.random_attention import RandomAttention
from tests.helpers.slow_world import EVICTED, HBM, HBM_Q, SlowWorld
from tests.policies.oracles import SlowStream


def group_rows(world: SlowWorld, token: int) -> list[list[float]]:
    """Attention of one token to its path: one list per group, mean over the group's heads."""
    row = world.episode.head_attention.row(token).tolist()
    layers, heads = len(row), len(row[0])
    per_group = layers * heads // world.groups
    flat = [head for layer in row for head in layer]
    rows = []
    for group in range(world.groups):
        mine = flat[group * per_group : (group + 1) * per_group]
        rows.append([plain_sum(column) / per_group for column in zip(*mine, strict=True)])
    return rows


def plain_sum(values: Iterable[float]) -> float:
    """Added one after the other; from Python 3.12 on `sum` is more exact than that."""
    total = 0.0
    for value in values:
        total += value
    return total


def in_slots(known: list[int], tokens: Iterable[int]) -> list[int]:
    """Tokens in the order that is known of them, then the others by age."""
    place = {token: i for i, token in enumerate(known)}
    return sorted(tokens, key=lambda t: (place.get(t, len(known)), t))


class SlowGroups(SlowStream):
    """`SlowStream` once per group: each gives up blocks, then its own lowest tokens."""

    def __init__(self, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.seen = 0

    def watch(self, world: SlowWorld) -> None:
        """Take in the tokens that came since the last call."""
        fresh = list(range(self.seen, len(world.node)))
        self.seen = len(world.node)
        for token in fresh:
            self.see(world, token)

    def see(self, world: SlowWorld, token: int) -> None:
        """Take in one token."""

    def prefill(self, world: SlowWorld) -> None:
        self.watch(world)
        super().prefill(world)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        super().step(world)

    def shrink(self, world: SlowWorld) -> None:
        for group in range(world.groups):
            self.shrink_group(world, group)

    def shrink_group(self, world: SlowWorld, group: int) -> None:
        tier = world.tiers[group]
        if self.adaptation == "path":
            for node in world.off_path_order():
                if world.in_hbm(group) <= world.budget:
                    return
                for token in world.block(node):
                    tier[token] = EVICTED
        if world.in_hbm(group) <= world.budget:
            return
        stream = world.active_tokens() if self.adaptation == "path" else range(len(world.node))
        safe = self.protected(world)
        free = [t for t in stream if tier[t] in (HBM, HBM_Q) and t not in safe]
        self.choose(world, group, free)

    def choose(self, world: SlowWorld, group: int, free: list[int]) -> None:
        """Evict the lowest of `free` until the budget holds."""
        score = {t: self.group_score(world, group, t) for t in free}
        while world.in_hbm(group) > world.budget:
            victim = min(free, key=lambda t: (score[t], t))
            free.remove(victim)
            world.tiers[group][victim] = EVICTED

    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        raise NotImplementedError


class SlowHeadH2O(SlowGroups):
    def __init__(self, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.received: dict[tuple[int, int], float] = {}

    def recent(self, world: SlowWorld) -> int:
        return max(1, world.budget // 2)

    def see(self, world: SlowWorld, token: int) -> None:
        path = world.path(world.node[token])
        for group, row in enumerate(group_rows(world, token)):
            for weight, at in zip(row, path[: len(row)], strict=True):
                self.received[group, at] = self.received.get((group, at), 0.0) + weight

    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        return self.received[group, token]


class SlowARKV(SlowGroups):
    """Cut to 0.75 (C - W); by kind, all, none or the layer's share of it at full precision."""

    taus, gamma, slack = (7.7744, 5.4070, 5.5277), 263.811, 0.75

    def __init__(
        self, kind: str, window: int, adaptation: str = "path", cumulative: bool = False,
        published: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(adaptation)
        self.kind, self.window = kind, window
        self.cumulative, self.published = cumulative, published
        self.raw: dict[int, list[list[list[float]]]] = {}  # rows of a token, by layer and head
        self.newest: dict[tuple[int, int], list[float]] = {}  # by group and token, of every leaf
        self.slots: dict[int, list[int]] = {}  # of a group, once cut: its tokens in slot order

    def recent(self, world: SlowWorld) -> int:
        return self.window

    def watch(self, world: SlowWorld) -> None:
        batch = list(range(self.seen, len(world.node)))
        super().watch(world)
        for token in batch:
            self.raw[token] = world.episode.head_attention.row(token).tolist()
        if len(world.node) == world.prompt:
            return  # the prompt is rated by its last queries
        latest: dict[tuple[int, int], list[float]] = {}
        for token in batch:
            path = world.path(world.node[token])
            for group, row in enumerate(group_rows(world, token)):
                for weight, at in zip(row, path, strict=True):
                    latest.setdefault((group, at), []).append(weight)
        self.newest.update(latest)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        if self.published and self.kind != "origin":
            safe = self.protected(world)
            for tier in world.tiers:
                for token, place in enumerate(tier):
                    if place == HBM_Q and token not in safe:
                        tier[token] = EVICTED
        self.shrink(world)

    def shrink(self, world: SlowWorld) -> None:
        self.before = [list(tier) for tier in world.tiers], dict(self.slots)
        super().shrink(world)

    def choose(self, world: SlowWorld, group: int, free: list[int]) -> None:
        over = world.in_hbm(group) - world.budget
        room = max(0, world.budget - self.window - self.outside(world))
        cut = self.published and len(world.node) == world.prompt
        best_first = self.best_first(world, group, free)
        keeps = int(self.slack * (len(free) if self.published else room))
        keeps = min(room if cut else keeps, len(free) - over)
        full = {"origin": keeps, "quant": 0}.get(self.kind, -1)
        if full < 0:
            full = keeps if cut else self.original(world, group, room)
        for place, token in enumerate(best_first):
            if place >= keeps:
                world.tiers[group][token] = EVICTED
            elif place >= full:
                world.tiers[group][token] = HBM_Q
        if self.published:
            self.reorder(world, group, best_first[:keeps], min(full, keeps), by_first=not cut)

    def reorder(
        self, world: SlowWorld, group: int, kept: list[int], full: int, by_first: bool
    ) -> None:
        """What is kept comes first: at full precision as the first head of the layer has it."""
        best = kept[:full]
        first = group - group % (world.groups // world.layers)
        tiers, slots = self.before
        if by_first:
            safe = self.protected(world)
            stream = world.active_tokens() if self.adaptation == "path" else range(len(world.node))
            theirs = [t for t in stream if tiers[first][t] in (HBM, HBM_Q) and t not in safe]
            places = in_slots(slots.get(first, []), range(len(world.node)))
            ranked = self.best_first(world, first, theirs, slots)[:full]
            order = sorted(range(len(best)), key=lambda i: places.index(ranked[i]))
            best = [best[i] for i in order]
        others = in_slots(slots.get(group, []), range(len(world.node)))
        lead = best + kept[full:]
        self.slots[group] = lead + [t for t in others if t not in lead]

    def best_first(
        self, world: SlowWorld, group: int, free: list[int], slots: Any = None
    ) -> list[int]:
        row = in_slots((self.slots if slots is None else slots).get(group, []), free)
        heavy = [0.0, 0.0, *(self.heaviness(world, group, t) for t in row), 0.0, 0.0]
        pooled = [plain_sum(heavy[i : i + 5]) / 5 for i in range(len(row))]
        ranked = sorted(range(len(row)), key=lambda i: (pooled[i], i), reverse=True)
        return [row[i] for i in ranked]

    def heaviness(self, world: SlowWorld, group: int, token: int) -> float:
        if not self.cumulative and len(world.node) > world.prompt:
            rows = self.newest[group, token]
            return plain_sum(rows) / len(rows) if len(rows) > 1 else rows[0]
        queries = [q for q in self.raw if q >= max(token, world.prompt - self.window)]
        queries = [q for q in queries if token in world.path(world.node[q])]
        at = world.path(world.node[token]).index(token)
        heads = [
            self.spread([self.raw[q][layer][head][at] for q in queries])
            for layer in range(world.layers)
            for head in range(len(self.raw[0][0]))
        ]
        size = len(heads) // world.groups
        return plain_sum(heads[group * size : (group + 1) * size]) / size

    def spread(self, weights: list[float]) -> float:
        """Mean plus gamma times the unbiased variance."""
        mean = squares = 0.0
        for n, weight in enumerate(weights, start=1):
            deviation = weight - mean
            mean += deviation / n
            squares += deviation * (weight - mean)
        return mean + self.gamma * (squares / max(1, len(weights) - 1))

    def original(self, world: SlowWorld, group: int, room: int) -> int:
        oq = [self.sensitivity(world, layer) for layer in range(world.layers)]
        mine = oq[group * world.layers // world.groups]
        count = round(mine / max(oq) * room) if max(oq) > 0 else room
        count = max(0, min(count, room))
        if self.published:
            count = max(0, min(count, world.prompt - self.window) - self.window)
        return count

    def sensitivity(self, world: SlowWorld, layer: int) -> float:
        keys, queries = world.prompt - self.window, range(world.prompt - self.window, world.prompt)
        entropy = variance = kurtosis = 0.0
        for head in range(len(self.raw[0][layer])):
            for key in range(keys):
                a = [self.raw[q][layer][head][key] for q in queries]
                mean = sum(a) / len(a)
                m2 = sum((x - mean) ** 2 for x in a) / len(a)
                m4 = sum((x - mean) ** 4 for x in a) / len(a)
                entropy -= sum(x * math.log(x + 1e-10) for x in a)
                variance += statistics.variance(a)
                kurtosis += m4 / max(m2, 1e-8) ** 2
        t1, t2, t3 = self.taus
        return max(entropy, 0.0) ** (1 / t1) * variance ** (1 / t2) * kurtosis ** (1 / t3)


class SlowRandomAttention(SlowGroups):
    """Whenever the cache has reached a multiple of `every` over budget, each head draws anew."""

    pin_prompt = True

    def __init__(self, every: int, window: int) -> None:
        super().__init__()
        self.every, self.window, self.iterations = every, window, 0

    def recent(self, world: SlowWorld) -> int:
        return min(self.window, world.budget // 4)

    def prefill(self, world: SlowWorld) -> None: ...
    def transition(self, world: SlowWorld) -> None: ...

    def step(self, world: SlowWorld) -> None:
        self.iterations += 1
        held = max(world.in_hbm(group) for group in range(world.groups))
        if any(n % self.every == 0 for n in range(world.budget + 1, held + 1)):
            rng = np.random.default_rng([0, self.iterations])
            self.drawn = rng.random((world.groups, len(world.node)))
            self.shrink(world)

    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        return float(self.drawn[group, token])


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "h2o": (H2O(), SlowHeadH2O),
    "h2o-layer": (H2O(per="layer"), SlowHeadH2O),
    "h2o-head-flat": (H2O(adaptation="flat"), lambda: SlowHeadH2O("flat")),
    "random-attention": (
        RandomAttention(interval=5, window=4), lambda: SlowRandomAttention(5, 4)),
    "arkv": (ARKV(window=4), lambda: SlowARKV("mix", 4)),
    "arkv-layer-flat": (
        ARKV(window=3, per="layer", adaptation="flat"), lambda: SlowARKV("mix", 3, "flat")),
    "arkv-cumulative": (
        ARKV(window=5, cumulative=True), lambda: SlowARKV("mix", 5, cumulative=True)),
    "arkv-as-published": (
        ARKV(window=3, as_published=True), lambda: SlowARKV("mix", 3, published=True)),
    "arkv-origin": (ARKVOrigin(window=4), lambda: SlowARKV("origin", 4)),
    "arkv-origin-as-published": (
        ARKVOrigin(window=4, as_published=True), lambda: SlowARKV("origin", 4, published=True)),
    "arkv-quant": (ARKVQuant(window=4), lambda: SlowARKV("quant", 4)),
    "arkv-quant-as-published": (
        ARKVQuant(window=4, as_published=True), lambda: SlowARKV("quant", 4, published=True)),
}  # fmt: skip
