"""Literal re-implementations of the policies on hidden states, keys and values (see `oracles`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from arborsim.core.observations import Signal
from arborsim.policies.base import Policy
from arborsim.policies.methods.epikv import (
    AttnHS,
    BandAdaptive,
    EpiKV,
    HSCosine,
    HSVariance,
    KVKey,
    KVValue,
)
from arborsim.policies.methods.keys import KeyDiff, KeyNorm, LagKVOfficial
from arborsim.policies.methods.thinkv import SegmentHS
from tests.helpers.slow_world import EVICTED, HBM, HBM_Q, SlowWorld
from tests.policies.oracles import SlowStream
from tests.policies.oracles_attention import SlowThinKV
from tests.policies.oracles_heads import SlowGroups

Bands = tuple[tuple[float, float, float], ...]
"""First and last layer as shares of the depth, and the weight."""

A = (10 / 32, 10 / 32, 1.0)
B = (21 / 32, 21 / 32, -1.0)
BAND_A = (7 / 32, 13 / 32, 1.29)
BAND_B = (18 / 32, 25 / 32, -1.0)
ALL = (0.0, 1.0, 1.0)


def add(values: Iterable[float]) -> float:
    """Plain left-to-right addition (`sum` compensates in later versions of Python)."""
    total = 0.0
    for value in values:
        total += value
    return total


def born_score(
    world: SlowWorld, token: int, signal: Signal, bands: Bands, z: bool, window: int, outside: int
) -> float:
    """Weighted rolling statistics over the last tokens of the token's own path.

    The first `outside` tokens take no part.
    """
    if token < outside:
        return 0.0
    path = world.path(world.node[token])
    seen = [t for t in path if outside <= t <= token][-window:][::-1]  # newest first
    score = 0.0
    for first, last, weight in bands:
        low, high = (min(round(x * world.layers), world.layers - 1) for x in (first, last))
        values = []
        for t in seen:
            layers = [float(world.episode.per_layer[signal][t, i]) for i in range(low, high + 1)]
            values.append(add(layers) / len(layers))
        mean = add(values) / len(values)
        if z and len(values) < 2:
            continue
        if z:
            std = math.sqrt(add((v - mean) * (v - mean) for v in values) / len(values))
            score += weight * ((values[0] - mean) / (std + 1e-6))
        else:
            score += weight * mean
    return score


class SlowRolling(SlowGroups):
    pin_prompt = True

    def __init__(
        self, signal: Signal, bands: Bands, z: bool, window: int = 64, adaptation: str = "path"
    ) -> None:
        super().__init__(adaptation)
        self.signal, self.bands, self.z, self.window = signal, bands, z, window
        self.born: list[float] = []

    def recent(self, world: SlowWorld) -> int:
        return min(128, world.budget // 4)

    def see(self, world: SlowWorld, token: int) -> None:
        what = self.signal, self.bands, self.z, self.window
        self.born.append(born_score(world, token, *what, self.outside(world)))

    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        return self.born[token]


class SlowTurn(SlowRolling):
    """The turn of the path's newest vectors, or of their differences, and its z-score."""

    def __init__(self, back: int, layer: int, window: int = 64, adaptation: str = "path") -> None:
        super().__init__(Signal.HIDDEN, (), True, window, adaptation)
        self.back, self.layer = back, layer
        self.turned: list[float] = []

    def see(self, world: SlowWorld, token: int) -> None:
        path = [t for t in world.path(world.node[token]) if t <= token]
        vectors = [world.episode.hidden.values[t, self.layer].tolist()
                   for t in path[-self.back - 1 :]]  # fmt: skip
        if self.back == 2:
            vectors = [[b - a for a, b in zip(*pair, strict=True)]
                       for pair in pairwise(vectors)]  # fmt: skip
        self.turned.append(0.0)
        if len(path) > self.back and length(vectors[0]) * length(vectors[1]) > 0:
            product = add(a * b for a, b in zip(*vectors, strict=True))
            self.turned[-1] = 1 - product / (length(vectors[1]) * length(vectors[0]))
        seen = [t for t in path if t >= self.outside(world)][-self.window :][::-1]  # newest first
        if len(seen) < 2:
            self.born.append(0.0)
            return
        values = [self.turned[t] for t in seen]
        mean = add(values) / len(values)
        std = math.sqrt(add((v - mean) * (v - mean) for v in values) / len(values))
        self.born.append((values[0] - mean) / (std + 1e-6))


class SlowAttnHS(SlowRolling):
    """Attention received and what the token had at birth, scaled over what was generated."""

    def __init__(self, adaptation: str = "path") -> None:
        super().__init__(Signal.HIDDEN_CHANGE, (A,), True, adaptation=adaptation)

    def choose(self, world: SlowWorld, group: int, free: list[int]) -> None:
        path = self.adaptation == "path"
        stream = world.active_tokens() if path else range(len(world.node))
        held = [t for t in stream if t >= self.outside(world) and world.tier[t] in (HBM, HBM_Q)]
        score = dict.fromkeys(free, 0.0)
        for part in (world.attended, self.born):
            low, high = min(part[t] for t in held), max(part[t] for t in held)
            for t in free:
                score[t] += 0.5 * ((part[t] - low) / (high - low)) if high > low else 0.0
        worst_first = sorted(free, key=lambda t: (score[t], t))
        for token in worst_first[: world.in_hbm(group) - world.budget]:
            world.tiers[group][token] = EVICTED


