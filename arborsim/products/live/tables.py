"""Live runs: a row per policy and budget, compared with full retention, and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.errors import more_room
from arborsim.core.statistics import clopper_pearson, fisher_p
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult
from arborsim.play.live_log import describe
from arborsim.play.results import ANY, BASELINE, MARK, EpisodeResult, Relative, Row, aggregate
from arborsim.policies.base import hints_of
from arborsim.products.replay.tables import COLUMNS, flat_measurements
from arborsim.products.replay.words import budget_of_reading
from arborsim.report.table import read_columns
from arborsim.report.words import counted, hundredths, interval

if TYPE_CHECKING:
    import pandas as pd

#: Columns that others imply: the first to go where a terminal has no room.
IMPLIED = ("total", "speed_vs_full")
LEGEND = (
    "Peaks are the largest of any search, with the prefill: they can exceed the budget; tokens "
    "moved and times are sums over searches."
)


@dataclass(frozen=True)
class LiveReport:
    """All results of a live run, and what they rest on."""

    facts: LiveFacts
    results: tuple[LiveResult, ...]
    request: dict[str, Any]  #: see `arborsim.play.live_log.describe`
    command: str
    #: Nothing was removed; bytes and seconds are those of a simulated machine.
    shadow: bool = False
    unbounded: frozenset[str] = frozenset()  #: policies that do not keep to the budget
    reading: tuple[str, ...] = ()  #: those whose budget is what a step reads

    @classmethod
    def of(
        cls, request: LiveRequest, facts: LiveFacts, results: Iterable[LiveResult]
    ) -> LiveReport:
        """In the order of problems, then of the request's cells."""
        order = {(c.policy.name, c.budget.text): i for i, c in enumerate(request.cells)}

        def place(result: LiveResult) -> tuple[int, int]:
            return result.episode, order.get((result.policy, result.budget), len(order))

        unbounded = frozenset(c.policy.name for c in request.cells if not c.policy.bounded)
        paged = (c.policy for c in request.cells if hints_of(c.policy).bounds_page)
        reading = tuple(policy.name for policy in paged if not policy.bounded)
        found = tuple(sorted(results, key=place))
        asked = describe(request), request.command, request.shadow
        return cls(facts, found, *asked, unbounded, reading)

    @property
    def problems(self) -> str:
        """``"8 problems"``."""
        return counted(len({result.episode for result in self.results}), "problem")


@dataclass(frozen=True, kw_only=True)
class LiveRow(Row):
    """One policy under one budget, over all problems whose search its budget could hold.

    Whatever is relative to full retention (`Row.relative`: peak of HBM, tokens per second) is so
    over those problems that both searched.
    """

    correct: int
    judged: int
    #: 95% Clopper-Pearson interval of the accuracy; NaN if nothing was judged.
    low: float
    high: float
    #: Accuracy less that of full retention; NaN if there is nothing to compare with.
    difference: float
    p: float  #: two-sided, of Fisher's exact test of that difference
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
        return self.wall_s or self.time.total_s

    @property
    def other_s(self) -> float:
        """Sampling, the tree, judging thoughts: what no other part is about."""
        return max(0.0, self.wall_s - self.time.total_s) if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.generated_tokens, self.total_s)


def live_rows(report: LiveReport) -> tuple[LiveRow, ...]:
    """Rows in the order of the results, which is that of the request's cells."""
    ran = [result for result in report.results if not result.infeasible]
    full = {result.episode: result for result in ran if result.policy == BASELINE}
    rows = aggregate(episode_result(report, result) for result in ran)
    by_cell = {(row.policy, row.budget): row for row in rows}
    cells = dict.fromkeys((result.policy, result.budget) for result in report.results)
    return tuple(_row(report, by_cell[cell], full) for cell in cells if cell in by_cell)


def episode_result(report: LiveReport, result: LiveResult) -> EpisodeResult:
    """The record that tables and figures of replays take."""
    cell = result.episode, result.policy, result.budget, result.budget_tokens
    kv_bytes, bounded = report.facts.kv_bytes_per_token, result.policy not in report.unbounded
    figures: dict[str, Any] = {
        "attention_kept": math.nan,
        "kv_bytes_per_token": kv_bytes,
        "bounded": bounded,
    }
    return EpisodeResult(report.facts.task, *cell, result.measured, **figures)


