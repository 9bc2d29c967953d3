"""Literal re-implementations of the policies that rank per layer or KV head (see `oracles`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arborsim.policies.base import Policy
from arborsim.policies.h2o import H2O
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
        rows.append([sum(column) / per_group for column in zip(*mine, strict=True)])
    return rows


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

    def head(self, world: SlowWorld) -> int:
        return 0

    def recent(self, world: SlowWorld) -> int:
        return max(1, world.budget // 2)

    def see(self, world: SlowWorld, token: int) -> None:
        path = world.path(world.node[token])
        for group, row in enumerate(group_rows(world, token)):
            for weight, at in zip(row, path[: len(row)], strict=True):
                self.received[group, at] = self.received.get((group, at), 0.0) + weight

    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        return self.received[group, token]


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "h2o-head": (H2O(per="head"), SlowHeadH2O),
    "h2o-layer": (H2O(per="layer"), SlowHeadH2O),
    "h2o-head-flat": (H2O(per="head", adaptation="flat"), lambda: SlowHeadH2O("flat")),
}
