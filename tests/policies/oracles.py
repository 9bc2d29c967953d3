"""Every policy written down literally, as a person would check it by hand."""

from __future__ import annotations

import math

import numpy as np

from arborsim.core.observations import Signal
from tests.helpers.slow_world import DDR, DDR_Q, EVICTED, HBM, HBM_Q, SlowWorld


class Nothing:
    """`full`."""

    def prefill(self, world: SlowWorld) -> None: ...
    def step(self, world: SlowWorld) -> None: ...
    def transition(self, world: SlowWorld) -> None: ...
    def boundary(self, world: SlowWorld, node: int) -> None: ...
    def prune(self, world: SlowWorld) -> None: ...


class SlowStream(Nothing):
    """Over budget, drop off-path blocks, then the lowest unprotected token, one at a time."""

    pin_prompt = False

    def __init__(self, adaptation: str = "path") -> None:
        self.adaptation = adaptation

    def prefill(self, world: SlowWorld) -> None:
        self.shrink(world)

    def step(self, world: SlowWorld) -> None:
        self.shrink(world)

    def transition(self, world: SlowWorld) -> None:
        self.shrink(world)

    def sinks(self, world: SlowWorld) -> int:
        return 0

    def outside(self, world: SlowWorld) -> int:
        """First tokens that take no part, because they are never evicted."""
        return world.prompt if self.pin_prompt else 0

    def recent(self, world: SlowWorld) -> int:
        raise NotImplementedError

    def score(self, world: SlowWorld, token: int) -> float:
        raise NotImplementedError

    def protected(self, world: SlowWorld) -> set[int]:
        head = self.outside(world) + self.sinks(world)
        if self.adaptation == "flat":
            return set(range(len(world.tier))[:head]) | self.newest_tokens(world)
        first = {token for leaf in world.leaves for token in world.path(leaf)[:head]}
        return first | self.newest_tokens(world)

    def newest_tokens(self, world: SlowWorld) -> set[int]:
        recent = self.recent(world)
        if not recent:
            return set()
        if self.adaptation == "flat":
            return set(range(len(world.tier))[-recent:])
        share = max(1, recent // len(world.leaves))
        return {token for leaf in world.leaves for token in world.path(leaf)[-share:]}

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
    pin_prompt = True

    def __init__(self, seed: int = 0, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.rng = np.random.default_rng(seed)
        self.drawn: list[float] = []

    def recent(self, world: SlowWorld) -> int:
        return min(128, world.budget // 4)

    def score(self, world: SlowWorld, token: int) -> float:
        while len(self.drawn) <= token:
            self.drawn.append(float(self.rng.random()))
        return self.drawn[token]


class SlowStreaming(SlowStream):
    def sinks(self, world: SlowWorld) -> int:
        return 4

    def recent(self, world: SlowWorld) -> int:
        return 1

    def score(self, world: SlowWorld, token: int) -> float:
        return float(token)


class SlowH2O(SlowStream):
    def __init__(self, adaptation: str = "path", count_prompt: bool = True) -> None:
        super().__init__(adaptation)
        self.count_prompt, self.received = count_prompt, dict[int, float]()
        self.seen = 0

    def step(self, world: SlowWorld) -> None:
        for token in range(self.seen, len(world.tier)):
            row = world.episode.attention.row(token).tolist()
            for at, weight in zip(world.path(world.node[token]), row, strict=False):
                self.received[at] = self.received.get(at, 0.0) + weight
        self.seen = len(world.tier)
        super().step(world)

    def prefill(self, world: SlowWorld) -> None:
        self.seen = world.prompt
        super().prefill(world)

    def recent(self, world: SlowWorld) -> int:
        return max(1, world.budget // 2)

    def score(self, world: SlowWorld, token: int) -> float:
        return world.attended[token] if self.count_prompt else self.received.get(token, 0.0)


class SlowEpiKV(SlowStream):
    """Section 3: z-scores over the trailing 64 generated tokens of the token's own path."""

    pin_prompt = True

    def __init__(self, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.born: dict[int, float] = {}

    def recent(self, world: SlowWorld) -> int:
        return min(128, world.budget // 4)

    def step(self, world: SlowWorld) -> None:
        self.see(world)
        super().step(world)

    def prefill(self, world: SlowWorld) -> None:
        self.see(world)
        super().prefill(world)

    def see(self, world: SlowWorld) -> None:
        for leaf in world.leaves:
            for token in world.block(leaf):
                if token not in self.born:
                    self.born[token] = self.contrast(world, token, leaf)

    def contrast(self, world: SlowWorld, token: int, leaf: int) -> float:
        change = world.episode.per_layer[Signal.HIDDEN_CHANGE]
        generated = [t for t in world.path(leaf) if self.outside(world) <= t <= token]
        window = generated[-64:][::-1]  # summed newest first, so that ties are ties to the last bit
        if len(window) < 2:
            return 0.0
        z = []
        for share in (10 / 32, 21 / 32):
            layer = min(round(share * world.layers), world.layers - 1)
            values = [float(change[t, layer]) for t in window]
            mean = sum(values) / len(values)
            std = math.sqrt(sum((v - mean) * (v - mean) for v in values) / len(values))
            z.append((values[0] - mean) / (std + 1e-6))
        return z[0] - z[1]

    def score(self, world: SlowWorld, token: int) -> float:
        return self.born.get(token, 0.0)


class SlowLagKV(SlowStream):
    pin_prompt = True

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

    pin_prompt = True

    def __init__(
        self, interval: int, recent: int, beta: float = 0.5, r: float = 0.03, sinks: int = 4,
        total: bool = False, quantised: float = 0.0,
    ) -> None:  # fmt: skip
        self.interval, self.recent, self.beta, self.r = interval, recent, beta, r
        self.sinks, self.total, self.quantised = sinks, total, quantised

    def prefill(self, world: SlowWorld) -> None:
        self.manage(world, scheduled=False)

    def step(self, world: SlowWorld) -> None:
        self.manage(world, scheduled=world.iterations % self.interval == 0)

    def transition(self, world: SlowWorld) -> None:
        self.manage(world, scheduled=False)

    def importance(self, world: SlowWorld, tokens: list[int]) -> dict[int, float]:
        return {t: world.attended[t] for t in tokens}

    def manage(self, world: SlowWorld, scheduled: bool) -> None:
        if not scheduled and world.in_hbm() <= world.budget:
            return
        safe: set[int] = set()
        share = max(1, self.recent // len(world.leaves))
        head = (world.prompt if self.pin_prompt else 0) + self.sinks
        for leaf in world.leaves:
            path = world.path(leaf)
            safe |= set(path[:head]) | set(path[-share:])
        path_tokens = world.active_tokens()
        free = [t for t in path_tokens if t not in safe and world.tier[t] != EVICTED]
        importance = self.importance(world, free)
        free.sort(key=lambda t: (importance[t], t))
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
