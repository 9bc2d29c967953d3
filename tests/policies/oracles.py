"""Every policy written down literally, as a person would check it by hand."""

from __future__ import annotations

import math

import numpy as np

from arborsim.signals.observations import Signal
from tests.helpers.slow_world import DDR, DDR_Q, EVICTED, HBM, HBM_Q, SlowWorld


class Nothing:
    """`full`."""

    def prefill(self, world: SlowWorld) -> None: ...
    def step(self, world: SlowWorld) -> None: ...
    def transition(self, world: SlowWorld) -> None: ...
    def boundary(self, world: SlowWorld, node: int) -> None: ...


class SlowStream(Nothing):
    """Over budget, drop off-path blocks, then the lowest unprotected token, one at a time."""

    def __init__(self, adaptation: str = "path") -> None:
        self.adaptation = adaptation

    def prefill(self, world: SlowWorld) -> None:
        self.shrink(world)

    def step(self, world: SlowWorld) -> None:
        self.shrink(world)

    def transition(self, world: SlowWorld) -> None:
        self.shrink(world)

    def head(self, world: SlowWorld) -> int:
        raise NotImplementedError

    def recent(self, world: SlowWorld) -> int:
        raise NotImplementedError

    def score(self, world: SlowWorld, token: int) -> float:
        raise NotImplementedError

    def protected(self, world: SlowWorld) -> set[int]:
        if self.adaptation == "flat":
            everything = list(range(len(world.tier)))
            return set(everything[: self.head(world)] + everything[-self.recent(world) :])
        share = max(1, self.recent(world) // len(world.leaves))
        safe: set[int] = set()
        for leaf in world.leaves:
            path = world.path(leaf)
            safe |= set(path[: self.head(world)]) | set(path[-share:])
        return safe

    def shrink(self, world: SlowWorld) -> None:
        if self.adaptation == "path":
            for node in world.off_path_order():
                if world.in_hbm() <= world.budget:
                    return
                for token in world.block(node):
                    world.tier[token] = EVICTED
        if world.in_hbm() <= world.budget:
            return
        stream = world.active_tokens() if self.adaptation == "path" else range(len(world.tier))
        safe = self.protected(world)
        score = {t: self.score(world, t) for t in stream}
        while world.in_hbm() > world.budget:
            free = [t for t in stream if world.tier[t] in (HBM, HBM_Q) and t not in safe]
            victim = min(free, key=lambda t: (score[t], t))
            world.tier[victim] = EVICTED


class SlowRandom(SlowStream):
    def __init__(self, seed: int = 0, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.rng = np.random.default_rng(seed)
        self.drawn: list[float] = []

    def head(self, world: SlowWorld) -> int:
        return world.prompt

    def recent(self, world: SlowWorld) -> int:
        return min(128, world.budget // 4)

    def score(self, world: SlowWorld, token: int) -> float:
        while len(self.drawn) <= token:
            self.drawn.append(float(self.rng.random()))
        return self.drawn[token]


class SlowStreaming(SlowStream):
    def head(self, world: SlowWorld) -> int:
        return 4

    def recent(self, world: SlowWorld) -> int:
        return 1

    def score(self, world: SlowWorld, token: int) -> float:
        return float(token)


class SlowH2O(SlowStream):
    def head(self, world: SlowWorld) -> int:
        return 0

    def recent(self, world: SlowWorld) -> int:
        return max(1, world.budget // 2)

    def score(self, world: SlowWorld, token: int) -> float:
        return world.attended[token]


class SlowEpiKV(SlowStream):
    """Section 3: z-scores over the trailing 64 generated tokens of the token's own path."""

    def __init__(self, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.born: dict[int, float] = {}

    def head(self, world: SlowWorld) -> int:
        return world.prompt

    def recent(self, world: SlowWorld) -> int:
        return min(128, world.budget // 4)

    def step(self, world: SlowWorld) -> None:
        for leaf in world.leaves:
            for token in world.block(leaf):
                if token not in self.born:
                    self.born[token] = self.contrast(world, token, leaf)
        super().step(world)

    def contrast(self, world: SlowWorld, token: int, leaf: int) -> float:
        change = world.episode.per_layer[Signal.HIDDEN_CHANGE]
        generated = [t for t in world.path(leaf) if world.prompt <= t <= token]
        window = generated[-64:]
        if len(window) < 2:
            return 0.0
        z = []
        for share in (10 / 32, 21 / 32):
            layer = min(round(share * world.layers), world.layers - 1)
            values = [float(change[t, layer]) for t in window]
            mean = sum(values) / len(values)
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
            z.append((values[-1] - mean) / (std + 1e-6))
        return z[0] - z[1]

    def score(self, world: SlowWorld, token: int) -> float:
        return self.born.get(token, 0.0)


class SlowLagKV(SlowStream):
    def head(self, world: SlowWorld) -> int:
        return world.prompt

    def recent(self, world: SlowWorld) -> int:
        return min(128, world.budget // 4)

    def score(self, world: SlowWorld, token: int) -> float:
        keys = world.episode.per_layer[Signal.LAG_KEY][token]
        values = world.episode.per_layer[Signal.LAG_VALUE][token]
        total = 0.0
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            total += key + value
        return total / world.layers


class SlowHierarchy(Nothing):
    """Algorithm 1 of the memory-hierarchy paper, with the budget as a further cap."""

    def __init__(
        self, interval: int, recent: int, beta: float = 0.5, r: float = 0.03, sinks: int = 4,
        total: bool = False, quantised: float = 0.0,
    ) -> None:  # fmt: skip
        self.interval, self.recent, self.beta, self.r = interval, recent, beta, r
        self.sinks, self.total, self.quantised = sinks, total, quantised

    def step(self, world: SlowWorld) -> None:
        self.manage(world, scheduled=world.iterations % self.interval == 0)

    def transition(self, world: SlowWorld) -> None:
        self.manage(world, scheduled=False)

    def manage(self, world: SlowWorld, scheduled: bool) -> None:
        if not scheduled and world.in_hbm() <= world.budget:
            return
        safe: set[int] = set()
        share = max(1, self.recent // len(world.leaves))
        for leaf in world.leaves:
            path = world.path(leaf)
            safe |= set(path[: world.prompt + self.sinks]) | set(path[-share:])
        path_tokens = world.active_tokens()
        free = [t for t in path_tokens if t not in safe and world.tier[t] != EVICTED]
        free.sort(key=lambda t: (world.attended[t], t))
        if scheduled:
            gone = sum(world.tier[t] == EVICTED for t in path_tokens)
            doomed = int(self.r * len(free))
            if self.total:
                doomed = max(0, int(self.r * (len(free) + gone)) - gone)
            for token in free[:doomed]:
                world.tier[token] = EVICTED
            free = free[doomed:]
        pinned = sum(world.tier[t] != EVICTED for t in safe)
        for token in safe:
            if world.tier[token] != EVICTED:
                world.tier[token] = HBM
        spare = world.budget - pinned
        room = spare - min(self.interval * len(world.leaves), spare // 2)
        wanted = int(self.beta * len(free))

        def off_path() -> int:
            active = world.active_nodes()
            return sum(
                tier in (HBM, HBM_Q) and node not in active
                for tier, node in zip(world.tier, world.node, strict=True)
            )

        for node in world.off_path_order():
            if off_path() + wanted <= room:
                break
            for token in world.block(node):
                if world.tier[token] in (HBM, HBM_Q):
                    world.tier[token] = DDR
        in_hbm = min(wanted, room - off_path())
        cold = free[: len(free) - in_hbm]
        for token in free:
            world.tier[token] = HBM
        for token in cold:
            world.tier[token] = DDR
        for token in cold[: int(self.quantised * len(cold))]:
            world.tier[token] = DDR_Q


class SlowArborKV(Nothing):
    """Algorithms 1 and 2 of the ArborKV paper; pressure trims one token at a time."""

    theta = (2.0, 0.5, 1.0)
    alpha, gamma, eta, lambda_d, lambda_delta, r_min = 1.5, 1.5, 0.7, 0.0, 0.15, 0.05
    k_min, tail, path_floor, margin = 4, 4, 0.25, 16

    def __init__(self, rehydrate: bool = True) -> None:
        self.rehydrate = rehydrate

    def held(self, world: SlowWorld, node: int) -> int:
        return sum(world.tier[t] != EVICTED for t in world.block(node))

    def scores(self, world: SlowWorld) -> list[float]:
        nodes = range(len(world.parent))
        received = [
            sum(world.attended_later[t] for t in world.block(n))
            if world.closed[n] and n > 0
            else 0.0
            for n in nodes
        ]
        whole = max(sum(received), 1e-12)
        s = []
        for n in nodes:
            v = 0.0 if math.isnan(world.reward[n]) else world.reward[n]
            h = world.entropy[n]
            u = 0.0 if math.isnan(h) else 1 - h / math.log(world.vocab)
            a = received[n] / whole
            x = self.theta[0] * v + self.theta[1] * u + self.theta[2] * a
            s.append(1 / (1 + math.exp(-x)))
        return s

    def weight(self, world: SlowWorld) -> list[float]:
        s, active = self.scores(world), world.active_nodes()
        weights = []
        for n in range(len(world.parent)):
            delta = min(world.edges_between(n, leaf) for leaf in world.leaves)
            off = 1 if n not in active else 0
            weights.append(
                self.eta**off
                * s[n] ** self.gamma
                * math.exp(-self.lambda_d * world.depth[n])
                * math.exp(-self.lambda_delta * delta)
            )
        return weights

    def target(self, world: SlowWorld, weights: list[float], node: int) -> int:
        n = len(world.block(node))
        r = min(1.0, max(self.r_min, self.alpha * weights[node]))
        return min(n, max(self.k_min, min(self.tail, n), math.floor(r * n)))

    def least(self, world: SlowWorld, node: int) -> int:
        n = len(world.block(node))
        return min(n, max(self.k_min, min(self.tail, n)))

    def evict(self, world: SlowWorld, node: int, keep: int) -> None:
        block = world.block(node)
        alive = [t for t in block if world.tier[t] != EVICTED]
        tail = [t for t in alive if t in block[-self.tail :]]
        if keep <= len(tail):
            kept = alive[len(alive) - keep :]
        else:
            rest = [t for t in alive if t not in tail]
            rest.sort(key=lambda t: (world.attended_later[t], t), reverse=True)
            kept = tail + rest[: keep - len(tail)]
        for token in alive:
            if token not in kept:
                world.tier[token] = EVICTED

    def boundary(self, world: SlowWorld, node: int) -> None:
        if node not in world.active_nodes():
            keep = min(self.held(world, node), self.target(world, self.weight(world), node))
            self.evict(world, node, keep)
        self.under_pressure(world)

    def transition(self, world: SlowWorld) -> None:
        weights, active = self.weight(world), world.active_nodes()
        nodes = range(len(world.parent))
        keep = {n: self.held(world, n) for n in nodes}
        for n in nodes:
            if n not in active:
                keep[n] = min(keep[n], self.target(world, weights, n))
        if self.rehydrate:
            least = sum(keep[n] for n in active)
            least += sum(
                min(self.least(world, n), self.held(world, n)) for n in nodes if n not in active
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
            floor = {n: min(self.least(world, n), keep[n]) for n in keep if n not in active}
            self.trim(world, keep, weights, floor, goal)
            if sum(keep.values()) > goal:
                floor = {}
                for n in keep:
                    if n in active and n != 0 and n not in world.leaves:
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

    def trim(
        self,
        world: SlowWorld,
        keep: dict[int, int],
        weights: list[float],
        floor: dict[int, int],
        goal: int,
    ) -> None:
        """Take one token at a time from the block that values its last token least."""
        while sum(keep.values()) > goal:
            free = [n for n in floor if keep[n] > floor[n]]
            if not free:
                return
            scale = {n: weights[n] * len(world.block(n)) for n in free}
            keep[max(free, key=lambda n: (keep[n] / scale[n], -n))] -= 1
