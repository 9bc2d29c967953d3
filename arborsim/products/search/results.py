"""Results of searches on a bank: a record per search, a row per comparison, and lambda_b.

ETS (Hooper et al. 2025, section 5.1) takes the largest lambda_b in [1, 2] whose accuracy is within
0.2 points of REBASE's (`verdicts`).  On few problems that says little, so the interval is given
with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from arborsim.core.measurements import Measurements, TimeSplit, check_figures, stored_columns
from arborsim.core.statistics import clopper_pearson
from arborsim.searches.arms import REFERENCE

#: ETS's choice of lambda_b: the option, the range, and what the accuracy may lose.
OPTION = "lambda_b"
LOW, HIGH = 1.0, 2.0
MARGIN = 0.002


@dataclass(frozen=True)
class Simulated:
    """One search under one policy and budget."""

    measured: Measurements
    budget_tokens: int
    #: Share of the recorded attention that fell on readable tokens; NaN if unknown.
    attention_kept: float
    #: Integral over time of the KV bytes in HBM under the policy, staging buffers included
    #: (trapezoids between events).
    hbm_kv_byte_s: float
    #: Largest KV size of the nodes that the search has not given up, whatever the policy keeps.
    peak_held_kv_bytes: int
    held_kv_byte_s: float  #: its integral over time
    kept_note: str = ""  #: why `attention_kept` is NaN on a bank that holds attention, or ""


_APART = {"simulated", "by_levels"}  # of a result: no columns of a table


@dataclass(frozen=True)
class SearchResult:
    """One search over one problem, on one machine under one policy and budget.

    Refuses figures that no search can have.
    """

    trace: str
    episode: int
    algorithm: str
    swept: str  #: as in `arborsim.searches.arms.Arm`
    width: int
    policy: str
    budget: str
    correct: bool | None  #: None: not judged
    #: KV size, summed over selections (`arborsim.searches.walk`).
    kv_tokens: int
    kv_tokens_with_prompt: int
    selections: int  #: steps that had candidates
    model_calls: int  #: thoughts opened
    iterations: int  #: of decoding
    generated_tokens: int
    prompt_tokens: int
    given_up: int  #: nodes that the search gave up
    #: Children that were asked for and not recorded, and thoughts whose end was not.
    bank_misses: int
    kv_bytes_per_token: int
    simulated: Simulated
    by_levels: bool = True  #: whether its KV size can be compared (`arborsim.searches.base.Search`)

    def __post_init__(self) -> None:
        whose = f"{self.trace}, problem {self.episode}, {self.label}, {self.policy}"
        check_figures(self.simulated.measured, whose, self.simulated.attention_kept)

    @property
    def label(self) -> str:
        return f"{self.algorithm} {self.swept}".strip()

    def flat(self) -> dict[str, Any]:
        """One row of a table; names carry their units."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        simulated, measured = self.simulated, self.simulated.measured
        known = {*own, "time", "series", "stored"}
        return {
            **own,
            "budget_tokens": simulated.budget_tokens,
            **{f.name: getattr(measured, f.name) for f in fields(measured) if f.name not in known},
            **stored_columns(measured.stored),
            "hbm_kv_byte_s": simulated.hbm_kv_byte_s,
            "peak_held_kv_bytes": simulated.peak_held_kv_bytes,
            "held_kv_byte_s": simulated.held_kv_byte_s,
            **{part.name: getattr(measured.time, part.name) for part in fields(TimeSplit)},
            "total_s": measured.time.total_s,
            "tokens_per_s": measured.tokens_per_s,
            **stored_columns(measured.stored),
            "attention_kept": simulated.attention_kept,
            "attention_kept_note": simulated.kept_note,
            "left_out": "",
        }


@dataclass(frozen=True)
class SkippedSearch:
    """A search that could not run under a policy, as its budget was too small for this problem."""

    trace: str
    episode: int
    algorithm: str
    swept: str
    width: int
    policy: str
    budget: str
    left_out: str  #: why

    @property
    def label(self) -> str:
        return f"{self.algorithm} {self.swept}".strip()


