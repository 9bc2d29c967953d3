"""Results of a validation: each search, a line per policy and budget, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from arborsim.core.statistics import bootstrap, spearman

#: Terms of the time that are compared (`arborsim.core.measurements.TimeSplit`, and their sum).
TERMS = ("prefill_s", "decode_s", "policy_s", "exposed_transfer_s", "rehydration_s", "total_s")
#: Counters that both sides keep (`arborsim.core.measurements.Measurements`).
_MOVED = tuple(f"{how}_tokens" for how in ("evicted", "offloaded", "quantised", "rehydrated"))
COUNTERS = ("decisions", *_MOVED, "rehydrations", "to_ddr_bytes", "from_ddr_bytes")
#: Peaks that both sides keep, in bytes.
PEAKS = tuple(f"peak_{of}_bytes" for of in ("hbm_kv", "ddr", "quantised", "staging"))
#: With fewer problems than this the ranks of accuracies say nothing.
LEAST_PROBLEMS = 40
#: A term is compared where it takes at least this share of the measured time.
LEAST_SHARE = 0.01
_SEED = 0
_LEAST_LINES = 3  # policies and budgets that make a ranking
_BASELINE = "full"
_NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class CellCheck:
    """One search under one policy and budget. Unknown numbers are NaN or -1."""

    episode: int
    policy: str
    budget: str
    budget_tokens: int
    full_tokens: int  #: length of the search under full retention
    #: Why the budget cannot hold the live search; nothing else was measured then.
    infeasible: str = ""
    #: (a) Moves of the shadow run; how many of them the replay repeats in their place; whether both
    #: lists are the same
    shadow_moves: int = -1
    equal_moves: int = -1
    parity: bool = False
    #: (b) Calls of the executor; after how many all bytes were equal; after how many some token was
    #: not in the same tier
    calls: int = 0
    equal_calls: int = 0
    tiers_differ: int = 0
    #: Largest difference by `arborsim.products.validate.compare.PARTS`, simulated less live
    off_bytes: tuple[int, ...] = ()
    #: By `PEAKS`
    live_peaks: tuple[int, ...] = ()
    simulated_peaks: tuple[int, ...] = ()
    #: By `COUNTERS`
    live_counters: tuple[float, ...] = ()
    simulated_counters: tuple[float, ...] = ()
    #: Largest size of the pools' tensors on the device, gaps included; largest memory of the
    #: framework's allocator (0 on the CPU); the weights
    allocated_bytes: int = 0
    device_peak_bytes: int = 0
    weight_bytes: int = 0
    simulated_device_bytes: int = 0  #: the allocator's largest memory as it is predicted; likewise
    #: Rows of `BytesOverTime.thinned`, one after the other; empty for searches that are not drawn
    bytes_over_time: tuple[int, ...] = ()
    #: (c) By `TERMS`
    live_s: tuple[float, ...] = ()
    simulated_s: tuple[float, ...] = ()
    #: CPU seconds of the live search where one thread computes it all: what other processes on a
    #: busy machine hardly change
    thread_s: float = _NAN
    generated_tokens: int = 0
    iterations: int = 0
    #: (d) Iterations for which the live run generated the tokens of the shadow run
    same_iterations: int = -1
    shadow_iterations: int = -1
    #: Jaccard index of the tokens in HBM of both: mean until then and after it, and over time
    jaccard_before: float = _NAN
    jaccard_after: float = _NAN
    jaccard_iteration: tuple[int, ...] = ()
    jaccard: tuple[float, ...] = ()
    #: (e) In the replay of the full-retention trace
    attention_kept: float = _NAN
    output_error: float = _NAN
    correct: int = -1  #: 1, 0 or -1 for "not judged", of the live run


@dataclass(frozen=True)
class Validation:
    """All that was compared."""

    checks: tuple[CellCheck, ...]  #: in order of problem
    #: What made the numbers: model, task, search, device, profile, versions, command, dates
    about: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  #: policies that no live search can run, and why


@dataclass(frozen=True)
class Line:
    """All searches of one policy under one budget."""

    policy: str
    budget: str
    searches: int  #: live searches that came to their end
    infeasible: int  #: those whose budget was too small
    parity: int  #: of all searches, those whose replay decides as the shadow run did
    shadow_moves: int
    equal_moves: int
    calls: int
    equal_calls: int
    peaks_equal: int  #: searches with the same peaks on both sides
    #: Sums by `TERMS`
    live_s: tuple[float, ...]
    simulated_s: tuple[float, ...]
    thread_s: float  #: CPU seconds of the searching thread; NaN if others computed with it
    tokens: int  #: generated
    #: Mean share of the shadow run's iterations that the live run repeats token by token
    same: float
    jaccard_before: float
    jaccard_after: float
    attention_kept: float
    output_error: float
    correct: int
    judged: int

    @property
    def name(self) -> str:
        return f"{self.policy} {self.budget}"

    def error(self, term: str) -> float:
        """Relative error of a term, simulated against measured. NaN where it hardly counts."""
        live, simulated = (side[TERMS.index(term)] for side in (self.live_s, self.simulated_s))
        total = self.live_s[TERMS.index("total_s")]
        return simulated / live - 1 if total and live >= LEAST_SHARE * total else _NAN

    def policy_share(self) -> tuple[float, float]:
        """Measured and simulated share of all seconds that signals, decisions and moves took."""
        policy, total = TERMS.index("policy_s"), TERMS.index("total_s")
        live, simulated = (
            side[policy] / side[total] if side[total] else _NAN
            for side in (self.live_s, self.simulated_s)
        )
        return live, simulated

    def per_token_s(self) -> tuple[float, float]:
        """Measured and simulated seconds per generated token, the prompt's left out."""
        if not self.tokens:
            return _NAN, _NAN
        total, prefill = TERMS.index("total_s"), TERMS.index("prefill_s")
        live, simulated = (
            (side[total] - side[prefill]) / self.tokens for side in (self.live_s, self.simulated_s)
        )
        return live, simulated


