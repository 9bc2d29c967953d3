"""The verdict of a validation, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborsim.validate.results import PEAKS, TERMS, CellCheck
from arborsim.validate.summary import (
    LEAST_PROBLEMS,
    Line,
    TermError,
    lines_of,
    rank_agreements,
    term_errors,
)

_MOVES = ("shadow_moves", "equal_moves")


def drift(lines: Sequence[Line]) -> tuple[float, float]:
    """Median Jaccard index over lines, while the tokens are the same and after that."""
    return _median([line.jaccard_before for line in lines]), _median(
        [line.jaccard_after for line in lines]
    )


def sentences(checks: Sequence[CellCheck]) -> list[str]:
    """The verdict, part by part."""
    lines = lines_of(checks)
    ran = [line for line in lines if line.searches]
    searches = sum(line.searches for line in ran)
    before, after = drift(ran)
    plans = sum(line.parity for line in lines)
    errors = {error.term: error for error in term_errors(ran)}
    token, thread = errors["per_token_s"], errors["thread_s"]
    against = errors["against_full_s"]
    calls, equal = sum(line.calls for line in ran), sum(line.equal_calls for line in ran)
    peaks = sum(line.peaks_equal for line in ran)
    moved, same = (sum(getattr(line, name) for line in lines) for name in _MOVES)
    said = [
        f"Plans: {plans:,} of {len(checks):,} shadow runs decide exactly as the replay of their "
        f"own recording ({same:,} of {moved:,} moves).",
        f"Bytes: equal to the byte after {equal:,} of {calls:,} steps of {searches:,} live "
        f"searches; all {len(PEAKS)} peaks equal in {peaks:,}.",
        f"Time: seconds per token off by {_percent(token.median)} in the median, "
        f"{_percent(token.worst)} at worst ({token.worst_name or 'nothing ran'})."
        + _against_full(against)
        + _of_thread(ran, thread),
        f"Decisions under real eviction: Jaccard index of the tokens in HBM {_number(before)} "
        f"while the tokens are the same, {_number(after)} after that (medians over policies and "
        "budgets).",
    ]
    ranks = rank_agreements(checks)
    for rank in ranks:
        said.append(
            f"Quality: {rank.figure.replace('_', ' ')} against live accuracy, Spearman "
            f"{rank.rho:+.2f} [{rank.low:+.2f}, {rank.high:+.2f}] over {rank.lines} policies and "
            f"budgets, {rank.problems} problems each."
        )
    if not ranks:
        problems = len({check.episode for check in checks})
        said.append(
            f"Quality: {problems} problems and {len(ran)} policies and budgets are too few to rank "
            f"accuracies; at least {LEAST_PROBLEMS} problems are needed."
        )
    return said


def _against_full(error: TermError) -> str:
    """What is left once the machine's pace of the moment cancels out."""
    if not error.lines:
        return ""
    return (
        f" As multiples of full retention's in this run, off by {_percent(error.median)} in the "
        f"median, {_percent(error.worst)} at worst ({error.worst_name})."
    )


def _of_thread(lines: Sequence[Line], error: TermError) -> str:
    """What all CPU time says: the terms', and that of the search's own bookkeeping."""
    if not error.lines:
        return ""
    terms_s = sum(line.live_s[TERMS.index("total_s")] for line in lines)
    share = terms_s / sum(line.thread_s for line in lines)
    return (
        f" Seconds are CPU time of the searching thread here, of which the terms are "
        f"{_percent(share)}; against all of it the sum is off by {_percent(error.median)} in the "
        f"median, {_percent(error.worst)} at worst ({error.worst_name})."
    )


def _percent(value: float) -> str:
    return "n/a" if value != value else f"{100 * value:.1f}%"


def _number(value: float) -> str:
    return "n/a" if value != value else f"{value:.3f}"


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return float(np.median(known)) if known else float("nan")
