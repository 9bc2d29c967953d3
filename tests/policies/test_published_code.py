"""Policies keep what their authors' code keeps, set for set; some with `as_published`.

The caches here are written anew from reading that code (ARKV 92b0800, R-KV d15c976, Random
Attention 066c520): slots in plain
lists, one step at a time.  Random attention, queries and keys; a third of the prompts is longer
than the cache.  So are the cuts of a prompt by AdaKV (efe4e2e) and PyramidKV (c97f9d7).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.events import Prefill, TokenRun
from arborsim.core.observations import Observations, Signal
from arborsim.core.shape import CacheShape
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.methods.arkv import ARKV, ARKVOrigin, ARKVQuant
from arborsim.policies.methods.random_attention import RandomAttention
from arborsim.policies.methods.rkv import RKV
from arborsim.policies.registry import available
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import trace_for

CASES = 32


def pooled(values: list[float]) -> list[float]:
    """Mean over five neighbours; those beyond the ends count as 0."""
    wide = [0.0, 0.0, *values, 0.0, 0.0]
    return [sum(wide[i : i + 5]) / 5 for i in range(len(values))]


def best_first(values: list[float]) -> list[int]:
    """Indices, the highest value first."""
    return sorted(range(len(values)), key=lambda i: -values[i])


class CodedLayer:
    """One layer of ARKV's cache: per KV head, the tokens in their slots."""

    def __init__(self, kind: str, cache: int, window: int, gamma: float) -> None:
        self.kind, self.cache, self.window, self.gamma = kind, cache, window, gamma
        self.slots: list[list[int]] = []
        self.rounded: list[set[int]] = []

    def prefill(self, rows: np.ndarray, kv_heads: int) -> None:
        """Cut the prompt by the attention of the window's queries, ``[queries, heads, keys]``."""
        prompt = rows.shape[2]
        self.slots = [list(range(prompt)) for _ in range(kv_heads)]
        self.rounded = [set() for _ in range(kv_heads)]
        if prompt <= self.cache:
            return
        score = rows.mean(axis=0) + self.gamma * rows.var(axis=0, ddof=1)
        for head, slots in enumerate(self.slots):
            group = np.split(score, kv_heads)[head][:, : -self.window]
            of_heads = [pooled(one.tolist()) for one in group]
            mean = np.mean(of_heads, axis=0).tolist()
            past = [slots[i] for i in best_first(mean)[: self.cache - self.window]]
            self.slots[head] = past + slots[-self.window :]
            if self.kind == "quant":
                self.rounded[head] = set(past)

    def step(self, token: int, row: np.ndarray, original: int) -> None:
        """One new token, and its query's attention to all tokens, ``[heads, keys]``."""
        for head, slots in enumerate(self.slots):  # an update keeps the plain part alone
            self.slots[head] = [t for t in slots if t not in self.rounded[head]] + [token]
            self.rounded[head] = set()
        length = len(self.slots[0])
        if length <= self.cache:
            return
        past = length - self.window
        keep = int(past / 4 * 3)
        plain = {"origin": keep, "quant": 0}.get(self.kind, max(0, min(original, keep)))
        ranked = []
        for group, slots in zip(np.split(row, len(self.slots)), self.slots, strict=True):
            of_heads = [pooled([float(one[t]) for t in slots[:past]]) for one in group]
            ranked.append(best_first(np.mean(of_heads, axis=0).tolist()))
        # Indices of all heads are the rows of one table, whose columns are sorted by the first row.
        columns = sorted(zip(*(one[:plain] for one in ranked), strict=True))
        for head, slots in enumerate(self.slots):
            kept = [slots[column[head]] for column in columns]
            rounded = [slots[i] for i in ranked[head][plain:keep]]
            self.rounded[head] = set(rounded)
            self.slots[head] = kept + rounded + slots[past:]


def prompt_of(episode: Episode) -> int:
    return int((episode.kind == Kind.PREFILL).sum())