@dataclass(frozen=True)
class SearchRow:
    """One search algorithm at one width under one policy and budget, over all problems.

    Figures other than accuracy and `missed` are means over searches; `tokens_per_s` is all tokens
    over all seconds.
    """

    label: str
    width: int
    policy: str
    budget: str
    searches: int
    judged: int
    right: int
    #: Share of right answers among those judged, with its 95 % Clopper-Pearson interval.
    accuracy: float
    low: float
    high: float
    figures: dict[str, float]  #: by their names in `FIGURES`
    missed: float  #: share of the thoughts asked for that were not recorded, over all searches
    #: The same figures of REBASE at this width, policy and budget; empty if it was not run.
    reference: dict[str, float]
    by_levels: bool  #: whether its KV size can be compared with REBASE's
    kept_note: str = ""  #: as in `Simulated`
    left_out: str = ""  #: why no problem could be searched; figures are then NaN

    def times(self, figure: str) -> float:
        """As a multiple of REBASE's; NaN if that is unknown or was not run."""
        other = self.reference.get(figure, math.nan)
        return self.figures[figure] / other if other else math.nan

    @property
    def ratios(self) -> dict[str, float]:
        """All figures as multiples of REBASE's."""
        return {name: self.times(name) for name in self.figures}


#: The figures of a `SearchRow`: means over searches of these columns of
#: `SearchResult.flat`, and `kv_bytes`: `kv_tokens` in bytes.
FIGURES = (
    "kv_tokens",
    "kv_tokens_with_prompt",
    "kv_bytes",
    "model_calls",
    "iterations",
    "generated_tokens",
    "peak_hbm_kv_bytes",
    "peak_ddr_bytes",
    "hbm_kv_byte_s",
    "peak_held_kv_bytes",
    "held_kv_byte_s",
    "total_s",
    "attention_kept",
)


def rows_of(
    results: Iterable[SearchResult], skipped: Iterable[SkippedSearch] = ()
) -> list[SearchRow]:
    """One row per algorithm, width, policy and budget, in order of appearance.

    Those of which every problem was `skipped` come last.
    """
    groups: dict[tuple[str, int, str, str], list[SearchResult]] = {}
    for result in results:
        key = (result.label, result.width, result.policy, result.budget)
        groups.setdefault(key, []).append(result)
    figures = {key: _figures(found) for key, found in groups.items()}
    rows = []
    for key, found in groups.items():
        verdicts = [r.correct for r in found if r.correct is not None]
        right, judged = sum(verdicts), len(verdicts)
        low, high = clopper_pearson(right, judged) if judged else (math.nan, math.nan)
        misses = sum(r.bank_misses for r in found)
        asked = misses + sum(r.model_calls for r in found)
        rows.append(
            SearchRow(
                *key,
                len(found),
                judged,
                right,
                right / judged if judged else math.nan,
                low,
                high,
                figures[key],
                misses / asked if asked else 0.0,
                figures.get((REFERENCE, *key[1:]), {}),
                found[0].by_levels,
                found[0].simulated.kept_note,
            )
        )
    reasons: dict[tuple[str, int, str, str], str] = {}
    for each in skipped:
        key = (each.label, each.width, each.policy, each.budget)
        if key not in groups:
            reasons.setdefault(key, each.left_out)
    unknown = dict.fromkeys((*FIGURES, "tokens_per_s"), math.nan)
    rows += [
        SearchRow(
            *key, 0, 0, 0, math.nan, math.nan, math.nan, unknown, math.nan, {}, True, left_out=why
        )
        for key, why in reasons.items()
    ]
    return rows


def _figures(results: Sequence[SearchResult]) -> dict[str, float]:
    rows = [{**r.flat(), "kv_bytes": r.kv_tokens * r.kv_bytes_per_token} for r in results]
    found = {name: fmean(row[name] for row in rows) for name in FIGURES}
    seconds = math.fsum(r.simulated.measured.time.total_s for r in results)
    tokens = sum(r.generated_tokens for r in results)
    found["tokens_per_s"] = tokens / seconds if seconds else math.nan
    return found


