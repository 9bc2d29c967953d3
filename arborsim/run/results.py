"""What a replay hands to tables and reports: a record per search, and a row per trace, policy and
budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from arborsim.core.measurements import Measurements, TimeSplit

if TYPE_CHECKING:
    from arborsim.machine.terms import Term
    from arborsim.run.pictures import TokenMap, TreePicture

BASELINE = "full"
ORACLE = "oracle"
#: The budget of policies that do not know budgets.
ANY = "any"
#: Follows the name of a policy that does not keep to the budget.
MARK = "\u2020"


@dataclass(frozen=True)
class EpisodeResult:
    """One search under one policy and budget.

    Attributes
    ----------
    trace : str
        Name of the trace file.
    episode : int
    policy : str
    budget : str
        As the user gave it: tokens (``"2048"``) or a share (``"0.25"``).
    budget_tokens : int
        What that came to for this search.
    measured : Measurements
    attention_kept : float
        Share of the recorded attention that fell on readable tokens; NaN if unknown.
    kv_bytes_per_token : int
        Keys and values of one token over all layers; 0 if unknown.  Draws the budget in bytes.
    output_error : float
        Relative error of the attention output on the captured layers; NaN if unknown.
    bounded : bool
        Whether the policy keeps the cache within the budget after every decision.
    terms : tuple of Term
        What the time consists of; empty unless it was to be explained.
    """

    trace: str
    episode: int
    policy: str
    budget: str
    budget_tokens: int
    measured: Measurements
    attention_kept: float
    kv_bytes_per_token: int = 0
    output_error: float = math.nan
    bounded: bool = True
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A policy that a trace cannot serve, under one budget or under any.

    Attributes
    ----------
    trace, policy : str
    budget : str
        Empty if no budget would do.
    remedy : str
        Options of ``arborsim record`` that supply what the trace lacks; empty if that is not the
        reason, but a budget that is too small.
    unrecorded : str
        Why no recording supplies it (`TraceInfo.unrecorded`); empty if one does.
    least : str
        The least budget that could do, as far as is known; empty if there is none.
    detail : str
        The whole story in one line.
    instead : str
        Setting under which the trace serves the policy after all, e.g. ``"per=shared"``.
    unsuited : bool
        The policy has no meaning on the model whose bytes are charged.
    """

    trace: str
    policy: str
    budget: str = ""
    remedy: str = ""
    least: str = ""
    detail: str = ""
    instead: str = ""
    unsuited: bool = False
    unrecorded: str = ""


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """All results of a replay, and what they rest on.

    Attributes
    ----------
    episodes : tuple of EpisodeResult
    pictures : tuple of TreePicture
    settings : dict
        GPU, model geometry, recall mode, page size, traces with their sha256, versions, seeds.
    assumed : tuple of str
        Numbers of the hardware profile that nobody measured.
    left_out : tuple of LeftOut
    token_maps : tuple of TokenMap
    notes : tuple of str
        Cautions about single policies on these traces.
    does_not_fit : tuple of str
        What needs more memory than the machine has, and how much more.
    """

    episodes: tuple[EpisodeResult, ...]
    pictures: tuple[TreePicture, ...]
    settings: dict[str, str]
    assumed: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    token_maps: tuple[TokenMap, ...] = ()
    notes: tuple[str, ...] = ()
    does_not_fit: tuple[str, ...] = ()


@dataclass(frozen=True)
class Relative:
    """A row against full retention on the same trace; NaN where there is nothing to compare with.

    1.0 is "the same": 0.25 of the memory, 1.3 times the time.
    """

    peak_hbm: float = math.nan
    mean_peak_hbm: float = math.nan
    time: float = math.nan
    tokens_per_s: float = math.nan
    attention_kept: float = math.nan


@dataclass(frozen=True)
class Row:
    """One policy under one budget, over all searches of a trace.

    Peaks are the largest over searches (`mean_*`: the mean); times, tokens, moves and traffic are
    summed; `attention_kept` and `output_error` are weighted by generated tokens (NaN if unknown for
    all searches).  `oracle_gap` is what the oracle keeps under the same budget, less what this
    policy keeps: a share, NaN if there is no oracle; negative for policies that lose less than
    evicting the same tokens everywhere must: they quantise, offload, recompute, choose per head or
    hold more than the budget (not `bounded`).  `fits` is whether the machine has the memory for
    every search.
    """

    trace: str
    policy: str
    budget: str
    searches: int
    prompt_tokens: int
    generated_tokens: int
    iterations: int
    peak_hbm_kv_bytes: int
    mean_peak_hbm_kv_bytes: float
    peak_hbm_kv_tokens: int
    peak_ddr_bytes: int
    peak_quantised_bytes: int
    mean_peak_ddr_bytes: float
    evicted_tokens: float
    offloaded_tokens: float
    quantised_tokens: float
    rehydrated_tokens: float
    rehydrations: int
    to_ddr_bytes: int
    from_ddr_bytes: int
    decisions: int
    time: TimeSplit
    attention_kept: float
    output_error: float
    bounded: bool = True
    fits: bool = True
    oracle_gap: float = math.nan
    relative: Relative = field(default_factory=Relative)

    @property
    def moved_bytes(self) -> int:
        """Traffic over PCIe, both directions."""
        return self.to_ddr_bytes + self.from_ddr_bytes

    @property
    def model_s(self) -> float:
        """Prefill and decode: what the search would cost with all KV in place."""
        return self.time.prefill_s + self.time.decode_s

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.generated_tokens, self.time.total_s)

    @property
    def is_baseline(self) -> bool:
        return self.policy == BASELINE

    @property
    def is_oracle(self) -> bool:
        return self.policy == ORACLE

    @property
    def label(self) -> str:
        """The policy for people, marked if it does not keep to the budget."""
        return self.policy if self.bounded or self.is_baseline else self.policy + MARK

    @property
    def budget_label(self) -> str:
        """The budget for people: full retention has none."""
        return "all" if self.is_baseline else self.budget


