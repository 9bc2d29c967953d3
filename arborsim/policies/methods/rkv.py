"""R-KV: importance minus redundancy, per layer and KV head (Cai et al., NeurIPS 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Decode, Event, Prefill
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import hbm_mask
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Allocation, Decision, EveryStep, OnlyEvery, Protect
from arborsim.policies.placement import Pool
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.pages import Queries
from arborsim.signals.scores import Score, rounded
from arborsim.signals.vectors import Vectors, norms

# Keys compared with all others at a time: few at first, because most keys resemble a recent one.
_FIRST_COLUMNS, _MOST_COLUMNS = 32, 512


@dataclass(frozen=True)
class PublishedSchedule(OnlyEvery):
    """When the public code decides on the first problem that it is given.

    After the prompt, and then with the token that follows a multiple of `iterations` tokens, those
    of the prompt included.
    """

    def next_decision(self, view: CacheView, headroom: int) -> int:
        return (1 - view.prompt_tokens - view.iterations) % self.iterations or self.iterations

    def due(self, view: CacheView, event: Event) -> bool:
        before = view.prompt_tokens + view.iterations - 1
        return isinstance(event, Prefill) or (
            isinstance(event, Decode) and before % self.iterations == 0
        )


@dataclass(frozen=True)
class RankedSlots(Pool):
    """A pool whose slots are in the order of their ranks after every decision, the best first."""

    def allot(self, at: Decision, tiers: np.ndarray) -> None:
        super().allot(at, tiers)
        for group in np.flatnonzero(at.view.held >= at.shares).tolist():
            kept = np.flatnonzero(at.movable & hbm_mask(tiers[group]))
            kept = at.view.by_slot(group, kept)
            at.lead(group, kept[np.argsort(at.rank[group, kept], kind="stable")[::-1]])


@dataclass(frozen=True)
class RKV(StreamPolicy):
    """Keep what the newest queries look at and what no later key repeats."""

    interval: int = setting(128, "iterations between two decisions", low=1)
    window: int = setting(8, "protected newest tokens, whose queries rate the others", low=1)
    mix: float = setting(0.07, "lambda: weight of importance against redundancy", low=0, high=1)
    threshold: float = setting(0.5, "cosine above which two keys repeat each other", low=-1, high=1)
    kernel: int = setting(7, "neighbours in the max-pool of importance, odd", unit="tokens", low=1)
    as_published: bool = setting(False, "decide as the public code does on its first problem")

    name = "rkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise UsageError(f"{self.name}: kernel must be odd, not {self.kernel}")
        if self.as_published and self.pin_prompt:
            raise UsageError(
                f"{self.name}: the public code cuts the prompt: as_published needs pin_prompt=false"
            )

    @cached_property
    def score(self) -> Score:
        return Queries(self.window)

    def scores(self) -> Mapping[str, Score]:
        return {"queries": self.score, "keys": Vectors(Signal.KEYS)}

    @cached_property
    def schedule(self) -> EveryStep:
        kind = PublishedSchedule if self.as_published else OnlyEvery
        return kind(self.interval, wait=not self.as_published)

    @cached_property
    def allocate(self) -> Allocation:
        return RankedSlots(self.adaptation) if self.as_published else super().allocate

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=ANY)

    def rank(self, view: CacheView) -> np.ndarray:
        """Z of the tokens of the stream that are held and not protected."""
        stream = view.stream(self.adaptation)
        protected = self.protected(view)
        window = self.allocate.protected(
            view, replace(self.protection(view.budget_tokens), pin_prompt=False)
        )
        window = stream[window[stream]]
        queries = view.scores["queries"]
        per_group = len(queries) // len(view.tier)
        rank = np.zeros(view.tier.shape)
        for group, tier in enumerate(view.tier):
            held = view.by_slot(group, stream[hbm_mask(tier[stream])])
            rated = np.flatnonzero(~protected[held])
            if not len(rated):
                continue
            free = held[rated]
            heads = queries[group * per_group : (group + 1) * per_group, window]
            keys = view.scores["keys"][group, held].astype(np.float64)
            logits = (heads.astype(np.float64) @ keys[rated].T).max(axis=0)
            seen = sees(view.tree, window, free)
            important = max_pool(importance(rounded(logits), seen), self.kernel)
            repeated = redundancy(keys, self.threshold, self.as_published)[rated]
            rank[group, free] = self.mix * important - (1 - self.mix) * repeated
        return rank


def sees(tree: ThoughtTree, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which keys are older than a query and on its path, bool ``[queries, keys]``."""
    node_of = tree.node_of_token.values
    on_path = {node: tree.on_path((node,)) for node in set(node_of[queries].tolist())}
    rows = [on_path[int(node_of[q])][node_of[keys]] & (keys < q) for q in queries.tolist()]
    return np.stack(rows)


