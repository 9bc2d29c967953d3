"""The figures of a validation's page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from arborsim.show.validation_svg import Plot
from arborsim.validate.beside import PARTS
from arborsim.validate.results import CellCheck
from arborsim.validate.summary import Line, rank_agreements

_COLOURS = dict(
    zip(PARTS, ("--hbm", "--quantised", "--ddr", "--ddr-quantised", "--staging"), strict=True)
)
_MOST_DRAWN = 6
_BUDGET_COLOURS = ("--c5", "--c2", "--c3", "--c4", "--c6", "--c1", "--c7")


def bytes_figures(checks: Sequence[CellCheck]) -> list[str]:
    """Live and simulated bytes over the iterations: those that use most tiers, then most bytes."""
    drawn = [check for check in checks if check.bytes_over_time]
    tables = {check.key: _over_time(check) for check in drawn}
    drawn.sort(key=lambda check: -int(tables[check.key][:, 1:].any(axis=0).sum()))
    shown = list({check.policy: check for check in reversed(drawn[: 4 * _MOST_DRAWN])}.values())
    found = []
    for check in shown[::-1][:_MOST_DRAWN]:
        table = tables[check.key]
        top = max(1.0, float(table[:, 1:].max()))
        plot = Plot((0.0, max(1.0, float(table[-1, 0]))), (0.0, 1.05 * top), "iteration", "bytes",
                    title=f"{check.policy} {check.budget}")  # fmt: skip
        for i, part in enumerate(PARTS):
            live, simulated = table[:, 1 + i], table[:, 1 + len(PARTS) + i]
            if live.any() or simulated.any():
                name, at = part.replace("_", " "), table[:, 0].tolist()
                plot.line(at, live.tolist(), _COLOURS[part], wide=5, label=f"{name}, live")
                plot.line(at, simulated.tolist(), "--ink", dashed=True, label=f"{name}, simulated")
        found.append(plot.svg())
    return found


def parts_legend() -> str:
    """Colours of the bytes' parts."""
    items = (
        f'<li><i style="background:var({_COLOURS[part]})"></i>{part.replace("_", " ")}</li>'
        for part in PARTS
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _over_time(check: CellCheck) -> np.ndarray:
    return np.array(check.bytes_over_time, dtype=np.int64).reshape(-1, 1 + 2 * len(PARTS))


def time_figure(lines: Sequence[Line]) -> str:
    """Measured against simulated seconds per token."""
    known = [(line, *line.per_token_s()) for line in lines if line.searches]
    known = [item for item in known if item[1] > 0 and item[2] > 0]
    if not known:
        return ""
    low = 0.8 * min(min(live, simulated) for _, live, simulated in known)
    high = 1.25 * max(max(live, simulated) for _, live, simulated in known)
    plot = Plot((low, high), (low, high), "measured, s per token", "simulated, s per token",
                title="Time per token", log=True, width=520, height=420)  # fmt: skip
    plot.line([low, high], [low, high], "--edge")
    for line, live, simulated in known:
        tip = f"{line.name}: {1e3 * live:.3f} ms measured, {1e3 * simulated:.3f} ms simulated"
        plot.dot(live, simulated, _colour(line.budget, lines), tip)
    return f"<div>{plot.svg()}{_legend(lines)}</div>"


def jaccard_figures(checks: Sequence[CellCheck]) -> list[str]:
    """A panel per budget: every policy's line over the iterations of the first search."""
    drawn = [check for check in checks if check.jaccard and check.shadow_moves]
    if not drawn:
        return []
    first = min(check.episode for check in drawn)
    drawn = [check for check in drawn if check.episode == first]
    found = []
    for budget in dict.fromkeys(check.budget for check in drawn):
        own = [check for check in drawn if check.budget == budget]
        last = max(max(check.jaccard_iteration) for check in own)
        least = min(0.9, min(min(check.jaccard) for check in own))
        plot = Plot((0.0, max(1.0, float(last))), (math.floor(10 * least) / 10, 1.0), "iteration",
                    "Jaccard index", title=f"budget {budget}, problem {first}",
                    width=560, height=320)  # fmt: skip
        for i, check in enumerate(own):
            at, value = np.array(check.jaccard_iteration), np.array(check.jaccard)
            same, colour = at <= check.same_iterations, _BUDGET_COLOURS[i % len(_BUDGET_COLOURS)]
            plot.line(at[same].tolist(), value[same].tolist(), colour, label=check.policy)
            after = np.flatnonzero(~same)
            if len(after):
                rest = slice(max(0, after[0] - 1), None)
                plot.line(at[rest].tolist(), value[rest].tolist(), colour, dashed=True,
                          label=check.policy)  # fmt: skip
        found.append(plot.svg())
    return found


def quality_figure(checks: Sequence[CellCheck], lines: Sequence[Line]) -> str:
    """Attention kept and output error against live accuracy, if there are enough problems."""
    if not rank_agreements(checks):
        return '<p class="note">Too few problems to rank accuracies: see the verdict.</p>'
    judged = [line for line in lines if line.judged]
    found = []
    for figure, title in (("attention_kept", "attention kept"), ("output_error", "output error")):
        values = [getattr(line, figure) for line in judged]
        known = [value for value in values if value == value]
        if not known:
            continue
        spread = max(known) - min(known) or 1.0
        ends = (min(known) - 0.03 * spread, max(known) + 0.03 * spread)
        plot = Plot(ends, (0.0, 1.0), f"{title} (replay)", "share right (live)",
                    title=f"{title.capitalize()} and accuracy", width=520, height=360)  # fmt: skip
        for line, value in zip(judged, values, strict=True):
            tip = f"{line.name}: {value:.4f}, {line.correct} of {line.judged} right"
            plot.dot(value, line.correct / line.judged, _colour(line.budget, lines), tip)
        found.append(plot.svg())
    note = "One dot per policy and budget; those with infeasible problems rest on fewer searches."
    return f'<p class="note">{note}</p><div class="figures">{"".join(found)}</div>{_legend(lines)}'


def _colour(budget: str, lines: Sequence[Line]) -> str:
    budgets = list(dict.fromkeys(line.budget for line in lines))
    return _BUDGET_COLOURS[budgets.index(budget) % len(_BUDGET_COLOURS)]


def _legend(lines: Sequence[Line]) -> str:
    items = "".join(
        f'<li><i style="background:var({_colour(budget, lines)})"></i>budget {html.escape(budget)}'
        "</li>"
        for budget in dict.fromkeys(line.budget for line in lines)
    )
    return f'<ul class="legend">{items}</ul>'
