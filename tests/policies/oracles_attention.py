"""Literal re-implementations of the policies that rank by attention (see `oracles`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from arborsim.policies.base import Policy
from arborsim.policies.thinkv import ThinKV
from tests.helpers.slow_world import EVICTED, HBM, HBM_Q, SlowWorld
from tests.policies.oracles import SlowStream


class SlowAttention(SlowStream):
    """Keeps the attention that every token got from the newest query (or queries)."""

    def __init__(self, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.newest: list[list[float]] = []  # per row (layer), per token
        self.seen = 0

    def row(self, world: SlowWorld, token: int) -> list[list[float]]:
        return [world.episode.attention.row(token).tolist()]

    def watch(self, world: SlowWorld) -> None:
        """Take in the tokens that came since the last call; several only at the prefill."""
        fresh = range(self.seen, len(world.tier))
        self.seen = len(world.tier)
        batches = [[t] for t in fresh] if self.seen == world.prompt else [list(fresh)]
        for batch in batches:
            rows = {t: self.row(world, t) for t in batch}
            for layer in range(len(rows[batch[0]])):
                if layer == len(self.newest):
                    self.newest.append([])
                now = self.newest[layer]
                now += [0.0] * (len(world.tier) - len(now))
                paths = {t: world.path(world.node[t])[: len(rows[t][layer])] for t in batch}
                for t in batch:
                    for at in paths[t]:
                        now[at] = 0.0
                readers: dict[int, int] = {}
                for t in batch:
                    for at, weight in zip(paths[t], rows[t][layer], strict=True):
                        now[at] += weight
                        readers[at] = readers.get(at, 0) + 1
                for at, count in readers.items():
                    now[at] /= count

    def prefill(self, world: SlowWorld) -> None:
        self.watch(world)
        super().prefill(world)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        super().step(world)


class SlowThinKV(SlowAttention):
    def __init__(self, segment: int, keeps: tuple[int, int, int], adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.segment, self.keeps = segment, keeps

    def head(self, world: SlowWorld) -> int:
        return 0

    def recent(self, world: SlowWorld) -> int:
        return max(1, min(128, world.budget // 4))

    def score(self, world: SlowWorld, token: int) -> float:
        return sum(row[token] for row in self.newest)

    def shrink(self, world: SlowWorld) -> None:
        if self.adaptation == "path":
            for node in world.off_path_order():
                if world.in_hbm() <= world.budget:
                    return
                for token in world.block(node):
                    world.tier[token] = EVICTED
        if world.in_hbm() <= world.budget:
            return
        path = self.adaptation == "path"
        stream = world.active_tokens() if path else list(range(len(world.tier)))
        safe = self.protected(world)
        segments: dict[int, list[int]] = {}
        for place, token in enumerate(stream):
            if world.tier[token] in (HBM, HBM_Q) and token not in safe:
                segments.setdefault(place // self.segment, []).append(token)
        numbers = sorted(segments, key=lambda j: (self.entropy(segments[j]), -j))
        room = world.budget - (world.in_hbm() - sum(map(len, segments.values())))
        for number, tokens in sorted(segments.items()):
            most = self.keeps[numbers.index(number) * 3 // len(numbers)]
            best = sorted(tokens, key=lambda t: (self.score(world, t), t), reverse=True)
            kept = best[: min(most, room)]
            room -= len(kept)
            for token in tokens:
                if token not in kept:
                    world.tier[token] = EVICTED

    def entropy(self, tokens: list[int]) -> float:
        total = 0.0
        for row in self.newest:
            mass = sum(row[t] for t in tokens)
            if mass == 0:
                total += math.log(len(tokens))
            total -= sum(row[t] / mass * math.log(row[t] / mass) for t in tokens if row[t] > 0)
        return round(total / len(self.newest), 9)


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "thinkv": (
        ThinKV(segment=8, keep_r=6, keep_e=3, keep_t=1), lambda: SlowThinKV(8, (6, 3, 1))),
    "thinkv-flat": (
        ThinKV(segment=5, keep_r=4, keep_e=2, keep_t=0, adaptation="flat"),
        lambda: SlowThinKV(5, (4, 2, 0), "flat")),
}  # fmt: skip
