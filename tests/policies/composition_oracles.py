"""The shipped compositions written down literally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from tests.helpers.slow_world import DDR, DDR_Q, EVICTED, HBM, HBM_Q, SlowWorld
from tests.policies import oracles
from tests.policies.arbor_oracle import SlowArborKV


class SlowArborEpi(SlowArborKV):
    """ArborKV without attention; inside a block EpiKV's score; what leaves HBM goes to DDR."""

    use_attention = False
    only_under_pressure = True
    out = DDR
    recent = 128

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.epikv = oracles.SlowEpiKV()

    def prefill(self, world: SlowWorld) -> None:
        self.epikv.pin_prompt = self.pin_prompt
        self.epikv.see(world)
        super().prefill(world)

    def step(self, world: SlowWorld) -> None:
        self.epikv.see(world)
        super().step(world)

    def settle(self, world: SlowWorld, keep: dict[int, int], weights: list[float]) -> None:
        if len(world.tier) > world.budget:  # else the whole search fits
            super().settle(world, keep, weights)

    def heavy(self, world: SlowWorld, token: int) -> float:
        return self.epikv.score(world, token)

    def safe(self, world: SlowWorld, node: int) -> list[int]:
        if node in world.leaves if node else self.pin_prompt:
            return world.block(node)
        recent = min(self.recent, world.budget // 4)
        share = max(1, recent // len(world.leaves)) if recent else 0
        newest = {t for leaf in world.leaves for t in world.path(leaf)[::-1][:share]}
        return [t for t in world.block(node) if t in newest]


class SlowStaircase(oracles.Nothing):
    """One ranking, four steps: HBM, 8-bit HBM, DDR as large as the budget, evicted."""

    pin_prompt = True

    def __init__(self, interval: int = 32, recent: int = 128) -> None:
        self.interval, self.most_recent = interval, recent
        self.epikv = oracles.SlowEpiKV()

    def prefill(self, world: SlowWorld) -> None:
        self.epikv.pin_prompt = self.pin_prompt
        self.epikv.see(world)
        self.manage(world, False)

    def step(self, world: SlowWorld) -> None:
        self.epikv.see(world)
        self.manage(world, world.iterations % self.interval == 0)

    def transition(self, world: SlowWorld) -> None:
        self.manage(world, False)

    def lowest(self, world: SlowWorld, tokens: list[int], count: int) -> list[int]:
        return sorted(tokens, key=lambda t: (self.epikv.score(world, t), t))[: max(0, count)]

    def down(self, world: SlowWorld, token: int) -> None:
        if world.tier[token] == HBM:
            world.tier[token] = DDR
        elif world.tier[token] == HBM_Q:
            world.tier[token] = DDR_Q

    def safe(self, world: SlowWorld) -> set[int]:
        recent = min(self.most_recent, world.budget // 4)
        share = max(1, recent // len(world.leaves)) if recent else 0
        head = 4 + (world.prompt if self.pin_prompt else 0)
        safe: set[int] = set()
        for leaf in world.leaves:
            path = world.path(leaf)
            safe |= set(path[:head]) | set(path[::-1][:share])
        return safe

    def manage(self, world: SlowWorld, scheduled: bool) -> None:
        if len(world.tier) <= world.budget:
            return
        if not scheduled and world.in_hbm() <= world.budget:
            return
        safe = self.safe(world)
        self.leave_hbm(world, safe)
        everything = [t for t in range(len(world.tier)) if t not in safe]
        full = [t for t in everything if world.tier[t] == HBM]
        narrow = [t for t in everything if world.tier[t] == HBM_Q]
        for token in self.lowest(world, full, (len(full) + len(narrow)) // 2 - len(narrow)):
            world.tier[token] = HBM_Q
        in_ddr = sum(tier in (DDR, DDR_Q) for tier in world.tier)
        free = [t for t in everything if world.tier[t] in (DDR, DDR_Q)]
        for token in self.lowest(world, free, in_ddr - world.budget):
            world.tier[token] = EVICTED

    def leave_hbm(self, world: SlowWorld, safe: set[int]) -> None:
        here = [t for t in world.active_tokens() if world.tier[t] in (HBM, HBM_Q)]
        pinned = [t for t in here if t in safe]
        free = [t for t in here if t not in safe]
        spare = max(0, world.budget - len(pinned))
        goal = world.budget - min(self.interval * len(world.leaves), spare // 2)
        for node in world.off_path_order():
            if world.in_hbm() <= goal:
                return
            for token in world.block(node):
                self.down(world, token)
        for token in self.lowest(world, free, min(len(free), world.in_hbm() - goal)):
            self.down(world, token)


SMALL = {"schedule.iterations": "4", "protect.recent": "6"}

PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "arbor-epi": (build("arbor-epi"), SlowArborEpi),
    "arbor-epi, small": (
        build("arbor-epi", {"schedule.slack": "3", "protect.recent": "6", "allocate.eta": "0.4"}),
        lambda: SlowArborEpi(margin=3, recent=6, eta=0.4),
    ),
    "staircase": (build("staircase"), SlowStaircase),
    "staircase, small": (build("staircase", SMALL), lambda: SlowStaircase(4, 6)),
}
