"""What replaying searches on a bank gives: one record per search, and one row per comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from arborsim.bank.arms import REFERENCE
from arborsim.bank.simulate import Simulated
from arborsim.core.measurements import TimeSplit
from arborsim.core.statistics import clopper_pearson


@dataclass(frozen=True)
class SearchResult:
    """One search over one problem, on one machine under one policy and budget.

    Attributes
    ----------
    trace : str
    episode : int
    algorithm, swept : str
        As in `arborsim.bank.arms.Arm`.
    width : int
    policy, budget : str
    correct : bool or None
        None: not judged.
    kv_tokens, kv_tokens_with_prompt : int
        KV size, summed over selections (`arborsim.bank.kv`).
    selections : int
        Steps that had candidates.
    model_calls, iterations, generated_tokens, prompt_tokens : int
        Thoughts opened; decode iterations; tokens.
    given_up : int
        Nodes that the search gave up.
    bank_misses : int
        Children that were asked for and not recorded, and thoughts whose end was not.
    kv_bytes_per_token : int
    simulated : Simulated
    """

    trace: str
    episode: int
    algorithm: str
    swept: str
    width: int
    policy: str
    budget: str
    correct: bool | None
    kv_tokens: int
    kv_tokens_with_prompt: int
    selections: int
    model_calls: int
    iterations: int
    generated_tokens: int
    prompt_tokens: int
    given_up: int
    bank_misses: int
    kv_bytes_per_token: int
    simulated: Simulated

    @property
    def label(self) -> str:
        return f"{self.algorithm} {self.swept}".strip()

    def flat(self) -> dict[str, Any]:
        """One row of a table; names carry their units."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "simulated"}
        simulated, measured = self.simulated, self.simulated.measured
        known = {*own, "time", "series"}
        return {
            **own,
            "budget_tokens": simulated.budget_tokens,
            **{f.name: getattr(measured, f.name) for f in fields(measured) if f.name not in known},
            "hbm_kv_byte_s": simulated.hbm_kv_byte_s,
            "peak_held_kv_bytes": simulated.peak_held_kv_bytes,
            "held_kv_byte_s": simulated.held_kv_byte_s,
            **{part.name: getattr(measured.time, part.name) for part in fields(TimeSplit)},
            "total_s": measured.time.total_s,
            "tokens_per_s": measured.tokens_per_s,
            "attention_kept": simulated.attention_kept,
        }


@dataclass(frozen=True)
class Row:
    """One search algorithm at one width under one policy and budget, over all problems.

    Figures other than accuracy and `missed` are means over searches; `tokens_per_s` is all tokens
    over all seconds.

    Attributes
    ----------
    label, policy, budget : str
    width : int
    searches, judged, right : int
    accuracy, low, high : float
        Share of right answers among those judged, with its 95 % Clopper-Pearson interval.
    figures : dict of str to float
        By name; see `FIGURES`.
    missed : float
        Share of the thoughts asked for that were not recorded, over all searches.
    reference : dict of str to float
        The same figures of REBASE at this width, policy and budget; empty if it was not run.
    """

    label: str
    width: int
    policy: str
    budget: str
    searches: int
    judged: int
    right: int
    accuracy: float
    low: float
    high: float
    figures: dict[str, float]
    missed: float
    reference: dict[str, float]

    def times(self, figure: str) -> float:
        """As a multiple of REBASE's; NaN if that is unknown or was not run."""
        other = self.reference.get(figure, math.nan)
        return self.figures[figure] / other if other else math.nan


#: The figures of a `Row`: all are means over searches.
FIGURES: dict[str, Callable[[SearchResult], float]] = {
    "kv_tokens": lambda r: r.kv_tokens,
    "kv_tokens_with_prompt": lambda r: r.kv_tokens_with_prompt,
    "kv_bytes": lambda r: r.kv_tokens * r.kv_bytes_per_token,
    "model_calls": lambda r: r.model_calls,
    "iterations": lambda r: r.iterations,
    "generated_tokens": lambda r: r.generated_tokens,
    "peak_hbm_kv_bytes": lambda r: r.simulated.measured.peak_hbm_kv_bytes,
    "peak_ddr_bytes": lambda r: r.simulated.measured.peak_ddr_bytes,
    "hbm_kv_byte_s": lambda r: r.simulated.hbm_kv_byte_s,
    "peak_held_kv_bytes": lambda r: r.simulated.peak_held_kv_bytes,
    "held_kv_byte_s": lambda r: r.simulated.held_kv_byte_s,
    "total_s": lambda r: r.simulated.measured.time.total_s,
    "attention_kept": lambda r: r.simulated.attention_kept,
}


def rows_of(results: Iterable[SearchResult]) -> list[Row]:
    """One row per algorithm, width, policy and budget, in order of appearance."""
    groups: dict[tuple[str, int, str, str], list[SearchResult]] = {}
    for result in results:
        key = (result.label, result.width, result.policy, result.budget)
        groups.setdefault(key, []).append(result)
    figures = {key: _figures(found) for key, found in groups.items()}
    return [
        _row(key, found, figures[key], figures.get((REFERENCE, *key[1:]), {}))
        for key, found in groups.items()
    ]


def _figures(results: Sequence[SearchResult]) -> dict[str, float]:
    found = {name: fmean(map(of, results)) for name, of in FIGURES.items()}
    seconds = math.fsum(r.simulated.measured.time.total_s for r in results)
    tokens = sum(r.generated_tokens for r in results)
    found["tokens_per_s"] = tokens / seconds if seconds else math.nan
    return found


def _row(
    key: tuple[str, int, str, str],
    results: Sequence[SearchResult],
    figures: dict[str, float],
    reference: dict[str, float],
) -> Row:
    label, width, policy, budget = key
    verdicts = [r.correct for r in results if r.correct is not None]
    right, judged = sum(verdicts), len(verdicts)
    low, high = clopper_pearson(right, judged) if judged else (math.nan, math.nan)
    misses = sum(r.bank_misses for r in results)
    asked = misses + sum(r.model_calls for r in results)
    missed = misses / asked if asked else 0.0
    return Row(
        label, width, policy, budget, len(results), judged, right,
        right / judged if judged else math.nan, low, high,
        figures, missed, reference,
    )  # fmt: skip
