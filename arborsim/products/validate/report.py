"""A validation: the verdict in words, a line per policy and budget, and its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.products.validate import results
from arborsim.products.validate.compare import PARTS
from arborsim.report import page
from arborsim.report.report import (
    Answer,
    Choice,
    Facts,
    Figures,
    Listed,
    Report,
    Section,
    Shown,
    write,
)
from arborsim.report.table import Table, print_tables, read_columns, terminal
from arborsim.report.words import counted, percent, plain

if TYPE_CHECKING:
    from rich.console import Console

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
_MOST_DRAWN = 6

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
    """The share of the seconds that deciding takes, measured and simulated."""
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


def print_validation(result: results.Validation, console: Console | None = None) -> None:
    """Print the verdict, the lines and the terms of the time; fits 80 columns."""
    console = console or terminal()
    if not result.checks:
        console.print("Nothing was compared.")
        return
    lines = results.lines_of(result.checks)
    table = Table(lines, COLUMNS)
    if console.width < _WIDE:
        table = table.without(_NARROW)
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


# --- the page ---


def write_page(result: results.Validation, path: Path) -> None:
    """Write the page; `UsageError` where the file cannot be written."""
    write(report_of(result), path)


def report_of(result: results.Validation) -> Report:
    """Make the report of the page."""
    checks, about = result.checks, result.about
    lines = results.lines_of(checks)
    where = [about[key] for key in ("task", "search", "device", "GPU profile") if key in about]
    parts: dict[str, str] = {}
    for name, _, said in (sentence.partition(": ") for sentence in sentences(checks)):
        parts[name] = f"{parts.get(name, '')} {said[0].upper()}{said[1:]}".lstrip()
    parts = {name: f"{said} {MEANINGS[name]}" for name, said in parts.items()}
    table = Table(lines, COLUMNS)
    terms = Table(results.term_errors(lines), _ERRORS)
    first = (Answer([verdict(checks)]), Facts("", parts))
    held, pace = Figures("bytes", _bytes(checks), ("Policy",)), Figures("time", _time(lines))
    ranks = Figures("quality", _quality(checks, lines), ("Figure",))
    infeasible = [
        f"{c.policy} at {c.budget}, problem {c.episode}: {c.infeasible}"
        for c in checks
        if c.infeasible
    ]
    sections = (
        Section("answer", "The verdict", first),
        Section("table", "Policies and budgets", (Shown(table, sorts=False),)),
        Section("bytes", "Bytes over time", (_BYTES, held, Listed(_peak_notes(result)))),
        Section("time", "Time", (_TIME, pace, Shown(terms, "terms", "Errors by term", False))),
        Section(
            "decisions",
            "Decisions when eviction is real",
            (_JACCARD, Figures("jaccard", _jaccard(checks), ("Budget",))),
        ),
        Section("quality", "Quality", (_QUALITY, ranks)),
    )
    appendix = (
        Facts("Settings", dict(about)),
        Listed([*result.left_out, *infeasible], "Left out"),
        Facts("Columns", table.definitions()),
    )
    title = "Simulated against measured"
    return Report("validation", title, ", ".join(where), sections, appendix)


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


def _line(
    name: str, x: Sequence[float], y: Sequence[float], paint: str, dash: str = "solid", **look: Any
) -> page.Figure:
    """A line over the iterations."""
    return page.scatter(name, list(x), list(y), line={"color": paint, "dash": dash, **look})


def _dots(
    lines: Sequence[results.Line], values: Sequence[tuple[float, float]], texts: Sequence[str]
) -> list[page.Figure]:
    """A dot per policy and budget, a colour per budget."""
    found = []
    for number, budget in enumerate(dict.fromkeys(line.budget for line in lines)):
        own = [k for k, line in enumerate(lines) if line.budget == budget]
        x, y = ([page.rounded(values[k][side]) for k in own] for side in range(2))
        marker = {"color": page.colour(number + 1), "size": 8, "opacity": 0.75}
        tips: page.Figure = {
            "customdata": [page.label(texts[k]) for k in own],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        found.append(page.scatter(f"budget {budget}", x, y, "markers", marker=marker, **tips))
    return found


def _bytes(checks: Sequence[results.CellCheck]) -> list[Choice]:
    """Live and simulated bytes over the iterations: those that use most tiers, then most bytes."""
    drawn = [
        (check, np.array(check.bytes_over_time, dtype=np.int64).reshape(-1, 1 + 2 * len(PARTS)))
        for check in checks
        if check.bytes_over_time
    ]
    drawn.sort(key=lambda item: -int(item[1][:, 1:].any(axis=0).sum()))
    first = {item[0].policy: item for item in reversed(drawn[: 4 * _MOST_DRAWN])}
    paints = ("hbm", "quantised", "ddr", "ddr-quantised", "staging")
    found = []
    for check, table in list(first.values())[::-1][:_MOST_DRAWN]:
        at, sides = table[:, 0].tolist(), table[:, 1:].T.tolist()
        data = []
        for part, paint, live, simulated in zip(
            PARTS, paints, sides[: len(PARTS)], sides[len(PARTS) :], strict=True
        ):
            if any(live) or any(simulated):
                name = part.replace("hbm", "HBM").replace("ddr", "DDR").replace("_", ", ")
                data.append(_line(f"{name}, live", at, live, f"var(--{paint})", width=5))
                data.append(
                    _line(f"{name}, simulated", at, simulated, "var(--ink)", "dash", width=1.5)
                )
        across, up = page.axis("iteration"), page.axis("bytes", rangemode="tozero")
        figure = page.figure(data, across, up, 380)
        found.append(Choice(figure, (f"{check.policy} at budget {check.budget}",)))
    return found


def _time(lines: Sequence[results.Line]) -> list[Choice]:
    """Measured against simulated seconds per token."""
    known = [line for line in lines if line.searches and min(line.per_token_s()) > 0]
    if not known:
        return []
    values = [line.per_token_s() for line in known]
    ends = [0.8 * min(map(min, values)), 1.25 * max(map(max, values))]
    same = _line("", ends, ends, "var(--edge)", "dash", width=1.5) | {"showlegend": False}
    texts = [
        f"{line.name}: {1e3 * live:.3f} ms measured, {1e3 * simulated:.3f} ms simulated"
        for line, (live, simulated) in zip(known, values, strict=True)
    ]
    x, y = (
        page.axis(f"{side}, s per token") | page.size_axis(ends, 1.0)
        for side in ("measured", "simulated")
    )
    return [Choice(page.figure([same, *_dots(known, values, texts)], x, y, 460))]


def _jaccard(checks: Sequence[results.CellCheck]) -> list[Choice]:
    """A figure per budget: every policy's line over the iterations of the first search."""
    drawn = [check for check in checks if check.jaccard and check.shadow_moves]
    first = min((check.episode for check in drawn), default=0)
    drawn = [check for check in drawn if check.episode == first]
    found = []
    for budget in dict.fromkeys(check.budget for check in drawn):
        data = []
        own = [check for check in drawn if check.budget == budget]
        for i, check in enumerate(own):
            at, value, paint = check.jaccard_iteration, check.jaccard, page.colour(i + 1)
            same = sum(iteration <= check.same_iterations for iteration in at)
            group = {"legendgroup": page.label(check.policy)}
            data.append(_line(check.policy, at[:same], value[:same], paint) | group)
            if same < len(at):
                rest = slice(max(0, same - 1), None)
                other = _line(check.policy, at[rest], value[rest], paint, "dot")
                data.append(other | group | {"showlegend": not same})
        x, y = page.axis("iteration"), page.axis("Jaccard index")
        found.append(Choice(page.figure(data, x, y, 420), (budget,), f"Problem {first}."))
    return found


def _quality(checks: Sequence[results.CellCheck], lines: Sequence[results.Line]) -> list[Choice]:
    """Attention kept and output error against live accuracy, if there are enough problems."""
    judged = [line for line in lines if line.judged] if results.rank_agreements(checks) else []
    found = []
    for figure in ("attention_kept", "output_error"):
        known = [line for line in judged if not math.isnan(getattr(line, figure))]
        if not known:
            continue
        values = [(getattr(line, figure), line.correct / line.judged) for line in known]
        texts = [
            f"{line.name}: {value:.4f}, {line.correct} of {line.judged} right"
            for line, (value, _) in zip(known, values, strict=True)
        ]
        title = figure.replace("_", " ")
        x, y = page.axis(f"{title} (replay)"), page.axis("share right (live)", range=[0, 1])
        made = page.figure(_dots(known, values, texts), x, y, 420)
        found.append(Choice(made, (title.capitalize(),)))
    return found
