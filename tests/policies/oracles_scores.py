"""Literal re-implementations of RaaS, the redundancy ablations and the bound by the task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from arborsim.core.observations import Signal
from arborsim.policies.base import Policy
from arborsim.policies.methods.attention import Raas
from arborsim.policies.methods.baselines import Needed
from arborsim.policies.methods.hierarchy import AttnValRedundancy, Redundancy
from tests.helpers.slow_world import EVICTED, SlowWorld
from tests.policies.oracles import SlowHierarchy, SlowStream


class SlowRaas(SlowStream):
    pin_prompt = True

    def __init__(self, page: int = 0, threshold: float = 0.0, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.page, self.threshold = page, threshold
        self.used: list[int] = []
        self.clock = 0

    def recent(self, world: SlowWorld) -> int:
        return 1

    def score(self, world: SlowWorld, token: int) -> float:
        return self.used[token]

    def prefill(self, world: SlowWorld) -> None:
        for token in range(world.prompt):
            self.used.append(0)
            if not self.pin_prompt:  # then it counts as if it were generated, token by token
                self.clock += 1
                self.use(world, token)
        super().prefill(world)

    def step(self, world: SlowWorld) -> None:
        self.clock += 1
        fresh = range(len(self.used), len(world.tier))
        self.used += [self.clock] * len(fresh)
        for token in fresh:
            self.use(world, token)
        super().step(world)

    def use(self, world: SlowWorld, token: int) -> None:
        """Refresh what the query of `token` attends to."""
        self.used[token] = self.clock
        path = world.path(world.node[token])
        row = world.episode.attention.row(token).tolist()
        first = self.outside(world)
        read = zip(path[first : len(row)], row[first:], strict=True)
        paid = {t: weight if world.tier[t] != EVICTED else None for t, weight in read}
        if not self.page:
            held = {t: weight for t, weight in paid.items() if weight is not None}
            middle = statistics.median_low(held.values())
            again = [t for t, weight in held.items() if weight >= middle]
        else:
            again = []
            tokens = list(paid)
            for start in range(0, len(tokens), self.page):
                page = tokens[start : start + self.page]
                if token in page or any((paid[t] or 0.0) > self.threshold for t in page):
                    again += page
        for t in again:
            self.used[t] = self.clock


class SlowRedundancy(SlowHierarchy):
    """Attention (times value norm), minus the mean cosine to the neighbours' keys."""

    reach, weight, values = 8, 1.0, False

    def importance(self, world: SlowWorld, tokens: list[int]) -> dict[int, float]:
        attention = {t: world.attended[t] * self.size(world, t) for t in tokens}
        largest = max(attention.values(), default=0.0) or 1.0
        direction = {t: self.direction(world, t) for t in tokens}
        found = {}
        for i, token in enumerate(tokens):
            near = []
            for lag in range(1, self.reach + 1):  # nearest first, the older of two first
                near += [tokens[i - lag]] if i - lag >= 0 else []
                near += [tokens[i + lag]] if i + lag < len(tokens) else []
            total = 0.0
            for other in near:
                total += self.cosine(direction[token], direction[other])
            similar = total / max(1, len(near))
            found[token] = attention[token] / largest - self.weight * similar
        return found

    def size(self, world: SlowWorld, token: int) -> float:
        if not self.values:
            return 1.0
        norms = world.episode.per_layer[Signal.VALUE_NORM][token].tolist()
        return sum(norms) / len(norms)

    def direction(self, world: SlowWorld, token: int) -> list[float]:
        key = self.key(world, token)
        length = math.sqrt(self.cosine(key, key)) or 1.0
        return [x / length for x in key]

    def key(self, world: SlowWorld, token: int) -> list[float]:
        return list(world.episode.per_layer[Signal.KEY_SKETCH][token].tolist())

    def cosine(self, a: list[float], b: list[float]) -> float:
        total = 0.0
        for x, y in zip(a, b, strict=True):
            total += x * y
        return total


class SlowWholeRedundancy(SlowRedundancy):
    """The same with the keys of all layers and heads, one after the other."""

    def key(self, world: SlowWorld, token: int) -> list[float]:
        return [x for layer in world.episode.keys[token].tolist() for head in layer for x in head]


class SlowValueRedundancy(SlowRedundancy):
    values = True


class SlowNeeded(SlowStream):
    """What no step of an active path reads goes first, then what its own thought's end needs."""

    def __init__(self, adaptation: str = "flat", fill: bool = True) -> None:
        super().__init__(adaptation)
        self.fill = fill

    def sinks(self, world: SlowWorld) -> int:
        return 4

    def recent(self, world: SlowWorld) -> int:
        return min(16, world.budget // 4)

    def step_after(self, world: SlowWorld, token: int) -> int:
        return int(world.episode.per_layer[Signal.READERS][token][0])

    def until_read(self, world: SlowWorld, token: int, now: int) -> float:
        readers = world.episode.per_layer[Signal.READERS][token].tolist()[1:]
        return min((step - now for step in readers if step >= now), default=math.inf)

    def score(self, world: SlowWorld, token: int) -> float:
        end = world.block(world.node[token])[-1]
        score = -1e6 - self.until_read(world, token, self.step_after(world, end))
        for now, path in self.active:
            if token in path:
                score = max(score, -self.until_read(world, token, now))
        return score

    def shrink(self, world: SlowWorld) -> None:
        paths = [world.path(leaf) for leaf in world.leaves]
        self.active = [(self.step_after(world, path[-1]), set(path)) for path in paths]
        super().shrink(world)

    def step(self, world: SlowWorld) -> None:
        self.shrink(world)
        if not self.fill:
            every = range(len(world.tier))
            stream = every if self.adaptation == "flat" else world.active_tokens()
            for token in set(stream) - self.protected(world):
                if world.tier[token] != EVICTED and self.score(world, token) <= -1e6:
                    world.tier[token] = EVICTED


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "raas": (Raas(page=4, threshold=0.06), lambda: SlowRaas(4, 0.06)),
    "raas-median": (Raas(variant="median"), SlowRaas),
    "raas-flat": (
        Raas(variant="median", adaptation="flat"), lambda: SlowRaas(adaptation="flat")),
    "needed": (Needed(), SlowNeeded),
    "needed-path": (Needed(adaptation="path"), lambda: SlowNeeded("path")),
    "needed-alone": (Needed(fill=False), lambda: SlowNeeded(fill=False)),
    "redundancy": (Redundancy(interval=4, recent=6), lambda: SlowRedundancy(4, 6)),
    "redundancy-whole-keys": (
        Redundancy(interval=4, recent=6, sketched=False), lambda: SlowWholeRedundancy(4, 6)),
    "attn-val-redundancy": (
        AttnValRedundancy(interval=3, recent=4, evict_ratio=0.2, quantised_ratio=0.5),
        lambda: SlowValueRedundancy(3, 4, r=0.2, quantised=0.5)),
}  # fmt: skip
