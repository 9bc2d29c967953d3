"""The verdict of a validation in sentences, and its notes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborsim.show.words import number, percent
from arborsim.validate.results import PEAKS, TERMS, CellCheck, Validation
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
        f"Time: seconds per token off by {percent(token.median)} in the median, "
        f"{percent(token.worst)} at worst ({token.worst_name or 'nothing ran'})."
        + _against_full(against)
        + _of_thread(ran, thread),
        f"Decisions under real eviction: Jaccard index of the tokens in HBM {number(before)} "
        f"while the tokens are the same, {number(after)} after that (medians over policies and "
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
        f" As multiples of full retention's in this run, off by {percent(error.median)} in the "
        f"median, {percent(error.worst)} at worst ({error.worst_name})."
    )


def _of_thread(lines: Sequence[Line], error: TermError) -> str:
    """What all CPU time says: the terms', and that of the search's own bookkeeping."""
    if not error.lines:
        return ""
    terms_s = sum(line.live_s[TERMS.index("total_s")] for line in lines)
    share = terms_s / sum(line.thread_s for line in lines)
    return (
        f" Seconds are CPU time of the searching thread here, of which the terms are "
        f"{percent(share)}; against all of it the sum is off by {percent(error.median)} in the "
        f"median, {percent(error.worst)} at worst ({error.worst_name})."
    )


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return float(np.median(known)) if known else float("nan")


def peak_notes(result: Validation) -> list[str]:
    """Peaks that differ, one by one; the size of tensors and of the allocator."""
    ran = [check for check in result.checks if not check.infeasible]
    said = [
        f"{check.policy} at {check.budget}, problem {check.episode}: {name} is "
        f"{simulated:,} B simulated, {live:,} B live"
        for check in ran
        for name, live, simulated in zip(
            PEAKS, check.live_peaks, check.simulated_peaks, strict=True
        )
        if live != simulated
    ]
    gaps = [c.allocated_bytes / c.live_peaks[0] for c in ran if c.live_peaks and c.live_peaks[0]]
    if gaps:
        said.append(
            f"The pools' tensors, gaps included, take {min(gaps):.2f} to {max(gaps):.2f} times the "
            "peak of the tokens in them."
        )
    over = [c.device_peak_bytes - c.weight_bytes - c.allocated_bytes for c in ran
            if c.device_peak_bytes]  # fmt: skip
    if over:
        said.append(
            f"The allocator's peak, less weights and pools, is {min(over):,} to {max(over):,} B: "
            "activations, and copies while pools grow."
        )
    return said


def left_out(result: Validation) -> list[str]:
    """What could not be compared, and why."""
    infeasible = (c for c in result.checks if c.infeasible)
    return [
        *result.left_out,
        *(f"{c.policy} at {c.budget}, problem {c.episode}: {c.infeasible}" for c in infeasible),
    ]