class SlowSegmentHS(SlowThinKV):
    pin_prompt = True

    def __init__(self, segment: int, keeps: tuple[int, int, int], adaptation: str = "path") -> None:
        super().__init__(segment, keeps, adaptation)
        self.born: dict[int, float] = {}

    def score(self, world: SlowWorld, token: int) -> float:
        if token not in self.born:
            what = Signal.HIDDEN_CHANGE, (A, B), True, 64
            self.born[token] = born_score(world, token, *what, self.outside(world))
        return self.born[token]


def group_vector(world: SlowWorld, group: int, token: int, per: str, which: str) -> list[float]:
    """A token's key or value in one group."""
    if per == "shared":
        return [float(x) for x in world.episode.per_layer[Signal.KEY_SKETCH][token]]
    by_layer = getattr(world.episode, which)[token].tolist()
    if per == "layer":
        return [x for head in by_layer[group] for x in head]
    heads = len(by_layer[0])
    return list(by_layer[group // heads][group % heads])


def length(vector: list[float]) -> float:
    return math.sqrt(add(x * x for x in vector))


class SlowKeys(SlowGroups):
    def __init__(self, per: str, adaptation: str = "path", recent: int = 128) -> None:
        super().__init__(adaptation)
        self.per, self.newest = per, recent

    def recent(self, world: SlowWorld) -> int:
        return max(1, min(self.newest, world.budget // 4))


class SlowKeyNorm(SlowKeys):
    def group_score(self, world: SlowWorld, group: int, token: int) -> float:
        if self.per == "shared":
            norms = [float(x) for x in world.episode.per_layer[Signal.KEY_NORM][token]]
        elif self.per == "layer":
            norms = [length(head) for head in world.episode.keys[token].tolist()[group]]
        else:
            norms = [length(group_vector(world, group, token, "head", "keys"))]
        return -add(norms) / len(norms)


class SlowKeyDiff(SlowKeys):
    def choose(self, world: SlowWorld, group: int, free: list[int]) -> None:
        path = self.adaptation == "path"
        stream = world.active_tokens() if path else range(len(world.node))
        held = [t for t in stream if world.tiers[group][t] in (HBM, HBM_Q)]
        direction = {}  # in whole steps: Python's integers are exact
        for t in held:
            key = group_vector(world, group, t, self.per, "keys")
            size = length(key) or 1.0
            direction[t] = [round(x / size * 65536) for x in key]
        mean = [sum(column) for column in zip(*direction.values(), strict=True)]
        like = {t: sum(a * b for a, b in zip(direction[t], mean, strict=True)) for t in free}
        order = sorted(free, key=lambda t: (-like[t], t))
        for victim in order[: world.in_hbm(group) - world.budget]:
            world.tiers[group][victim] = EVICTED


class SlowLagKVOfficial(SlowStream):
    def __init__(self, sinks: int, lag: int, ratio: float, adaptation: str = "path") -> None:
        super().__init__(adaptation)
        self.first, self.lag, self.ratio = sinks, lag, ratio
        self.had: dict[int, int] = {}

    def sinks(self, world: SlowWorld) -> int:
        return self.first

    def recent(self, world: SlowWorld) -> int:
        return self.lag

    def streams(self, world: SlowWorld) -> list[list[int]]:
        if self.adaptation == "flat":
            return [list(range(len(world.node)))]
        return [world.path(leaf) for leaf in world.leaves]

    def prefill(self, world: SlowWorld) -> None:
        self.compress(world)

    def transition(self, world: SlowWorld) -> None:
        self.compress(world)

    def step(self, world: SlowWorld) -> None:
        if any(self.complete(s) > self.had[i] for i, s in enumerate(self.streams(world))):
            self.compress(world)

    def complete(self, stream: list[int]) -> int:
        return max(0, len(stream) - self.first) // self.lag

    def compress(self, world: SlowWorld) -> None:
        safe = self.protected(world)
        for i, stream in enumerate(self.streams(world)):
            self.had[i] = self.complete(stream)
            rest = stream[self.first :]
            parts = [rest[j * self.lag : (j + 1) * self.lag] for j in range(self.had[i])]
            for j in range(len(parts) - 1):
                for group in range(world.groups):
                    self.shrink_part(world, group, parts[j], parts[j + 1], safe)

    def shrink_part(
        self, world: SlowWorld, group: int, part: list[int], after: list[int], safe: set[int]
    ) -> None:
        tier = world.tiers[group]
        held = [t for t in part if tier[t] == HBM]
        reference = [t for t in after if tier[t] == HBM]
        score = dict.fromkeys(held, 0.0)
        for which in ("keys", "values"):
            spread = [self.spread(world, group, t, reference, which) for t in held]
            weights = [math.exp(s - max(spread)) for s in spread]
            whole = add(weights)
            for t, weight in zip(held, weights, strict=True):
                score[t] += weight / whole
        lowest_first = sorted((t for t in held if t not in safe), key=lambda t: (score[t], t))
        for t in lowest_first[: max(0, len(held) - int(self.ratio * self.lag))]:
            tier[t] = EVICTED

    def spread(
        self, world: SlowWorld, group: int, token: int, reference: list[int], which: str
    ) -> float:
        vector = group_vector(world, group, token, "head", which)
        others = [group_vector(world, group, t, "head", which) for t in reference]
        scaled = []
        for i, x in enumerate(vector):
            column = [other[i] for other in others]
            low, high = (min(column), max(column)) if column else (0.0, 1.0)
            scaled.append((x - low) / ((high - low) or 1.0))
        mean = add(scaled) / len(scaled)
        return math.sqrt(add((x - mean) * (x - mean) for x in scaled) / (len(scaled) - 1))


def rolling(
    signal: Signal, bands: Bands, z: bool, window: int = 64, adaptation: str = "path"
) -> Any:
    return lambda: SlowRolling(signal, bands, z, window, adaptation)


CHANGE, KEY, VALUE = Signal.HIDDEN_CHANGE, Signal.KEY_VARIANCE, Signal.VALUE_VARIANCE

# Small windows make runs long in comparison, which is another way through the rolling statistics.
PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "epikv-window-3": (EpiKV(window=3), rolling(CHANGE, (A, B), True, 3)),
    "hs-variance": (HSVariance(), rolling(CHANGE, (A, B), False)),
    "hs-variance-flat": (
        HSVariance(window=2, adaptation="flat"), rolling(CHANGE, (A, B), False, 2, "flat")),
    "hs-cosine": (HSCosine(), lambda: SlowTurn(1, 1)),
    "hs-cosine-change": (
        HSCosine(turn="change", layer=0.6, window=5), lambda: SlowTurn(2, 2, 5)),
    "hs-cosine-flat": (
        HSCosine(window=3, adaptation="flat"), lambda: SlowTurn(1, 1, 3, "flat")),
    "band-adaptive": (BandAdaptive(), rolling(CHANGE, (BAND_A, BAND_B), True)),
    "band-adaptive-flat": (
        BandAdaptive(window=3, adaptation="flat"),
        rolling(CHANGE, (BAND_A, BAND_B), True, 3, "flat")),
    "kv-key": (KVKey(), rolling(KEY, (ALL,), False)),
    "kv-key-raw": (KVKey(window=1), rolling(KEY, (ALL,), False, 1)),
    "kv-key-flat": (KVKey(window=3, adaptation="flat"), rolling(KEY, (ALL,), False, 3, "flat")),
    "kv-value": (KVValue(window=2), rolling(VALUE, (ALL,), False, 2)),
    "kv-value-flat": (KVValue(adaptation="flat"), rolling(VALUE, (ALL,), False, 64, "flat")),
    "attn-hs": (AttnHS(), SlowAttnHS),
    "attn-hs-flat": (AttnHS(adaptation="flat"), lambda: SlowAttnHS("flat")),
    "segment-hs": (
        SegmentHS(segment=8, keep_r=6, keep_e=3, keep_t=1), lambda: SlowSegmentHS(8, (6, 3, 1))),
    "segment-hs-flat": (
        SegmentHS(segment=5, keep_r=4, keep_e=2, keep_t=0, adaptation="flat"),
        lambda: SlowSegmentHS(5, (4, 2, 0), "flat")),
    "key-norm": (KeyNorm(), lambda: SlowKeyNorm("head")),
    "key-norm-layer": (KeyNorm(per="layer", recent=2), lambda: SlowKeyNorm("layer", recent=2)),
    "key-norm-shared": (KeyNorm(per="shared"), lambda: SlowKeyNorm("shared")),
    "key-norm-flat": (KeyNorm(adaptation="flat"), lambda: SlowKeyNorm("head", "flat")),
    "keydiff": (KeyDiff(), lambda: SlowKeyDiff("head")),
    "keydiff-layer": (KeyDiff(per="layer", recent=2), lambda: SlowKeyDiff("layer", recent=2)),
    "keydiff-shared": (KeyDiff(per="shared"), lambda: SlowKeyDiff("shared")),
    "keydiff-flat": (KeyDiff(adaptation="flat"), lambda: SlowKeyDiff("head", "flat")),
    "lag-kv-official": (
        LagKVOfficial(sinks=3, lag=8, ratio=0.5), lambda: SlowLagKVOfficial(3, 8, 0.5)),
    "lag-kv-official-flat": (
        LagKVOfficial(sinks=0, lag=5, ratio=0.3, adaptation="flat"),
        lambda: SlowLagKVOfficial(0, 5, 0.3, "flat")),
}  # fmt: skip