def coded_arkv(policy: Policy, kind: str, episode: Episode, cache: int) -> list[list[set[int]]]:
    """Tokens held after every iteration, of every group, by the code's rules."""
    assert isinstance(policy, ARKV | ARKVOrigin | ARKVQuant)
    assert episode.head_attention is not None
    rows = episode.head_attention
    kv_heads, prompt, window = rows.kv_heads, prompt_of(episode), policy.window
    ends = [rows.row(q).astype(np.float64) for q in range(prompt - window, prompt)]
    wide = np.zeros((window, *ends[-1].shape))  # queries, layers, heads, keys
    for at, row in enumerate(ends):
        wide[at, ..., : row.shape[-1]] = row
    layers = [CodedLayer(kind, cache, window, policy.gamma) for _ in range(wide.shape[1])]
    scores = []
    for number, layer in enumerate(layers):
        layer.prefill(wide[:, number], kv_heads)
        seen = wide[:, number, :, : prompt - window]
        spread = seen - seen.mean(axis=0)
        entropy = -(seen * np.log(seen + 1e-10)).sum()
        fourth, second = (spread**4).mean(axis=0), (spread**2).mean(axis=0).clip(1e-8)
        parts = (max(entropy, 0.0), seen.var(axis=0, ddof=1).sum(), (fourth / second**2).sum())
        powers = (policy.tau1, policy.tau2, policy.tau3) if isinstance(policy, ARKV) else (1, 1, 1)
        scores.append(
            float(np.prod([part ** (1 / tau) for part, tau in zip(parts, powers, strict=True)]))
        )
    room = cache - window
    original = [
        min(round(one / max(scores) * room), room, prompt - window) - window for one in scores
    ]
    held = [[set(slots) for layer in layers for slots in layer.slots]]
    for token in range(prompt, episode.num_tokens):
        row = rows.row(token).astype(np.float64)
        for number, layer in enumerate(layers):
            layer.step(token, row[number], original[number])
        held.append([set(slots) for layer in layers for slots in layer.slots])
    return held


def coded_rkv(policy: RKV, episode: Episode, budget: int) -> list[list[set[int]]]:
    """Tokens held after every iteration, of every group, by the code's rules."""
    assert episode.head_attention is not None
    assert episode.keys is not None
    rows, window, prompt = episode.head_attention, policy.window, prompt_of(episode)
    queries = [rows.query(t).astype(np.float64) for t in range(episode.num_tokens)]
    keys = episode.keys.astype(np.float64)  # tokens, layers, KV heads, size
    layers, kv_heads = keys.shape[1:3]
    slots = {(la, h): list(range(prompt)) for la in range(layers) for h in range(kv_heads)}

    def compress(layer: int, head: int, now: int) -> None:
        mine = slots[layer, head]
        if len(mine) < budget:
            return
        of_group = np.split(np.arange(len(queries[0][layer])), kv_heads)[head]
        past = mine[:-window]
        weights = np.zeros(len(past))
        for query in range(now - window, now):
            logits = [
                max(float(queries[query][layer, q] @ keys[t, layer, head]) for q in of_group)
                for t in past
            ]
            powers = np.exp(np.array(logits) - max(logits))
            weights += powers / powers.sum() / window
        reach = policy.kernel // 2
        pool = [weights[max(0, i - reach) : i + reach + 1].max() for i in range(len(past))]
        unit = np.array(
            [keys[t, layer, head] / (np.linalg.norm(keys[t, layer, head]) + 1e-8) for t in mine]
        )
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, 0.0)
        for i in range(len(mine)):
            alike = [j for j in range(len(mine)) if cosine[i, j] > policy.threshold]
            cosine[i, max(alike, default=0)] = 0.0
        power = np.exp(cosine.mean(axis=0))
        repeated = power / power.sum()
        score = [policy.mix * pool[i] - (1 - policy.mix) * repeated[i] for i in range(len(past))]
        slots[layer, head] = [past[i] for i in best_first(score)[: budget - window]] + mine[
            -window:
        ]

    held = []
    for now in range(prompt, episode.num_tokens + 1):
        if now > prompt:
            for mine in slots.values():
                mine.append(now - 1)
        if now == prompt or (now - 1) % policy.interval == 0:
            for layer, head in slots:
                compress(layer, head, now)
        held.append([set(mine) for mine in slots.values()])
    return held