@dataclass(frozen=True)
class Paired:
    """A search against REBASE, on the problems that were judged for both."""

    judged: int
    right: int
    reference_right: int
    gained: int  #: problems that only this search got right
    lost: int  #: problems that only REBASE got right
    kv_times: float = math.nan  #: the KV size as a multiple of REBASE's, over the same problems

    @property
    def difference(self) -> float:
        """Accuracy less REBASE's."""
        return (self.gained - self.lost) / self.judged

    def interval(self) -> tuple[float, float]:
        """Interval that holds the difference of accuracies at 95 % at least.

        From those of the shares gained and lost, each Clopper-Pearson at 97.5 % (Bonferroni): wide,
        but right for few problems, and where no problem differs.
        """
        gained = clopper_pearson(self.gained, self.judged, 0.975)
        lost = clopper_pearson(self.lost, self.judged, 0.975)
        return gained[0] - lost[1], gained[1] - lost[0]


def paired(mine: Iterable[SearchResult], reference: Iterable[SearchResult]) -> Paired | None:
    """Compare problem by problem; None if none was judged for both."""
    theirs = {r.episode: r for r in reference if r.correct is not None}
    pairs = [(r, theirs[r.episode]) for r in mine if r.correct is not None and r.episode in theirs]
    if not pairs:
        return None
    their_kv = sum(b.kv_tokens for _, b in pairs)
    return Paired(
        len(pairs),
        sum(a.correct is True for a, _ in pairs),
        sum(b.correct is True for _, b in pairs),
        sum(a.correct is True and b.correct is False for a, b in pairs),
        sum(b.correct is True and a.correct is False for a, b in pairs),
        sum(a.kv_tokens for a, _ in pairs) / their_kv if their_kv else math.nan,
    )


def verdicts(results: Sequence[SearchResult]) -> list[str]:
    """A line for each algorithm, width, policy and budget that `OPTION` was swept for."""
    groups: dict[tuple[str, int, str, str], dict[str, list[SearchResult]]] = {}
    for r in results:
        key = (r.algorithm, r.width, r.policy, r.budget)
        groups.setdefault(key, {}).setdefault(r.swept, []).append(r)
    lines = []
    for (algorithm, width, policy, budget), swept in groups.items():
        values = [name for name in swept if name.startswith(f"{OPTION}=")]
        reference = groups.get((REFERENCE, width, policy, budget), {}).get("", [])
        if values and reference:
            found = {
                float(name.partition("=")[2]): paired(swept[name], reference) for name in values
            }
            under = "" if policy == "full" else f" under {policy} at budget {budget}"
            lines.append(f"{algorithm} at width {width}{under}: {_chosen(found)}")
    return lines


def _chosen(found: dict[float, Paired | None]) -> str:
    """The value that ETS would take, as a sentence."""
    judged = {v: p for v, p in found.items() if p is not None and LOW <= v <= HIGH}
    if not judged:
        return f"no {OPTION} in [{LOW:g}, {HIGH:g}] has answers that were judged"
    fine = [v for v, p in judged.items() if p.difference >= -MARGIN - 1e-12]
    value = max(fine) if fine else max(judged, key=lambda v: (judged[v].difference, v))
    p = judged[value]
    low, high = p.interval()
    against = (
        f"{p.right} right against {p.reference_right} of {p.judged}; {p.gained} gained, {p.lost} "
        f"lost, difference {100 * p.difference:+.1f} points, 95% interval {100 * low:+.1f} to "
        f"{100 * high:+.1f}; one problem is {100 / p.judged:.1f}; KV size {p.kv_times:.2f} times "
        "REBASE's"
    )
    if fine:
        return f"{OPTION} {value:g} is the largest within 0.2 points of REBASE ({against})"
    return f"no {OPTION} is within 0.2 points of REBASE; {value:g} comes closest ({against})"
