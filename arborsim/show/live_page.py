"""The page about a live run: the answer in words, the table, and its figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arborsim.core.units import quantity
from arborsim.live.request import LiveResult
from arborsim.run.results import ANY, BASELINE, at_budget
from arborsim.show import page, replay_figures
from arborsim.show.export import live_frame
from arborsim.show.figures import (
    ACCURACY_AXIS,
    COLOURS,
    MOST_BARS,
    Figure,
    label,
    named_axis,
    symbol,
    whiskers,
)
from arborsim.show.live import ANSWERS, MEMORY, NAMES, TIME
from arborsim.show.live_rows import LiveReport, LiveRow, episode_result, live_rows
from arborsim.show.live_words import cautions, left_out, summarise
from arborsim.show.table import Table, shown
from arborsim.show.words import counted

_POINTS = 600
_SPREAD = 0.5  # of the distance between budgets, over which policies stand side by side


def write_live_page(report: LiveReport, path: str | Path) -> None:
    """Write the page; the same results give the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    page.write(render(report), path)


def render(report: LiveReport) -> str:
    """The whole page as text."""
    rows = live_rows(report)
    return page.render(
        "live",
        ("live.js",),
        _data(report, rows),
        title="Policies in a shadow run" if report.shadow else "Policies on a live model",
        subtitle=_subtitle(report),
        sentences=summarise(rows),
        cautions=cautions(report, rows),
        table=Table(
            rows,
            shown((*NAMES, *ANSWERS, *MEMORY, *TIME), rows) if rows else NAMES,
            look=lambda row: "baseline" if row.row.is_baseline else "",
        ),
        settings=_settings(report),
        left_out=_reasons(report),
    )


def _reasons(report: LiveReport) -> list[str]:
    """Every reason once; the policy stands before it already."""
    return [
        f"{policy}, budget {budget}: {each.removeprefix(f'budget infeasible for {policy}: ')}"
        for (policy, budget), reasons in left_out(report).items()
        for each in dict.fromkeys(reasons)
    ]


def _data(report: LiveReport, rows: Sequence[LiveRow]) -> dict[str, Any]:
    groups = {"all": rows} if rows else {}
    if len(rows) > MOST_BARS:
        budgets = dict.fromkeys(row.budget_label for row in rows if not row.row.is_baseline)
        groups = {
            budget: [r for r in rows if r.row.is_baseline or r.budget_label == budget]
            for budget in budgets
        }
    shown_memory = memories(report)
    return {
        "accuracy": accuracy(rows),
        "time": [{"budget": budget, "figure": time_split(some)} for budget, some in groups.items()],
        "memory": shown_memory,
        "start": shown_memory[1]["cell"] if len(shown_memory) > 1 else "",
        "csv": live_frame(report).to_csv(index=False, lineterminator="\n"),
    }


def _subtitle(report: LiveReport) -> str:
    facts = report.facts
    problems = counted(len({result.episode for result in report.results}), "problem")
    return (
        f"{facts.model}: {problems} of {facts.task}, {report.request['search']} search, "
        f"{facts.dtype} on {facts.device}. {quantity('bytes', facts.weight_bytes)} of weights, "
        f"{quantity('bytes', facts.kv_bytes_per_token)} of KV per token."
    )


def _settings(report: LiveReport) -> dict[str, str]:
    facts, request = report.facts, report.request
    found = {
        "command": report.command,
        "model": facts.model + (" (random weights)" if facts.random_weights else ""),
        "task": facts.task,
        "device": f"{facts.device}, {facts.dtype}",
        "versions": ", ".join(f"{name} {version}" for name, version in facts.software.items()),
    }
    spoken = {"cells", "command", "model", "task", "device", "dtype", "gpu"}
    for key, value in request.items():
        if key not in spoken:
            found[key.replace("_", " ")] = value if isinstance(value, str) else json.dumps(value)
    if "gpu" in request:
        found["simulated GPU"] = request["gpu"]["name"]
    for cell in request["cells"]:
        values = ", ".join(f"{key} {value}" for key, value in cell["settings"].items())
        found[f"policy {cell['policy']}"] = values or "no parameters"
    return {name: text for name, text in found.items() if text}


