"""ThinKV, reconstructed from its paper's description (Ramachandran et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Boundary, Event, Pressure, Prune, TokenRun
from arborsim.core.formats import Format
from arborsim.core.observations import Signal
from arborsim.core.row_uses import ALL_QUERIES, RowUse
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.core.tree import ThoughtTree
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import Protect, ProtectSome
from arborsim.policies.placement import evict, off_path_blocks
from arborsim.policies.stream import RecentPolicy
from arborsim.signals.rows import head_rows
from arborsim.signals.scores import AtBegin, Score, ScoreState, rounded, sum_in_order
from arborsim.signals.vectors import Vectors

TRANSITION, EXECUTION, REASON = 0, 1, 2  # the least important first


@dataclass(frozen=True)
class AttentionSparsity(Score):
    """Share of a row's entries under a part of its maximum, mean over captured layers and heads.

    ThinKV (Ramachandran et al. 2025, arXiv:2510.01290), where the part is 1 %.  Entries are of the
    tokens that a head can read.  Heads whose softmax overflowed are left out.  Prompt tokens have
    0, unless `prompt` is set.
    """

    part: float = 0.01
    prompt: bool = False
    needs = frozenset({Signal.HEAD_ATTENTION})
    about = "sparsity of the attention"

    @property
    def use(self) -> RowUse:
        return RowUse("shared", "sparsity", ALL_QUERIES if self.prompt else 0, part=self.part)

    def start(self, layers: int) -> ScoreState:
        return _SparsityState(self)


class _SparsityState(AtBegin):
    knows_held = True

    def __init__(self, spec: AttentionSparsity) -> None:
        super().__init__()
        self._spec = spec
        self._held = np.ones((1, 0), dtype=bool)  # [cache groups, tokens before the run]

    def hold(self, held: np.ndarray) -> None:
        self._held = held

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        now = self._grow(1, run.num_tokens)
        if not (generated or self._spec.prompt):
            return
        reduced = run.observed.reduced.get(self._spec.use)
        of_leaf = []
        for leaf, node in enumerate(run.leaves):
            held = self._held[:, tree.path(node)[: -run.steps]]
            if reduced is None:
                of_leaf.append(self._from_rows(run, leaf, held))
                continue
            heads, large = reduced.leaves[leaf]
            entries = heads * (held.sum(1).mean() + 1 + np.arange(run.steps))
            of_leaf.append((entries - large) / np.maximum(entries, 1))
        now[0, now.shape[1] - run.num_tokens :] = np.stack(of_leaf, axis=-1).ravel()

    def _from_rows(self, run: TokenRun, leaf: int, held: np.ndarray) -> np.ndarray:
        rows, width = head_rows(run.observed), len(run.leaves)
        found = np.empty(run.steps)
        for step in range(run.steps):
            own = np.pad(held, ((0, 0), (0, step + 1)), constant_values=True)
            found[step] = row_sparsity(rows.row(step * width + leaf), self._spec.part, own)
        return found


def row_sparsity(row: np.ndarray, part: float, held: np.ndarray | None = None) -> float:
    """Sparsity of one token's rows ``[layers, heads, positions]``, or 0 if all are NaN.

    Of the entries that are `held`, bool ``[cache groups, positions]``.  None: of all.
    """
    heads = row.reshape(-1, row.shape[-1])
    here = np.ones(heads.shape, dtype=bool)
    if held is not None:
        here = np.repeat(held, len(heads) // len(held), axis=0)
    numbers = ~np.isnan(heads).any(axis=1)
    heads, here = heads[numbers], here[numbers]
    largest = np.where(here, heads, 0.0).max(axis=1, keepdims=True, initial=0.0)
    small = np.count_nonzero(here & (heads < np.float32(part) * largest))
    return float(small / max(1, int(np.count_nonzero(here))))


@dataclass(frozen=True)
class ThinKVPaper(RecentPolicy):
    """Quantise complete segments of thought.  Each transition takes the earlier ones a rung down.

    The generated tokens of the stream form segments, and with them the prompt's if it is not
    pinned.  A complete segment is a transition (T), reasoning (R) or execution (E) by the mean
    sparsity of its tokens' attention.  It keeps as many tokens as the rung says that it has
    reached, one per T segment after it, and those kept represent its keys.
    """

    segment: int = setting(128, "length of a segment", unit="tokens", low=1)
    low: float = setting(0.822, "sparsity below which a segment is execution", low=0, high=1)
    high: float = setting(0.828, "sparsity from which a segment is a transition", low=0, high=1)
    most: int = setting(64, "kept of a segment on the first rung; each next one halves it", low=1)
    least: int = setting(4, "kept of a segment on the last rung", unit="tokens", low=1)

    name = "thinkv-paper"
    tiers = (Tier.HBM, Tier.HBM_QUANTISED, Tier.HBM_COARSE, Tier.EVICTED)
    score = Vectors(Signal.KEYS)
    formats = tuple(Format(bits, group=16, scale_bytes=1) for bits in (4, 2))

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("low", "high"), ("least", "most")):
            below, above = getattr(self, low), getattr(self, high)
            if below > above:
                raise UsageError(
                    f"{self.name}: {low} ({below:g}) is above {high} ({above:g}); swap them or "
                    "set both"
                )

    def scores(self) -> Mapping[str, Score]:
        sparsity = AttentionSparsity(prompt=not self.pin_prompt)
        return {"sparsity": sparsity, "keys": self.score}

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, recent=self.recent)

    def next_decision(self, view: CacheView) -> int:
        return 1  # a segment is dealt with in the iteration in which it leaves the protected window

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if isinstance(event, Boundary | Prune | Pressure):
            return None
        stream = view.stream(self.adaptation)
        tiers, safe = view.tier.copy(), self.protected(view)
        thoughts = stream[view.prompt_tokens :] if self.pin_prompt else stream
        whole = len(thoughts) - len(thoughts) % self.segment
        segments = thoughts[:whole].reshape(-1, self.segment)
        kind = self.kinds(view.scores["sparsity"][0, segments])
        rungs = self.rungs()
        reached = reached_rungs(kind == TRANSITION, len(rungs))
        settled = ~safe[segments].any(axis=1)
        segments, kind, reached = segments[settled], kind[settled], reached[settled]
        keeps = np.array([*rungs, self.segment])[reached]  # -1 is the last: all of it
        blocks = off_path_blocks(view) if self.adaptation == "path" else []
        for tier, keys in zip(tiers, view.scores["keys"], strict=True):
            # Quantise what is left of the segments, and take them to the rungs they have reached.
            for of_kind, rung in (
                (segments[kind != TRANSITION], Tier.HBM_QUANTISED),
                (segments[kind == TRANSITION], Tier.HBM_COARSE),
            ):
                tier[of_kind[tier[of_kind] == Tier.HBM]] = rung
            held = np.count_nonzero(hbm_mask(tier[segments]), axis=1)
            for j in np.flatnonzero(held > keeps):
                thin(tier, segments[j], keys, int(keeps[j]))
            over = int(np.count_nonzero(hbm_mask(tier))) - view.budget_tokens
            for block in blocks:
                over -= evict(tier, block) if over > 0 else 0
            by_worth = segments[np.argsort(kind, kind="stable")]
            over -= thin_further(tier, by_worth, keys, rungs, over)
            if over > 0:
                rest = stream[~safe[stream] & hbm_mask(tier[stream])]
                if len(rest) < over:
                    raise self.infeasible(view, len(rest), over)
                tier[rest[:over]] = Tier.EVICTED
        return Plan(tiers) if (tiers != view.tier).any() else None

    def kinds(self, sparsity: np.ndarray) -> np.ndarray:
        """Classes of segments, int64 ``[segments]``, by their tokens', ``[segments, tokens]``."""
        mean = rounded(sum_in_order(sparsity) / self.segment)
        return np.where(mean >= self.high, TRANSITION, np.where(mean < self.low, EXECUTION, REASON))

    def rungs(self) -> list[int]:
        """Tokens that a segment keeps, from rung to rung: halves of `most` down to `least`."""
        rungs = [self.most]
        while rungs[-1] // 2 >= self.least:
            rungs.append(rungs[-1] // 2)
        return rungs


def reached_rungs(transition: np.ndarray, rungs: int) -> np.ndarray:
    """Number of the rung that each segment has reached, -1 for none.  Int64 ``[segments]``.

    Every `transition`, bool ``[segments]``, oldest first, takes all before it a rung down.  The
    last of the `rungs` is not left.
    """
    later = np.cumsum(transition[::-1])[::-1] - transition
    return np.asarray(np.minimum(later, rungs) - 1)


def thin(tier: np.ndarray, segment: np.ndarray, keys: np.ndarray, count: int) -> int:
    """Evict all but `count` representatives of a segment's tokens, and return how many left HBM.

    `tier`, int8 ``[tokens]`` of one group, is changed in place.  Keys are ``[tokens, head_dim]``.
    """
    held = segment[hbm_mask(tier[segment])]
    if len(held) <= count:
        return 0
    evicted = np.delete(held, representatives(keys[held].astype(np.float64), count))
    return evict(tier, evicted)


def thin_further(
    tier: np.ndarray, segments: np.ndarray, keys: np.ndarray, rungs: list[int], over: int
) -> int:
    """Take segments one rung below what they hold, in the order given, until `over` tokens left.

    When all have gone a rung and it was not enough, they go another.  Returns how many left, which
    is less than `over` if all segments are at the last rung.
    """
    left, lowered = 0, True
    while left < over and lowered:
        lowered = False
        for segment in segments:
            if left >= over:
                break
            held = np.count_nonzero(hbm_mask(tier[segment]))
            below = [rung for rung in rungs if rung < held]
            if below:
                left += thin(tier, segment, keys, below[0])
                lowered = True
    return left


def representatives(vectors: np.ndarray, count: int, iterations: int = 10) -> np.ndarray:
    """Rising indices of `count` of the members, float64 ``[members, size]``, oldest first.

    Lloyd's algorithm from evenly spaced members, with a fixed number of iterations at most.  Each
    mean in turn takes the nearest member that none before it took.  The newer among equals.
    """
    members = len(vectors)
    if count >= members:
        return np.arange(members)
    means = vectors[np.arange(count) * members // max(1, count)]
    owner = np.full(members, -1)
    for _ in range(iterations):
        nearest = squared_distances(vectors, means).argmin(axis=1) if count else owner
        if (nearest == owner).all():
            break
        owner = nearest
        for cluster in np.unique(owner):  # a mean that lost all its members stays where it is
            mine = vectors[owner == cluster]
            means[cluster] = rounded(np.add.accumulate(mine)[-1] / len(mine))
    chosen = np.zeros(members, dtype=bool)
    for distance in squared_distances(vectors, means).T:
        free = np.flatnonzero(~chosen)
        chosen[free[len(free) - 1 - distance[free][::-1].argmin()]] = True
    return np.flatnonzero(chosen)


def squared_distances(vectors: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances, float64 ``[members, means]``."""
    squares = (vectors[:, None] - means[None]) ** 2
    return rounded(squares.sum(axis=-1))
