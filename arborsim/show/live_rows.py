"""Live results, aggregated: one row per policy and budget, compared with full retention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.statistics import clopper_pearson
from arborsim.live.log import describe
from arborsim.live.request import LiveFacts, LiveRequest, LiveResult
from arborsim.run.results import BASELINE, EpisodeResult, Row, aggregate

#: Differences with a smaller p are called differences.
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class LiveReport:
    """All results of a live run, and what they rest on."""

    facts: LiveFacts
    results: tuple[LiveResult, ...]
    request: dict[str, Any]  #: see `arborsim.live.log.describe`
    command: str
    #: Nothing was removed; bytes and seconds are those of a simulated machine.
    shadow: bool = False
    unbounded: frozenset[str] = frozenset()  #: policies that do not keep to the budget

    @classmethod
    def of(
        cls, request: LiveRequest, facts: LiveFacts, results: tuple[LiveResult, ...]
    ) -> LiveReport:
        """In the order of problems, then of the request's cells."""
        order = {(c.policy.name, c.budget.text): i for i, c in enumerate(request.cells)}
        return cls(
            facts=facts,
            results=tuple(sorted(
                results,
                key=lambda r: (r.episode, order.get((r.policy, r.budget), len(order))),
            )),
            request=describe(request),
            command=request.command,
            shadow=request.shadow,
            unbounded=frozenset(c.policy.name for c in request.cells if not c.policy.bounded),
        )  # fmt: skip


@dataclass(frozen=True)
class LiveRow:
    """One policy under one budget, over all problems whose search its budget could hold.

    Whatever is relative to full retention is so over those problems that both searched.
    """

    row: Row  #: memory, moves and times: see there
    correct: int
    judged: int
    #: 95% Clopper-Pearson interval of the accuracy; NaN if nothing was judged.
    low: float
    high: float
    #: Accuracy less that of full retention; NaN if there is nothing to compare with.
    difference: float
    p: float  #: two-sided, of Fisher's exact test of that difference
    #: Peak of KV in HBM, and tokens per second, relative to full retention.
    hbm_vs_full: float
    speed_vs_full: float
    #: Largest of any search.
    allocated_bytes: int
    device_peak_bytes: int
    wall_s: float  #: sum over searches; 0 in a shadow run, where seconds are simulated
    infeasible: tuple[str, ...]  #: why, of each problem that the budget could not hold

    @property
    def accuracy(self) -> float:
        return self.correct / self.judged if self.judged else math.nan

    @property
    def total_s(self) -> float:
        return self.wall_s or self.row.time.total_s

    @property
    def other_s(self) -> float:
        """Sampling, the tree, judging thoughts: what no other part is about."""
        return max(0.0, self.wall_s - self.row.time.total_s) if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.row.generated_tokens / self.total_s if self.total_s else math.nan

    @property
    def label(self) -> str:
        return self.row.label

    @property
    def budget_label(self) -> str:
        return self.row.budget_label


def live_rows(report: LiveReport) -> tuple[LiveRow, ...]:
    """Rows in the order of the results, which is that of the request's cells."""
    order = list(dict.fromkeys((result.policy, result.budget) for result in report.results))
    ran = [result for result in report.results if not result.infeasible]
    rows = aggregate(episode_result(report, result) for result in ran)
    full = {result.episode: result for result in ran if result.policy == BASELINE}
    in_order = sorted(rows, key=lambda row: order.index((row.policy, row.budget)))
    return tuple(_row(report, row, full) for row in in_order)


def episode_result(report: LiveReport, result: LiveResult) -> EpisodeResult:
    """The record that tables and figures of replays take."""
    return EpisodeResult(
        trace=report.facts.task,
        episode=result.episode,
        policy=result.policy,
        budget=result.budget,
        budget_tokens=result.budget_tokens,
        measured=result.measured,
        attention_kept=math.nan,
        kv_bytes_per_token=report.facts.kv_bytes_per_token,
        bounded=result.policy not in report.unbounded,
    )


def _row(report: LiveReport, row: Row, full: dict[int, LiveResult]) -> LiveRow:
    cell = [r for r in report.results if (r.policy, r.budget) == (row.policy, row.budget)]
    own = [result for result in cell if not result.infeasible]
    shared = [result for result in own if result.episode in full]
    others = [full[result.episode] for result in shared]
    # Policies that only look on answer nothing.
    answers = row.is_baseline or not report.shadow
    judged = [result for result in own if answers and result.correct is not None]
    correct = sum(bool(result.correct) for result in judged)
    low, high = clopper_pearson(correct, len(judged)) if judged else (math.nan, math.nan)
    compares = answers and not row.is_baseline
    difference, p = _compared(shared, others) if compares else (math.nan, math.nan)
    return LiveRow(
        row=row,
        correct=correct,
        judged=len(judged),
        low=low,
        high=high,
        difference=difference,
        p=p,
        hbm_vs_full=_ratio(_peak(shared), _peak(others)),
        speed_vs_full=_ratio(_speed(report, shared), _speed(report, others)),
        allocated_bytes=max(result.allocated_bytes for result in own),
        device_peak_bytes=max(result.device_peak_bytes for result in own),
        wall_s=0.0 if report.shadow else math.fsum(result.wall_s for result in own),
        infeasible=tuple(result.infeasible for result in cell if result.infeasible),
    )


def _compared(own: Sequence[LiveResult], others: Sequence[LiveResult]) -> tuple[float, float]:
    """Difference of accuracies, and Fisher's p."""
    verdicts = [(a.correct, b.correct) for a, b in zip(own, others, strict=True)]
    pairs = [(bool(a), bool(b)) for a, b in verdicts if a is not None and b is not None]
    if not pairs:
        return math.nan, math.nan
    good, base = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    return (good - base) / len(pairs), fisher_p(good, base, len(pairs))


def fisher_p(good: int, other: int, n: int) -> float:
    """Two-sided p of Fisher's exact test for `good` against `other` successes, of `n` each."""
    from scipy.stats import fisher_exact

    return float(fisher_exact([[good, n - good], [other, n - other]])[1])


def least_visible(correct: int, n: int) -> int | None:
    """The best of the lower counts that `n` problems tell from `correct`; None if there is none."""
    lower = (k for k in range(correct - 1, -1, -1) if fisher_p(k, correct, n) < SIGNIFICANT)
    return next(lower, None)


def _peak(results: Sequence[LiveResult]) -> float:
    return max((result.measured.peak_hbm_kv_bytes for result in results), default=0)


def _speed(report: LiveReport, results: Sequence[LiveResult]) -> float:
    tokens = sum(result.measured.generated_tokens for result in results)
    spent = (r.measured.time.total_s if report.shadow else r.wall_s for r in results)
    return _ratio(tokens, math.fsum(spent))


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan
