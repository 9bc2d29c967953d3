"""A validation in a terminal: a line per policy and budget, and the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from arborsim.products.validate import results
from arborsim.report.table import LABEL, Column, Table, name_column, print_tables, terminal
from arborsim.report.words import counted, percent, plain

if TYPE_CHECKING:
    from rich.console import Console

#: Below this width the columns of `_SPARE` are left out.
_WIDE = 116
_SPARE = ("time", "share", "same", "kept")


#: What each part of the verdict is about, and what would be a fault.
MEANINGS = {
    "Plans": "A shadow run lets the policy decide next to the live model, removing nothing; the "
    "same search is then replayed from its recording. All must decide alike: a difference is a "
    "fault of the simulator.",
    "Bytes": "The live cache and the simulated ledger count the same tokens at the same moments. "
    "All must be equal to the byte: a difference is a fault of one of the two.",
    "Time": "Simulated seconds are as good as the profile of the machine, and noisy where other "
    "work runs at the same time. The aim is 15% per generated token in the median.",
    "Policies": "Signals, scores, decisions and moves, as a share of all seconds. On small models "
    "the forward pass is short, and the share large.",
    "Decisions under real eviction": "Removing tokens changes what the model computes later, and "
    "so what the policy sees. A replay cannot know that: 1 means that it changed nothing.",
    "Quality": "Whether figures of a replay rank policies as right answers do. It is a result, "
    "not a test: answers are only known from live runs.",
}
#: Relative error of the seconds per token that is aimed at, in the median.
_AIM = 0.15


def verdict(checks: Sequence[results.CellCheck]) -> str:
    """Whether the simulator can be trusted here, in a sentence or two."""
    lines = results.lines_of(checks)
    ran = [line for line in lines if line.searches]
    plans = sum(line.parity for line in lines) == len(checks)
    steps = sum(line.equal_calls for line in ran) == sum(line.calls for line in ran)
    peaks = sum(line.peaks_equal for line in ran) == sum(line.searches for line in ran)
    if plans and steps and peaks:
        said = "The simulator decides as the live run does and counts its memory to the byte"
    else:
        wrong = [name for name, right in (("decisions", plans), ("bytes", steps and peaks))
                 if not right]  # fmt: skip
        said = f"The simulator and the live run differ in {' and '.join(wrong)}, which is a fault"
    token = {error.term: error for error in results.term_errors(ran)}["per_token_s"]
    if not token.lines:
        return f"{said}; no time was compared."
    within = "within" if token.median <= _AIM else "beyond"
    return (
        f"{said}. Its seconds per token are off by {percent(token.median)} in the median, "
        f"{within} the aim of {percent(_AIM)}."
    )


def sentences(checks: Sequence[results.CellCheck]) -> list[str]:
    """The verdict, part by part; each begins with a key of `MEANINGS`."""
    lines = results.lines_of(checks)
    ran = [line for line in lines if line.searches]

    def total(name: str, of: Sequence[results.Line] = ran) -> int:
        return sum(getattr(line, name) for line in of)

    errors = {error.term: error for error in results.term_errors(ran)}
    token, thread, against = (errors[n] for n in ("per_token_s", "thread_s", "against_full_s"))
    time = f"Time: seconds per token {off(token)}."
    if against.lines:  # the machine's pace of the moment cancels out
        time += f" As multiples of full retention's in this run, {off(against)}."
    if thread.lines:
        terms_s = sum(line.live_s[results.TERMS.index("total_s")] for line in ran)
        time += (
            " Seconds are CPU time of the searching thread here, of which the terms are "
            f"{percent(terms_s / sum(line.thread_s for line in ran))}; against all of it the sum "
            f"is {off(thread)}."
        )
    said = [
        f"Plans: {total('parity', lines):,} of {len(checks):,} shadow runs decide exactly as the "
        f"replay of their own recording ({total('equal_moves', lines):,} of "
        f"{total('shadow_moves', lines):,} moves).",
        f"Bytes: equal to the byte after {total('equal_calls'):,} of {total('calls'):,} steps of "
        f"{total('searches'):,} live searches; all {len(results.PEAKS)} peaks equal in "
        f"{total('peaks_equal'):,}.",
        time,
        _policies(ran),
        "Decisions under real eviction: Jaccard index of the tokens in HBM "
        f"{_median([line.jaccard_before for line in ran])} while the tokens are the same, "
        f"{_median([line.jaccard_after for line in ran])} after that (medians over policies and "
        "budgets).",
    ]
    ranks = results.rank_agreements(checks)
    said += [
        f"Quality: {rank.figure.replace('_', ' ')} against live accuracy, Spearman "
        f"{rank.rho:+.2f} [{rank.low:+.2f}, {rank.high:+.2f}] over {rank.lines} policies and "
        f"budgets, {rank.problems} problems each."
        for rank in ranks
    ]
    if not ranks:
        problems = len({check.episode for check in checks})
        said.append(
            f"Quality: {counted(problems, 'problem')} and {len(ran)} policies and budgets are too "
            f"few to rank accuracies; at least {results.LEAST_PROBLEMS} problems are needed."
        )
    return said


def _policies(lines: Sequence[results.Line]) -> str:
    """What deciding takes of the seconds, measured and simulated."""
    shares = [(*line.policy_share(), line.name) for line in lines if line.live_s[-1] > 0]
    if not shares:
        return "Policies: no time was measured."
    live, simulated = (
        percent(float(np.median(side))) for side in list(zip(*shares, strict=True))[:2]
    )
    most, as_simulated, name = max(shares)
    return (
        f"Policies: {live} of the seconds in the median, {simulated} simulated; most under {name} "
        f"({percent(most)}, {percent(as_simulated)} simulated)."
    )


def off(error: results.TermError) -> str:
    """How far off a term is, and where most."""
    return (
        f"off by {percent(error.median)} in the median, {percent(error.worst)} at worst "
        f"({error.worst_name or 'nothing ran'})"
    )


def term_name(error: results.TermError) -> str:
    return error.term.removesuffix("_s").replace("_", " ")


def _median(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{np.median(known):.3f}" if known else "n/a"


def _figure(
    title: str, about: str, value: Callable[[results.Line], float],
    text: Callable[[results.Line], str] | None = None, form: str = ".3f",
) -> Column[results.Line]:  # fmt: skip
    """A figure of searches that ran: as `text`, else in this form; empty where it is unknown."""

    def shown(line: results.Line) -> str:
        known = line.searches and not math.isnan(value(line))
        return "" if not known else text(line) if text else format(value(line), form)

    return Column(title, title, "count", value, about, text=shown)


def _of(count: int, total: int) -> str:
    return "all" if count == total else f"{count}/{total}"


def _share(part: float, whole: float) -> str:
    return "all" if part == whole else f"{100 * part / whole:.1f}%" if whole else ""


def _per_token(line: results.Line) -> float:
    live, simulated = line.per_token_s()
    return simulated / live - 1 if live else math.nan


COLUMNS: tuple[Column[results.Line], ...] = (
    name_column("policy", lambda line: line.policy),
    name_column("budget", lambda line: line.budget, LABEL),
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
            lambda line: line.error("total_s"), form="+.0%"),
    _figure("token", "relative error of the seconds per generated token, without the prompt",
            _per_token, form="+.0%"),
    _figure("share", "the policy's share of all seconds, measured and simulated",
            lambda line: sum(line.policy_share()),
            lambda line: "/".join(f"{100 * share:.1f}" for share in line.policy_share()) + "%"),
    _figure("same", "share of the iterations that the live run repeats token by token",
            lambda line: line.same, lambda line: _share(line.same, 1.0)),
    _figure("J", "Jaccard index of the tokens in HBM, shadow against live, while the tokens are "
            "the same", lambda line: line.jaccard_before),
    _figure("J after", "the same after the first other token, matched by order of arrival",
            lambda line: line.jaccard_after),
    _figure("kept", "attention kept, in the replay of the full-retention trace",
            lambda line: line.attention_kept),
    _figure("right", "answers of the live searches", lambda line: line.correct,
            lambda line: f"{line.correct}/{line.judged}" if line.judged else ""),
)  # fmt: skip


def print_validation(result: results.Validation, console: Console | None = None) -> None:
    """Print the verdict, the lines and the terms of the time; fits 80 columns."""
    console = console or terminal()
    if not result.checks:
        console.print("Nothing was compared.")
        return
    lines = results.lines_of(result.checks)
    table = Table(lines, COLUMNS)
    if console.width < _WIDE:
        table = table.without(_SPARE)
    print_tables(console, [("", table)])
    legend = "; ".join(
        f"{c.title}: {c.about.replace('; ', ', ')}" for c in table.columns if c.about
    )
    hidden = [column.title for column in COLUMNS if column not in table.columns]
    missing = f" From {_WIDE} columns on also {', '.join(hidden)}." if hidden else ""
    console.print(plain(f"{legend}.{missing}"), style="dim", markup=False)
    for error in results.term_errors(lines):
        if error.lines:
            text = f"  {term_name(error)}: {off(error)}, n {error.lines}"
            console.print(plain(text), markup=False)
    for sentence in (verdict(result.checks), *sentences(result.checks), *result.left_out):
        console.print(plain(sentence), markup=False)
