"""Literal re-implementations of the policies that give layers and heads uneven shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from arborsim.policies.base import Policy
from arborsim.policies.methods.duoattention import DuoAttention
from arborsim.policies.methods.snapkv import AdaKV, PyramidKV
from tests.helpers.slow_world import EVICTED, HBM, HBM_Q, SlowWorld
from tests.policies.oracles import SlowStream
from tests.policies.oracles_attention import group_row


def held(world: SlowWorld, groups: list[int]) -> int:
    return sum(world.in_hbm(group) for group in groups)


class SlowUneven(SlowStream):
    """Groups that draw on one budget give up off-path blocks together, then what `choose` says."""

    def parts(self, world: SlowWorld) -> list[list[int]]:
        raise NotImplementedError

    def choose(self, world: SlowWorld, part: list[int], free: dict[int, list[int]]) -> None:
        raise NotImplementedError

    def drop_blocks(self, world: SlowWorld, part: list[int], budget: int) -> None:
        for node in world.off_path_order() if self.adaptation == "path" else ():
            if held(world, part) > budget:
                for group in part:
                    for token in world.block(node):
                        world.tiers[group][token] = EVICTED

    def free(self, world: SlowWorld, group: int) -> list[int]:
        path = self.adaptation == "path"
        stream = world.active_tokens() if path else range(len(world.node))
        safe = self.protected(world)
        return [t for t in stream if world.tiers[group][t] in (HBM, HBM_Q) and t not in safe]

    def shrink(self, world: SlowWorld) -> None:
        for part in self.parts(world):
            budget = world.budget * len(part)
            self.drop_blocks(world, part, budget)
            if held(world, part) > budget:
                self.choose(world, part, {group: self.free(world, group) for group in part})


class SlowVoting(SlowUneven):
    """SnapKV's pooled votes, to which every generated token's query adds its own."""

    def __init__(self, window: int, kernel: int, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.window, self.kernel = window, kernel
        self.votes: list[list[float]] = []
        self.seen = 0

    def recent(self, world: SlowWorld) -> int:
        return min(self.window, world.budget // 2)

    def watch(self, world: SlowWorld) -> None:
        self.votes += [[] for _ in range(world.groups - len(self.votes))]
        for group, votes in enumerate(self.votes):
            votes += [0.0] * (len(world.node) - len(votes))
            for token in range(self.seen, len(world.node)):
                if token >= world.prompt - self.window:
                    row = group_row(world, token, "head", group)
                    for at, weight in zip(world.path(world.node[token]), row, strict=False):
                        votes[at] += weight
        self.seen = len(world.node)

    def prefill(self, world: SlowWorld) -> None:
        world.prompt = len(world.node)
        self.watch(world)
        super().prefill(world)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        super().step(world)

    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        votes, before = self.votes[group], max(0, world.prompt - self.window)
        if token >= before:
            return votes[token]
        total = 0.0
        for at in range(token - self.kernel // 2, token + self.kernel // 2 + 1):
            total += votes[at] if 0 <= at < before else 0.0
        return total / self.kernel

    def worst_first(self, world: SlowWorld, group: int, free: list[int]) -> list[int]:
        return sorted(free, key=lambda t: (self.group_score(world, group, t), t))


class SlowPyramid(SlowVoting):
    def __init__(self, window: int, kernel: int, beta: int = 20, adaptation: str = "path") -> None:
        super().__init__(window, kernel, adaptation)
        self.beta = beta

    def shares(self, world: SlowWorld) -> list[int]:
        """A straight line over the layers, in whole numbers that add up."""
        heads = world.episode.info.geometry.kv_heads
        layers = world.groups // heads
        window = max(min(self.window, world.budget // 2), len(world.leaves)) + self.outside(world)
        base = world.budget - window
        fullest = max(world.in_hbm(group) for group in range(world.groups))
        most = min(2 * base - base // self.beta, fullest - window)
        least = 2 * base - most
        if layers == 1 or most <= base:
            return [world.budget] * world.groups
        shares, whole, exact = [], 0, Fraction(0)
        for layer in range(layers):
            exact += most - Fraction(layer * (most - least), layers - 1)
            share = math.ceil(exact) - whole
            whole += share
            shares += [window + share] * heads
        assert sum(shares) == world.budget * world.groups
        return shares

    def shrink(self, world: SlowWorld) -> None:
        everyone = list(range(world.groups))
        if held(world, everyone) <= world.budget * world.groups:
            return
        for group, share in enumerate(self.shares(world)):
            self.drop_blocks(world, [group], share)
            over = max(0, world.in_hbm(group) - share)
            for token in self.worst_first(world, group, self.free(world, group))[:over]:
                world.tiers[group][token] = EVICTED


class SlowAda(SlowVoting):
    def __init__(
        self, window: int, kernel: int, alpha: float = 0.2, adaptation: str = "path"
    ) -> None:
        super().__init__(window, kernel, adaptation)
        self.alpha = alpha
        self.only_prompt = True

    def step(self, world: SlowWorld) -> None:
        self.only_prompt = False
        super().step(world)

    def transition(self, world: SlowWorld) -> None:
        self.only_prompt = False
        super().transition(world)

    def parts(self, world: SlowWorld) -> list[list[int]]:
        heads = world.episode.info.geometry.kv_heads
        return [list(range(i, i + heads)) for i in range(0, world.groups, heads)]

    def choose(self, world: SlowWorld, part: list[int], free: dict[int, list[int]]) -> None:
        total = sum(map(len, free.values())) - (held(world, part) - world.budget * len(part))
        queue = {g: self.worst_first(world, g, free[g]) for g in part}
        floor = 0 if self.only_prompt else int(self.alpha * total / len(part))
        left = {g: list(queue[g]) for g in part}
        while sum(map(len, left.values())) > total:
            lowest = min(
                (g for g in part if len(left[g]) > floor),
                key=lambda g: (self.group_score(world, g, left[g][0]), left[g][0], g),
            )
            left[lowest].pop(0)
        kept = {g: len(left[g]) for g in part}
        if self.only_prompt:
            wanted = {
                g: round((1 - self.alpha) * kept[g] + self.alpha * total / len(part), 9)
                for g in part
            }
            kept = {g: math.floor(wanted[g]) for g in part}
            by_rest = sorted(part, key=lambda g: (kept[g] - wanted[g], g))
            for g in by_rest[: total - sum(kept.values())]:
                kept[g] += 1
        for g in part:
            for token in queue[g][: len(queue[g]) - kept[g]]:
                world.tiers[g][token] = EVICTED


class SlowDuo(SlowUneven):
    def __init__(self, sinks: int, recent: int, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.first, self.newest = sinks, recent
        self.gates: list[float] = []

    def sinks(self, world: SlowWorld) -> int:
        return min(self.first, world.budget // 8)

    def recent(self, world: SlowWorld) -> int:
        return max(1, min(self.newest, world.budget // 2))

    def parts(self, world: SlowWorld) -> list[list[int]]:
        return [list(range(world.groups))]

    def prefill(self, world: SlowWorld) -> None:
        length = len(world.node)
        sinks, recent = min(self.first, length // 8), max(1, min(self.newest, length // 4))
        for group in range(world.groups):
            reach, queries = 0.0, 0
            for token in range(sinks + recent, length):
                row = group_row(world, token, "head", group)
                paid = 0.0
                for at in range(sinks, token - recent + 1):
                    paid += row[at]
                reach, queries = reach + paid, queries + 1
            self.gates.append(round(reach / max(1, queries), 9))
        super().prefill(world)

    def choose(self, world: SlowWorld, part: list[int], free: dict[int, list[int]]) -> None:
        most = max(map(len, free.values()))
        for group in part:
            if len(free[group]) < most:
                for token in free[group]:
                    world.tiers[group][token] = EVICTED
        for group in sorted(part, key=lambda g: (self.gates[g], g)):
            if held(world, part) > world.budget * len(part):
                for token in free[group]:
                    world.tiers[group][token] = EVICTED


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "pyramidkv": (PyramidKV(window=4, kernel=3), lambda: SlowPyramid(4, 3)),
    "pyramidkv-flat": (
        PyramidKV(window=3, beta=2, adaptation="flat"), lambda: SlowPyramid(3, 5, 2, "flat")),
    "adakv": (AdaKV(window=4, kernel=3), lambda: SlowAda(4, 3)),
    "adakv-flat": (
        AdaKV(window=3, alpha=0.5, adaptation="flat"), lambda: SlowAda(3, 5, 0.5, "flat")),
    "duoattention": (DuoAttention(sinks=2, recent=5), lambda: SlowDuo(2, 5)),
    "duoattention-flat": (
        DuoAttention(sinks=1, recent=4, adaptation="flat"), lambda: SlowDuo(1, 4, "flat")),
}  # fmt: skip
