"""A validation in a terminal and as a page: the verdict, and a line per policy and budget.

The page needs no script and no network: its figures are SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arborsim.show import page
from arborsim.show.table import LABEL, Column, Table, name_column, print_tables
from arborsim.show.validation_figures import (
    bytes_figures,
    jaccard_figures,
    parts_legend,
    quality_figures,
    time_figure,
)
from arborsim.show.words import number, percent, plain
from arborsim.validate.results import PEAKS, TERMS, CellCheck, Validation
from arborsim.validate.summary import (
    LEAST_PROBLEMS,
    Line,
    TermError,
    lines_of,
    rank_agreements,
    term_errors,
)

if TYPE_CHECKING:
    from rich.console import Console

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


#: Below this width the columns of `_SPARE` are left out.
_WIDE = 100
_SPARE = ("time", "same", "kept")


def _figure(
    title: str, about: str, value: Callable[[Line], float], text: Callable[[Line], str]
) -> Column[Line]:
    """A figure of searches that ran, shown as `text`."""
    return Column(title, title, "count", value, about,
                  text=lambda line: text(line) if line.searches else "")  # fmt: skip


def _of(count: int, total: int) -> str:
    return "all" if count == total else f"{count}/{total}"


def _share(part: float, whole: float) -> str:
    return "all" if part == whole else f"{100 * part / whole:.1f}%" if whole else ""


def _signed(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:+.0f}%"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _per_token(line: Line) -> float:
    live, simulated = line.per_token_s()
    return simulated / live - 1 if live else math.nan


NAMES: tuple[Column[Line], ...] = (
    name_column("policy", lambda line: line.policy),
    name_column("budget", lambda line: line.budget, LABEL),
)
COLUMNS: tuple[Column[Line], ...] = (
    Column("n", "n", "count", lambda line: line.searches,
           "live searches; +k: the budget was too small for k more",
           text=lambda line: f"{line.searches}" + f"+{line.infeasible}" * bool(line.infeasible)),
    Column("plans", "plans", "count", lambda line: line.parity,
           "shadow runs that decide exactly as the replay of their own recording",
           text=lambda line: _of(line.parity, line.searches + line.infeasible)),
    _figure("bytes",
            "share of steps after which the simulated bytes of every tier are the live ones",
            lambda line: line.equal_calls, lambda line: _share(line.equal_calls, line.calls)),
    _figure("peaks", "searches in which all simulated peaks are the live ones",
            lambda line: line.peaks_equal, lambda line: _of(line.peaks_equal, line.searches)),
    _figure("time", "relative error of all seconds, simulated against measured",
            lambda line: line.error("total_s"), lambda line: _signed(line.error("total_s"))),
    _figure("token", "relative error of the seconds per generated token, without the prompt",
            _per_token, lambda line: _signed(_per_token(line))),
    _figure("same", "share of the iterations that the live run repeats token by token",
            lambda line: line.same, lambda line: _share(line.same, 1.0)),
    _figure("J", "Jaccard index of the tokens in HBM, shadow against live, while the tokens are "
            "the same", lambda line: line.jaccard_before,
            lambda line: _number(line.jaccard_before)),
    _figure("J after", "the same after the first other token, matched by order of arrival",
            lambda line: line.jaccard_after, lambda line: _number(line.jaccard_after)),
    _figure("kept", "attention kept, in the replay of the full-retention trace",
            lambda line: line.attention_kept, lambda line: _number(line.attention_kept)),
    _figure("right", "answers of the live searches", lambda line: line.correct,
            lambda line: f"{line.correct}/{line.judged}" if line.judged else ""),
)  # fmt: skip
_ERRORS: tuple[Column[TermError], ...] = (
    name_column("term", lambda error: _term(error)),
    Column("lines", "policies and budgets", "count", lambda error: error.lines,
           text=lambda error: str(error.lines)),
    Column("median", "median error", "count", lambda error: error.median,
           text=lambda error: percent(error.median)),
    Column("worst", "worst error", "count", lambda error: error.worst,
           text=lambda error: percent(error.worst)),
    name_column("worst", lambda error: error.worst_name, LABEL),
)  # fmt: skip


def _term(error: TermError) -> str:
    return error.term.removesuffix("_s").replace("_", " ")


def print_validation(result: Validation, console: Console | None = None) -> None:
    """Print the verdict, the lines and the terms of the time; fits 80 columns."""
    from rich.console import Console

    console = console or Console(highlight=False)
    if not result.checks:
        console.print("Nothing was compared.")
        return
    lines = lines_of(result.checks)
    table = Table(lines, (*NAMES, *COLUMNS))
    shown = table if console.width >= _WIDE else table.without(_SPARE)
    print_tables(console, [("", shown)])
    console.print(plain(_legend(shown)), style="dim", markup=False)
    for error in term_errors(lines):
        if error.lines:
            console.print(
                f"  {_term(error)}: off by {percent(error.median)} in the median, "
                f"{percent(error.worst)} at worst ({plain(error.worst_name)}), n {error.lines}",
                markup=False,
            )
    for sentence in (*sentences(result.checks), *result.left_out):
        console.print(plain(sentence), markup=False)


def _legend(shown: Table[Line]) -> str:
    """What the columns show, and which of them a wider terminal would show."""
    said = "; ".join(f"{c.title}: {c.about.replace('; ', ', ')}" for c in shown.columns if c.about)
    hidden = [column.title for column in COLUMNS if column not in shown.columns]
    missing = f" From {_WIDE} columns on also {', '.join(hidden)}." if hidden else ""
    return f"{said}.{missing}"


def write_page(result: Validation, path: Path) -> None:
    """Write the page; the same result gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    page.write(render(result), path)


def render(result: Validation) -> str:
    """The whole page as text."""
    lines: Sequence[Line] = lines_of(result.checks)
    about = result.about
    where = [about[key] for key in ("task", "search", "device", "GPU profile") if key in about]
    return page.render(
        "validation",
        title="Simulated against measured",
        subtitle=", ".join(where),
        verdict=sentences(result.checks),
        table=Table(lines, (*NAMES, *COLUMNS)),
        bytes=bytes_figures(result.checks),
        parts=parts_legend(),
        peaks=peak_notes(result),
        time=time_figure(lines),
        terms=Table(term_errors(lines), _ERRORS),
        jaccard=jaccard_figures(result.checks),
        quality=quality_figures(result.checks, lines),
        about=dict(about),
        left_out=left_out(result),
    )
