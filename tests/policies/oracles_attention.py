"""Literal re-implementations of the policies that rank by attention (see `oracles`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from arborsim.core.observations import Signal
from arborsim.policies.base import Policy
from arborsim.policies.methods.attention import Tova, Vatp
from arborsim.policies.methods.snapkv import SnapKV
from arborsim.policies.methods.thinkv import ThinKV
from tests.helpers.slow_world import EVICTED, HBM, HBM_Q, SlowWorld
from tests.policies.oracles import Nothing, SlowStream


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
    def __init__(
        self, segment: int, keeps: tuple[int, int, int], adaptation: str = "path", layers: int = 0
    ) -> None:
        super().__init__(adaptation)
        self.segment, self.keeps, self.layers = segment, keeps, layers

    def row(self, world: SlowWorld, token: int) -> list[list[float]]:
        if not self.layers:
            return super().row(world, token)
        captured = world.episode.layer_attention.of(token)
        return [means.tolist() for means, _ in captured[-self.layers :]]

    def recent(self, world: SlowWorld) -> int:
        return max(1, min(128, world.budget // 4))

    def score(self, world: SlowWorld, token: int) -> float:
        return self.newest[-1][token]

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
        safe, newest = self.protected(world), self.newest_tokens(world)
        segments: dict[int, list[int]] = {}
        for place, token in enumerate(stream):
            if world.tier[token] in (HBM, HBM_Q) and token not in newest:
                segments.setdefault(place // self.segment, []).append(token)
        entropy = {j: self.entropy(tokens) for j, tokens in segments.items()}
        segments = {j: [t for t in own if t not in safe] for j, own in segments.items()}
        ordered = sorted(entropy.values())
        low = ordered[len(ordered) // 3] if ordered else 0.0
        high = ordered[2 * len(ordered) // 3] if ordered else 0.0
        room = world.budget - (world.in_hbm() - sum(map(len, segments.values())))
        for number, tokens in sorted(segments.items()):
            kind = 0 if entropy[number] <= low else 1 if entropy[number] <= high else 2
            most = self.keeps[kind]
            best = sorted(tokens, key=lambda t: (self.score(world, t), t), reverse=True)
            kept = best[: min(most, room)]
            room -= len(kept)
            for token in tokens:
                if token not in kept:
                    world.tier[token] = EVICTED

    def entropy(self, tokens: list[int]) -> float:
        row = {t: sum(layer[t] for layer in self.newest) / len(self.newest) for t in tokens}
        mass = sum(row.values())
        if mass == 0:
            return round(math.log(len(tokens)), 9)
        return round(-sum(x / mass * math.log(x / mass) for x in row.values() if x > 0), 9)


class SlowTova(SlowStream):
    """Group by group: the candidate with the least attention from the newest query goes."""

    def __init__(self, per: str, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.per = per
        self.groups: list[SlowAttention] = []

    def watch(self, world: SlowWorld) -> None:
        if not self.groups:
            kinds = range(world.groups)
            self.groups = [SlowGroupRow(self.per, g) for g in kinds]
        for group in self.groups:
            group.watch(world)

    def prefill(self, world: SlowWorld) -> None:
        self.watch(world)
        super().prefill(world)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        super().step(world)

    def newest_tokens(self, world: SlowWorld) -> set[int]:
        return set()

    def shrink(self, world: SlowWorld) -> None:
        shrink_groups(self, world, lambda group, t: self.groups[group].newest[0][t])


def shrink_groups(stream: SlowStream, world: SlowWorld, score: Callable[[int, int], float]) -> None:
    """`SlowStream.shrink` for each group on its own."""
    for group, tier in enumerate(world.tiers):
        if stream.adaptation == "path":
            for node in world.off_path_order():
                if world.in_hbm(group) <= world.budget:
                    break
                for token in world.block(node):
                    tier[token] = EVICTED
        path = stream.adaptation == "path"
        tokens = world.active_tokens() if path else range(len(tier))
        safe = stream.protected(world)
        while world.in_hbm(group) > world.budget:
            free = [t for t in tokens if tier[t] in (HBM, HBM_Q) and t not in safe]
            tier[min(free, key=lambda t: (score(group, t), t))] = EVICTED


def group_row(world: SlowWorld, token: int, per: str, group: int) -> list[float]:
    """Attention of a token's query, mean over the query heads of one group."""
    if per == "shared":
        return [float(x) for x in world.episode.attention.row(token)]
    heads = world.episode.head_attention.row(token)
    geometry = world.episode.info.geometry
    layer, first, count = group, 0, geometry.heads
    if per == "head":
        layer, kv_head = divmod(group, geometry.kv_heads)
        count = geometry.heads // geometry.kv_heads
        first = kv_head * count
    row = []
    for position in range(heads.shape[2]):
        total = 0.0
        for head in range(first, first + count):
            total += float(heads[layer, head, position])
        row.append(total / count)
    return row