def _row(report: LiveReport, row: Row, full: dict[int, LiveResult]) -> LiveRow:
    cell = [r for r in report.results if (r.policy, r.budget) == (row.policy, row.budget)]
    own = [result for result in cell if not result.infeasible]
    shared = [result for result in own if result.episode in full]
    others = [full[result.episode] for result in shared]
    # In a shadow run all answers are full retention's.
    answers = row.is_baseline or not report.shadow
    judged = [result for result in own if answers and result.correct is not None]
    correct = sum(bool(result.correct) for result in judged)
    low, high = clopper_pearson(correct, len(judged)) if judged else (math.nan, math.nan)
    compares = answers and not row.is_baseline
    difference, p = _compared(shared, others) if compares else (math.nan, math.nan)
    relative = Relative(
        peak_hbm=_ratio(_peak(shared), _peak(others)),
        tokens_per_s=_ratio(_speed(report, shared), _speed(report, others)),
    )
    return LiveRow(
        **{**vars(row), "relative": relative},
        correct=correct,
        judged=len(judged),
        low=low,
        high=high,
        difference=difference,
        p=p,
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
    good, base = map(sum, zip(*pairs, strict=True))
    return (good - base) / len(pairs), fisher_p(good, base, len(pairs))


def _peak(results: Sequence[LiveResult]) -> float:
    return max((result.measured.peak_hbm_kv_bytes for result in results), default=0)


def _speed(report: LiveReport, results: Sequence[LiveResult]) -> float:
    tokens = sum(result.measured.generated_tokens for result in results)
    spent = (r.measured.time.total_s if report.shadow else r.wall_s for r in results)
    return _ratio(tokens, math.fsum(spent))


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _p(row: LiveRow) -> str:
    if math.isnan(row.p):
        return ""
    return "<0.001" if row.p < 0.001 else f"{row.p:.3f}"


def _difference(row: LiveRow) -> str:
    return "" if math.isnan(row.difference) else f"{100 * row.difference:+.1f}"


_FUNCTIONS: dict[str, Callable[[LiveRow], Any]] = {
    "judged_correct": lambda row: row.correct if row.judged else math.nan,
    "right_text": lambda row: f"{row.correct}/{row.judged}" if row.judged else "n/a",
    "accuracy_text": lambda row: hundredths(row.accuracy),
    "interval_text": lambda row: interval(row.low, row.high),
    "difference_text": _difference,
    "p_text": _p,
}
#: Columns by group: ``columns.toml`` declares them.
ANSWERS, MEMORY, TIME = read_columns("arborsim.products.live", _FUNCTIONS, COLUMNS).values()
#: What a terminal shows at once: answers, memory and, but for masked runs, speed.
DECIDING = (
    *("policy", "budget", "correct", "interval", "difference", "p", "peak_hbm", "hbm_vs_full"),
    "peak_ddr",
)
SPEED = ("total", "tokens_per_s", "speed_vs_full")


def left_out(report: LiveReport) -> dict[tuple[str, str], list[str]]:
    """Why budgets were infeasible, by policy and budget; problem by problem."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in report.results:
        if each.infeasible:
            why = each.infeasible.removeprefix(f"budget infeasible for {each.policy}: ")
            found.setdefault((each.policy, each.budget), []).append(why)
    return found


def cautions(report: LiveReport, rows: Sequence[LiveRow]) -> list[str]:
    """Notes without which the numbers can be misread."""
    found = []
    if report.facts.random_weights:
        found.append(
            "Random weights: text and answers mean nothing; memory and time are those of the "
            "geometry."
        )
    elif not any(row.judged for row in rows):
        found.append("The answers were not judged: there is no accuracy.")
    if report.request.get("masked"):
        found.append(
            "Masked run: tokens were masked in place of being removed. Answers are those of a live "
            "run; memory is counted by the policies' decisions, and seconds are no cache's."
        )
    if report.shadow:
        gpu = report.request.get("gpu", {}).get("name", "?")
        found.append(
            f"Shadow run: policies decided, nothing was removed. Bytes and seconds are simulated "
            f"on {gpu}; the answers are those of full retention."
        )
    together = report.request.get("batch", 1)
    if together > 1 and not report.shadow:
        found.append(
            f"{together} searches ran at a time: the seconds of one are those of all that ran with "
            "it, so speeds are those of a single search among others."
        )
    if any(row.label != row.policy for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    found += budget_of_reading(report.reading)
    reasons: list[str] = []
    for (policy, budget), why in left_out(report).items():
        at = "" if budget == ANY else f" at budget {budget}"
        times = counted(len(why), "search")
        found.append(f"{policy}{at} could not hold {times}, e.g. {why[0]}.")
        reasons += why
    if reasons:
        todo = more_room(reasons)
        found.append(f"{todo[0].upper()}{todo[1:]}.")
    return found


def live_json(report: LiveReport) -> str:
    """Facts, request, rows and searches as strict JSON (unknown numbers are null)."""
    rows = live_rows(report)
    found = {name: getattr(report, name) for name in ("facts", "request", "command", "shadow")}
    found |= {"rows": [*map(row_record, rows)], "results": [*map(flat, report.results)]}
    return documents.to_json({**found, "notes": cautions(report, rows)})


#: Fields of a `LiveRow` that live runs do not know, and what is said besides its fields.
_ATTENTION = ("attention_kept", "kept_note", "oracle_gap", "output_error")
SILENT = ("trace", "relative", "per", "answers", *_ATTENTION)
DERIVED = ("accuracy", "total_s", "other_s", "tokens_per_s")


def row_record(row: LiveRow) -> dict[str, Any]:
    """A row as a flat record; names carry their units."""
    return {
        **{name: value for name, value in asdict(row).items() if name not in SILENT},
        **{name: getattr(row, name) for name in DERIVED},
        "hbm_vs_full": row.relative.peak_hbm,
        "speed_vs_full": row.relative.tokens_per_s,
    }


def flat(result: LiveResult) -> dict[str, Any]:
    """One search as a flat record; names carry their units."""
    found = {**vars(result), **flat_measurements(result.measured)}
    del found["measured"]
    return found


def live_frame(report: LiveReport) -> pd.DataFrame:
    """One row per search."""
    import pandas as pd

    return pd.DataFrame([flat(result) for result in report.results])