def importance(logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Softmax of every query over the keys it sees, mean over the queries that see a key.

    Logits, float64, and the mask, bool, are both ``[queries, keys]``.  A key that no query sees has
    0.
    """
    total = np.zeros(logits.shape[1])
    for row, mask in zip(logits, seen, strict=True):
        if mask.any():
            weight = np.where(mask, np.exp(np.where(mask, row - row[mask].max(), 0.0)), 0.0)
            total += weight / weight.sum()
    return np.asarray(total / np.maximum(seen.sum(axis=0), 1))


def max_pool(values: np.ndarray, kernel: int) -> np.ndarray:
    """Largest value among the `kernel` neighbours around each, fewer at the ends."""
    reach = kernel // 2
    padded = np.pad(values, reach, constant_values=-np.inf)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).max(axis=1))


def redundancy(keys: np.ndarray, threshold: float, else_first: bool = False) -> np.ndarray:
    """How much each key repeats others (R-KV, section 3.3): a softmax of its mean cosine.

    In each row of the cosine matrix of keys ``[keys, head_dim]``, oldest first, the most recent
    entry above the threshold is taken out, so that of near-duplicates the latest survives.  Where
    there is none, the first entry is with `else_first`, and nothing without.
    """
    length = norms(keys)[:, None]
    directions = keys / np.where(length > 0, length, 1.0)
    # A sum of products is the product with the sum: only what is taken out needs single cosines.
    total = directions @ directions.sum(axis=0) - np.einsum("kd,kd->k", directions, directions)
    latest, cosine = latest_similar(directions, threshold, else_first)
    total -= np.bincount(latest, weights=cosine, minlength=len(keys))
    mean = rounded(total / len(keys))
    weight = np.exp(mean - mean.max())
    return np.asarray(weight / weight.sum())


def latest_similar(
    directions: np.ndarray, threshold: float, else_first: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """For each key the most recent one whose cosine to it is above a threshold, if there is one.

    A key's own cosine counts as 0.  Goes back from the newest, and each key drops out at its first
    find: at worst every key is compared with every other.  `directions`, ``[keys, head_dim]``, have
    length 1, oldest first.  Returns the latest and its cosine for those keys that have one, in no
    order to rely on.  With `else_first`, the others have the first key.
    """
    seeking, last, width = np.arange(len(directions)), len(directions), _FIRST_COLUMNS
    latest, cosines = [seeking[:0]], [np.empty(0)]
    while last and len(seeking):
        first = max(0, last - width)
        cosine = directions[seeking] @ directions[first:last].T
        inside = np.flatnonzero((seeking >= first) & (seeking < last))
        cosine[inside, seeking[inside] - first] = 0.0
        similar = rounded(cosine) > threshold
        hit = np.flatnonzero(similar.any(axis=1))
        at = similar.shape[1] - 1 - similar[hit, ::-1].argmax(axis=1)
        latest.append(first + at)
        cosines.append(cosine[hit, at])
        seeking = np.delete(seeking, hit)
        last, width = first, min(2 * width, _MOST_COLUMNS)
    if else_first and len(seeking):
        latest.append(np.zeros_like(seeking))
        cosines.append(np.where(seeking > 0, directions[seeking] @ directions[0], 0.0))
    return np.concatenate(latest), np.concatenate(cosines)
