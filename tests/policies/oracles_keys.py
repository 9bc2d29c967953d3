"""Literal re-implementations of the policies that compare keys, per KV head (see `oracles`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from arborsim.policies.base import Policy
from arborsim.policies.methods.expected_attention import ExpectedAttention
from arborsim.policies.methods.kivi import KIVI
from arborsim.policies.methods.rkv import RKV
from arborsim.policies.methods.thinkv_paper import ThinKVPaper
from tests.helpers.slow_world import EVICTED, HBM, HBM_C, HBM_Q, SlowWorld
from tests.policies.oracles_heads import SlowGroups, in_slots, plain_sum


class SlowRKV(SlowGroups):
    """R-KV with every cosine and every logit computed on its own."""

    mix, threshold = 0.07, 0.5

    def __init__(
        self, interval: int, window: int, kernel: int, adaptation: str = "path",
        published: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(adaptation)
        self.interval, self.window, self.kernel = interval, window, kernel
        self.published = published
        self.slots: dict[int, list[int]] = {}  # of a group, once decided: its tokens in slot order

    def recent(self, world: SlowWorld) -> int:
        return self.window

    def prefill(self, world: SlowWorld) -> None:
        if self.published:
            self.shrink(world)

    def step(self, world: SlowWorld) -> None:
        before = world.prompt + world.iterations - 1
        if (before if self.published else world.iterations) % self.interval == 0:
            self.shrink(world)

    def transition(self, world: SlowWorld) -> None:
        pass

    def shrink_group(self, world: SlowWorld, group: int) -> None:
        full = self.published and world.in_hbm(group) >= world.budget
        z = self.rated(world, group) if full else {}
        super().shrink_group(world, group)
        if full:
            kept = [t for t in z if world.tiers[group][t] == HBM]
            order = sorted(range(len(kept)), key=lambda i: (z[kept[i]], i), reverse=True)
            lead = [kept[i] for i in order]
            others = in_slots(self.slots.get(group, []), range(len(world.node)))
            self.slots[group] = lead + [t for t in others if t not in lead]

    def key(self, world: SlowWorld, group: int, token: int) -> list[float]:
        of_layer = world.episode.keys[token].tolist()
        return of_layer[group // len(of_layer[0])][group % len(of_layer[0])]

    def rated(self, world: SlowWorld, group: int) -> dict[int, float]:
        """Z of the tokens that may leave, in the order of slots."""
        tier = world.tiers[group]
        stream = world.active_tokens() if self.adaptation == "path" else range(len(world.node))
        held = [t for t in stream if tier[t] in (HBM, HBM_Q)]
        held = in_slots(self.slots.get(group, []), held)
        free = [t for t in held if t not in self.protected(world)]
        repeated = self.redundancy([self.key(world, group, t) for t in held])
        rated = self.importance(world, group, free)
        z = {}
        for i, token in enumerate(free):
            near = rated[max(0, i - self.kernel // 2) : i + self.kernel // 2 + 1]
            z[token] = self.mix * max(near) - (1 - self.mix) * repeated[held.index(token)]
        return z

    def choose(self, world: SlowWorld, group: int, free: list[int]) -> None:
        tier, z = world.tiers[group], self.rated(world, group)
        for _ in range(world.in_hbm(group) - world.budget):
            victim = min(free, key=lambda t: (z[t], t))
            free.remove(victim)
            tier[victim] = EVICTED

    def importance(self, world: SlowWorld, group: int, free: list[int]) -> list[float]:
        total, seen = [0.0] * len(free), [0] * len(free)
        for query in sorted(self.newest_tokens(world)):
            path = world.path(world.node[query])
            keys = [i for i, t in enumerate(free) if t in path and t < query]
            if not keys:
                continue
            of_layer = world.episode.head_attention.query(query).tolist()
            kv_heads = world.groups // len(of_layer)
            layer, size = group // kv_heads, len(of_layer[0]) // kv_heads
            heads = of_layer[layer][group % kv_heads * size :][:size]
            logit = {i: max(self.dot(h, self.key(world, group, free[i])) for h in heads)
                     for i in keys}  # fmt: skip
            top = max(logit.values())
            mass = sum(math.exp(x - top) for x in logit.values())
            for i in keys:
                total[i] += math.exp(logit[i] - top) / mass
                seen[i] += 1
        return [x / max(1, n) for x, n in zip(total, seen, strict=True)]

    def redundancy(self, keys: list[list[float]]) -> list[float]:
        length = [math.sqrt(sum(x * x for x in key)) or 1.0 for key in keys]
        unit = [[x / n for x in key] for key, n in zip(keys, length, strict=True)]
        cosine = [[0.0 if i == j else self.product(a, b) for j, b in enumerate(unit)]
                  for i, a in enumerate(unit)]  # fmt: skip
        for row in cosine:
            similar = [j for j, c in enumerate(row) if round(c, 9) > self.threshold]
            if similar:
                row[similar[-1]] = 0.0
            elif self.published:
                row[0] = 0.0
        mean = [round(plain_sum(column) / len(keys), 9) for column in zip(*cosine, strict=True)]
        weight = [math.exp(m - max(mean)) for m in mean]
        return [w / sum(weight) for w in weight]

    def dot(self, a: list[float], b: list[float]) -> float:
        return round(self.product(a, b), 9)

    def product(self, a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))


def rounded(number: float) -> float:
    """To 9 decimals as NumPy does it: Python rounds a few numbers the other way."""
    return float(np.round(number, 9))


class SlowThinKVPaper(SlowGroups):
    """Segments as lists of tokens, k-means as a person would do it."""

    low, high, pin_prompt = 0.4, 0.6, True

    def __init__(self, segment: int, rungs: list[int], adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.segment, self.rungs = segment, rungs
        self.sparsity: list[float] = []

    def recent(self, world: SlowWorld) -> int:
        return max(1, min(128, world.budget // 4))

    def see(self, world: SlowWorld, token: int) -> None:
        small = entries = 0
        path = world.path(world.node[token])
        rows = world.episode.head_attention.row(token)
        shared = rows.shape[0] * rows.shape[1] // world.groups  # query heads of a cache group
        for number, head in enumerate(rows.reshape(-1, rows.shape[2])):
            tier = world.tiers[number // shared]
            read = [w for t, w in zip(path, head.tolist(), strict=False) if tier[t] != EVICTED]
            limit = float(np.float32(0.01) * np.float32(max(read)))
            small += sum(weight < limit for weight in read)
            entries += len(read)
        self.sparsity.append(small / entries)

    def shrink(self, world: SlowWorld) -> None:
        stream = world.active_tokens() if self.adaptation == "path" else range(len(world.node))
        thoughts = [t for t in stream if t >= self.outside(world)]
        whole = len(thoughts) // self.segment
        segments = [thoughts[j * self.segment :][: self.segment] for j in range(whole)]
        mean = [rounded(plain_sum(self.sparsity[t] for t in s) / self.segment) for s in segments]
        kind = ["T" if m >= self.high else "E" if m < self.low else "R" for m in mean]
        safe = self.protected(world)
        settled = [j for j in range(whole) if not safe & set(segments[j])]
        order = sorted(settled, key=lambda j: ("TER".index(kind[j]), j))
        for group, tier in enumerate(world.tiers):
            for j in settled:
                for token in segments[j]:
                    if tier[token] == HBM:
                        tier[token] = HBM_C if kind[j] == "T" else HBM_Q
                later = kind[j + 1 :].count("T")
                if later:
                    keep = self.rungs[min(later, len(self.rungs)) - 1]
                    self.thin(world, group, segments[j], keep)
            if self.adaptation == "path":
                for node in world.off_path_order():
                    for token in world.block(node) if world.in_hbm(group) > world.budget else ():
                        tier[token] = EVICTED
            moved = True
            while moved:
                moved = False
                for j in order:
                    held = sum(tier[t] != EVICTED for t in segments[j])
                    below = [rung for rung in self.rungs if rung < held]
                    if below and world.in_hbm(group) > world.budget:
                        self.thin(world, group, segments[j], below[0])
                        moved = True
            for token in stream:
                if world.in_hbm(group) > world.budget and token not in safe:
                    tier[token] = EVICTED

    def thin(self, world: SlowWorld, group: int, tokens: list[int], keep: int) -> None:
        held = [t for t in tokens if world.tiers[group][t] != EVICTED]
        if len(held) <= keep:
            return
        of_layers = [world.episode.keys[t].tolist() for t in held]
        keys = [[head for layer in token for head in layer][group] for token in of_layers]
        means = [keys[i * len(held) // keep] for i in range(keep)]
        owner: list[int] = []
        for _ in range(10):
            nearest = [min(range(keep), key=lambda c: (self.away(key, means[c]), c))
                       for key in keys]  # fmt: skip
            if nearest == owner:
                break
            owner = nearest
            for cluster in set(owner):
                mine = [key for key, c in zip(keys, owner, strict=True) if c == cluster]
                means[cluster] = [rounded(sum(x) / len(mine)) for x in zip(*mine, strict=True)]
        chosen: list[int] = []
        for mean in means:
            free = [i for i in range(len(held)) if i not in chosen]
            chosen.append(min(free, key=lambda i: (self.away(keys[i], mean), -i)))
        for i, token in enumerate(held):
            if i not in chosen:
                world.tiers[group][token] = EVICTED

    def away(self, a: list[float], b: list[float]) -> float:
        return rounded(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


class SlowExpectedAttention(SlowGroups):
    """Every query un-rotated and every future position turned to on its own."""

    def __init__(
        self, interval: int, future: int, sinks: int, epsilon: float = 0.0, covariance: bool = True,
        norm: bool = True, adaptation: str = "path",
    ) -> None:  # fmt: skip
        super().__init__(adaptation)
        self.interval, self.future, self.first, self.epsilon = interval, future, sinks, epsilon
        self.covariance, self.norm = covariance, norm
        self.queries: list[list[list[float]]] = []  # by token and query head, before RoPE

    def sinks(self, world: SlowWorld) -> int:
        return self.first

    def recent(self, world: SlowWorld) -> int:
        return 1

    def turned(self, world: SlowWorld, vector: list[float], at: int, back: bool) -> list[float]:
        rope = world.episode.info.rope
        half, scale = len(vector) // 2, 1 / rope.scaling if back else rope.scaling
        result = [0.0] * len(vector)
        for i, frequency in enumerate(rope.inverse_frequencies):
            angle = float(np.float32(at) * np.float32(frequency)) * (-1 if back else 1)
            a, b = vector[i], vector[i + half]
            result[i] = scale * (a * math.cos(angle) - b * math.sin(angle))
            result[i + half] = scale * (b * math.cos(angle) + a * math.sin(angle))
        return result

    def see(self, world: SlowWorld, token: int) -> None:
        at = world.path(world.node[token]).index(token)
        if at >= self.first:
            heads = [h for layer in world.episode.head_attention.query(token) for h in layer]
            self.queries.append([self.turned(world, h.tolist(), at, True) for h in heads])

    def prefill(self, world: SlowWorld) -> None:
        self.watch(world)
        self.transition(world)

    def step(self, world: SlowWorld) -> None:
        self.watch(world)
        due = len(world.node) > world.budget and world.iterations % self.interval == 0
        self.shrink(world) if due else self.transition(world)

    def transition(self, world: SlowWorld) -> None:
        if any(world.in_hbm(group) > world.budget for group in range(world.groups)):
            self.shrink(world)

    def shrink(self, world: SlowWorld) -> None:
        budget, safe = world.budget, self.protected(world)
        whole = [list(tier) for tier in world.tiers]
        for group in range(world.groups):
            pinned = sum(whole[group][t] == HBM for t in safe)
            spare = max(0, budget - pinned)
            world.budget = budget - min(self.interval * len(world.leaves), spare // 2)
            self.shrink_group(world, group)
            world.budget = budget

    def choose(self, world: SlowWorld, group: int, free: list[int]) -> None:
        tier = world.tiers[group]
        stream = world.active_tokens() if self.adaptation == "path" else range(len(world.node))
        sinks = {t for leaf in world.leaves for t in world.path(leaf)[: self.first]}
        rated = [t for t in stream if tier[t] == HBM and t not in sinks]
        score = dict(zip(rated, self.expected(world, group, rated), strict=True))
        if self.norm:
            for token in rated:
                value = [h for layer in world.episode.values[token].tolist() for h in layer][group]
                length = math.sqrt(plain_sum(x * x for x in value))
                score[token] = (score[token] + self.epsilon) * length
        for _ in range(world.in_hbm(group) - world.budget):
            victim = min(free, key=lambda t: (score.get(t, 0.0), t))
            free.remove(victim)
            tier[victim] = EVICTED

    def expected(self, world: SlowWorld, group: int, rated: list[int]) -> list[float]:
        keys = [[h for layer in world.episode.keys[t].tolist() for h in layer][group]
                for t in rated]  # fmt: skip
        heads = len(self.queries[0]) // world.groups if self.queries else 1
        length = max(len(world.path(leaf)) for leaf in world.leaves)
        total = [0.0] * len(rated)
        for head in range(group * heads, (group + 1) * heads):
            own = [query[head] for query in self.queries] or [[0.0] * len(keys[0])]
            mean = [sum(x) / len(own) for x in zip(*own, strict=True)]
            apart = [[x - m for x, m in zip(query, mean, strict=True)] for query in own]
            logits = []
            for key in keys:
                # q.(R' k) for the mean R over positions: the same as (R q).k
                back = [0.0] * len(key)
                for at in range(length, length + self.future):
                    for i, x in enumerate(self.turned_back(world, key, at)):
                        back[i] += x / self.future
                logit = sum(m * x for m, x in zip(mean, back, strict=True))
                if self.covariance:
                    away = [sum(a * x for a, x in zip(q, back, strict=True)) for q in apart]
                    logit += sum(a * a for a in away) / len(own) / 2
                logits.append(round(logit, 9))
            weight = [math.exp(x - max(logits)) for x in logits]
            total = [t + w / sum(weight) for t, w in zip(total, weight, strict=True)]
        return [t / heads for t in total]

    def turned_back(self, world: SlowWorld, key: list[float], at: int) -> list[float]:
        """The transpose of the rotation: the other way round, scaled all the same."""
        scale = world.episode.info.rope.scaling
        return [scale * scale * x for x in self.turned(world, key, at, True)]


class SlowKIVI:
    """A group at a time, for as long as a path has one that is older than all windows."""

    def __init__(self, group: int, residual: int) -> None:
        self.group, self.residual = group, residual
        self.pin_prompt = False

    def decide(self, world: SlowWorld) -> None:
        paths = [world.path(leaf) for leaf in world.leaves]
        kept = {token for path in paths for token in path[-self.residual :]}
        kept |= set(range(world.prompt if self.pin_prompt else 0))
        for path in paths:
            while True:
                old = [t for t in path if world.tier[t] == HBM and t not in kept][: self.group]
                if len(old) < self.group:
                    break
                for token in old:
                    world.tier[token] = HBM_Q

    step = prefill = transition = decide

    def boundary(self, world: SlowWorld, node: int) -> None:
        pass

    def prune(self, world: SlowWorld) -> None:
        pass


PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "kivi": (KIVI(group=8, residual=5), lambda: SlowKIVI(8, 5)),
    "kivi-small": (KIVI(bits=4, group=9, residual=1), lambda: SlowKIVI(9, 1)),
    "rkv": (RKV(interval=7, window=3, kernel=3), lambda: SlowRKV(7, 3, 3)),
    "rkv-as-published": (
        RKV(interval=7, window=3, kernel=3, as_published=True),
        lambda: SlowRKV(7, 3, 3, published=True)),
    "rkv-flat": (
        RKV(interval=16, window=5, kernel=7, adaptation="flat"), lambda: SlowRKV(16, 5, 7, "flat")),
    "thinkv-paper": (
        ThinKVPaper(segment=12, low=0.4, high=0.6, most=8, least=2),
        lambda: SlowThinKVPaper(12, [8, 4, 2])),
    "thinkv-paper-flat": (
        ThinKVPaper(segment=9, low=0.4, high=0.6, most=6, least=1, adaptation="flat"),
        lambda: SlowThinKVPaper(9, [6, 3, 1], "flat")),
    "expected-attention": (
        ExpectedAttention(interval=7, future=5, sinks=2),
        lambda: SlowExpectedAttention(7, 5, 2)),
    "expected-attention-flat": (
        ExpectedAttention(interval=3, future=2, sinks=3, epsilon=0.02, adaptation="flat"),
        lambda: SlowExpectedAttention(3, 2, 3, 0.02, adaptation="flat")),
    "expected-attention,mean": (
        ExpectedAttention(interval=5, future=1, covariance=False, value_norm=False),
        lambda: SlowExpectedAttention(5, 1, 4, covariance=False, norm=False)),
}  # fmt: skip