@dataclass(frozen=True)
class TermError:
    """Relative errors of one term over policies and budgets."""

    term: str
    lines: int  #: policies and budgets in which the term counts
    #: Of the absolute errors; NaN if it never counts
    median: float
    worst: float
    worst_name: str


@dataclass(frozen=True)
class RankAgreement:
    """Spearman's rho over policies and budgets between a replay's figure and live accuracy."""

    figure: str
    #: With the 95% percentile interval of a bootstrap over problems
    rho: float
    low: float
    high: float
    #: What it rests on
    lines: int
    problems: int


def lines_of(checks: Sequence[CellCheck]) -> list[Line]:
    """One per policy and budget, in the order in which they were asked for."""
    groups: dict[tuple[str, str], list[CellCheck]] = {}
    for check in checks:
        groups.setdefault((check.policy, check.budget), []).append(check)
    return [_line(policy, budget, found) for (policy, budget), found in groups.items()]


def _line(policy: str, budget: str, checks: Sequence[CellCheck]) -> Line:
    ran = [check for check in checks if not check.infeasible]
    judged = [check for check in ran if check.correct >= 0]
    return Line(
        policy=policy,
        budget=budget,
        searches=len(ran),
        infeasible=len(checks) - len(ran),
        parity=sum(check.parity for check in checks),
        shadow_moves=sum(check.shadow_moves for check in checks),
        equal_moves=sum(check.equal_moves for check in checks),
        calls=sum(check.calls for check in ran),
        equal_calls=sum(check.equal_calls for check in ran),
        peaks_equal=sum(check.live_peaks == check.simulated_peaks for check in ran),
        live_s=_sums([check.live_s for check in ran]),
        simulated_s=_sums([check.simulated_s for check in ran]),
        thread_s=sum(check.thread_s for check in ran),
        tokens=sum(check.generated_tokens for check in ran),
        same=_mean([check.same_iterations / max(1, check.shadow_iterations) for check in ran]),
        jaccard_before=_mean([check.jaccard_before for check in ran]),
        jaccard_after=_mean([check.jaccard_after for check in ran]),
        attention_kept=_mean([check.attention_kept for check in ran]),
        output_error=_mean([check.output_error for check in ran]),
        correct=sum(check.correct for check in judged),
        judged=len(judged),
    )


