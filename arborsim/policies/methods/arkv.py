"""ARKV: full precision, FP8 or eviction, by how sensitive a layer is (and its two baselines).

The paper lost its equations on the way to HTML; these follow its public code
(Large-scale-Sustainable-Computing-LSC/ARKV), sections IV-C to IV-E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Decode, Event, TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier, hbm_mask
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Allocation, Decision, Protect
from arborsim.policies.placement import Pool, highest, neighbour_mean
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import NewestState
from arborsim.signals.rows import head_rows, num_row_groups
from arborsim.signals.scores import AtBirth, Changes, Score, ScoreState, sum_in_order

_LOSS = (
    "the code drops an FP8 token before the next query reads it; here a decision follows an "
    "iteration, so that query still does; tokens that a revisited path protects are not lost",
)
_CODED = (
    "as_published cuts the prompt to C - W and takes the slack of all there is outside the window "
    "later, C + 1 - W tokens; neighbours whose scores are averaged lie side by side in the code's "
    "slots: after the prompt in the order of scores, and those of later heads mixed by the first's",
)
_KERNEL = 5  # neighbouring tokens whose scores are averaged


@dataclass(frozen=True)
class LayerSensitivity(Score):
    """ARKV's OQ score (Eqs. 3-6): ``Ent^(1/tau1) Var^(1/tau2) Kurt^(1/tau3)`` of each layer.

    Taken once, from the attention of the last `window` prompt queries to the keys before them, not
    renormalised; see `layer_statistics`.  The same number for every token of a layer's groups; 0
    for all if the prompt is not longer than the window.
    """

    grouping: str = "head"
    window: int = 32
    tau1: float = 7.7744
    tau2: float = 5.4070
    tau3: float = 5.5277
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})
    about: ClassVar[str] = "sensitivity of the layer"

    def start(self, layers: int) -> ScoreState:
        return _SensitivityState(self)

    def combine(self, statistics: np.ndarray) -> np.ndarray:
        """Float64 ``[layers]`` of entropy, variance and kurtosis ``[layers, 3]``.

        A negative entropy (``-A ln(A + 1e-10)`` of a weight of 1) counts as 0, and 0 to any power
        is 0: a layer whose window looks at nothing before it has no claim to full precision.
        """
        exponents = 1.0 / np.array([self.tau1, self.tau2, self.tau3])
        return np.asarray(np.prod(np.maximum(statistics, 0.0) ** exponents, axis=1))


def layer_statistics(attention: np.ndarray) -> np.ndarray:
    """Entropy, variance and kurtosis of one layer (Eqs. 3-5), summed over its heads and keys.

    Of attention, float64 ``[heads, queries, keys]``, of at least two queries; a head with a NaN is
    left out.  Float64 ``[3]``: ``-sum A ln(A + 1e-10)``, the unbiased variance over the queries,
    and ``m4 / max(m2, 1e-8)^2`` with the biased central moments over the queries.
    """
    a = attention[~np.isnan(attention).any(axis=(1, 2))]
    deviation = a - a.mean(axis=1, keepdims=True)
    second, fourth = (deviation**2).mean(axis=1), (deviation**4).mean(axis=1)
    queries = a.shape[1]
    return np.array(
        [
            -(a * np.log(a + 1e-10)).sum(),
            second.sum() * queries / (queries - 1),
            (fourth / np.maximum(second, 1e-8) ** 2).sum(),
        ]
    )


class _SensitivityState(AtBirth):
    def __init__(self, spec: LayerSensitivity) -> None:
        super().__init__(lambda run: np.repeat(self._of_groups[:, None], run.num_tokens, axis=1))
        self._spec = spec
        self._of_groups = np.zeros(0)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        if not generated:
            rows = head_rows(run.observed)
            layers, window = len(rows.row(0)), self._spec.window
            keys = run.steps - window
            sensitivity = np.zeros(layers)
            if keys > 0:
                queries = [rows.row(i)[..., :keys] for i in range(keys, run.steps)]
                attention = np.stack(queries, axis=2)  # [layers, heads, queries, keys]
                of_layer = [layer_statistics(layer.astype(np.float64)) for layer in attention]
                sensitivity = self._spec.combine(np.stack(of_layer))
            groups = num_row_groups(rows.row(0), rows.kv_heads, self._spec.grouping)
            self._of_groups = np.repeat(sensitivity, groups // layers)
        super().begin(run, tree, generated)


@dataclass(frozen=True)
class HeavyHitters(Score):
    """ARKV's token score before pooling (Eq. 9): ``mean_q A + gamma Var_q A``, mean over the group.

    After the prompt, ``q`` runs over its last `window` queries.  From then on the score is the
    attention of the newest query, as the public code has it (one query has no variance); leaves
    that decode in one iteration are averaged.  With `cumulative`, ``q`` runs over all queries since
    the window instead.
    """

    grouping: str = "head"
    window: int = 32
    gamma: float = 263.811
    cumulative: bool = False
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})
    about: ClassVar[str] = (
        "attention of the last prompt queries, then of the newest query; variance counts"
    )
    changes: ClassVar[Changes] = "freely"

    def start(self, layers: int) -> ScoreState:
        return _HeavyHitterState(self)


class _HeavyHitterState(NewestState):
    def __init__(self, spec: HeavyHitters) -> None:
        super().__init__(spec.grouping)
        self._spec = spec
        self._spread = Spread()
        self._first = 0  # iteration of the run from which queries count
        self._by_spread = True

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        super().begin(run, tree, generated)
        self._first = 0 if generated else run.steps - self._spec.window
        self._by_spread = self._spec.cumulative or not generated
        if self._by_spread:
            self._heads = head_rows(run.observed)
            layers, heads, _ = self._heads.row(0).shape
            self._spread.extend(layers * heads, run.num_tokens)

    def observe(self, step: int) -> None:
        if not self._by_spread:
            super().observe(step)
        elif step >= self._first:
            width = len(self._paths)
            for leaf in range(width):
                row = self._heads.row(step * width + leaf)
                at = self._paths.places(leaf, row.shape[2])
                tokens = np.arange(self.values.shape[1])[at]
                self._spread.add(tokens, row.reshape(-1, row.shape[2]).astype(np.float64))
                self.values[:, tokens] = self._spread.heaviness(
                    tokens, len(self.values), self._spec.gamma
                )

    def observe_all(self, first: int, last: int) -> None:
        if self._by_spread:
            ScoreState.observe_all(self, first, last)
        else:
            super().observe_all(first, last)


class Spread:
    """Mean and variance of the attention to each token, per query head, one query after the other.

    Welford's updates, so that the bits do not depend on how queries arrive in runs.
    """

    def __init__(self) -> None:
        self._tables: tuple[GrowingTable, ...] = ()  # queries, mean, squares

    def extend(self, heads: int, count: int) -> None:
        """Make room for `count` more tokens."""
        self._tables = self._tables or tuple(GrowingTable(heads, np.float64) for _ in range(3))
        for table in self._tables:
            table.extend(count, 0)

    def add(self, tokens: np.ndarray, row: np.ndarray) -> None:
        """Take in one query's float64 row ``[heads, tokens]``; heads with a NaN are left out."""
        heads = np.flatnonzero(~np.isnan(row).any(axis=1))
        at = np.ix_(heads, tokens)
        queries, mean, squares = (table.values for table in self._tables)
        queries[at] += 1
        deviation = row[heads] - mean[at]
        mean[at] += deviation / queries[at]
        squares[at] += deviation * (row[heads] - mean[at])

    def heaviness(self, tokens: np.ndarray, groups: int, gamma: float) -> np.ndarray:
        """Float64 ``[groups, tokens]``: mean + gamma variance, mean over the heads of a group."""
        queries, mean, squares = (table.values[:, tokens] for table in self._tables)
        variance = squares / np.maximum(queries - 1, 1)
        heavy = (mean + gamma * variance).reshape(groups, -1, len(tokens))
        heads = np.count_nonzero(queries.reshape(heavy.shape), axis=1)
        return np.asarray(sum_in_order(heavy, axis=1) / np.maximum(heads, 1))