def held_by(policy: Policy, episode: Episode, budget: int) -> list[list[set[int]]]:
    groups = len(episode.info.qkv_layers) * episode.info.geometry.kv_heads
    found: dict[int, list[set[int]]] = {}
    for tiers in decide_all(policy, episode, budget, 1)[0]:
        table = np.asarray(tiers).reshape(groups, -1)
        found[table.shape[1]] = [set(np.flatnonzero(row < Tier.DDR).tolist()) for row in table]
    return list(found.values())


def random_episode(policy: Policy, folder: Path, seed: int) -> tuple[Episode, int]:
    """A chain, and a size of the cache that its prompt exceeds, fills, or leaves room in."""
    rng = np.random.default_rng(seed)
    prompt = int(rng.integers(14, 40))
    path = trace_for(
        policy, folder / "x.parquet", seed=seed, episodes=1, kind="linear", prompt=prompt, nodes=5,
        block=(8, 14),
    )  # fmt: skip
    signals = sorted(policy.reads() | {Signal.ATTENTION})
    episode = next(iter(TraceReader(path).episodes(signals)))
    cache = [int(rng.integers(9, prompt)), prompt, int(rng.integers(prompt + 1, prompt + 20))]
    return episode, cache[seed % 3]


ARKVS = {
    "mix": ARKV(window=4, as_published=True),
    "quant": ARKVQuant(window=4, as_published=True),
    "origin": ARKVOrigin(window=4, as_published=True),
}


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("kind", ARKVS)
def test_arkv_keeps_what_its_code_keeps(kind: str, seed: int, tmp_path: Path) -> None:
    policy = ARKVS[kind]
    episode, cache = random_episode(policy, tmp_path, seed)
    expected = coded_arkv(policy, kind, episode, cache)
    assert held_by(policy, episode, cache) == expected
    assert any(len(one) < episode.num_tokens for one in expected[-1])


@pytest.mark.parametrize("seed", range(CASES))
def test_rkv_keeps_what_its_code_keeps(seed: int, tmp_path: Path) -> None:
    policy = RKV(window=3, interval=6, threshold=(0.5, 0.9)[seed % 2], as_published=True)
    episode, budget = random_episode(policy, tmp_path, seed)
    assert held_by(policy, episode, budget) == coded_rkv(policy, episode, budget)


def coded_random_attention(
    policy: RandomAttention, episode: Episode, budget: int
) -> list[list[set[int]]]:
    """Mode ``random_pp``: what each head holds after every token, oldest slot first."""
    prompt = int(np.count_nonzero(episode.kind == Kind.PREFILL))
    groups = len(episode.info.qkv_layers) * episode.info.geometry.kv_heads
    slots = [list(range(prompt)) for _ in range(groups)]
    held = [[set(mine) for mine in slots]]
    for now in range(prompt, episode.num_tokens):
        for mine in slots:
            mine.append(now)
        length = len(slots[0])
        if length > budget and length % policy.interval == 0:
            drawn = np.random.default_rng([policy.seed, now + 1 - prompt]).random((groups, now + 1))
            for head, mine in enumerate(slots):
                candidates, newest = mine[: -policy.window], mine[-policy.window :]
                score = [np.inf if t < prompt else drawn[head, t] for t in candidates]
                kept = best_first(score)[: budget - policy.window]
                slots[head] = sorted(candidates[i] for i in kept) + newest
        held.append([set(mine) for mine in slots])
    return held