def at_budget(policy: str, budget: str) -> str:
    """``"h2o at budget 0.5"``; of a policy that knows no budget, its name."""
    return policy if budget == ANY else f"{policy} at budget {budget}"


def oracles(results: Iterable[EpisodeResult]) -> dict[tuple[str, int, str], float]:
    """Attention that the oracle keeps, by trace, episode and budget."""
    return {(r.trace, r.episode, r.budget): r.attention_kept for r in results if r.policy == ORACLE}


def aggregate(episodes: Iterable[EpisodeResult]) -> tuple[Row, ...]:
    """One row per (trace, policy, budget).

    Rows follow the traces as they came; within a trace full retention leads, then budgets and,
    within a budget, policies as they came: so that neighbours are what one wants to compare.
    """
    cells: dict[tuple[str, str, str], list[EpisodeResult]] = {}
    for result in episodes:
        cells.setdefault((result.trace, result.policy, result.budget), []).append(result)
    rows = [_row(results) for results in cells.values()]
    traces = list(dict.fromkeys(row.trace for row in rows))
    budgets = list(dict.fromkeys(row.budget for row in rows if not row.is_baseline))
    rows.sort(
        key=lambda row: (
            traces.index(row.trace),
            -1 if row.is_baseline else budgets.index(row.budget),
        )
    )
    baselines = {row.trace: row for row in reversed(rows) if row.is_baseline}
    bounds = {(row.trace, row.budget): row.attention_kept for row in rows if row.is_oracle}
    return tuple(
        replace(
            row,
            oracle_gap=bounds.get((row.trace, row.budget), math.nan) - row.attention_kept,
            relative=_relative(row, baselines[row.trace]) if row.trace in baselines else Relative(),
        )
        for row in rows
    )


def _row(results: list[EpisodeResult]) -> Row:
    first = results[0]
    measured = [result.measured for result in results]
    n = len(results)
    time = TimeSplit(
        **{
            part.name: math.fsum(getattr(m.time, part.name) for m in measured)
            for part in fields(TimeSplit)
        }
    )
    return Row(
        trace=first.trace,
        policy=first.policy,
        budget=first.budget,
        searches=n,
        prompt_tokens=sum(m.prompt_tokens for m in measured),
        generated_tokens=sum(m.generated_tokens for m in measured),
        iterations=sum(m.iterations for m in measured),
        peak_hbm_kv_bytes=max(m.peak_hbm_kv_bytes for m in measured),
        mean_peak_hbm_kv_bytes=sum(m.peak_hbm_kv_bytes for m in measured) / n,
        peak_hbm_kv_tokens=max(m.peak_hbm_kv_tokens for m in measured),
        peak_ddr_bytes=max(m.peak_ddr_bytes for m in measured),
        peak_quantised_bytes=max(m.peak_quantised_bytes for m in measured),
        mean_peak_ddr_bytes=sum(m.peak_ddr_bytes for m in measured) / n,
        evicted_tokens=math.fsum(m.evicted_tokens for m in measured),
        offloaded_tokens=math.fsum(m.offloaded_tokens for m in measured),
        quantised_tokens=math.fsum(m.quantised_tokens for m in measured),
        rehydrated_tokens=math.fsum(m.rehydrated_tokens for m in measured),
        rehydrations=sum(m.rehydrations for m in measured),
        to_ddr_bytes=sum(m.to_ddr_bytes for m in measured),
        from_ddr_bytes=sum(m.from_ddr_bytes for m in measured),
        decisions=sum(m.decisions for m in measured),
        time=time,
        attention_kept=_mean((r.attention_kept, r.measured.generated_tokens) for r in results),
        output_error=_mean((r.output_error, r.measured.generated_tokens) for r in results),
        bounded=first.bounded,
        fits=all(m.fits for m in measured),
    )


def _relative(row: Row, full: Row) -> Relative:
    return Relative(
        peak_hbm=_ratio(row.peak_hbm_kv_bytes, full.peak_hbm_kv_bytes),
        mean_peak_hbm=_ratio(row.mean_peak_hbm_kv_bytes, full.mean_peak_hbm_kv_bytes),
        time=_ratio(row.time.total_s, full.time.total_s),
        tokens_per_s=_ratio(row.tokens_per_s, full.tokens_per_s),
        attention_kept=_ratio(row.attention_kept, full.attention_kept),
    )


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    """Mean of (value, weight) pairs whose value is known."""
    known = [(value, weight) for value, weight in weighted if not math.isnan(value)]
    total = math.fsum(value * weight for value, weight in known)
    return _ratio(total, sum(weight for _, weight in known))


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan
