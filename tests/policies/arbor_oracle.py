"""ArborKV and its ablations written down literally, as a person would check them by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from arborsim.policies.base import Policy
from arborsim.policies.methods.arborkv import ArborKV
from tests.helpers.ablations import ABLATIONS
from tests.helpers.slow_world import EVICTED, HBM, SlowWorld
from tests.policies import oracles


class SlowArborKV(oracles.Nothing):
    """Algorithms 1 and 2 of the ArborKV paper; pressure trims one token at a time.

    Parameters are the settings of `ArborKV` that differ from its defaults.
    """

    theta_value, theta_certainty, theta_attention = 2.0, 0.5, 1.0
    alpha, gamma, eta, lambda_depth, lambda_distance, r_min = 1.5, 1.5, 0.7, 0.0, 0.15, 0.05
    k_min, tail, path_floor, margin = 4, 4, 0.25, 16
    use_value = use_certainty = use_attention = msve = True
    rehydrate = pin_prompt = True
    boundary_trims_path = only_under_pressure = keep_pruned = False
    retain, relief, sinks = "sinks+tail+heavy", "alpha", 4
    attention, priority = "share", "ratio"
    out = EVICTED

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            assert hasattr(type(self), name), name
            setattr(self, name, value)

    def held(self, world: SlowWorld, node: int) -> int:
        return sum(world.tier[t] == HBM for t in world.block(node))

    def scores(self, world: SlowWorld) -> list[float]:
        nodes = range(len(world.parent))
        if not self.msve:
            return [1.0 for _ in nodes]
        received = [
            sum(world.attended_later[t] for t in world.block(n))
            if world.closed[n] and n > 0
            else 0.0
            for n in nodes
        ]
        whole = max(sum(received), 1e-12) if self.attention == "share" else 1.0
        s = []
        for n in nodes:
            v = 0.0 if math.isnan(world.reward[n]) else world.reward[n]
            h = world.entropy[n]
            u = 0.0 if math.isnan(h) else 1 - h / math.log(world.vocab)
            a = received[n] / whole
            x = 0.0
            if self.use_value:
                x += self.theta_value * v
            if self.use_certainty:
                x += self.theta_certainty * u
            if self.use_attention:
                x += self.theta_attention * a
            s.append(1 / (1 + math.exp(-x)))
        return s

    def away(self, world: SlowWorld, node: int) -> int:
        return min(world.edges_between(node, leaf) for leaf in world.leaves)

    def weight(self, world: SlowWorld) -> list[float]:
        s, active = self.scores(world), world.active_nodes()
        weights = []
        for n in range(len(world.parent)):
            off = 1 if n not in active else 0
            weights.append(
                self.eta**off
                * s[n] ** self.gamma
                * math.exp(-self.lambda_depth * world.depth[n])
                * math.exp(-self.lambda_distance * self.away(world, n))
            )
        return weights

    def safe(self, world: SlowWorld, node: int) -> list[int]:
        """Protected tokens of a block, but for active leaves, which nothing here trims."""
        if node != 0:
            return []
        prompt = world.block(0)
        if self.pin_prompt:
            return prompt
        first = prompt[: 0 if self.retain == "tail" else self.sinks]
        newest = prompt[-1:] if world.leaves == (0,) else []
        return sorted({*first, *newest})

    def target(self, world: SlowWorld, weights: list[float], node: int) -> int:
        n = len(world.block(node))
        r = min(1.0, max(self.r_min, self.alpha * weights[node]))
        return max(self.least(world, node), math.floor(r * n))

    def least(self, world: SlowWorld, node: int) -> int:
        n = len(world.block(node))
        return min(n, max(self.k_min, min(self.tail, n), len(self.safe(world, node))))

    def last(self, world: SlowWorld, node: int) -> int:
        """What a block off the path can be brought down to when floors are too much."""
        if node in world.pruned and not self.keep_pruned:
            return len(self.safe(world, node))
        return self.least(world, node)

    def roomy(self, world: SlowWorld) -> bool:
        return self.only_under_pressure and world.in_hbm() < world.budget - self.margin

    def evict(self, world: SlowWorld, node: int, keep: int) -> None:
        """Protected first, then the tail, then by attention (or age); of equals the newest."""
        block = world.block(node)
        alive = [t for t in block if world.tier[t] == HBM]

        def precious(token: int) -> tuple[bool, bool, float, int]:
            tail = token in block[-self.tail :]
            heavy = self.heavy(world, token) if self.retain.endswith("heavy") else 0.0
            return token in self.safe(world, node), tail, 0.0 if tail else heavy, token

        for token in sorted(alive, key=precious)[: len(alive) - keep]:
            world.tier[token] = self.out

    def heavy(self, world: SlowWorld, token: int) -> float:
        return world.attended_later[token]

    def prefill(self, world: SlowWorld) -> None:
        if world.in_hbm() > world.budget:
            self.settle(world, {0: self.held(world, 0)}, self.weight(world))

    def boundary(self, world: SlowWorld, node: int) -> None:
        weights = self.weight(world)
        keep = {n: self.held(world, n) for n in range(len(world.parent))}
        trims = self.boundary_trims_path or node not in world.active_nodes()
        if trims and not self.roomy(world):
            keep[node] = min(keep[node], self.target(world, weights, node))
        self.settle(world, keep, weights)
        self.under_pressure(world)

    def transition(self, world: SlowWorld) -> None:
        weights, active = self.weight(world), world.active_nodes()
        nodes = range(len(world.parent))
        keep = {n: self.held(world, n) for n in nodes}
        for n in nodes:
            if n not in active and not self.roomy(world):
                keep[n] = min(keep[n], self.target(world, weights, n))
        if self.rehydrate:
            least = sum(keep[n] for n in active)
            least += sum(
                min(self.last(world, n), self.held(world, n)) for n in nodes if n not in active
            )
            for n in sorted(active):
                missing = len(world.block(n)) - keep[n]
                if missing and least + missing <= world.budget - 2 * self.margin:
                    keep[n] += missing
                    least += missing
        self.settle(world, keep, weights)
        self.under_pressure(world)

    def step(self, world: SlowWorld) -> None:
        self.under_pressure(world)

    def prune(self, world: SlowWorld) -> None:
        self.under_pressure(world)

    def under_pressure(self, world: SlowWorld) -> None:
        if world.in_hbm() < world.budget - self.margin:
            return
        weights, active = self.weight(world), world.active_nodes()
        keep = {n: self.held(world, n) for n in range(len(world.parent))}
        for n in keep:
            if n not in active:
                keep[n] = min(keep[n], self.target(world, weights, n))
        self.settle(world, keep, weights)

    def settle(self, world: SlowWorld, keep: dict[int, int], weights: list[float]) -> None:
        active = world.active_nodes()
        if sum(keep.values()) >= world.budget - self.margin:
            goal = world.budget - 2 * self.margin
            if self.relief == "lambda":
                self.tighten(world, keep, weights, goal)
            floor = {n: min(self.least(world, n), keep[n]) for n in keep if n not in active}
            self.trim(world, keep, weights, floor, goal)
            floor = {n: min(self.last(world, n), keep[n]) for n in world.pruned - active}
            self.trim(world, keep, weights, floor, goal)
            if sum(keep.values()) > goal and self.path_floor < 1:
                floor = {}
                for n in keep:
                    untouched = n in world.leaves if n else self.pin_prompt
                    if n in active and not untouched:
                        size = len(world.block(n))
                        high = max(self.least(world, n), math.ceil(self.path_floor * size))
                        floor[n] = min(keep[n], high)
                self.trim(world, keep, weights, floor, goal)
        for n, k in keep.items():
            held = self.held(world, n)
            if k > held:
                for token in world.block(n):
                    world.tier[token] = HBM
            elif k < held:
                self.evict(world, n, k)

    def tighten(
        self, world: SlowWorld, keep: dict[int, int], weights: list[float], goal: int
    ) -> None:
        """Raise lambda_Delta step by step: each step is the next token that some block loses."""
        losses = []
        for n in keep:
            if n in world.active_nodes():
                continue
            size = len(world.block(n))
            least = max(self.least(world, n), math.floor(self.r_min * size))
            for count in range(keep[n], least, -1):
                more = math.log(self.alpha * weights[n] * size / count) / self.away(world, n)
                losses.append((max(0.0, more), n))
        losses.sort()
        raised = -1.0
        while losses and (sum(keep.values()) > goal or losses[0][0] <= raised + 1e-9):
            if sum(keep.values()) > goal:
                raised = losses[0][0]
            keep[losses.pop(0)[1]] -= 1

    def trim(
        self,
        world: SlowWorld,
        keep: dict[int, int],
        weights: list[float],
        floor: dict[int, int],
        goal: int,
    ) -> None:
        """Take one token at a time from the block of the lowest priority."""
        while sum(keep.values()) > goal:
            free = [n for n in floor if keep[n] > floor[n]]
            if not free:
                return
            priority = {
                "ratio": lambda n: weights[n] * len(world.block(n)) / keep[n],
                "tokens": lambda n: weights[n] / keep[n],
                "weight": lambda n: weights[n],
            }[self.priority]
            keep[min(free, key=lambda n: (priority(n), n))] -= 1


SWITCHES: dict[str, dict[str, Any]] = {
    **ABLATIONS,
    "relief by lambda": {"relief": "lambda"},
    "boundary trims the path": {"boundary_trims_path": True},
    "pinned path": {"path_floor": 1.0},
    "trims only under pressure": {"only_under_pressure": True},
    "pruned blocks keep floors": {"keep_pruned": True},
    "depth decay": {"lambda_depth": 0.3},
    "mass of attention": {"attention": "mass"},
    "printed program": {"priority": "tokens"},
    "lowest weight first": {"priority": "weight"},
    "whole prompt, tail": {"retain": "tail"},
    "many sinks": {"pin_prompt": False, "sinks": 9},
}


def pair(settings: dict[str, Any]) -> tuple[Policy, Callable[[], Any]]:
    settings = {"margin": 4, **settings}
    return ArborKV(**settings), lambda: SlowArborKV(**settings)


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "arborkv": (ArborKV(), SlowArborKV),
    **{f"arborkv, {name}": pair(settings) for name, settings in SWITCHES.items()},
}