@pytest.mark.parametrize("seed", range(CASES))
def test_random_attention_keeps_what_its_code_keeps(seed: int, tmp_path: Path) -> None:
    policy = RandomAttention(interval=5, window=5, seed=seed)
    episode, _ = random_episode(policy, tmp_path, seed)
    prompt = int(np.count_nonzero(episode.kind == Kind.PREFILL))
    budget = prompt + 8 + seed % 9
    expected = coded_random_attention(policy, episode, budget)
    assert held_by(policy, episode, budget) == expected
    last = expected[-1]
    assert any(len(one) < episode.num_tokens for one in last)
    assert len({frozenset(one) for one in last}) > 1, "heads draw for themselves"


def coded_heads_of_adakv(votes: np.ndarray, window: int, cache: int, alpha: float) -> list[set]:
    """Tokens that AdaKV's heads keep of a prompt; `votes` are ``[heads, tokens]``."""
    base, past = cache - window, votes.shape[1] - window
    score = np.array([pooled(row) for row in votes[:, :past].tolist()])
    best = np.argsort(-score.ravel(), kind="stable")[: len(votes) * base] // past
    capacity = np.bincount(best, minlength=len(votes)) * (1 - alpha) + int(base * alpha)
    newest = range(past, past + window)
    return [
        {*best_first(row)[: round(own)], *newest}
        for row, own in zip(score.tolist(), capacity.tolist(), strict=True)
    ]


def coded_layers_of_pyramidkv(
    votes: np.ndarray, window: int, cache: int, beta: int, heads: int
) -> list[set]:
    """Tokens that PyramidKV's heads keep of a prompt of at least 2 (C - W) tokens."""
    base, past, layers = cache - window, votes.shape[1] - window, len(votes) // heads
    least = base // beta
    most = 2 * base - least
    if most >= past:
        most, least = past, 2 * base - past
    step, newest = (most - least) // (layers - 1), range(past, past + window)
    return [
        {*best_first(pooled(row))[: most - group // heads * step], *newest}
        for group, row in enumerate(votes[:, :past].tolist())
    ]


@pytest.mark.parametrize("method", ["adakv", "pyramidkv"])
def test_uneven_heads_keep_what_the_code_keeps_but_for_rounding(method: str) -> None:
    """Of each head one set holds the other; the code's sums miss the budget, these do not."""
    for case in range(CASES):
        rng = np.random.default_rng(case)
        layers, heads, window = int(rng.integers(2, 9)), 3, 6
        cache, alpha, beta = int(rng.integers(20, 60)), 0.2, int(rng.choice([2, 10, 20]))
        tokens = int(rng.integers(2 * cache, 6 * cache))
        votes = rng.random((layers * heads, tokens)) ** rng.uniform(1, 9, (layers * heads, 1))
        tree = ThoughtTree()
        tree.open(0, -1)
        tree.append((0,), tokens)
        tree.activate((0,))
        shape = CacheShape(tuple(range(layers)), heads, 8)
        tiers = np.zeros(votes.shape, dtype=np.int8)
        view = CacheView(tiers, {"score": votes}, tree, (0,), tokens, cache, 0, 128, shape=shape)
        own = {"adakv": {"alpha": alpha}, "pyramidkv": {"beta": beta}}[method]
        policy = available()[method](window=window, **own)
        run = TokenRun((0,), tokens, np.zeros(tokens, np.int32), Observations(tokens))
        plan = policy.decide(view, Prefill(run))
        assert plan is not None
        kept = [set(np.flatnonzero(row == Tier.HBM).tolist()) for row in plan.tiers]
        assert sum(map(len, kept)) == cache * layers * heads
        if method == "adakv":
            coded = [
                head
                for first in range(0, len(votes), heads)
                for head in coded_heads_of_adakv(votes[first : first + heads], window, cache, alpha)
            ]
        else:
            coded = coded_layers_of_pyramidkv(votes, window, cache, beta, heads)
        apart = 1 if method == "adakv" else layers
        for mine, theirs in zip(kept, coded, strict=True):
            assert mine <= theirs or theirs <= mine
            assert abs(len(mine) - len(theirs)) <= apart
