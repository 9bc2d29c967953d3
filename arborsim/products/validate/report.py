"""A validation: the verdict in words, a line per policy and budget, and its figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from arborsim.products.validate import figures, results
from arborsim.report.report import (
    Answer,
    Facts,
    Figures,
    Listed,
    Printed,
    Report,
    Section,
    Shown,
)
from arborsim.report.table import Table, read_columns
from arborsim.report.words import counted, percent, plain

#: Below this width some columns are left out.
_WIDE = 116
_NARROW = ("time", "share", "same", "kept")
_BYTES = (
    "What the live pools hold (wide line) and what the simulated ledger holds (dashed, on top of "
    "it), in the first search."
)
_TIME = "Seconds per generated token, the prompt left out; on the line both are the same."
_JACCARD = (
    "Jaccard index of the tokens in HBM, shadow run against live run, over the iterations of the "
    "first search. Dotted: after the first token that differs."
)
_QUALITY = "One dot per policy and budget; those with infeasible problems rest on fewer searches."

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
        verdicts = {"decisions": plans, "bytes": steps and peaks}
        wrong = [name for name, right in verdicts.items() if not right]
        said = f"The simulator and the live run differ in {' and '.join(wrong)}, which is a fault"
    token = {error.term: error for error in results.term_errors(ran)}["per_token_s"]
    if not token.lines:
        return f"{said}; no time was compared."
    within = "within" if token.median <= _AIM else "beyond"
    return (
        f"{said}. Its seconds per token are off by {percent(token.median)} in the median, "
        f"{within} the aim of {percent(_AIM)}."
    )


def parts(checks: Sequence[results.CellCheck]) -> dict[str, str]:
    """The verdict, part by part: what was found, and what that means."""
    lines = results.lines_of(checks)
    ran = [line for line in lines if line.searches]

    def total(name: str, of: Sequence[results.Line] = ran) -> int:
        return sum(getattr(line, name) for line in of)

    errors = {error.term: error for error in results.term_errors(ran)}
    token, thread, against = (errors[n] for n in ("per_token_s", "thread_s", "against_full_s"))
    time = f"Seconds per token {off(token)}."
    if against.lines:  # the machine's pace of the moment cancels out
        time += f" As multiples of full retention's in this run, {off(against)}."
    if thread.lines:
        terms_s = sum(line.live_s[results.TERMS.index("total_s")] for line in ran)
        share = percent(terms_s / sum(line.thread_s for line in ran))
        time += f" Of the searching thread's CPU time the terms are {share}; the sum is"
        time += f" {off(thread)}."
    ranks = results.rank_agreements(checks)
    quality = " ".join(
        f"{rank.figure.replace('_', ' ').capitalize()} against live accuracy, Spearman "
        f"{rank.rho:+.2f} [{rank.low:+.2f}, {rank.high:+.2f}] over {rank.lines} policies and "
        f"budgets, {rank.problems} problems each."
        for rank in ranks
    )
    if not ranks:
        problems = counted(len({check.episode for check in checks}), "problem")
        quality = (
            f"{problems} and {len(ran)} policies and budgets are too few to rank accuracies; at "
            f"least {results.LEAST_PROBLEMS} problems are needed."
        )
    before, after = ([getattr(line, f"jaccard_{n}") for line in ran] for n in ("before", "after"))
    return {
        "Plans": f"{total('parity', lines):,} of {len(checks):,} shadow runs decide exactly as the "
        f"replay of their own recording ({total('equal_moves', lines):,} of "
        f"{total('shadow_moves', lines):,} moves): a difference is a fault of the simulator.",
        "Bytes": f"Equal to the byte after {total('equal_calls'):,} of {total('calls'):,} steps of "
        f"{total('searches'):,} live searches; all {len(results.PEAKS)} peaks equal in "
        f"{total('peaks_equal'):,}: a difference is a fault of the cache or of the ledger.",
        "Time": f"{time} Simulated seconds are as good as the profile of the machine, and noisy "
        f"where other work runs. The aim is {_AIM:.0%} per generated token in the median.",
        "Policies": f"{_policies(ran)} On small models the forward pass is short, and the share "
        "large.",
        "Decisions under real eviction": f"Jaccard index of the tokens in HBM {_median(before)} "
        f"while the tokens are the same, {_median(after)} after that (medians): removing tokens "
        "changes what the model computes later, which a replay cannot know.",
        "Quality": f"{quality} Whether figures of a replay rank policies as right answers do is a "
        "result, not a test.",
    }


def _policies(lines: Sequence[results.Line]) -> str:
    """The share of the seconds that deciding takes, measured and simulated."""
    shares = [(*line.policy_share(), line.name) for line in lines if line.live_s[-1] > 0]
    if not shares:
        return "No time was measured."
    live, simulated = (
        percent(float(np.median(side))) for side in list(zip(*shares, strict=True))[:2]
    )
    most, as_simulated, name = max(shares)
    return (
        f"{live} of the seconds in the median, {simulated} simulated; most under {name} "
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


def _of(count: int, total: int) -> str:
    return "all" if count == total else f"{count}/{total}"


def _share(part: float, whole: float) -> str:
    return "all" if part == whole else f"{100 * part / whole:.1f}%" if whole else ""


def _per_token(line: results.Line) -> float:
    live, simulated = line.per_token_s()
    return simulated / live - 1 if live else math.nan


_Text = Callable[[results.Line], str]
_Value = Callable[[results.Line], float]


def _known(value: _Value, said: _Text | str) -> _Text:
    """A figure of searches that ran, in words or in a form; empty where it is unknown."""

    def text(line: results.Line) -> str:
        if not line.searches or math.isnan(number := value(line)):
            return ""
        return format(number, said) if isinstance(said, str) else said(line)

    return text


def _shares(line: results.Line) -> str:
    return "/".join(f"{100 * share:.1f}" for share in line.policy_share()) + "%"


def _right(line: results.Line) -> str:
    return f"{line.correct}/{line.judged}" if line.judged else ""


_VALUES: dict[str, _Value] = {
    "error of time": lambda line: line.error("total_s"),
    "error per token": _per_token,
    "share of policies": lambda line: sum(line.policy_share()),
}
#: Of searches that ran: the name of a text, the figure that must be known, and the text.
_TEXTS: tuple[tuple[str, _Value, _Text | str], ...] = (
    ("bytes", lambda line: line.calls, lambda line: _share(line.equal_calls, line.calls)),
    ("peaks", lambda line: line.searches, lambda line: _of(line.peaks_equal, line.searches)),
    ("time", _VALUES["error of time"], "+.0%"),
    ("token", _VALUES["error per token"], "+.0%"),
    ("share", _VALUES["share of policies"], _shares),
    ("as live", lambda line: line.same, lambda line: _share(line.same, 1.0)),
    ("before", lambda line: line.jaccard_before, ".3f"),
    ("after", lambda line: line.jaccard_after, ".3f"),
    ("attention", lambda line: line.attention_kept, ".3f"),
    ("right", lambda line: line.correct, _right),
)
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "n": lambda line: f"{line.searches}" + f"+{line.infeasible}" * bool(line.infeasible),
    "plans": lambda line: _of(line.parity, line.searches + line.infeasible),
    **_VALUES,
    **{name: _known(value, said) for name, value, said in _TEXTS},
    "term name": term_name,
    "count": lambda error: str(error.lines),
    "median error": lambda error: percent(error.median),
    "worst error": lambda error: percent(error.worst),
}
#: Columns by group: ``columns.toml`` declares them.
COLUMNS, _ERRORS = read_columns("arborsim.products.validate", _FUNCTIONS).values()


def _printed(lines: Sequence[results.Line], width: int) -> Iterator[Printed]:
    """The lines, with the columns that fit, and what these mean."""
    table = Table(lines, COLUMNS)
    if width < _WIDE:
        table = table.without(_NARROW)
    yield "", "", [("", table)]
    hidden = [column.title for column in COLUMNS if column not in table.columns]
    missing = f" From {_WIDE} columns on also {', '.join(hidden)}." if hidden else ""
    legend = "; ".join(
        f"{c.title}: {c.about.replace('; ', ', ')}" for c in table.columns if c.about
    )
    yield "", "", textwrap.wrap(plain(f"{legend}.{missing}"), width)


def report_of(result: results.Validation) -> Report:
    """Make the report of a validation."""
    checks, about = result.checks, result.about
    lines = results.lines_of(checks)
    where = [about[key] for key in ("task", "search", "device", "GPU profile") if key in about]
    table = Table(lines, COLUMNS)
    terms = Table(results.term_errors(lines), _ERRORS)
    first = (Answer([verdict(checks)]), Facts("", parts(checks)))
    infeasible = [
        f"{c.policy} at {c.budget}, problem {c.episode}: {c.infeasible}"
        for c in checks
        if c.infeasible
    ]
    compared = Shown(table, sorts=False, printed=partial(_printed, lines))
    sections = (
        Section("answer", "The verdict", first),
        Section("table", "Policies and budgets", (compared,)),
        Section("terms", "Errors of the time by term", (Shown(terms, "terms", sorts=False),)),
    )

    def pictures() -> Iterator[Section]:
        held = Figures("bytes", figures.held(checks), ("Policy",))
        yield Section("bytes", "Bytes over time", (_BYTES, held, Listed(_peak_notes(result))))
        yield Section("time", "Time", (_TIME, Figures("time", figures.per_token(lines))))
        drift = Figures("jaccard", figures.drift(checks), ("Budget",))
        yield Section("decisions", "Decisions when eviction is real", (_JACCARD, drift))
        ranks = Figures("quality", figures.quality(checks, lines), ("Figure",))
        yield Section("quality", "Quality", (_QUALITY, ranks))

    appendix = (
        Facts("Settings", dict(about)),
        Listed([*result.left_out, *infeasible], "Left out", printed=True),
        Facts("Columns", table.definitions()),
    )
    title = "Simulated against measured"
    nothing = "" if checks else "nothing was compared"
    said = ", ".join(where)
    return Report("validation", title, said, sections, pictures, appendix, nothing=nothing)


def _peak_notes(result: results.Validation) -> list[str]:
    """Peaks that differ, one by one; the size of tensors and of the allocator."""
    ran = [check for check in result.checks if not check.infeasible]
    said = [
        f"{check.policy} at {check.budget}, problem {check.episode}: {name} is "
        f"{simulated:,} B simulated, {live:,} B live"
        for check in ran
        for name, live, simulated in zip(
            results.PEAKS, check.live_peaks, check.simulated_peaks, strict=True
        )
        if live != simulated
    ]
    gaps = [c.allocated_bytes / c.live_peaks[0] for c in ran if c.live_peaks and c.live_peaks[0]]
    if gaps:
        said.append(
            f"The pools' tensors, gaps included, take {min(gaps):.2f} to {max(gaps):.2f} times the "
            "peak of the tokens in them."
        )
    on_device = [check for check in ran if check.device_peak_bytes]
    over = [c.device_peak_bytes - c.weight_bytes - c.allocated_bytes for c in on_device]
    if over:
        said.append(
            f"The allocator's peak, less weights and pools, is {min(over):,} to {max(over):,} B: "
            "activations, and copies while pools grow."
        )
    pairs = [(c.simulated_device_bytes, c.device_peak_bytes) for c in ran]
    off = [predicted / real - 1 for predicted, real in pairs if predicted and real]
    if off:
        said.append(
            f"The allocator's peak is predicted to {min(off):+.1%} to {max(off):+.1%} of the real "
            f"one (target: 3%)."
        )
    return said