class SlowGroupRow(SlowAttention):
    def __init__(self, per: str, group: int) -> None:
        super().__init__()
        self.per, self.group = per, group

    def row(self, world: SlowWorld, token: int) -> list[list[float]]:
        return [group_row(world, token, self.per, self.group)]


class SlowVatp(SlowStream):
    def __init__(self, per: str, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.per = per
        self.received: list[list[float]] = []
        self.seen = 0

    def sinks(self, world: SlowWorld) -> int:
        return min(20, world.budget // 4)

    def recent(self, world: SlowWorld) -> int:
        return max(1, world.budget // 2)

    def shrink(self, world: SlowWorld) -> None:
        self.received += [[] for _ in range(world.groups - len(self.received))]
        for group, received in enumerate(self.received):
            received += [0.0] * (len(world.tier) - len(received))
            for token in range(self.seen, len(world.tier)):
                row = group_row(world, token, self.per, group)
                for at, weight in zip(world.path(world.node[token]), row, strict=False):
                    received[at] += weight
        self.seen = len(world.tier)
        shrink_groups(self, world, lambda g, t: self.received[g][t] * self.size(world, g, t))

    def size(self, world: SlowWorld, group: int, token: int) -> float:
        if self.per == "shared":
            norms = world.episode.per_layer[Signal.VALUE_NORM][token].tolist()
            return sum(norms) / len(norms)
        values = world.episode.values[token]
        if self.per == "head":
            layer, head = divmod(group, values.shape[1])
            return sum(abs(x) for x in values[layer, head].tolist())
        sizes = [sum(abs(x) for x in head) for head in values[group].tolist()]
        return sum(sizes) / len(sizes)


class SlowSnapKV(Nothing):
    def __init__(self, per: str, window: int, kernel: int) -> None:
        self.per, self.window, self.kernel = per, window, kernel

    def prefill(self, world: SlowWorld) -> None:
        before = world.prompt - min(self.window, world.budget)
        for group, tier in enumerate(world.tiers):
            votes = [0.0] * world.prompt
            for token in range(world.prompt)[-self.window :]:
                for at, weight in enumerate(group_row(world, token, self.per, group)):
                    votes[at] += weight
            pooled = []
            for centre in range(before):
                total = 0.0
                for at in range(centre - self.kernel // 2, centre + self.kernel // 2 + 1):
                    total += votes[at] if 0 <= at < before else 0.0
                pooled.append(total / self.kernel)
            worst_first = sorted(range(before), key=lambda t: (pooled[t], t))
            for token in worst_first[: max(0, world.prompt - world.budget)]:
                tier[token] = EVICTED


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "thinkv": (
        ThinKV(segment=8, keep_r=6, keep_e=3, keep_t=1), lambda: SlowThinKV(8, (6, 3, 1))),
    "thinkv-flat": (
        ThinKV(segment=5, keep_r=4, keep_e=2, keep_t=0, adaptation="flat"),
        lambda: SlowThinKV(5, (4, 2, 0), "flat")),
    "thinkv-layers": (
        ThinKV(segment=8, keep_r=6, keep_e=3, keep_t=1, rows="layers", layers=2),
        lambda: SlowThinKV(8, (6, 3, 1), layers=2)),
    "tova": (Tova(), lambda: SlowTova("layer")),
    "tova-head-flat": (Tova(per="head", adaptation="flat"), lambda: SlowTova("head", "flat")),
    "tova-shared": (Tova(per="shared"), lambda: SlowTova("shared")),
    "tova-shared-flat": (
        Tova(per="shared", adaptation="flat"), lambda: SlowTova("shared", "flat")),
    "vatp": (Vatp(), lambda: SlowVatp("head")),
    "vatp-layer-flat": (Vatp(per="layer", adaptation="flat"), lambda: SlowVatp("layer", "flat")),
    "vatp-shared": (Vatp(per="shared"), lambda: SlowVatp("shared")),
    "snapkv": (SnapKV(window=4, kernel=3), lambda: SlowSnapKV("head", 4, 3)),
    "snapkv-layer": (SnapKV(per="layer", window=2), lambda: SlowSnapKV("layer", 2, 5)),
    "snapkv-shared": (SnapKV(per="shared", window=3), lambda: SlowSnapKV("shared", 3, 5)),
}  # fmt: skip