@dataclass(frozen=True)
class Cut(Pool):
    """A group over budget is cut, but for the window, to `slack` times what it may be (Eq. 10)."""

    window: int = 32
    slack: float = 0.75
    pin_prompt: bool = False

    about: ClassVar[str] = "cut to a share of the budget"

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        """Evict the lowest; of those kept outside the window, all but the best turn to FP8."""
        candidates = np.flatnonzero(free)
        room = at.view.budget_tokens - self.window
        room -= at.view.prompt_tokens if self.pin_prompt else 0
        keeps = int(self.slack * max(0, room))
        # Several leaves can protect more than the window: then the budget limits what is kept.
        keeps = min(keeps, len(candidates) - over)
        score = neighbour_mean(at.view.scores["score"][group, candidates], _KERNEL)
        kept = candidates[highest(score, keeps)]
        assert isinstance(at.policy, _Tailor)
        full = min(keeps, int(at.policy.full_precision(at.view)[group]))
        best = candidates[highest(score, full)]
        self._place(tier, candidates, kept, best)

    @staticmethod
    def _place(
        tier: np.ndarray, candidates: np.ndarray, kept: np.ndarray, best: np.ndarray
    ) -> None:
        were, tier[candidates] = tier[best], Tier.EVICTED
        tier[kept] = Tier.HBM_QUANTISED
        tier[best] = were  # what was rounded once stays rounded


@dataclass(frozen=True)
class CodedCut(Cut):
    """The cut as the public code has it, which works on slots and leaves them in another order.

    Neighbours are slots that lie side by side.  The prompt is cut to ``C - W``, without slack, and
    what is kept stays in the order of its scores.  A later cut takes `slack` of all there is
    outside the window.  It sorts the slots at full precision, with those of all KV heads of a layer
    as the rows of one table whose columns are ordered by the first head.
    """

    def thin(self, at: Decision, group: int, tier: np.ndarray, free: np.ndarray, over: int) -> None:
        view = at.view
        ranked = self._ranked(at, group)
        after_prompt = view.num_tokens == view.prompt_tokens
        room = view.budget_tokens - self.window
        keeps = room if after_prompt else int(self.slack * len(ranked))
        kept = ranked[: min(keeps, len(ranked) - over)]
        assert isinstance(at.policy, _Tailor)
        best = kept[: int(at.policy.full_precision(view)[group])]
        self._place(tier, ranked, kept, best)
        if not after_prompt:
            first = group - group % max(1, len(view.tier) // max(1, len(view.shape.layers)))
            leads = best if group == first else self._ranked(at, first)[: len(best)]
            places = leads if view.slots is None else view.slots[first, leads]
            best = best[np.argsort(places)]
        at.lead(group, np.concatenate([best, kept[len(best) :]]))

    def _ranked(self, at: Decision, group: int) -> np.ndarray:
        """Ids of the tokens outside the window in the order of their scores, the best first."""
        held = at.movable & hbm_mask(at.view.tier[group])
        past = at.view.by_slot(group, np.flatnonzero(held))
        score = neighbour_mean(at.view.scores["score"][group, past], _KERNEL)
        return np.asarray(past[np.argsort(score, kind="stable")[::-1]])


@dataclass(frozen=True)
class _Tailor(StreamPolicy):
    """What the three share: the score, and the cut when the cache exceeds the budget."""

    window: int = setting(32, "protected newest tokens; queries that rate the prompt", low=2)
    slack: float = setting(0.75, "share of budget - window that a cut keeps", low=0, high=1)
    gamma: float = setting(263.811, "weight of the variance in a token's score", low=0)
    cumulative: bool = setting(False, "rate by all queries since the prompt, not by the newest")
    per: str = setting("head", "what decides on its own", choices=("layer", "head"))
    as_published: bool = setting(False, "decide as the public code does, defects included")

    paper: ClassVar[str] = "ARKV (Large-scale-Sustainable-Computing-LSC/ARKV)"
    official: ClassVar[str] = (
        "Large-scale-Sustainable-Computing-LSC/ARKV@92b0800: literally, with as_published 120 of "
        "120 random chains (40 with prompts longer than the cache) hold the same tokens at every "
        "step"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.as_published and self.pin_prompt:
            raise UsageError(
                f"{self.name}: the public code cuts the prompt: as_published needs pin_prompt=false"
            )

    @cached_property
    def score(self) -> Score:
        return HeavyHitters(self.per, self.window, self.gamma, self.cumulative)

    @cached_property
    def allocate(self) -> Allocation:
        kind = CodedCut if self.as_published else Cut
        return kind(self.adaptation, self.window, self.slack, self.pin_prompt)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.window, recent_share=ANY)

    def full_precision(self, view: CacheView) -> np.ndarray:
        """Int64 ``[groups]``: how many of the best that a cut keeps stay at full precision."""
        return np.full(len(view.tier), view.num_tokens)


@dataclass(frozen=True)
class _Quantiser(_Tailor):
    """A tailor that keeps some tokens in FP8, and loses them as published."""

    words: ClassVar[Mapping[str, Any]] = {
        "place": "quantise, then evict",
        "tiers": (Tier.HBM, Tier.HBM_QUANTISED, Tier.EVICTED),
    }

    def full_precision(self, view: CacheView) -> np.ndarray:
        return np.zeros(len(view.tier), dtype=np.int64)

    def next_decision(self, view: CacheView) -> int:
        if self.as_published and (view.tier == Tier.HBM_QUANTISED).any():
            return 1
        return super().next_decision(view)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if self.as_published and isinstance(event, Decode):
            lost = (view.tier == Tier.HBM_QUANTISED) & ~self.protected(view)
            if lost.any():
                tiers = np.where(lost, np.int8(Tier.EVICTED), view.tier)
                return super().decide(replace(view, tier=tiers), event) or Plan(tiers)
        return super().decide(view, event)


@dataclass(frozen=True)
class ARKV(_Quantiser):
    """The more a layer's attention is spread and changes, the more of it keeps full precision."""

    tau1: float = setting(7.7744, "temperature of the entropy", low=1e-3)
    tau2: float = setting(5.4070, "temperature of the variance", low=1e-3)
    tau3: float = setting(5.5277, "temperature of the kurtosis", low=1e-3)

    name: ClassVar[str] = "arkv"
    summary: ClassVar[str] = "per layer, the best tokens in full precision, the next in FP8"
    formula: ClassVar[str] = (
        "OQ_l = Ent^(1/tau1) Var^(1/tau2) Kurt^(1/tau3); O_l = clip(round(OQ_l / max OQ (C - W)), "
        "0, C - W); hh = avgpool5(mean_q A + gamma Var_q A); keep the top slack (C - W) by hh: the "
        "first O_l in full precision, the rest in FP8 (Eqs. 3-10)"
    )
    words: ClassVar[Mapping[str, Any]] = {
        **_Quantiser.words,
        "allocate": "full precision by the sensitivity of the layer",
    }
    deviations: ClassVar[tuple[str, ...]] = (
        "by default as the equations say; as_published decides as the public code does: W is "
        "subtracted from O_l twice, O_l is at most the prompt before its window, every FP8 token "
        "is lost one step later, and the prompt has neither slack nor FP8",
        *_CODED,
        "with a transformers before 4.56 the code's first layer keeps O_0 = C - W whatever its "
        "sensitivity: not reproduced",
        *_LOSS,
        "the code's third defect, one scale per cache slot for heads that hold different tokens, "
        "changes values and not decisions: it is not reproduced",
        "what was rounded to FP8 stays FP8 when it ranks among the best again (the code stores the "
        "rounded value at full precision)",
    )

    def scores(self) -> Mapping[str, Score]:
        taus = (self.tau1, self.tau2, self.tau3)
        return {"score": self.score, "sensitivity": LayerSensitivity(self.per, self.window, *taus)}

    def full_precision(self, view: CacheView) -> np.ndarray:
        """``O_l`` of every group (Eq. 8); all there is where no layer looked before its window."""
        if self.as_published and view.num_tokens == view.prompt_tokens:
            return np.full(len(view.tier), view.num_tokens)
        room = view.budget_tokens - self.window
        room -= view.prompt_tokens if self.pin_prompt else 0
        sensitivity = view.scores["sensitivity"][:, 0]
        top = sensitivity.max()
        ratio = sensitivity / top if top > 0 else np.ones(len(sensitivity))
        original = np.clip(np.rint(ratio * room), 0, room).astype(np.int64)
        if self.as_published:
            original = np.minimum(original, view.prompt_tokens - self.window) - self.window
        return np.maximum(original, 0)


@dataclass(frozen=True)
class ARKVOrigin(_Tailor):
    """The paper's baseline that evicts only."""

    name: ClassVar[str] = "arkv-origin"
    summary: ClassVar[str] = "ARKV's baseline: the same cuts, all kept tokens in full precision"
    formula: ClassVar[str] = "keep the top slack (C - W) by hh = avgpool5(mean_q A + gamma Var_q A)"
    deviations: ClassVar[tuple[str, ...]] = (
        "by default the prompt is cut with slack too, as the equations say",
        *_CODED,
    )


@dataclass(frozen=True)
class ARKVQuant(_Quantiser):
    """The paper's baseline that rounds all it keeps outside the window."""

    name: ClassVar[str] = "arkv-quant"
    summary: ClassVar[str] = "ARKV's baseline: the same cuts, all kept tokens in FP8"
    formula: ClassVar[str] = (
        "keep the top slack (C - W) by hh = avgpool5(mean_q A + gamma Var_q A), all in FP8"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "as_published loses every FP8 token one step later, as the public code does",
        *_CODED,
        *_LOSS,
        "tokens turn to FP8 when the cache exceeds the budget, not when they leave the window "
        "(section V-G: below the budget nothing differs from the plain model)",
    )