# --- figures ---


def accuracy(rows: Sequence[LiveRow]) -> Figure | None:
    """Accuracy with its interval, policies side by side per budget; None if nothing was judged."""
    judged = [row for row in rows if row.judged and row.row.policy != BASELINE]
    full = next((row for row in rows if row.judged and row.row.policy == BASELINE), None)
    if not judged:
        return None
    budgets = sorted({row.row.budget for row in judged}, key=_size)
    policies = list(dict.fromkeys(row.row.policy for row in judged))
    data = [] if full is None else _baseline(full, len(budgets))
    for i, policy in enumerate(policies):
        own = [row for row in judged if row.row.policy == policy]
        shift = _SPREAD * ((i + 0.5) / len(policies) - 0.5)
        data.append(_points(own, [budgets.index(row.row.budget) + shift for row in own], i))
    names = [label(budget) for budget in budgets]
    layout = {
        "xaxis": {"title": {"text": "budget"},
                  **named_axis(range(len(budgets)), names, (-0.5, len(budgets) - 0.5))},
        "yaxis": ACCURACY_AXIS,
        "height": 420,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _size(budget: str) -> tuple[bool, float, str]:
    """Shares before tokens, by size; no budget last."""
    number = float("inf") if budget == ANY else float(budget)
    return number > 1, number, budget


def _points(rows: Sequence[LiveRow], places: list[float], i: int) -> Figure:
    paint = f"var(--c{1 + i % (COLOURS - 1)})"  # the first is full retention's
    y = [100 * row.accuracy for row in rows]
    low, high = [100 * row.low for row in rows], [100 * row.high for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(rows[0].label),
        "x": places,
        "y": y,
        "error_y": whiskers(y, low, high, paint),
        "marker": {"color": paint, "size": 9, "symbol": symbol(i)},
        "customdata": [
            label(f"{row.row.policy}, budget {row.row.budget}: {row.correct}/{row.judged} right, "
                  f"95% {100 * row.low:.1f} to {100 * row.high:.1f}") for row in rows
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _baseline(full: LiveRow, budgets: int) -> list[Figure]:
    line = {"type": "scatter", "mode": "lines", "x": [-0.5, budgets - 0.5], "hoverinfo": "skip"}
    edge = {**line, "line": {"width": 0}, "showlegend": False}
    dashed = {"width": 2, "dash": "dash", "color": "var(--c0)"}
    return [
        {**edge, "y": [100 * full.low] * 2},
        {**edge, "y": [100 * full.high] * 2, "fill": "tonexty", "fillcolor": "var(--bar)",
         "name": "95% interval of full", "showlegend": True},
        {**line, "y": [100 * full.accuracy] * 2, "name": "full", "line": dashed},
    ]  # fmt: skip


def time_split(rows: Sequence[LiveRow]) -> Figure:
    """Where the seconds went; what no part is about is in ``Other``."""
    return replay_figures.time_split([row.row for row in rows], [row.other_s for row in rows])


def memories(report: LiveReport) -> list[dict[str, Any]]:
    """Bytes by tier of one search per policy and budget: the first that most of them have."""
    ran = [r for r in report.results if not r.infeasible and r.measured.series.time_s]
    counts: dict[int, int] = {}
    for result in ran:
        counts[result.episode] = counts.get(result.episode, 0) + 1
    found: dict[tuple[str, str], LiveResult] = {}
    for episode in sorted(counts, key=lambda episode: (-counts[episode], episode)):
        for result in ran:
            if result.episode == episode:
                found.setdefault((result.policy, result.budget), result)
    items = []
    for (policy, budget), result in found.items():
        drawn = episode_result(report, result)
        if budget == ANY:  # no budget, no line
            drawn = replace(drawn, kv_bytes_per_token=0)
        clock = "simulated time" if report.shadow else "time"
        figure = replay_figures.memory(drawn, _POINTS, clock)
        cell = at_budget(policy, budget).replace(" at budget", ", budget")
        items.append({"search": f"problem {result.episode}", "cell": cell, "figure": figure})
    return items
