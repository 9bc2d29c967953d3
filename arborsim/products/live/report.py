"""The page about a live run: the answer in words, the table, and its figures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from arborsim.core.statistics import SIGNIFICANT, least_visible
from arborsim.core.units import quantity
from arborsim.play.backends import LiveResult
from arborsim.play.results import ANY, at_budget
from arborsim.products.live import tables as live
from arborsim.products.provenance import parameters
from arborsim.products.replay.figures import memory, time_splits
from arborsim.products.replay.report import MOST_SENTENCES, SORTS
from arborsim.products.replay.tables import GROUPS, NAMES
from arborsim.report import page
from arborsim.report.report import Answer, Choice, Facts, Figures, Listed, Report, Section, Shown
from arborsim.report.table import Table, shown
from arborsim.report.words import counted, score

_POINTS = 600
_FEWEST = 2  # settings that a sentence compares as well as a chart
_SUMS = "Times and moves are sums over searches."
_ACCURACY = (
    "Share of problems solved, with 95% Clopper-Pearson intervals. Policies stand side by side at "
    "each budget; the band is full retention's interval."
)
#: Besides names and answers: the figures that decide.
_LEADING = ("peak_hbm", "hbm_vs_full", "peak_ddr", "total", "tokens_per_s", "speed_vs_full")


def report_of(report: live.LiveReport) -> Report:
    """Make the report of a live run."""
    rows, facts = live.live_rows(report), report.facts
    masked = bool(report.request.get("masked"))
    said, known = summarise(rows, timed=not masked), live.cautions(report, rows)
    columns = (*NAMES, *live.ANSWERS, *live.MEMORY, *GROUPS["page"], *live.TIME)
    table = Table(
        rows,
        shown(columns, rows) if rows else NAMES,
        look=lambda row: "baseline" if row.is_baseline else "",
        leading={*_LEADING, *(c.key for c in NAMES), *(c.key for c in live.ANSWERS)},
    )
    compared = Shown(
        table,
        deciding=(*live.DECIDING, *live.SPEED * (not masked)),
        implied=live.IMPLIED,
        legend=(live.LEGEND,) if rows else (),
    )
    sections = [
        Section("answer", "The answer", (Answer(said), *known)),
        Section("table", "All settings", (f"{SORTS} {_SUMS}", *[compared] * bool(rows))),
    ]

    def pictures() -> Iterator[Section]:
        judged = sum(row.judged > 0 for row in rows)
        drawn = accuracy(rows) if judged > _FEWEST else []
        yield Section("accuracy", "Accuracy", (_ACCURACY, Figures("accuracy", drawn)))
        held = Figures("memory", memories(report), ("Search", "Policy"))
        yield Section("memory", "Memory during a search", (held,))
        times = time_splits(rows, lambda row: row.other_s) if rows else []
        yield Section("time", "Where the time goes", (Figures("time", times, ("Budget",)),))

    missing = [
        f"{policy}, budget {budget}: {reason}"
        for (policy, budget), reasons in live.left_out(report).items()
        for reason in dict.fromkeys(reasons)
    ]
    first = next((row for row in rows if not row.is_baseline), None)
    return Report(
        "live",
        _title(report),
        f"{facts.model}: {report.problems} of {facts.task}, {report.request['search']} search, "
        f"{facts.dtype} on {facts.device}. {quantity('bytes', facts.weight_bytes)} of weights, "
        f"{quantity('bytes', facts.kv_bytes_per_token)} of KV per token.",
        sections,
        pictures,
        (
            Facts("Settings", _settings(report)),
            Listed(missing, "Budgets that could not hold a search"),
            Facts("Columns", table.definitions()),
        ),
        {"arborsim-live.csv": partial(live.live_frame, report)},
        start=_cell(first.policy, first.budget) if first else "",
        leading=said[:MOST_SENTENCES],
        telling=known,
    )


def _cell(policy: str, budget: str) -> str:
    return at_budget(policy, budget).replace(" at budget", ", budget")


def _settings(report: live.LiveReport) -> dict[str, str]:
    facts, request = report.facts, report.request
    found = {
        "command": report.command,
        "model": facts.model + (" (random weights)" if facts.random_weights else ""),
        "task": facts.task,
        "device": f"{facts.device}, {facts.dtype}",
        "versions": facts.about,
    }
    for key, value in request.items():
        if key not in ("cells", "command", "model", "task", "device", "dtype", "gpu"):
            found[key.replace("_", " ")] = value if isinstance(value, str) else json.dumps(value)
    if "gpu" in request:
        found["simulated GPU"] = request["gpu"]["name"]
    for cell in request["cells"]:
        found[f"policy {cell['policy']}"] = parameters(cell["settings"])
    return {name: text for name, text in found.items() if text}


# --- the answer ---


def summarise(rows: Sequence[live.LiveRow], timed: bool = True) -> list[str]:
    """Sentences about the rows; the first is the answer.

    What full retention solves, which settings answer measurably worse and what so few problems
    cannot show, and what the smallest of the others needs and solves; then speeds, if `timed`.
    """
    if not rows:
        return ["Nothing could be run."]
    full = next((row for row in rows if row.is_baseline), None)
    others = [row for row in rows if not row.is_baseline]
    judged = [row for row in others if row.judged]
    worse = [row for row in judged if row.p < SIGNIFICANT and row.difference < 0]
    rest = [row for row in judged if row not in worse]
    said = []
    if full is not None and full.judged:
        verdict = f" {_verdict(full, len(rest), len(worse))}" if judged else ""
        said.append(f"Full retention solves {_score(full)}.{verdict}")
    elif judged:
        solved = "; ".join(f"{_name(row)} solves {_score(row)}" for row in judged)
        said.append(f"{solved}.")
    if worse:
        names = "; ".join(f"{_name(row)}: {_score(row)}" for row in worse)
        said.append(f"Worse than full retention (Fisher's p below {SIGNIFICANT}): {names}.")
    small = min(rest or others or rows, key=lambda row: row.peak_hbm_kv_bytes)
    of = "Of the others, " if worse and rest else ""
    solves = f"; it solves {_score(small)}" if small.judged else ""
    said.append(f"{of}{_name(small)} needs the least HBM: {_memory(small)}{solves}.")
    speeds = {row.relative.tokens_per_s: _name(row) for row in others}
    known = sorted(speed for speed in speeds if not math.isnan(speed))
    if timed and known:
        ends = dict.fromkeys((known[0], known[-1]))
        named = " to ".join(f"{speed:.2f} ({speeds[speed]})" for speed in ends)
        said.append(f"Speed relative to full retention: {named}.")
    return said


def _verdict(full: live.LiveRow, rest: int, worse: int) -> str:
    """How many settings lose answers, and what this number of problems can show."""
    if not rest:
        return "Every setting tried answers measurably worse."
    least = least_visible(full.correct, full.judged)
    problems = counted(full.judged, "problem")
    if least is None:
        are = "is" if full.judged == 1 else "are"
        return f"{problems} {are} too few to tell any setting from it: raise --episodes."
    return (
        f"{worse} of {rest + worse} settings are measurably worse; with {problems}, a loss shows "
        f"only from {least}/{full.judged} down (p < {SIGNIFICANT})."
    )


def _name(row: live.LiveRow) -> str:
    if row.is_baseline:
        return "Full retention"
    return row.label if row.budget == ANY else f"{row.label} at budget {row.budget}"


def _score(row: live.LiveRow) -> str:
    return score(row.correct, row.judged, row.low, row.high)


def _memory(row: live.LiveRow) -> str:
    share = row.relative.peak_hbm
    of_full = "" if math.isnan(share) or row.is_baseline else f" ({share:.0%} of full)"
    return f"{quantity('bytes', row.peak_hbm_kv_bytes)}{of_full}"


# --- figures ---


def accuracy(rows: Sequence[live.LiveRow]) -> list[Choice]:
    """Accuracy with its interval, policies side by side per budget; none if nothing was judged."""
    judged = [row for row in rows if row.judged and not row.is_baseline]
    full = next((row for row in rows if row.judged and row.is_baseline), None)
    if not judged:
        return []
    budgets = sorted({row.budget for row in judged}, key=_size)
    policies = list(dict.fromkeys(row.policy for row in judged))
    data = [] if full is None else _baseline(full, len(budgets))
    for i, policy in enumerate(policies):
        own = [row for row in judged if row.policy == policy]
        places = [budgets.index(row.budget) + page.side_by_side(i, len(policies)) for row in own]
        texts = [
            page.label(
                f"{row.policy}, budget {row.budget}: {row.correct}/{row.judged} right, "
                f"95% {100 * row.low:.1f} to {100 * row.high:.1f}"
            )
            for row in own
        ]
        paint = f"var(--c{1 + i % (page.COLOURS - 1)})"  # the first is full retention's
        data.append(page.accuracies(own[0].label, own, places, paint, i, texts))
    names, ends = list(map(page.label, budgets)), (-0.5, len(budgets) - 0.5)
    x = page.axis("budget") | page.named_axis(range(len(budgets)), names, ends)
    return [Choice(page.figure(data, x, page.ACCURACY_AXIS, 420))]


def _size(budget: str) -> tuple[bool, float, str]:
    """Shares before tokens, by size; no budget last."""
    number = math.inf if budget == ANY else float(budget)
    return number > 1, number, budget


def _baseline(full: live.LiveRow, budgets: int) -> list[page.Figure]:
    ends = [-0.5, budgets - 0.5]
    none: page.Figure = {"line": {"width": 0}, "hoverinfo": "skip"}
    low, high, level = ([100 * each] * 2 for each in (full.low, full.high, full.accuracy))
    band: page.Figure = {**none, "fill": "tonexty", "fillcolor": "var(--bar)"}
    dashed = {"width": 2, "dash": "dash", "color": "var(--c0)"}
    return [
        page.scatter("", ends, low, showlegend=False, **none),
        page.scatter("95% interval of full", ends, high, **band),
        page.scatter("full", ends, level, line=dashed, hoverinfo="skip"),
    ]


def _title(report: live.LiveReport) -> str:
    if report.request.get("masked"):
        return "Policies on a live model, masked"
    return "Policies in a shadow run" if report.shadow else "Policies on a live model"


def memories(report: live.LiveReport) -> list[Choice]:
    """Bytes by tier of one search per policy and budget: the first that most of them have."""
    ran = [r for r in report.results if not r.infeasible and r.measured.series.time_s]
    count = Counter(result.episode for result in ran)
    found: dict[tuple[str, str], LiveResult] = {}
    for result in sorted(ran, key=lambda result: (-count[result.episode], result.episode)):
        found.setdefault((result.policy, result.budget), result)
    items = []
    for (policy, budget), result in found.items():
        drawn = live.episode_result(report, result)
        if budget == ANY:  # no budget, no line
            drawn = replace(drawn, kv_bytes_per_token=0)
        clock = "simulated time" if report.shadow else "time"
        note = f"Of problem {result.episode}."
        labels = f"problem {result.episode}", _cell(policy, budget)
        items.append(Choice(memory(drawn, _POINTS, clock), labels, note))
    return items