def term_errors(lines: Sequence[Line]) -> list[TermError]:
    """How far off each term is, then seconds per generated token, and CPU seconds of the thread.

    ``against_full_s`` is seconds per token as a multiple of full retention's in the same run: how
    fast the machine happens to be, which differs from the calibration's moment, cancels out.
    ``thread_s`` compares all simulated seconds with the CPU time of the searching thread.
    """
    errors: dict[str, Callable[[Line], float]]
    errors = {term: partial(Line.error, term=term) for term in TERMS}
    errors["per_token_s"] = _per_token_error
    pace = next((1 + _per_token_error(line) for line in lines if line.policy == _BASELINE), _NAN)
    errors["against_full_s"] = lambda line: (
        _NAN if line.policy == _BASELINE else (1 + _per_token_error(line)) / pace - 1
    )
    errors["thread_s"] = lambda line: (
        line.simulated_s[TERMS.index("total_s")] / line.thread_s - 1 if line.thread_s > 0 else _NAN
    )
    found = []
    for term, of in errors.items():
        known = [(abs(of(line)), line.name) for line in lines if line.searches]
        known = [(error, name) for error, name in known if error == error]
        sizes = [error for error, _ in known]
        worst = max(known, default=(_NAN, ""))
        found.append(
            TermError(term, len(known), float(np.median(sizes)) if sizes else _NAN, *worst)
        )
    return found


def _per_token_error(line: Line) -> float:
    live, simulated = line.per_token_s()
    return simulated / live - 1 if live else _NAN


def rank_agreements(checks: Sequence[CellCheck]) -> list[RankAgreement]:
    """How well the figures of a replay rank policies as live accuracy does.

    Only policies and budgets that were feasible, and judged, on every problem are ranked, and for
    which the figure is known.  Nothing is returned for fewer problems than `LEAST_PROBLEMS`, or
    fewer than three lines.
    """
    problems = sorted({check.episode for check in checks})
    groups: dict[tuple[str, str], dict[int, CellCheck]] = {}
    for check in checks:
        if not check.infeasible and check.correct >= 0:
            groups.setdefault((check.policy, check.budget), {})[check.episode] = check
    ranked = [group for group in groups.values() if len(group) == len(problems)]
    if len(problems) < LEAST_PROBLEMS or len(ranked) < _LEAST_LINES:
        return []

    def table(name: str) -> np.ndarray:
        """Float64 ``[problems, lines]``."""
        return np.array(
            [[float(getattr(group[number], name)) for group in ranked] for number in problems]
        )

    accuracy = table("correct")
    found = []
    for figure in ("attention_kept", "output_error"):
        values = table(figure)
        known = ~np.isnan(values).any(axis=0)
        if known.sum() < _LEAST_LINES:
            continue
        values, right = values[:, known], accuracy[:, known]

        def rho(drawn: np.ndarray, values: np.ndarray = values, right: np.ndarray = right) -> float:
            return spearman(values[drawn].mean(axis=0), right[drawn].mean(axis=0))

        low, high = bootstrap(rho, len(problems), _SEED).tolist()
        whole = rho(np.arange(len(problems)))
        found.append(RankAgreement(figure, whole, low, high, int(known.sum()), len(problems)))
    return found


def _sums(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0.0,) * len(TERMS)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else _NAN
