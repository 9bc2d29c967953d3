"""DuoAttention: some heads keep all, others sinks and newest tokens (Xiao et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import Allocation, Decision, ProtectSome
from arborsim.policies.placement import Pool
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.rows import group_rows
from arborsim.signals.scores import OfPrompt, Position, Score, ScoreState, rounded, sum_in_order


@dataclass(frozen=True)
class PromptReach(Score):
    """Attention that a head's prompt queries pay outside sinks and newest tokens, on average.

    In [0, 1], the same number for every token of a group, the mean over the query heads of a KV
    head.  Of a short prompt, sinks are at most an eighth and the newest tokens a quarter.  It is 0
    where no query sees more than these.
    """

    sinks: int = 64
    recent: int = 256
    needs = frozenset({Signal.HEAD_ATTENTION})
    grouping = "head"
    about = "reach of the head in the prompt"

    @property
    def use(self) -> RowUse:
        return RowUse("head", "reach", generated=False, sinks=self.sinks, recent=self.recent)

    def start(self, layers: int) -> ScoreState:
        return OfPrompt(self.of_prompt)

    def of_prompt(self, run: TokenRun) -> np.ndarray:
        """Float64 ``[groups]`` of the prompt's attention."""
        sinks, recent = self.use.excluded(run.steps)
        queries = range(sinks + recent, run.steps)
        reduced = run.observed.reduced.get(self.use)
        if reduced is not None:
            total: np.ndarray = reduced.leaves[0].sum(1)
        else:
            rows = group_rows(run.observed, "head")
            reach = [
                sum_in_order(np.stack(rows.row(query))[:, sinks : query + 1 - recent])
                for query in queries
            ]
            total = sum_in_order(np.array(reach), axis=0) if reach else np.zeros(rows.groups)
        return rounded(total / max(1, len(queries)))


@dataclass(frozen=True)
class HeadKinds(Pool):
    """Heads keep all of their tokens (retrieval) or only those that are protected (streaming).

    Over budget, streaming heads give up what came since the last decision.  If that is not enough,
    retrieval heads become streaming ones, the lowest gates first.
    """

    about = "retrieval heads keep all, streaming heads sinks and newest tokens"
    budget_scope = "model"

    def evictions(self, at: Decision, first: int, free: np.ndarray, over: int) -> np.ndarray:
        assert isinstance(at.policy, DuoAttention)
        count = np.count_nonzero(free, axis=1)
        evictions = np.where(count < count.max(), count, 0)  # a head that lacks tokens streams
        for head in np.argsort(at.policy.gates_of(at.view), kind="stable").tolist():
            if evictions.sum() >= over:
                break
            evictions[head] = count[head]
        return np.asarray(evictions)


@dataclass(frozen=True)
class DuoAttention(StreamPolicy):
    """As many heads keep everything as the budget allows, those with the highest gates.

    The longer the search grows, the fewer they are.  A head that became a streaming one stays so.
    """

    sinks: int = setting(
        64,
        "first tokens that every head keeps, at most an eighth of the budget",
        unit="tokens",
        low=0,
    )
    recent: int = setting(
        256, "newest tokens that every head keeps, at most half of the budget", unit="tokens", low=1
    )
    gates: str = setting(
        "",
        "file with the gates: a row per layer, a number per KV head, as the authors' "
        "full_attention_heads.tsv; empty: measured on the prompt",
    )

    name = "duoattention"
    score = Position()
    grouping = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gates:
            _ = self._given  # a file that is no table is found now

    @cached_property
    def allocate(self) -> Allocation:
        return HeadKinds(self.adaptation)

    @cached_property
    def protect(self) -> ProtectSome:
        return ProtectSome(self.pin_prompt, self.sinks, self.recent, 0.5, sinks_share=0.125)

    def scores(self) -> Mapping[str, Score]:
        measured = {} if self.gates else {"gate": PromptReach(self.sinks, self.recent)}
        return {"score": self.score, **measured}

    def gates_of(self, view: CacheView) -> np.ndarray:
        """Gate of every group, float64 ``[groups]`` in [0, 1]."""
        if not self.gates:
            return view.scores["gate"][:, 0]
        rows, columns = self._given.shape
        shape = view.shape
        if columns != shape.kv_heads or max(shape.layers, default=-1) >= rows:
            raise UsageError(
                f"{self.name}: gates '{self.gates}' is a table of {rows} x {columns} (layers x KV "
                f"heads); this model needs {max(shape.layers) + 1} x "
                f"{shape.kv_heads}, or more layers"
            )
        return self._given[list(shape.layers)].reshape(-1)

    @cached_property
    def _given(self) -> np.ndarray:
        """Float64 ``[layers, kv_heads]``, clipped to [0, 1] as the authors do."""
        try:
            text = Path(self.gates).read_text(encoding="utf-8")
            rows = [[float(x) for x in line.split()] for line in text.splitlines() if line.strip()]
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"{self.name}: gates '{self.gates}' cannot be read ({why})") from None
        except ValueError:  # not a number, or not text
            rows = []
        if len({len(row) for row in rows}) != 1 or not np.isfinite(rows).all():  # or no row
            raise UsageError(
                f"{self.name}: gates '{self.gates}' must be a table: a row per layer, as many "
                "numbers in each as the model has KV heads"
            )
        return np.clip(np.array(rows, dtype=np.float64), 0, 1)
